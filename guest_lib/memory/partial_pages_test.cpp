// Pages that move with a small registered buffer and hold what is not registered: the heap around it.
#include <malloc.h>
#include <signal.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "guest_lib/memory/test_support.hpp"

using namespace vrdma;
using namespace vrdma::memory;
using namespace vrdma::memory::test;

namespace {

// A block of the heap that knows what it should contain, and may be registered in part.
class Block {
 public:
  Block(std::size_t bytes, std::uint64_t seed) : bytes_(bytes), seed_(seed), memory_(static_cast<unsigned char*>(std::malloc(bytes))) {
    for (std::size_t i = 0; i < bytes_; ++i) memory_[i] = expected(i);
  }
  Block(const Block&) = delete;
  ~Block() { std::free(memory_); }

  bool intact() const {
    for (std::size_t i = 0; i < bytes_; ++i)
      if (memory_[i] != expected(i)) return false;
    return true;
  }
  // By its owner, or from outside where it is registered and mapped.
  void rewrite(std::uint64_t seed, MemoryManager& manager) {
    seed_ = seed;
    std::size_t from = 0, to = 0;
    if (registration && in_window(*registration)) from = registration->address - at(memory_), to = from + registration->bytes;
    for (std::size_t i = 0; i < bytes_; ++i)
      if (i < from || i >= to) memory_[i] = expected(i);
    if (from == to) return;
    const std::uint64_t begin = page_floor(registration->address);
    View view(manager, reinterpret_cast<void*>(begin), page_ceiling(registration->address + registration->bytes) - begin);
    for (std::size_t i = from; i < to; ++i) view[at(memory_) + i - begin] = expected(i);
  }
  void add(MemoryManager& manager, std::mt19937& random) {
    const std::size_t from = random() % bytes_, length = 1 + random() % (bytes_ - from);
    auto added = manager.add(at(memory_) + from, length, writable_access);
    REQUIRE(added.has_value());
    registration = std::move(*added);
  }
  void remove(MemoryManager& manager) {
    manager.remove(std::move(*registration));
    registration.reset();
  }
  void grow(std::size_t bytes) {
    memory_ = static_cast<unsigned char*>(std::realloc(memory_, bytes));
    bytes_ = bytes;
    for (std::size_t i = 0; i < bytes_; ++i) memory_[i] = expected(i);
  }

  std::optional<Registration> registration;

 private:
  unsigned char expected(std::size_t i) const { return static_cast<unsigned char>((i + seed_) * 0x9e3779b97f4a7c15u >> 56); }

  std::size_t bytes_;
  std::uint64_t seed_;
  unsigned char* memory_;
};

std::size_t some_size(std::mt19937& random) {
  const auto kind = random() % 16;
  return kind == 0 ? 100'000 + random() % 200'000 : kind < 4 ? 1 + random() % 20'000 : 1 + random() % 600;
}

// What a program does with its heap while parts of it are registered. `forks`: now and then a child looks at it all and uses it.
void use_heap(MemoryManager& manager, unsigned seed, int steps, bool forks) {
  std::mt19937 random(seed);
  std::vector<std::unique_ptr<Block>> blocks;
  const auto all_intact = [&] {
    for (const auto& block : blocks)
      if (!block->intact()) return false;
    return true;
  };
  for (int step = 0; step < steps; ++step) {
    const auto what = random() % 100;
    if (blocks.size() < 8 || what < 25) {
      blocks.push_back(std::make_unique<Block>(some_size(random), random()));
      continue;
    }
    auto& block = blocks[random() % blocks.size()];
    if (what < 40) {
      if (!block->registration) block->add(manager, random);
    } else if (what < 55) {
      if (block->registration) block->remove(manager);
    } else if (what < 75) {
      block->rewrite(random(), manager);
    } else if (what < 80) {
      if (!block->registration) block->grow(some_size(random));
    } else if (what < 96) {
      if (block->registration) block->remove(manager);
      std::swap(block, blocks.back());
      blocks.pop_back();
    } else if (what < 98) {
      ::malloc_trim(0);
    } else if (forks) {
      CHECK(in_child([&] {
              if (!all_intact()) return 1;
              // It uses the heap, too, as its own; what was registered is so no more.
              for (const auto& block_of_parent : blocks) block_of_parent->registration.reset();
              for (int i = 0; i < 200; ++i) blocks.push_back(std::make_unique<Block>(some_size(random), random()));
              for (const auto& mine : blocks) mine->rewrite(random(), manager);
              if (!all_intact()) return 2;
              blocks.resize(blocks.size() / 2);
              return all_intact() ? 0 : 3;
            }) == 0);
    }
    if (step % 16 == 0) REQUIRE(all_intact());
  }
  REQUIRE(all_intact());
  for (const auto& block : blocks)
    if (block->registration) block->remove(manager);
  REQUIRE(all_intact());
}

}  // namespace

