// Writers during both moves: no write is lost, no system call into the buffer fails; and without permission nothing
// moves.
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>

#include "guest_lib/memory/test_support.hpp"
#include "guest_lib/memory/write_freeze.hpp"

using namespace vrdma;
using namespace vrdma::memory;
using namespace vrdma::memory::test;

TEST_CASE("No write of another thread is lost and no system call fails while pages move to and fro") {
  REQUIRE_OR_SKIP(can_move_with_threads(), "userfaultfd with kernel faults is not permitted");
  Service service;
  MemoryManager manager(service.backings());
  constexpr std::uint64_t pages = 64;
  unsigned char* p = map_anonymous(pages * page);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> lost{0}, failed{0}, written{0}, calls{0};
  std::thread writer([&] {
    // Each word is written by this thread alone, so it must always read back what it wrote last.
    std::vector<std::uint64_t> last(pages);
    for (std::uint64_t n = 1; !stop.load(std::memory_order_relaxed); ++n) {
      for (std::uint64_t i = 0; i < pages; ++i) {
        std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(p + i * page));
        if (word.load(std::memory_order_relaxed) != last[i]) lost.fetch_add(1);
        word.store(n, std::memory_order_relaxed);
        last[i] = n;
      }
      written.store(n, std::memory_order_relaxed);
    }
  });
  std::thread caller([&] {
    int ends[2];
    if (::pipe(ends) != 0) failed.fetch_add(1);
    for (std::uint64_t n = 1; !stop.load(std::memory_order_relaxed); ++n) {
      for (std::uint64_t i = 0; i < pages; ++i) {
        unsigned char* slot = p + i * page + 512;
        if (::write(ends[1], &n, 8) != 8 || ::syscall(SYS_read, ends[0], slot, 8) != 8) failed.fetch_add(1);
        std::uint64_t back = 0;
        if (::syscall(SYS_write, ends[1], slot, 8) != 8 || ::read(ends[0], &back, 8) != 8) failed.fetch_add(1);
        if (back != n) lost.fetch_add(1);
      }
      calls.store(n, std::memory_order_relaxed);
    }
    ::close(ends[0]);
    ::close(ends[1]);
  });
  int moves = 0;
  while (moves < 300 || written.load() < 100 || calls.load() < 100) {
    auto r = manager.add(at(p), pages * page, writable_access);
    REQUIRE(r.has_value());
    REQUIRE(in_window(*r));
    manager.remove(std::move(*r));
    ++moves;
  }
  stop.store(true);
  writer.join();
  caller.join();
  MESSAGE(moves << " moves in and out, " << written.load() << " rounds of stores, " << calls.load()
                << " of system calls");
  CHECK(lost.load() == 0);
  CHECK(failed.load() == 0);
  CHECK(manager.statistics().resident_bytes == 0);
  ::munmap(p, pages * page);
}

TEST_CASE("Another thread's stack stays with the process, memory merged above it moves") {
  REQUIRE_OR_SKIP(can_move_with_threads(), "userfaultfd with kernel faults is not permitted");
  Service service;
  MemoryManager manager(service.backings());
  std::atomic<unsigned char*> shared{nullptr};
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    alignas(4096) unsigned char local[8 * page];
    local[0] = 1;
    shared.store(local);
    shared.notify_one();
    stop.wait(false);
  });
  shared.wait(nullptr);
  auto r = manager.add(at(shared.load()), 8 * page, writable_access);
  REQUIRE(r.has_value());
  CHECK(r->extents.size() == 1);
  CHECK(r->extents[0].backing == backing_process);
  manager.remove(std::move(*r));
  stop.store(true);
  stop.notify_one();
  thread.join();
}

namespace {

// Registers with a second thread running; 0: stayed with the process, 1: moved, 2: failed.
int add_beside_a_thread(MemoryManager& manager, unsigned char* p) {
  std::atomic<bool> stop{false};
  std::thread thread([&] { stop.wait(false); });
  auto r = manager.add(at(p), 4 * page, writable_access);
  const int result = !r ? 2 : r->extents[0].backing == backing_process ? 0 : 1;
  if (r) manager.remove(std::move(*r));
  stop.store(true);
  stop.notify_one();
  thread.join();
  return result;
}

int forbid_userfaultfd() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog filter{4, program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) | ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
}

}  // namespace

