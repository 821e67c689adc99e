#include "vmkernel_svc/memory/machine_ram.hpp"

#include <cerrno>

#include "doctest/doctest.h"

namespace vrdma::svc {
namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20, gib = std::uint64_t{1} << 30;
constexpr std::uint64_t tables = 128 * 1024;  // of ACPI, at the end of what lies below

std::uint64_t high_of(std::uint64_t bytes, std::uint64_t seen_high, std::uint64_t seen_low_end) {
  const auto layout = MachineRam::layout_of(bytes, {seen_high, seen_low_end});
  REQUIRE(layout.has_value());
  CHECK(layout->low_bytes + layout->high_bytes == bytes);
  return layout->high_bytes;
}

TEST_CASE("What a machine's kernel sees tells how much of the RAM file lies from 4 GiB on") {
  CHECK(high_of(512 * mib, 0, 512 * mib - tables) == 0);
  CHECK(high_of(5 * gib, 3 * gib, 2 * gib - tables) == 3 * gib);                      // q35
  CHECK(high_of(5 * gib, 2 * gib, 3 * gib - tables) == 2 * gib);                      // pc
  CHECK(high_of(5 * gib, 2 * gib, 3 * gib - 60 * mib) == 2 * gib);                    // firmware that keeps much
  CHECK(high_of(3000 * mib, 2000 * mib, 1000 * mib - tables) == 2000 * mib);          // max-ram-below-4g=1000M
  CHECK(high_of(4 * gib, 2 * gib, 1 * gib) == 2 * gib);                               // a kernel that was told to leave some out
  CHECK(high_of(8 * gib, 0, 8 * gib) == 0);                                           // no hole (User Mode Linux)
}

TEST_CASE("Memory that was plugged in beside the file is not in it") {
  CHECK(high_of(512 * mib, 128 * mib, 512 * mib - tables) == 0);
  CHECK(high_of(512 * mib, 1 * gib, 512 * mib - tables) == 0);
  CHECK(high_of(3 * gib, 128 * mib, 3 * gib - tables) == 0);
  CHECK(high_of(2900 * mib, 256 * mib, 2900 * mib - tables) == 0);
  CHECK(high_of(5 * gib, 4 * gib + 128 * mib, 2 * gib - tables) == 3 * gib);  // from the next GiB on
  CHECK(high_of(5 * gib, 3 * gib, 3 * gib - tables) == 2 * gib);
}

TEST_CASE("An older agent does not say where RAM ends below: what is wrong for sure is refused") {
  CHECK(high_of(512 * mib, 0, 0) == 0);
  CHECK(high_of(5 * gib, 3 * gib, 0) == 3 * gib);
  for (const MachineRam::Seen seen : {MachineRam::Seen{128 * mib, 0}, {1 * gib, 0}, {4097, 512 * mib}})
    CHECK(MachineRam::layout_of(512 * mib, seen).error() == Errno{EINVAL});
}

TEST_CASE("Pages lie in the file where all of them are its RAM") {
  constexpr std::uint64_t page = vm::page_bytes, high = 4 * gib / page;
  constexpr vm::RamLayout layout{2 * gib, 3 * gib};
  CHECK(layout.offset_of({0, 1}) == 0u);
  CHECK(layout.offset_of({2 * gib / page - 1, 1}) == 2 * gib - page);
  CHECK(layout.offset_of({high, 3 * gib / page}) == 2 * gib);
  CHECK(layout.offset_of({high + 3 * gib / page - 1, 1}) == 5 * gib - page);
  for (const vm::Run outside : {vm::Run{2 * gib / page - 1, 2}, {2 * gib / page, 1}, {high - 1, 1}, {high - 1, 2}, {high + 3 * gib / page, 1}, {high + 1, 3 * gib / page}, {0, 0},
                                {~std::uint64_t{0}, 2}, {1, ~std::uint64_t{0}}})
    CHECK_FALSE(layout.offset_of(outside).has_value());
}

}  // namespace
}  // namespace vrdma::svc