#ifdef VRDMA_SANITIZED
constexpr unsigned seeds = 2;  // a sanitizer's heap makes a child twenty times as expensive
#else
constexpr unsigned seeds = 8;
#endif

TEST_CASE("A heap of which parts are registered works as ever, in children as well") {
  REQUIRE_OR_SKIP(thread_count() == 1 || can_move_with_threads(), "a second thread and no userfaultfd");
  for (unsigned seed = 1; seed <= seeds; ++seed) {
    CAPTURE(seed);
    Service service;
    MemoryManager manager(service.backings());
    manager.set_partial_pages(PartialPages::move);
    use_heap(manager, seed, 1500, thread_count() == 1);
    CHECK(manager.statistics().moved_in_bytes > 0);
    CHECK(manager.statistics().resident_bytes == manager.statistics().stranded_bytes);
  }
}

TEST_CASE("A heap of which parts are registered works while other threads use it") {
  REQUIRE_OR_SKIP(can_move_with_threads(), "no userfaultfd");
  Service service;
  MemoryManager manager(service.backings());
  manager.set_partial_pages(PartialPages::move);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 2; ++i)
    threads.emplace_back([&, i] {
      std::mt19937 random(i);
      std::vector<std::unique_ptr<Block>> blocks;
      while (!stop) {
        blocks.push_back(std::make_unique<Block>(some_size(random), random()));
        CHECK(blocks[random() % blocks.size()]->intact());
        if (blocks.size() < 100) continue;
        std::shuffle(blocks.begin(), blocks.end(), random);
        blocks.resize(50);
      }
    });
  use_heap(manager, 99, 1500, false);
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK(manager.statistics().moved_in_bytes > 0);
}

// Whether these bytes are mapped, by moving the pages that hold them, while they are registered.
bool moves(MemoryManager& manager, const void* address, std::uint64_t bytes) {
  auto r = manager.add(at(address), bytes, writable_access);
  REQUIRE(r.has_value());
  const bool moved = in_window(*r);
  manager.remove(std::move(*r));
  return moved;
}

TEST_CASE("Without being told, only what malloc has mapped for one buffer moves with a part of it") {
  REQUIRE_OR_SKIP(thread_count() == 1 || can_move_with_threads(), "a second thread and no userfaultfd");
  Service service;
  MemoryManager manager(service.backings());
  constexpr std::size_t bytes = 5'000'000;
  ::mallopt(M_MMAP_THRESHOLD, 128 << 10);  // or it rises to what has been freed
  for (const std::size_t alignment : {16u, 64u, 4096u, 65536u}) {
    CAPTURE(alignment);
    const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(alignment, bytes / alignment * alignment), &std::free);
    auto* const large = static_cast<unsigned char*>(memory.get());
    large[0] = 1, large[4'900'000] = 2;
    REQUIRE_OR_SKIP(moves(manager, large, 4'900'001), "another malloc than glibc's");
    CHECK((large[0] == 1 && large[4'900'000] == 2));
    if (alignment == 16) CHECK((moves(manager, large + 8, 100) && moves(manager, large + 100, 4'000'000)));
  }
  auto* const small = static_cast<unsigned char*>(std::malloc(64));
  CHECK_FALSE(moves(manager, small, 64));
  std::free(small);
  // What is below may be no memory to look at.
  const Pages pages(4);
  REQUIRE(::mprotect(pages.p, page, PROT_NONE) == 0);
  CHECK_FALSE(moves(manager, pages.p + page, 100));
  constexpr int guard_install = 102;  // MADV_GUARD_INSTALL, Linux 6.13
  REQUIRE(::mprotect(pages.p, page, PROT_READ | PROT_WRITE) == 0);
  (void)::madvise(pages.p, page, guard_install);
  CHECK_FALSE(moves(manager, pages.p + page, 100));
  CHECK(manager.statistics().resident_bytes == 0);
}

