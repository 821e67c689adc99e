// Memory that is registered again and again: its pages wait aside, and every byte is where the application and the service look for it.
#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <vector>

#include "guest_lib/memory/test_support.hpp"

using namespace vrdma;
using namespace vrdma::memory;
using namespace vrdma::memory::test;

namespace {

constexpr std::uint64_t bytes = KeptPages::bytes_min;

// Where the window's page of `offset` is mapped in this process.
std::vector<Range> mappings_of(MemoryManager& manager, const void* offset) {
  std::vector<Range> found;
  const auto window = manager.window_fd();
  REQUIRE(window.has_value());
  const auto id = file_id(*window);
  REQUIRE(id.has_value());
  auto reader = VmaReader::open();
  REQUIRE(reader.has_value());
  for (auto vma = reader->at_or_after(0); vma; vma = reader->at_or_after(vma->range.end)) {
    const std::uint64_t end = vma->file_offset + vma->range.bytes();
    if (vma->file == *id && vma->file_offset <= at(offset) && at(offset) < end)
      found.push_back({vma->range.begin + (at(offset) - vma->file_offset), vma->range.end});
  }
  return found;
}

// A second thread may write meanwhile; and kernels before 5.14 cannot put such pages aside.
bool pages_can_wait_aside() {
  constexpr int dont_unmap = 4;
  const int file = ::memfd_create("probe", MFD_CLOEXEC);
  REQUIRE(::ftruncate(file, page) == 0);
  void* const here = ::mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  REQUIRE(here != MAP_FAILED);
  void* const there = ::mremap(here, page, page, MREMAP_MAYMOVE | dont_unmap, nullptr);
  ::munmap(here, page);
  if (there == MAP_FAILED) return false;
  ::munmap(there, page);
  return thread_count() == 1;
}

void fill(unsigned char* p, unsigned seed) {
  for (std::uint64_t i = 0; i < bytes; ++i) p[i] = static_cast<unsigned char>(seed + i * 31 + (i >> 9));
}
bool holds(const unsigned char* p, unsigned seed) {
  for (std::uint64_t i = 0; i < bytes; ++i)
    if (p[i] != static_cast<unsigned char>(seed + i * 31 + (i >> 9))) return false;
  return true;
}

Registration registered(MemoryManager& manager, const void* p, std::uint64_t length = bytes) {
  auto made = manager.add(at(p), length, writable_access);
  REQUIRE(made.has_value());
  REQUIRE(in_window(*made));
  return std::move(*made);
}

}  // namespace

TEST_CASE("Memory that begins and ends inside pages waits aside like any other") {
  REQUIRE_OR_SKIP(pages_can_wait_aside(), "a second thread, or a kernel before 5.14");
  Service service;
  MemoryManager manager(service.backings());
  manager.set_partial_pages(PartialPages::move);
  Pages pages(bytes / page + 1);
  for (unsigned i = 0; i < 4; ++i) {
    fill(pages.p + 16, i);
    pages.p[15] = pages.p[16 + bytes] = static_cast<unsigned char>(i);
    auto registration = registered(manager, pages.p + 16);
    CHECK(in_window(registration));
    CHECK(mappings_of(manager, pages.p).front().begin == at(pages.p));
    manager.remove(std::move(registration));
    REQUIRE(mappings_of(manager, pages.p).size() == 1);
    CHECK(mappings_of(manager, pages.p).front().begin != at(pages.p));
    CHECK(holds(pages.p + 16, i));
    CHECK((pages.p[15] == i && pages.p[16 + bytes] == i));
  }
}

TEST_CASE("Memory that is registered again has its pages back, and both sides see the same bytes") {
  REQUIRE_OR_SKIP(pages_can_wait_aside(), "a second thread, or an old kernel");
  Service service;
  MemoryManager manager(service.backings());
  unsigned char* p = map_anonymous(bytes);
  for (unsigned round = 0; round < 8; ++round) {
    fill(p, round);
    Registration registration = registered(manager, p);
    const auto in_place = mappings_of(manager, p);
    REQUIRE(in_place.size() == 1);
    CHECK(in_place[0].begin == at(p));
    CHECK(holds(p, round));
    {
      View view(manager, p, bytes);
      CHECK(holds(view.data(), round));
      fill(view.data(), round + 100);
      CHECK(holds(p, round + 100));
    }
    manager.remove(std::move(registration));
    CHECK(holds(p, round + 100));
    const auto aside = mappings_of(manager, p);
    REQUIRE(aside.size() == 1);
    CHECK(aside[0].begin != at(p));
    // Private again: what the service might still write is not seen.
    View view(manager, p, bytes);
    fill(view.data(), round + 200);
    CHECK(holds(p, round + 100));
  }
  CHECK(manager.statistics().resident_bytes == 0);
  ::munmap(p, bytes);
}

