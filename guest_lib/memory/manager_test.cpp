// What kinds of memory become which extents, and that contents and mappings survive.

#include "guest_lib/memory/manager.hpp"
#include "guest_lib/memory/mapped_memory.hpp"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>

#include "guest_lib/memory/test_support.hpp"
#include "vmci_channel/segment.hpp"

using namespace vrdma;
using namespace vrdma::memory;
using namespace vrdma::memory::test;

TEST_CASE("Our own tables fill no hole of the memory that is looked at") {
  constexpr std::uint64_t pages = 64, tables = 200;
  unsigned char* p = map_anonymous(pages * page);
  const Range range{at(p), at(p) + pages * page};
  for (std::uint64_t i = 1; i < pages; i += 4) REQUIRE(::munmap(p + i * page, page) == 0);
  MappedMemory outside(range);
  std::vector<std::uint64_t> made;
  for (std::uint64_t i = 0; i < tables; ++i) made.push_back(at(outside.allocate(page)));
  for (const std::uint64_t table : made) CHECK_FALSE(range.overlaps({table, table + page}));
  auto reader = VmaReader::open();
  for (std::uint64_t i = 1; i < pages; i += 4) CHECK(reader->at_or_after(range.begin + i * page)->range.begin == range.begin + (i + 1) * page);
  for (const std::uint64_t table : made) outside.deallocate(reinterpret_cast<void*>(table), page);
  ::munmap(p, pages * page);
}

TEST_CASE("Private memory is reached through the window, with the pages that it fills in part unless these are to stay") {
  REQUIRE_OR_SKIP(thread_count() == 1 || can_move_with_threads(), "a second thread and no userfaultfd");
  Service service;
  MemoryManager manager(service.backings());
  bool stay = false;
  SUBCASE("they move") { manager.set_partial_pages(PartialPages::move); }
  SUBCASE("they stay") {
    stay = true;
    manager.set_partial_pages(PartialPages::stay);
  }
  SUBCASE("they stay where there is more in them than this buffer") { stay = true; }
  Pages pages(8);
  unsigned char* const p = pages.p;
  for (std::uint64_t i = 0; i < 8 * page; ++i) p[i] = static_cast<unsigned char>(i * 7 >> 3);
  const std::vector<unsigned char> before(p, p + 8 * page);
  auto r = manager.add(at(p) + 100, 7 * page, writable_access);
  REQUIRE(r.has_value());
  REQUIRE(r->extents.size() == (stay ? 3 : 1));
  const Extent& inside = r->extents[stay];
  CHECK(inside.backing == window_backing);
  CHECK(inside.address == at(p) + (stay ? page : 100));
  CHECK(inside.backing_offset == inside.address);
  CHECK(inside.bytes == (stay ? 6 : 7) * page);
  if (stay) {
    CHECK(r->extents[0].backing == backing_process);
    CHECK(r->extents[0].bytes == page - 100);
    CHECK(r->extents[2].backing == backing_process);
    CHECK(r->extents[2].bytes == 100);
  }
  CHECK(manager.statistics().resident_bytes == (stay ? 6 : 8) * page);
  CHECK(std::memcmp(p, before.data(), before.size()) == 0);
  {
    View view(manager, p + page, 6 * page);
    CHECK(std::memcmp(view.data(), before.data() + page, 6 * page) == 0);
    view[5] = 99;
    CHECK(p[page + 5] == 99);
    p[page + 6] = 98;
    CHECK(view[6] == 98);
  }
  manager.remove(std::move(*r));
  CHECK(p[page + 5] == 99);
  CHECK(p[page + 6] == 98);
  p[page + 5] = before[page + 5], p[page + 6] = before[page + 6];
  CHECK(std::memcmp(p, before.data(), before.size()) == 0);
  CHECK(manager.statistics().resident_bytes == 0);
}