#ifdef VRDMA_SANITIZED
constexpr bool blocks_fill_pages = false;
#else
constexpr bool blocks_fill_pages = true;
#endif
extern "C" void* __libc_memalign(std::size_t alignment, std::size_t bytes);  // the C library's own, which nothing stands in front of

TEST_CASE("A block that begins at a page ends at one, and moves whole with a part of it") {
  REQUIRE_OR_SKIP(thread_count() == 1 || can_move_with_threads(), "a second thread and no userfaultfd");
  Service service;
  MemoryManager manager(service.backings());
  constexpr std::size_t bytes = 5000;
  const auto from_posix = [](std::size_t alignment) {
    void* memory = nullptr;
    CHECK(::posix_memalign(&memory, alignment, bytes) == 0);
    return memory;
  };
  using Block = std::unique_ptr<void, decltype(&std::free)>;
  REQUIRE_OR_SKIP(blocks_fill_pages, "a sanitizer's malloc");
  // What the C library gives by itself has something else behind it.
  for (int i = 0; i < 4; ++i) {
    const Block own(__libc_memalign(page, bytes), &std::free), beside(std::malloc(1000), &std::free);
    CHECK_FALSE(moves(manager, own.get(), bytes));
  }
  for (void* const memory : {::memalign(page, bytes), std::aligned_alloc(page, bytes), ::valloc(bytes), from_posix(page), from_posix(1 << 16)}) {
    const Block block(memory, &std::free), beside(std::malloc(1000), &std::free);
    auto* const data = static_cast<unsigned char*>(memory);
    REQUIRE(data != nullptr);
    std::memset(data, 7, bytes);
    CHECK(moves(manager, data, bytes));
    CHECK(moves(manager, data + 100, bytes - 100));
    CHECK_FALSE(moves(manager, data, 2 * page + 100));  // more than is the block's
    CHECK(std::all_of(data, data + bytes, [](unsigned char byte) { return byte == 7; }));
    auto registration = manager.add(at(data), bytes, writable_access);
    REQUIRE(registration.has_value());
    CHECK(in_child([&] {
            const bool intact = std::all_of(data, data + bytes, [](unsigned char byte) { return byte == 7; });
            std::free(data);
            std::free(std::malloc(3000));
            return intact ? 0 : 1;
          }) == 0);
    manager.remove(std::move(*registration));
  }
  void* none = nullptr;
  const volatile std::size_t too_much = SIZE_MAX - 100;
  CHECK((::memalign(page, too_much) == nullptr && ::posix_memalign(&none, 3, bytes) == EINVAL));
  // Words that only look like a block's.
  const Pages pages(5);
  auto* const words = reinterpret_cast<std::uint64_t*>(pages.p + page);
  words[-1] = (2 * page + 16) | 1;
  CHECK_FALSE(moves(manager, pages.p + page, bytes));
  words[-1] = (1ull << 40) | 1;
  CHECK_FALSE(moves(manager, pages.p + page, bytes));
  CHECK(manager.statistics().resident_bytes == 0);
}

