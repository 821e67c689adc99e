#include "guest_agent/frames.hpp"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <sstream>
#include <string>

using namespace vrdma::agent;
using vrdma::vm::Run;

namespace {
constexpr std::uint64_t present = std::uint64_t{1} << 63;
bool same(const Runs& a, const Runs& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](const Run& x, const Run& y) { return x.page == y.page && x.pages == y.pages; });
}
}  // namespace

TEST_CASE("Consecutive frames are one run, across calls too") {
  Runs runs;
  const std::uint64_t first[] = {present | 7, present | 8, present | 6, present | 20};
  const std::uint64_t then[] = {present | 21, present | (std::uint64_t{1} << 55) | 22};  // soft-dirty: no part of the frame
  CHECK(append_frames(first, runs).has_value());
  CHECK(append_frames(then, runs).has_value());
  CHECK(same(runs, {{7, 2}, {6, 1}, {20, 3}}));
}

TEST_CASE("A page that is not there, or whose frame is hidden, has no run") {
  Runs runs;
  const std::uint64_t swapped[] = {present | 7, std::uint64_t{1} << 62 | 5}, hidden[] = {present};
  CHECK(value(append_frames(swapped, runs).error()) == EFAULT);
  CHECK(value(append_frames(hidden, runs).error()) == EPERM);
}

TEST_CASE("What was never mapped, or lies beyond all addresses, is not translated") {
  const auto self = Pagemap::of_self();
  REQUIRE(self.has_value());
  void* const nothing = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(nothing != MAP_FAILED);
  CHECK(value(self->runs(reinterpret_cast<std::uintptr_t>(nothing), 4096).error()) == EFAULT);
  CHECK(!self->runs(~std::uint64_t{0} - 8191, 8192).has_value());
  ::munmap(nothing, 4096);
}

TEST_CASE("RAM from 4 GiB on counts to the end of its last region, and nothing else does") {
  std::istringstream q35(
      "00000000-00000fff : Reserved\n00001000-0009fbff : System RAM\n00100000-7fffffff : System RAM\n"
      "  01000000-01ffffff : Kernel code\nfeb00000-febfffff : PCI Bus 0000:00\n"
      "100000000-13fffffff : System RAM\n  13f000000-13fffffff : Crash kernel\n800000000-8000fffff : PCI Bus 0000:00\n");
  const RamExtent of_q35 = RamExtent::of(q35);
  CHECK(of_q35.high_bytes == 0x40000000u);
  CHECK(of_q35.low_end == 0x80000000u);
  std::istringstream small("00001000-0009fbff : System RAM\n00100000-1fffffff : System RAM\n");
  const RamExtent of_small = RamExtent::of(small);
  CHECK(of_small.high_bytes == 0);
  std::istringstream holes("100000000-17fffffff : System RAM\n180000000-18fffffff : Reserved\n190000000-1ffffffff : System RAM\n");
  const RamExtent of_holes = RamExtent::of(holes);
  CHECK(of_holes.high_bytes == 0x100000000u);
  std::istringstream hidden("00000000-00000000 : System RAM\n00000000-00000000 : System RAM\n");
  const RamExtent of_hidden = RamExtent::of(hidden);
  CHECK(of_hidden.high_bytes == 0);
  CHECK(of_hidden.low_end == 0);
}

TEST_CASE("Memory that was plugged in begins where its DIMM does, or its device") {
  const std::string text =
      "00100000-17ffffff : System RAM\n  01000000-01ffffff : Kernel code\n100000000-107ffffff : System RAM\n108000000-10fffffff : System RAM\n"
      "140000000-1bfffffff : virtio0\n  148000000-14fffffff : System RAM (virtio_mem)\n";
  const auto begin = [&](std::uint64_t address) {
    std::istringstream iomem(text);
    return part_begin(iomem, address);
  };
  CHECK(begin(0x01000000) == 0x00100000u);
  CHECK(begin(0x107fff000) == 0x100000000u);
  CHECK(begin(0x108000000) == 0x108000000u);
  CHECK(begin(0x148001000) == 0x140000000u);
  CHECK(begin(0x120000000) == 0);
}
