// What applications do to registered memory behind the library's back: madvise, unmap, reuse, remap, close
// descriptors.
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "guest_lib/memory/test_support.hpp"

using namespace vrdma;
using namespace vrdma::memory;
using namespace vrdma::memory::test;

TEST_CASE("MADV_DONTNEED on registered pages gives zeroes, and the service sees them too") {
  Moved m;
  REQUIRE_MOVED(m);
  View view(m.manager, m.p, m.bytes);
  REQUIRE(::madvise(m.p + page, 2 * page, MADV_DONTNEED) == 0);
  CHECK(m.p[0] == 1);
  CHECK(m.p[page] == 0);
  CHECK(m.p[3 * page - 1] == 0);
  CHECK(m.p[3 * page] == 1);
  CHECK(view[page] == 0);
  m.p[page] = 8;
  CHECK(view[page] == 8);
  CHECK(::madvise(m.p, m.bytes, MADV_DOFORK) == 0);
  CHECK(in_child([&] {
          m.p[0] = 2;
          return m.p[page] == 8 ? 0 : 1;
        }) == 0);
  CHECK(m.p[0] == 1);
  m.manager.remove(std::move(m.registration));
  CHECK(m.p[page] == 8);
}

TEST_CASE("Memory unmapped while registered and mapped anew by someone else is not clobbered at remove") {
  Moved m;
  REQUIRE_MOVED(m);
  REQUIRE(::munmap(m.p + 4 * page, 4 * page) == 0);
  unsigned char* other = map_anonymous(2 * page, m.p + 5 * page);
  std::memset(other, 0xee, 2 * page);
  m.manager.remove(std::move(m.registration));
  for (std::uint64_t i = 0; i < 2 * page; ++i) REQUIRE(other[i] == 0xee);
  CHECK(m.p[0] == 1);
  CHECK(m.p[9 * page] == 1);
  CHECK(m.manager.add(at(m.p), m.bytes, writable_access).error() == Errno{EFAULT});  // holes were not filled
  CHECK(m.manager.statistics().resident_bytes == 0);
}

TEST_CASE("Memory that is replaced and registered again keeps apart from what the old registration names, until that ends") {
  Moved m;
  REQUIRE_MOVED(m);
  map_anonymous(m.bytes / 2, m.p);
  m.p[1] = 3;
  auto again = m.manager.add(at(m.p), m.bytes, writable_access);
  REQUIRE(again.has_value());
  REQUIRE(again->extents.size() == 2);
  CHECK(again->extents[0].backing == backing_process);
  CHECK(again->extents[0].bytes == m.bytes / 2);
  CHECK(again->extents[1].backing == window_backing);
  {
    View old(m.manager, m.p, m.bytes);
    CHECK(old[1] == 1);
    old[1] = 9;
    CHECK(m.p[1] == 3);
  }
  m.manager.remove(std::move(m.registration));
  m.p[4] = 6;
  m.manager.remove(std::move(*again));
  CHECK(m.p[1] == 3);
  CHECK(m.p[4] == 6);
  CHECK(m.p[m.bytes / 2] == 1);
  CHECK(m.manager.statistics().resident_bytes == 0);
  again = m.manager.add(at(m.p), m.bytes, writable_access);
  REQUIRE(again.has_value());
  CHECK(in_window(*again));
  m.manager.remove(std::move(*again));
}

TEST_CASE("What this library maps of the window for itself is not taken for memory that has moved") {
  Moved m;
  REQUIRE_MOVED(m);
  const auto fd = m.manager.window_fd();
  REQUIRE(fd.has_value());
  const auto view = MemoryManager::map_view(*fd, at(m.p), m.bytes);
  REQUIRE(view.has_value());
  CHECK((*view)[0] == std::byte{1});
  REQUIRE(::munmap(m.p, m.bytes) == 0);
  m.manager.remove(std::move(m.registration));
  CHECK(m.manager.statistics().resident_bytes == 0);
  CHECK((*view)[0] == std::byte{0});
  map_anonymous(m.bytes, m.p);
  auto again = m.manager.add(at(m.p), m.bytes, writable_access);
  REQUIRE(again.has_value());
  CHECK(in_window(*again));
  m.manager.remove(std::move(*again));
  MemoryManager::unmap_view({at(*view), at(*view) + m.bytes});
}