TEST_CASE("realloc copies what could not be moved back, too") {
  CHECK(in_child([] {
          (void)!::setuid(65534);  // who may not use userfaultfd; others are not of this kind
          Service service;
          MemoryManager manager(service.backings());
          constexpr std::size_t bytes = 1 << 20;
          unsigned char *a = static_cast<unsigned char*>(std::malloc(bytes)), *b = static_cast<unsigned char*>(std::malloc(bytes));
          std::memset(a, 1, bytes), std::memset(b, 2, bytes);
          auto of_a = manager.add(at(a), bytes, writable_access), of_b = manager.add(at(b), bytes, writable_access);
          if (!of_a || !of_b) return 1;
          std::atomic<bool> stop{false};
          std::thread other([&] { stop.wait(false); });
          manager.remove(std::move(*of_a));
          a = static_cast<unsigned char*>(std::realloc(a, 2 * bytes));
          for (std::size_t i = 0; i < bytes; ++i)
            if (a[i] != 1) return 2;
          std::memset(a, 3, 2 * bytes);
          for (std::size_t i = 0; i < bytes; ++i)
            if (b[i] != 2) return 3;
          manager.remove(std::move(*of_b));
          stop = true;
          stop.notify_all();
          other.join();
          return 0;
        }) == 0);
}

TEST_CASE("realloc of registered memory copies it: it shares nothing with what is registered behind it") {
  REQUIRE_OR_SKIP(thread_count() == 1 || can_move_with_threads(), "a second thread and no userfaultfd");
  Service service;
  MemoryManager manager(service.backings());
  constexpr std::size_t bytes = 200'000, more = 900'000;
  std::vector<unsigned char*> blocks;
  std::vector<Registration> registrations;
  for (int i = 0; i < 6; ++i) {
    blocks.push_back(static_cast<unsigned char*>(std::malloc(bytes)));
    std::memset(blocks.back(), i, bytes);
    auto r = manager.add(at(blocks.back()), bytes, writable_access);
    REQUIRE(r.has_value());
    registrations.push_back(std::move(*r));
  }
  for (int i = 0; i < 6; ++i) {
    blocks[i] = static_cast<unsigned char*>(std::realloc(blocks[i], more));
    for (std::size_t k = 0; k < bytes; ++k) REQUIRE(blocks[i][k] == i);
    std::memset(blocks[i], 100 + i, more);
  }
  const auto intact = [&] {
    for (int i = 0; i < 6; ++i)
      for (std::size_t k = 0; k < more; ++k)
        if (blocks[i][k] != 100 + i) return false;
    return true;
  };
  CHECK(intact());
  CHECK(in_child([&] { return intact() ? 0 : 1; }) == 0);
  for (auto& registration : registrations) manager.remove(std::move(registration));
  CHECK(intact());
  CHECK(manager.statistics().resident_bytes == 0);
  for (unsigned char* const block : blocks) std::free(block);
}

TEST_CASE("A child of a program with threads can use the FILE that lies beside registered memory") {
  REQUIRE_OR_SKIP(thread_count() == 1 || can_move_with_threads(), "a second thread and no userfaultfd");
  Service service;
  MemoryManager manager(service.backings());
  manager.set_partial_pages(PartialPages::move);
  FILE* const file = std::fopen("/dev/null", "w");
  REQUIRE(file != nullptr);
  auto beside = manager.add(at(file), 8, 0);
  REQUIRE(beside.has_value());
  std::atomic<bool> stop{false};
  std::thread other([&] { stop.wait(false); });  // so that the C library unlocks every FILE in the child
  const bool could_move = at(file) % (2 << 20) >= page;  // else it may be the head of an arena's
  if (could_move) CHECK(in_window(*beside));
  for (int i = 0; i < 3; ++i)
    CHECK(in_child([&] { return std::fputs("of the child", file) >= 0 && std::fflush(file) == 0 && manager.statistics().resident_bytes == 0 ? 0 : 1; }) == 0);
  // Only a fork that asks for it inherits: not one that no handler hears of.
  const long child = ::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL);
    ::_exit(*reinterpret_cast<volatile unsigned char*>(file) == 0);
  }
  int status = 0;
  ::waitpid(static_cast<pid_t>(child), &status, 0);
  if (could_move) CHECK(WIFSIGNALED(status));
  CHECK(std::fputs("of the parent", file) >= 0);
  stop = true;
  stop.notify_all();
  other.join();
  manager.remove(std::move(*beside));
  CHECK(std::fclose(file) == 0);
}
