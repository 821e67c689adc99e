#include "guest_agent/frames.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <sstream>
#include <string>

#include "vmci_channel/page_pin.hpp"

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

TEST_CASE("Own pages are private ones that nobody else maps") {
  Runs runs;
  constexpr std::uint64_t of_file = std::uint64_t{1} << 61, exclusive = std::uint64_t{1} << 56;
  const std::uint64_t own[] = {present | exclusive | 7}, shared[] = {present | 7}, file[] = {present | of_file | 7}, file_of_one[] = {present | of_file | exclusive | 7};
  for (const auto& entries : {shared, file, file_of_one}) {
    CHECK(value(append_frames(std::span(entries, 1), runs, Pages::own).error()) == EACCES);
    CHECK(append_frames(std::span(entries, 1), runs).has_value());
  }
  runs.clear();
  CHECK(append_frames(own, runs, Pages::own).has_value());
  CHECK(same(runs, {{7, 1}}));
}

// As the kernel says it, that this process has; of what is pinned for writing, too.
TEST_CASE("Pages of a file, of zeroes, and those that are shared since a fork, are not own; pinned ones are") {
  const auto self = Pagemap::of_self();
  REQUIRE(self.has_value());
  const auto map = [](int protection, int flags, int fd) {
    void* const at = ::mmap(nullptr, 4096, protection, flags, fd, 0);
    REQUIRE(at != MAP_FAILED);
    return static_cast<std::byte*>(at);
  };
  const auto why_not = [&](const std::byte* page) {
    (void)*const_cast<const volatile std::byte*>(page);
    const auto runs = self->runs(reinterpret_cast<std::uintptr_t>(page), 4096, Pages::own);
    return runs ? 0 : value(runs.error());
  };
  std::byte* const private_page = map(PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  *private_page = std::byte{1};
  if (why_not(private_page) == EPERM) {
    MESSAGE("SKIPPED: frames are hidden (root is needed)");
    return;
  }
  CHECK(why_not(private_page) == 0);
  CHECK(why_not(map(PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1)) == EACCES);
  CHECK(why_not(map(PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1)) == EACCES);
  const vmci::UniqueFd program(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  CHECK(why_not(map(PROT_READ, MAP_SHARED, program.get())) == EACCES);
  CHECK(why_not(map(PROT_READ, MAP_PRIVATE, program.get())) == EACCES);

  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) for (;;) ::pause();
  CHECK(why_not(private_page) == EACCES);
  const auto ring = vmci::pin_pages(std::span(private_page, 4096));
  if (ring) CHECK(why_not(private_page) == 0);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
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