TEST_CASE("Where userfaultfd is not permitted, memory beside other threads stays with the process") {
  unsigned char* p = map_anonymous(4 * page);
  SUBCASE("an unprivileged user; alone, it still moves") {
    REQUIRE_OR_SKIP(::getuid() == 0, "not root, so the user cannot be changed");
    CHECK(in_child([&] {
            if (::setgroups(0, nullptr) != 0 || ::setgid(65534) != 0 || ::setuid(65534) != 0) return 20;
            Service service;
            MemoryManager manager(service.backings());
            if (thread_count() == 1) {
              auto r = manager.add(at(p), 4 * page, writable_access);
              if (!r || !in_window(*r)) return 21;
              manager.remove(std::move(*r));
            }
            const bool permitted = can_move_with_threads();  // vm.unprivileged_userfaultfd
            return add_beside_a_thread(manager, p) == (permitted ? 1 : 0) ? 0 : 22;
          }) == 0);
  }
  SUBCASE("seccomp forbids the system call and the device is out of reach") {
    CHECK(in_child([&] {
            if (::getuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return 20;
            if (forbid_userfaultfd() != 0) return 21;
            Service service;
            MemoryManager manager(service.backings());
            return add_beside_a_thread(manager, p);
          }) == 0);
  }
  SUBCASE("moved while alone, then a thread appears: pages stay in the window, contents kept, nothing lost") {
    CHECK(in_child([&] {
            if (thread_count() != 1) return 0;
            if (::getuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return 20;
            if (forbid_userfaultfd() != 0) return 21;
            Service service;
            MemoryManager manager(service.backings());
            p[5] = 9;
            auto r = manager.add(at(p), 4 * page, writable_access);
            if (!r || !in_window(*r)) return 22;
            std::atomic<bool> stop{false};
            std::thread thread([&] { stop.wait(false); });
            manager.remove(std::move(*r));
            const auto now = manager.statistics();
            const bool right = p[5] == 9 && now.stranded_bytes == 4 * page && now.resident_bytes == 4 * page;
            stop.store(true);
            stop.notify_one();
            thread.join();
            return right ? 0 : 23;
          }) == 0);
  }
  ::munmap(p, 4 * page);
}

namespace {
// Whether writes to memory at `at` are held back by a userfaultfd.
bool frozen(const void* at) {
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2)
      inside = begin <= reinterpret_cast<std::uintptr_t>(at) && reinterpret_cast<std::uintptr_t>(at) < end;
    else if (inside && line.starts_with("VmFlags:"))
      return line.find(" uw") != line.npos;
  }
  return false;
}
std::vector<int> userfaultfds() {
  std::vector<int> found;
  for (int fd = 0; fd < 4096; ++fd) {
    char link[64] = {};
    if (::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), link, sizeof(link) - 1) > 0 && std::string(link) == "anon_inode:[userfaultfd]") found.push_back(fd);
  }
  return found;
}
}  // namespace

TEST_CASE("What freezes is kept for the next time, not for a fork's child, and not where its number is another file's") {
  REQUIRE_OR_SKIP(can_move_with_threads(), "userfaultfd with kernel faults is not permitted");
  unsigned char* const p = map_anonymous(4 * page);
  const auto begin = reinterpret_cast<std::uint64_t>(p);
  p[0] = p[page] = 1;
  const auto freeze = [&](std::uint64_t first) { return WriteFreeze::freeze({begin + first * page, begin + (first + 1) * page}, WriteFreeze::Memory::anonymous); };
  REQUIRE(freeze(0).has_value());
  const std::vector<int> kept = userfaultfds();
  CHECK(!kept.empty());
  for (int round = 0; round < 3; ++round) {
    {
      const auto held = freeze(round % 2);
      REQUIRE(held.has_value());
      CHECK(frozen(p + round % 2 * page));
      CHECK_FALSE(frozen(p + (1 - round % 2) * page));
    }
    CHECK_FALSE(frozen(p));
    p[round % 2 * page] = 2;  // would wait for ever
  }
  CHECK(userfaultfds() == kept);

  // Its parent's memory stays as it is, of which it had the descriptor.
  int ready[2], over[2];
  REQUIRE(::pipe(ready) == 0);
  REQUIRE(::pipe(over) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto held = freeze(0);
    char said = held && frozen(p) && userfaultfds().size() == kept.size() ? 'y' : 'n';
    [[maybe_unused]] auto moved = ::write(ready[1], &said, 1);
    moved = ::read(over[0], &said, 1);
    ::_exit(0);
  }
  char said = 0;
  CHECK(::read(ready[0], &said, 1) == 1);
  CHECK(said == 'y');
  CHECK_FALSE(frozen(p));
  CHECK(::write(over[1], &said, 1) == 1);
  CHECK(::waitpid(child, nullptr, 0) == child);

  // A program that closes what it does not know, and opens something else.
  for (const int fd : kept) REQUIRE(::dup2(ready[0], fd) == fd);
  {
    const auto held = freeze(1);
    REQUIRE(held.has_value());
    CHECK(frozen(p + page));
  }
  for (const int fd : kept) CHECK(::close(fd) == 0);
  for (const int fd : {ready[0], ready[1], over[0], over[1]}) ::close(fd);
  ::munmap(p, 4 * page);
}