TEST_CASE("Where private pages are to stay they are reached through the process, and files are announced as ever") {
  Service service;
  MemoryManager manager(service.backings());
  manager.keep_private_pages();
  unsigned char* const p = map_anonymous(4 * page);
  const int fd = ::memfd_create("app", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(::ftruncate(fd, 4 * page) == 0);
  void* const shared = ::mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  auto pages = manager.add(at(p), 4 * page, writable_access), file = manager.add(at(shared), 4 * page, writable_access);
  REQUIRE(pages.has_value());
  REQUIRE(file.has_value());
  CHECK(pages->extents.size() == 1);
  CHECK(pages->extents[0].backing == backing_process);
  CHECK(manager.statistics().moved_in_bytes == 0);
  CHECK(file->extents[0].backing == 1);
  manager.remove(std::move(*pages));
  manager.remove(std::move(*file));
  ::munmap(p, 4 * page);
  ::munmap(shared, 4 * page);
  ::close(fd);
}

TEST_CASE("Small buffers in one page share it, and the last one takes it home") {
  REQUIRE_OR_SKIP(thread_count() == 1 || can_move_with_threads(), "a second thread and no userfaultfd");
  Service service;
  MemoryManager manager(service.backings());
  manager.set_partial_pages(PartialPages::move);
  Pages pages(3);
  auto first = manager.add(at(pages.p) + page + 64, 64, writable_access), second = manager.add(at(pages.p) + page + 256, 64, writable_access),
       third = manager.add(at(pages.p) + page - 8, 16, writable_access);
  REQUIRE((first && second && third));
  CHECK((in_window(*first) && in_window(*second) && in_window(*third)));
  CHECK(manager.statistics().resident_bytes == 2 * page);
  View view(manager, pages.p, 3 * page);
  view[page + 64] = 5, view[page + 256] = 6, view[page] = 7;
  manager.remove(std::move(*first));
  CHECK(pages.p[page + 64] == 5);
  view[page + 257] = 8;
  manager.remove(std::move(*third));
  CHECK(manager.statistics().resident_bytes == page);
  manager.remove(std::move(*second));
  CHECK(manager.statistics().resident_bytes == 0);
  for (const auto& [offset, value] : {std::pair{64, 5}, {256, 6}, {0, 7}, {257, 8}, {65, 0}}) CHECK(pages.p[page + static_cast<unsigned>(offset)] == value);
}

namespace {
thread_local char of_this_thread[32];
}

TEST_CASE("Pages that the C library needs at any moment do not move for a part of them") {
  Service service;
  MemoryManager manager(service.backings());
  manager.set_partial_pages(PartialPages::move);
  const auto stays = [&](const void* address) {
    auto r = manager.add(at(address), 32, writable_access);
    REQUIRE(r.has_value());
    CHECK(r->extents[0].backing == backing_process);
    manager.remove(std::move(*r));
  };
  stays(of_this_thread);
  unsigned char* const p = map_anonymous(4 << 20);
  const std::uint64_t head_of_an_arena = (at(p) + (2 << 20)) & ~std::uint64_t{(2 << 20) - 1};
  stays(reinterpret_cast<void*>(head_of_an_arena + 1024));
  ::munmap(p, 4 << 20);
}

TEST_CASE("Bad ranges are refused with the errno of ibv_reg_mr") {
  Service service;
  MemoryManager manager(service.backings());
  unsigned char* p = map_anonymous(4 * page);
  CHECK(manager.add(at(p), 0, 1).error() == Errno{EINVAL});
  CHECK(manager.add(at(p), ~std::uint64_t{0} - 100, 1).error() == Errno{EINVAL});
  REQUIRE(::mprotect(p + page, page, PROT_READ) == 0);
  CHECK(manager.add(at(p), 4 * page, 1).error() == Errno{EFAULT});
  CHECK(manager.add(at(p), 4 * page, 8).error() == Errno{EFAULT});
  auto readable = manager.add(at(p), 4 * page, 4);
  REQUIRE(readable.has_value());
  manager.remove(std::move(*readable));
  REQUIRE(::mprotect(p + page, page, PROT_NONE) == 0);
  CHECK(manager.add(at(p), 4 * page, 4).error() == Errno{EFAULT});
  ::munmap(p + page, page);
  CHECK(manager.add(at(p), 4 * page, 0).error() == Errno{EFAULT});
  CHECK(manager.statistics().resident_bytes == 0);
  ::munmap(p, 4 * page);
}

TEST_CASE("Stacks, private file pages and shared files of a disk stay with the process") {
  Service service;
  MemoryManager manager(service.backings());
  const auto process_only = [&](void* p, std::uint64_t bytes) {
    auto r = manager.add(at(p), bytes, writable_access);
    REQUIRE(r.has_value());
    CHECK(r->extents.size() == 1);
    CHECK(r->extents[0].backing == backing_process);
    manager.remove(std::move(*r));
  };
  unsigned char local[6 * page];
  process_only(local, sizeof local);
  char name[] = "/tmp/vrdma-memory-XXXXXX";
  const int fd = ::mkstemp(name);
  ::unlink(name);
  REQUIRE(::ftruncate(fd, 4 * page) == 0);
  void* shared = ::mmap(nullptr, 4 * page, 3, MAP_SHARED, fd, 0);
  void* copy = ::mmap(nullptr, 4 * page, 3, MAP_PRIVATE, fd, 0);
  if (!vmci::memory_file_bytes(fd)) process_only(shared, 4 * page);  // where /tmp is no tmpfs
  process_only(copy, 4 * page);
  CHECK(service.announced == 0);
  for (void* p : {shared, copy}) ::munmap(p, 4 * page);
  ::close(fd);
}

TEST_CASE("Overlapping registrations in any order keep every byte, seen from both sides") {
  REQUIRE_OR_SKIP(thread_count() == 1 || can_move_with_threads(), "a second thread and no userfaultfd");
  constexpr std::uint64_t pages = 48;
  for (unsigned seed = 1; seed <= 12; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    Service service;
    MemoryManager manager(service.backings());
    manager.set_partial_pages(PartialPages::move);
    Pages mapped(pages);
    unsigned char* const p = mapped.p;
    View view(manager, p, pages * page);
    std::vector<unsigned char> model(pages * page);
    std::vector<Registration> live;
    std::vector<int> held(pages);
    const auto count = [&](const Registration& r, int change) {
      for (std::uint64_t i = (r.address - at(p)) / page; i * page < r.address + r.bytes - at(p); ++i) held[i] += change;
    };
    for (int step = 0; step < 150; ++step) {
      if (live.size() < 8 && random() % 2 == 0) {
        const std::uint64_t begin = random() % (pages * page - 1);
        auto r = manager.add(at(p) + begin, 1 + random() % (pages * page - begin), writable_access);
        REQUIRE(r.has_value());
        std::uint64_t next = r->address;
        for (const Extent& e : r->extents) {
          REQUIRE(e.address == next);
          next += e.bytes;
        }
        REQUIRE(next == r->address + r->bytes);
        count(*r, 1);
        live.push_back(std::move(*r));
      } else if (!live.empty()) {
        const std::size_t pick = random() % live.size();
        count(live[pick], -1);
        manager.remove(std::move(live[pick]));
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(pick));
      }
      for (int write = 0; write < 20; ++write) {
        const std::uint64_t i = random() % (pages * page);
        const auto value = static_cast<unsigned char>(random());
        const bool remote = held[i / page] > 0 && random() % 2 == 0;
        (remote ? view[i] : p[i]) = value;
        model[i] = value;
      }
      REQUIRE(std::memcmp(p, model.data(), model.size()) == 0);
      for (std::uint64_t i = 0; i < pages; ++i)
        if (held[i] > 0) REQUIRE(std::memcmp(view.data() + i * page, p + i * page, page) == 0);
    }
    for (auto& r : live) manager.remove(std::move(r));
    CHECK(std::memcmp(p, model.data(), model.size()) == 0);
    CHECK(manager.statistics().resident_bytes == 0);
  }
}