TEST_CASE("Remapped memory keeps its contents, called through the library or not") {
  for (const bool bare : {false, true}) {
    CAPTURE(bare);
    Moved m;
    REQUIRE_MOVED(m);
    unsigned char* target = map_anonymous(m.bytes);
    if (bare)
      REQUIRE(::syscall(SYS_mremap, m.p, m.bytes, m.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target) != -1);
    else
      REQUIRE(::mremap(m.p, m.bytes, m.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target) == target);
    std::memset(target, 0x31, m.bytes);
    map_anonymous(m.bytes, m.p);
    auto again = m.manager.add(at(m.p), m.bytes, writable_access);  // must not write over the remapped pages
    REQUIRE(again.has_value());
    m.p[0] = 0x55;
    m.manager.remove(std::move(m.registration));
    m.manager.remove(std::move(*again));
    for (std::uint64_t i = 0; i < m.bytes; ++i) REQUIRE(target[i] == 0x31);
    CHECK(m.p[0] == 0x55);
    ::munmap(target, m.bytes);
  }
}

// Pages moved back beside another thread stay a mapping of their own, beside those that were never moved.
TEST_CASE("Memory that was registered is grown, moved and shrunk by mremap as what the application mapped") {
  constexpr int fixed = MREMAP_MAYMOVE | MREMAP_FIXED;
  Service service;
  MemoryManager manager(service.backings());
  std::jthread other([](std::stop_token stop) {
    while (!stop.stop_requested()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  for (const bool still_registered : {false, true}) {
    for (const std::uint64_t pages : {5u, 8u, 12u, 700u}) {
      for (const int flags : {0, int{MREMAP_MAYMOVE}, fixed}) {
        CAPTURE(still_registered);
        CAPTURE(pages);
        CAPTURE(flags);
        unsigned char* const p = map_anonymous(8 * page);
        for (std::uint64_t i = 0; i < 8; ++i) p[i * page + 7] = static_cast<unsigned char>(i + 1);
        auto r = manager.add(at(p) + 2 * page + 100, 3 * page, writable_access);
        REQUIRE(r.has_value());
        if (!still_registered) manager.remove(std::move(*r));
        unsigned char* const target = flags == fixed ? map_anonymous(pages * page) : nullptr;
        auto* q = static_cast<unsigned char*>(::mremap(p, 8 * page - 50, pages * page, flags, target));
        if (q == MAP_FAILED && flags == 0 && pages > 8) {  // something lies behind it
          CHECK(errno == ENOMEM);
          q = static_cast<unsigned char*>(::mremap(p, 8 * page, pages * page, MREMAP_MAYMOVE));
        }
        REQUIRE(q != MAP_FAILED);
        if (flags == fixed) CHECK(q == target);
        for (std::uint64_t i = 0; i < std::min<std::uint64_t>(pages, 8); ++i) REQUIRE(q[i * page + 7] == i + 1);
        for (std::uint64_t i = 8; i < pages; ++i) REQUIRE(q[i * page + 7] == 0);
        std::memset(q, 3, pages * page);
        // What has been moved once is as good as before.
        auto* const again = static_cast<unsigned char*>(::mremap(q, pages * page, (pages + 1000) * page, MREMAP_MAYMOVE));
        REQUIRE(again != MAP_FAILED);
        CHECK(again[pages * page - 1] == 3);
        CHECK(again[(pages + 1000) * page - 1] == 0);
        ::munmap(again, (pages + 1000) * page);
        if (still_registered) manager.remove(std::move(*r));
      }
    }
  }
  unsigned char* const gap = map_anonymous(3 * page);
  ::munmap(gap + page, page);
  CHECK(::mremap(gap, 3 * page, 9 * page, MREMAP_MAYMOVE) == MAP_FAILED);
  CHECK(errno == EFAULT);
}

TEST_CASE("malloc, free, trim and reuse while registered leave sane memory") {
  Service service;
  MemoryManager manager(service.backings());
  std::vector<Registration> live;
  for (int round = 0; round < 30; ++round) {
    const std::size_t bytes = (round % 3 == 0 ? 300 : 40) * 1024u;
    auto* p = static_cast<unsigned char*>(std::malloc(bytes));
    std::memset(p, round, bytes);
    auto r = manager.add(at(p), bytes, writable_access);
    REQUIRE(r.has_value());
    live.push_back(std::move(*r));
    for (std::size_t i = 0; i < bytes; ++i) REQUIRE(p[i] == round);
    std::free(p);  // while registered
    ::malloc_trim(0);
    auto* fresh = static_cast<unsigned char*>(std::calloc(1, bytes));
    for (std::size_t i = 0; i < bytes; ++i) REQUIRE(fresh[i] == 0);
    std::memset(fresh, 0xcc, bytes);
    if (round % 2) {
      manager.remove(std::move(live.front()));
      live.erase(live.begin());
    }
    for (std::size_t i = 0; i < bytes; ++i) REQUIRE(fresh[i] == 0xcc);
    std::free(fresh);
  }
  for (auto& r : live) manager.remove(std::move(r));
}

TEST_CASE("An application that closes every descriptor keeps its memory and its files") {
  Moved m;
  REQUIRE_MOVED(m);
  const int window = *m.manager.window_fd();
  const int kept = ::dup(window);
  char name[] = "/tmp/vrdma-memory-XXXXXX";
  const int file = ::mkstemp(name);
  ::unlink(name);
  REQUIRE(::dup2(file, window) == window);  // as closefrom() and open() would
  unsigned char* p = map_anonymous(4 * page);
  std::memset(p, 4, 4 * page);
  auto r = m.manager.add(at(p), 4 * page, writable_access);
  REQUIRE(r.has_value());
  CHECK(r->extents[0].backing == backing_process);
  m.manager.remove(std::move(m.registration));
  CHECK(m.p[0] == 1);
  CHECK(::lseek(file, 0, SEEK_END) == 0);
  m.manager.remove(std::move(*r));
  ::munmap(p, 4 * page);
  ::close(window);
  ::close(kept);
  ::close(file);
}

namespace {

// So many descriptors as there are, and no more: false.
bool allow_no_more_descriptors() {
  const struct rlimit none { 0, 0 };
  return ::setrlimit(RLIMIT_NOFILE, &none) == 0 && ::open("/dev/null", O_RDONLY) == -1 && errno == EMFILE;
}

// What a program may do with memory that it has registered, without a file that could be opened: 0, or what went wrong. In a child of its own.
int use_registered_memory(Moved& m) {
  if (in_child([&] { return m.p[0] == 1 && m.p[m.bytes - 1] == 1 ? 0 : 1; }) != 0) return 11;
  if (::madvise(m.p + page, 2 * page, MADV_DONTNEED) != 0 || m.p[page] != 0 || m.p[3 * page] != 1) return 12;
  m.manager.remove(std::move(m.registration));
  if (::madvise(m.p + 4 * page, page, MADV_DONTNEED) != 0 || m.p[4 * page] != 0 || m.p[5 * page] != 1) return 13;
  auto again = m.manager.add(at(m.p), m.bytes, writable_access);
  if (!again || !in_window(*again)) return 14;
  auto* const longer = static_cast<unsigned char*>(::mremap(m.p, m.bytes, 100 * m.bytes, MREMAP_MAYMOVE));
  if (longer == MAP_FAILED || longer[0] != 1 || longer[page] != 0 || longer[m.bytes - 1] != 1 || longer[m.bytes] != 0) return 15;
  return 0;
}

}  // namespace

TEST_CASE("Memory that was registered is what it is also at the limit of descriptors, and behind a chroot without /proc") {
  // Alone: to hold other threads back takes a descriptor, and to count them /proc.
  bool in_empty_root = false;
  SUBCASE("no descriptor left") {}
  SUBCASE("an empty root") { in_empty_root = true; }
  char root[] = "/tmp/vrdma-memory-XXXXXX";
  REQUIRE(::mkdtemp(root) != nullptr);
  const int ended = in_child([&] {
    if (thread_count() != 1) return 77;
    Moved m;
    if (in_empty_root) {
      if (::chroot(root) != 0) return 78;
      return in_child([&] { return m.p[0] == 1 && m.p[m.bytes - 1] == 1 ? 0 : 1; });
    }
    return allow_no_more_descriptors() ? use_registered_memory(m) : 1;
  });
  ::rmdir(root);
  REQUIRE_OR_SKIP(ended != 77, "a second thread");
  REQUIRE_OR_SKIP(ended != 78, "may not chroot");
  CHECK(ended == 0);
}

TEST_CASE("Where nobody can tell what is mapped, a fork's child has what it finds nothing at, and nothing is changed without saying so") {
  CHECK(in_child([] {
          Moved m;
          if (!m.works()) return 0;
          const int window = *m.manager.window_fd(), other = ::open("/dev/zero", O_RDONLY);
          for (int fd = 3; fd < 1024; ++fd)
            if (fd != window && fd != other && ::fcntl(fd, F_GETFD) != -1) ::dup2(other, fd);  // as closefrom() and open() would
          // Of the application's own since.
          map_anonymous(2 * page, m.p + 4 * page)[0] = 9;
          ::munmap(m.p + 8 * page, page);
          if (!allow_no_more_descriptors()) return 1;
          const int child = in_child([&] {
            if (m.p[0] != 1 || m.p[m.bytes - 1] != 1 || m.p[4 * page] != 9 || m.p[5 * page] != 0) return 1;
            std::memset(m.p, 7, 4 * page);
            return 0;
          });
          if (child != 0 || m.p[0] != 1) return 2;
          if (::madvise(m.p, page, MADV_DONTNEED) != -1 || errno != EAGAIN || m.p[0] != 1) return 3;
          if (::mremap(m.p, 4 * page, 8 * page, MREMAP_MAYMOVE) != MAP_FAILED || m.p[0] != 1) return 4;
          return 0;
        }) == 0);
}

TEST_CASE("A file size limit keeps memory with the process and raises no signal") {
  CHECK(in_child([] {
          const struct rlimit limit { 1 << 20, 1 << 20 };
          ::setrlimit(RLIMIT_FSIZE, &limit);
          auto* p = static_cast<unsigned char*>(::mmap(nullptr, 8 * page, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
          Service service;
          MemoryManager manager(service.backings());
          auto r = manager.add(at(p), 8 * page, writable_access);
          return r && r->extents[0].backing == backing_process ? 0 : 1;
        }) == 0);
}

// Sanitizers hook them themselves.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

namespace {

Range watched;
std::atomic<int> changes_seen{0};

void look(const void* address, std::size_t bytes) {
  if (watched.overlaps({at(address), at(address) + bytes})) ++changes_seen;
}

}  // namespace

// As UCX's registration cache hooks them in every program that it is in.
extern "C" void* mmap(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  look(address, bytes);
  return reinterpret_cast<void*>(::syscall(SYS_mmap, address, bytes, protection, flags, fd, offset));
}
extern "C" int munmap(void* address, std::size_t bytes) noexcept {
  look(address, bytes);
  return static_cast<int>(::syscall(SYS_munmap, address, bytes));
}
extern "C" int mprotect(void* address, std::size_t bytes, int protection) noexcept {
  look(address, bytes);
  return static_cast<int>(::syscall(SYS_mprotect, address, bytes, protection));
}

TEST_CASE("Who watches what is mapped and unmapped does not see registered memory change") {
  Service service;
  MemoryManager manager(service.backings());
  manager.set_partial_pages(PartialPages::move);
  constexpr std::uint64_t most = 40 << 20;  // more than is kept aside
  unsigned char* const p = map_anonymous(most);
  std::atomic<bool> stop{false};
  std::thread other;
  SUBCASE("alone") {}
  SUBCASE("beside a thread") {
    REQUIRE_OR_SKIP(can_move_with_threads(), "no userfaultfd");
    other = std::thread([&] { stop.wait(false); });
  }
  watched = {at(p), at(p) + most};
  for (const std::uint64_t bytes : {std::uint64_t{64}, 3 * page, std::uint64_t{300'000}, most - 16})
    for (int i = 0; i < 3; ++i) {
      auto r = manager.add(at(p) + 16, bytes, writable_access);
      REQUIRE(r.has_value());
      if (at(p) % (2 << 20) != 0) CHECK(in_window(*r));
      CHECK(in_child([] { return 0; }) == 0);
      manager.remove(std::move(*r));
    }
  CHECK(changes_seen == 0);
  watched = {};
  stop = true;
  stop.notify_all();
  if (other.joinable()) other.join();
  ::munmap(p, most);
}

#endif

#if defined(__x86_64__)
namespace {
int madvise_seen, mremap_seen;
int hooked_madvise(void* address, std::size_t bytes, int advice) {
  ++madvise_seen;
  return static_cast<int>(::syscall(SYS_madvise, address, bytes, advice));
}
void* hooked_mremap(void* address, std::size_t old_bytes, std::size_t bytes, int flags, void* target) {
  ++mremap_seen;
  return reinterpret_cast<void*>(::syscall(SYS_mremap, address, old_bytes, bytes, flags, target));
}
// As libucm does it: a jump at the function's beginning.
bool patch(const char* name, const void* hook) {
  auto* const code = static_cast<unsigned char*>(::dlsym(::dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD), name));
  unsigned char jump[] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};  // movabs rax; jmp rax
  std::memcpy(jump + 2, &hook, sizeof(hook));
  if (code == nullptr || ::mprotect(reinterpret_cast<void*>(page_floor(at(code))), 2 * page, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return false;
  std::memcpy(code, jump, sizeof(jump));
  return true;
}
}  // namespace

TEST_CASE("Hooks in the C library's code see what the program does to its memory, and not what is done here") {
  const int ended = in_child([] {
    Moved m;
    if (!patch("madvise", reinterpret_cast<const void*>(&hooked_madvise)) || !patch("mremap", reinterpret_cast<const void*>(&hooked_mremap))) return 77;
    auto* const other = map_anonymous(4 * page);
    if (::madvise(other, page, MADV_DONTNEED) != 0 || madvise_seen != 1) return 1;
    if (::mremap(other, 4 * page, 2 * page, 0) != other || mremap_seen != 1) return 2;
    m.manager.remove(std::move(m.registration));
    auto again = m.manager.add(at(m.p), m.bytes, writable_access);
    if (!again) return 3;
    m.manager.remove(std::move(*again));
    return madvise_seen == 1 && mremap_seen == 1 ? 0 : 4;
  });
  REQUIRE_OR_SKIP(ended != 77, "the C library's code cannot be made writable here");
  CHECK(ended == 0);
}
#endif
