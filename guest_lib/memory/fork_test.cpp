// What children find of registered memory, and what becomes of it, however they are made and whoever else has fork handlers.
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <atomic>
#include <thread>

#include "guest_lib/memory/test_support.hpp"

using namespace vrdma;
using namespace vrdma::memory;
using namespace vrdma::memory::test;

TEST_CASE("After fork the child has private copies and an empty manager, and the parent's registration works on") {
  Moved m;
  REQUIRE_MOVED(m);
  View view(m.manager, m.p, m.bytes);
  m.p[3] = 42;
  int to_child[2], to_parent[2];
  REQUIRE(::pipe(to_child) == 0);
  REQUIRE(::pipe(to_parent) == 0);
  const pid_t child = ::fork();
  char token = 0;
  if (child == 0) {
    if (::read(to_child[0], &token, 1) != 1) ::_exit(10);  // the parent has written by now
    if (m.p[3] != 42 || m.p[5 * page] != 1) ::_exit(11);
    std::memset(m.p, 0x77, m.bytes);
    if (m.manager.statistics().resident_bytes != 0) ::_exit(12);
    m.manager.remove(std::move(m.registration));  // void here: must not touch anything
    if (m.p[0] != 0x77) ::_exit(13);
    auto again = m.manager.add(at(m.p), m.bytes, writable_access);  // a window of its own
    if (!again || !in_window(*again) || m.p[9] != 0x77) ::_exit(14);
    if (::write(to_parent[1], &token, 1) != 1) ::_exit(15);
    if (::read(to_child[0], &token, 1) != 1) ::_exit(16);
    ::_exit(m.p[7 * page] == 0x77 ? 0 : 17);
  }
  ::close(to_parent[1]);  // so that a child that dies early ends the read below
  m.p[3] = 43;
  REQUIRE(::write(to_child[1], &token, 1) == 1);
  REQUIRE(::read(to_parent[0], &token, 1) == 1);
  CHECK(m.p[3] == 43);
  CHECK(m.p[100] == 1);
  view[7 * page] = 9;
  CHECK(m.p[7 * page] == 9);
  REQUIRE(::write(to_child[1], &token, 1) == 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  m.manager.remove(std::move(m.registration));
  CHECK(m.p[7 * page] == 9);
  for (int fd : {to_child[0], to_child[1], to_parent[0]}) ::close(fd);
}

const volatile unsigned char* touched_in_child = nullptr;
const int watching_forks = ::pthread_atfork(nullptr, nullptr, [] {
  if (touched_in_child != nullptr) static_cast<void>(*touched_in_child);
});

TEST_CASE("Fork handlers of others find the child's memory in place, also handlers that came long before the first registration") {
  REQUIRE(watching_forks == 0);
  Moved m;
  REQUIRE_MOVED(m);
  touched_in_child = m.p;
  CHECK(in_child([&] { return m.p[0] == 1 ? 0 : 1; }) == 0);
  touched_in_child = nullptr;
  m.manager.remove(std::move(m.registration));
}

// An allocator: its lock is taken by its fork handlers, which it registered before anybody else (jemalloc does at the first malloc), and
// held by a thread of its own while that gives memory back (its background threads).
pthread_mutex_t allocator_lock = PTHREAD_MUTEX_INITIALIZER;
std::atomic<bool> allocator_in_use{false}, fork_waits_for_allocator{false};
void register_allocator() {
  ::pthread_atfork(
      [] {
        if (!allocator_in_use) return;
        fork_waits_for_allocator = true;
        pthread_mutex_lock(&allocator_lock);
      },
      [] { if (allocator_in_use) pthread_mutex_unlock(&allocator_lock); },
      [] { if (allocator_in_use) pthread_mutex_unlock(&allocator_lock); });
}
[[gnu::section(".preinit_array"), gnu::used]] void (*const register_allocator_first)() = &register_allocator;

TEST_CASE("An allocator whose fork handler waits for a thread that is in madvise gets there, and the child finds zeroes as promised") {
  Moved m;
  REQUIRE_MOVED(m);
  View view(m.manager, m.p, m.bytes);
  allocator_in_use = true;
  std::atomic<bool> locked{false};
  std::thread background([&] {
    pthread_mutex_lock(&allocator_lock);
    locked = true;
    while (!fork_waits_for_allocator) std::this_thread::yield();
    CHECK(::madvise(m.p + page, 2 * page, MADV_DONTNEED) == 0);
    pthread_mutex_unlock(&allocator_lock);
  });
  while (!locked) std::this_thread::yield();
  CHECK(in_child([&] { return m.p[0] == 1 && m.p[page] == 0 && m.p[3 * page - 1] == 0 && m.p[3 * page] == 1 ? 0 : 1; }) == 0);
  background.join();
  allocator_in_use = false;
  CHECK(view[0] == 1);
  CHECK(view[page] == 0);
  m.manager.remove(std::move(m.registration));
  CHECK(m.p[page] == 0);
  CHECK(m.p[3 * page] == 1);
}

// The list of them grows while the thread that forks holds the lock, and lies where mremap() looks for registered pages: below one of
// them, which is above all that the kernel maps, and above another.
TEST_CASE("A fork with many separate pieces registered ends, wherever the list of them lies") {
  CHECK(in_child_under_watchdog([] {
          constexpr std::uint64_t pieces = 70;
          alignas(page) static unsigned char lowest[page];
          auto* const highest = reinterpret_cast<unsigned char*>(page_floor(at(__builtin_frame_address(0))) - (64 << 20));
          if (::mmap(highest, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != highest) return 1;
          unsigned char* const p = map_anonymous(2 * pieces * page);
          std::memset(p, 1, 2 * pieces * page);
          lowest[0] = *highest = 1;
          Service service;
          MemoryManager manager(service.backings());
          std::vector<Registration> live;
          const auto add = [&](unsigned char* what) {
            auto r = manager.add(at(what), page, writable_access);
            if (r) live.push_back(std::move(*r));
            return r.has_value();
          };
          if (!add(lowest) || !add(highest)) return 2;
          for (std::uint64_t i = 0; i < pieces; ++i)
            if (!add(p + 2 * i * page)) return 3;
          return in_child([&] {
            for (std::uint64_t i = 0; i < pieces; ++i)
              if (p[2 * i * page] != 1) return 4;
            return lowest[0] == 1 && *highest == 1 ? 0 : 5;
          });
        }) == 0);
}

TEST_CASE("A child made by the bare system call cannot write to the parent's memory") {
  Moved m;
  REQUIRE_MOVED(m);
  const long child = ::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL);
    *const_cast<volatile unsigned char*>(m.p) = 0x66;
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(static_cast<pid_t>(child), &status, 0);
  CHECK(m.p[0] == 1);
  m.manager.remove(std::move(m.registration));
}

TEST_CASE("A vfork or posix_spawn leaves registrations alone") {
  Moved m;
  REQUIRE_MOVED(m);
  char program[] = "/bin/true";
  char* arguments[] = {program, nullptr};
  pid_t child = 0;
  REQUIRE(::posix_spawn(&child, program, nullptr, nullptr, arguments, nullptr) == 0);
  ::waitpid(child, nullptr, 0);
  View view(m.manager, m.p, m.bytes);
  view[0] = 5;
  CHECK(m.p[0] == 5);
  m.manager.remove(std::move(m.registration));
}