TEST_CASE("Transparent huge pages move like others, and explicit ones stay with the process") {
  REQUIRE_OR_SKIP(thread_count() == 1 || can_move_with_threads(), "a second thread and no userfaultfd");
  Service service;
  MemoryManager manager(service.backings());
  constexpr std::uint64_t huge = 2 << 20;
  unsigned char* base = map_anonymous(4 * huge);
  auto* p = reinterpret_cast<unsigned char*>((at(base) + huge - 1) & ~(huge - 1));
  ::madvise(p, 2 * huge, MADV_HUGEPAGE);
  std::memset(p, 0x5a, 2 * huge);
  auto r = manager.add(at(p) + page, huge, writable_access);
  REQUIRE(r.has_value());
  CHECK(in_window(*r));
  manager.remove(std::move(*r));
  for (std::uint64_t i = 0; i < 2 * huge; ++i) REQUIRE(p[i] == 0x5a);
  ::munmap(base, 4 * huge);
  void* explicit_huge = ::mmap(nullptr, huge, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
  REQUIRE_OR_SKIP(explicit_huge != MAP_FAILED, "no huge pages configured (vm.nr_hugepages)");
  auto h = manager.add(at(explicit_huge), huge, writable_access);
  REQUIRE(h.has_value());
  CHECK(h->extents[0].backing == backing_process);
  manager.remove(std::move(*h));
  ::munmap(explicit_huge, huge);
}

TEST_CASE("Many isolated pages leave the process the mappings it needs") {
  REQUIRE_OR_SKIP(thread_count() == 1 || can_move_with_threads(), "a second thread and no userfaultfd");
  Service service;
  MemoryManager manager(service.backings());
  constexpr std::uint64_t pages = 80000, enough = 500;
  unsigned char* p = map_anonymous(pages * page);
  std::vector<Registration> live;
  std::uint64_t by_process = 0;
  for (std::uint64_t i = 0; i < pages && by_process < enough; i += 2) {
    auto r = manager.add(at(p) + i * page, page, writable_access);
    REQUIRE(r.has_value());
    by_process += r->extents[0].backing == backing_process;
    live.push_back(std::move(*r));
  }
  CHECK(by_process == enough);
  CHECK(live.size() > 2 * enough);
  auto reader = VmaReader::open();
  REQUIRE(reader->at_or_after(0).has_value());
  CHECK(*count_mappings() < (reader->reads_text() ? 4000 : 40000));
  if (reader->reads_text()) {  // what is left is for large buffers
    unsigned char* large = map_anonymous(1 << 20);
    auto r = manager.add(at(large), 1 << 20, writable_access);
    REQUIRE(r.has_value());
    CHECK(in_window(*r));
    manager.remove(std::move(*r));
    ::munmap(large, 1 << 20);
  }
  void* malloc_works = std::malloc(64 << 20);
  CHECK(malloc_works != nullptr);
  std::free(malloc_works);
  for (auto& r : live) manager.remove(std::move(r));
  CHECK(*count_mappings() < 1000);
  ::munmap(p, pages * page);
}

namespace {

// The most memory, of the other process's own and of its window, that there was at once until `other` is closed at its other end, who is
// told when it has been looked at for the first time.
std::uint64_t watch_peak_mib(pid_t process, int window, int other) {
  const std::string folder = "/proc/" + std::to_string(process);
  std::uint64_t peak = 0, looks = 0;
  char byte;
  do {
    // In this order: what moves from the window into the process meanwhile is not counted twice. It may not be counted at all.
    std::uint64_t own_kib = 0;
    std::ifstream status(folder + "/status");
    for (std::string line; std::getline(status, line);)
      if (line.starts_with("RssAnon:")) own_kib = std::strtoull(line.c_str() + 8, nullptr, 10);
    struct stat file {};
    ::stat((folder + "/fd/" + std::to_string(window)).c_str(), &file);
    peak = std::max(peak, (own_kib >> 10) + (static_cast<std::uint64_t>(file.st_blocks) >> 11));
    if (++looks == 1 && ::send(other, "", 1, MSG_NOSIGNAL) != 1) break;
  } while (::recv(other, &byte, 1, MSG_DONTWAIT) < 0);
  return peak;
}

}  // namespace

TEST_CASE("Much memory that is moved back exists twice only in part") {
  REQUIRE_OR_SKIP(thread_count() == 1 || can_move_with_threads(), "a second thread and no userfaultfd");
  Service service;
  MemoryManager manager(service.backings());
  constexpr std::uint64_t mib = 192;
  unsigned char* const p = map_anonymous(mib << 20);
  for (std::uint64_t i = 0; i < mib << 20; i += page) p[i] = static_cast<unsigned char>(i >> 12);
  const auto window = manager.window_fd();
  REQUIRE(window.has_value());
  int ends[2], answer[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  REQUIRE(::pipe(answer) == 0);
  const pid_t parent = ::getpid(), watcher = ::fork();
  if (watcher == 0) {
    ::close(ends[1]);
    char registered;
    if (::recv(ends[0], &registered, 1, 0) != 1) ::_exit(1);
    const std::uint64_t peak = watch_peak_mib(parent, *window, ends[0]);
    ::_exit(::write(answer[1], &peak, sizeof(peak)) == sizeof(peak) ? 0 : 1);
  }
  ::close(ends[0]);
  auto r = manager.add(at(p), mib << 20, writable_access);
  REQUIRE(r.has_value());
  CHECK(in_window(*r));
  REQUIRE(::send(ends[1], "", 1, MSG_NOSIGNAL) == 1);
  char watched;
  REQUIRE(::recv(ends[1], &watched, 1, 0) == 1);
  manager.remove(std::move(*r));
  ::close(ends[1]);
  std::uint64_t peak = 0;
  CHECK(::read(answer[0], &peak, sizeof(peak)) == sizeof(peak));
  CHECK(peak >= mib);
  CHECK(peak < mib + mib / 2);
  int status = 0;
  ::waitpid(watcher, &status, 0);
  for (std::uint64_t i = 0; i < mib << 20; i += page) REQUIRE(p[i] == static_cast<unsigned char>(i >> 12));
  ::close(answer[0]);
  ::close(answer[1]);
  ::munmap(p, mib << 20);
}