TEST_CASE("New memory at the address of old has its own bytes, registered and after") {
  REQUIRE_OR_SKIP(pages_can_wait_aside(), "a second thread, or an old kernel");
  Service service;
  MemoryManager manager(service.backings());
  unsigned char* const p = map_anonymous(bytes);
  for (unsigned round = 0; round < 6; ++round) {
    fill(map_anonymous(bytes, p), round);
    Registration registration = registered(manager, p);
    CHECK(holds(p, round));
    // Every second time it is replaced while it is registered: that is nobody's to put back.
    if (round % 2 == 1) fill(map_anonymous(bytes, p), round + 50);
    manager.remove(std::move(registration));
    CHECK(holds(p, round % 2 == 1 ? round + 50 : round));
  }
  ::munmap(p, bytes);
}

TEST_CASE("A child has its bytes and nothing of what is aside, and the parent's pages go on") {
  REQUIRE_OR_SKIP(pages_can_wait_aside(), "a second thread, or an old kernel");
  Service service;
  MemoryManager manager(service.backings());
  unsigned char* p = map_anonymous(bytes);
  const int parents_window = [&] { return manager.window_fd().value(); }();
  const auto id = file_id(parents_window).value();
  const auto child_is_well = [&](unsigned seed) {
    return in_child([&] {
      auto reader = VmaReader::open();
      for (auto vma = reader->at_or_after(0); vma; vma = reader->at_or_after(vma->range.end))
        if (vma->file == id) return 1;
      if (!holds(p, seed)) return 2;
      for (int again = 0; again < 3; ++again) {
        fill(p, seed + 7);
        auto registration = manager.add(at(p), bytes, writable_access);
        if (!registration || !in_window(*registration) || !holds(p, seed + 7)) return 3;
        manager.remove(std::move(*registration));
        if (!holds(p, seed + 7)) return 4;
      }
      return 0;
    });
  };
  for (unsigned round = 0; round < 4; ++round) {
    fill(p, round);
    Registration registration = registered(manager, p);
    CHECK(child_is_well(round) == 0);
    CHECK(holds(p, round));
    manager.remove(std::move(registration));
    CHECK(child_is_well(round) == 0);
    CHECK(holds(p, round));
  }
  ::munmap(p, bytes);
}

TEST_CASE("What the application maps where our pages were aside stays as it is") {
  REQUIRE_OR_SKIP(pages_can_wait_aside(), "a second thread, or an old kernel");
  Service service;
  MemoryManager manager(service.backings());
  unsigned char* p = map_anonymous(bytes);
  for (unsigned round = 0; round < 3; ++round) {
    fill(p, round);
    manager.remove(registered(manager, p));
    const auto aside = mappings_of(manager, p);
    REQUIRE(aside.size() == 1);
    auto* const taken = reinterpret_cast<unsigned char*>(aside[0].begin);
    fill(map_anonymous(bytes, taken), 200);
    Registration registration = registered(manager, p);
    CHECK(holds(p, round));
    manager.remove(std::move(registration));
    CHECK(holds(p, round));
    CHECK(holds(taken, 200));
    ::munmap(taken, bytes);
  }
  ::munmap(p, bytes);
}

TEST_CASE("More ranges than are kept lose nothing, in any order and with any overlap") {
  REQUIRE_OR_SKIP(pages_can_wait_aside(), "a second thread, or an old kernel");
  Service service;
  MemoryManager manager(service.backings());
  constexpr std::uint64_t blocks = 100;
  constexpr unsigned operations = 3000;
  unsigned char* p = map_anonymous(blocks * bytes);
  std::array<unsigned, blocks> seed{};
  for (std::uint64_t i = 0; i < blocks; ++i) fill(p + i * bytes, 0);
  struct Held {
    std::uint64_t first, count;
    Registration registration;
  };
  std::vector<Held> held;
  std::mt19937 random(20240611);
  const auto below = [&](std::uint64_t limit) { return std::uint64_t{random()} % limit; };
  const auto touched = [&](std::uint64_t block) {
    return std::any_of(held.begin(), held.end(), [&](const Held& h) { return block >= h.first && block < h.first + h.count; });
  };
  for (unsigned operation = 0; operation < operations; ++operation) {
    const std::uint64_t block = below(blocks);
    switch (below(8)) {
      case 0:
      case 1:
      case 2:
      case 3: {  // mostly the same ranges: a block alone
        const std::uint64_t count = below(4) == 0 ? 1 + below(std::min<std::uint64_t>(blocks - block, 5)) : 1;
        auto made = manager.add(at(p) + block * bytes, count * bytes, writable_access);
        REQUIRE(made.has_value());
        held.push_back({block, count, std::move(*made)});
        break;
      }
      case 4:
      case 5:
      case 6: {
        if (held.empty()) break;
        const std::size_t which = below(held.size());
        manager.remove(std::move(held[which].registration));
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
        break;
      }
      default:
        if (below(4) == 0 && !touched(block)) map_anonymous(bytes, p + block * bytes);
        fill(p + block * bytes, seed[block] = operation);
    }
    REQUIRE(holds(p + block * bytes, seed[block]));
  }
  for (auto& h : held) manager.remove(std::move(h.registration));
  for (std::uint64_t i = 0; i < blocks; ++i) CHECK(holds(p + i * bytes, seed[i]));
  CHECK(manager.statistics().resident_bytes == 0);
  ::munmap(p, blocks * bytes);
}
