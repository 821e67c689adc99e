#include "guest_lib/memory/page_counts.hpp"

#include <doctest/doctest.h>

#include <array>
#include <random>
#include <vector>

using namespace vrdma::memory;

namespace {

std::uint64_t runs_of(const PageCounts& counts) {
  std::uint64_t runs = 0;
  for (std::uint64_t at = 0;; ++runs) {
    const Range run = counts.first_overlap({at, ~std::uint64_t{0}});
    if (run.empty()) return runs;
    at = run.end;
  }
}

}  // namespace

TEST_CASE("Page counts agree with an array of counters over seeded random operations") {
  for (unsigned seed = 1; seed <= 50; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    PageCounts counts(std::pmr::new_delete_resource());
    std::array<std::uint32_t, 64> model{};
    std::vector<Range> raised;
    for (int step = 0; step < 400; ++step) {
      const bool lower = !raised.empty() && random() % 2 == 0;
      if (!lower) {
        const std::uint64_t begin = random() % 63, end = begin + 1 + random() % (64 - begin);
        counts.raise({begin << 12, end << 12});
        for (auto i = begin; i < end; ++i) ++model[i];
        raised.push_back({begin, end});
      } else {
        const std::size_t pick = random() % raised.size();
        const Range range = raised[pick];
        raised.erase(raised.begin() + static_cast<std::ptrdiff_t>(pick));
        std::array<bool, 64> zero{}, expected{};
        for (auto i = range.begin; i < range.end; ++i) expected[i] = --model[i] == 0;
        counts.lower({range.begin << 12, range.end << 12}, [&](Range fell) {
          for (auto i = fell.begin >> 12; i < fell.end >> 12; ++i) zero[i] = true;
        });
        CHECK(zero == expected);
      }
      std::uint64_t bytes = 0, runs = 0;
      for (std::size_t i = 0; i < 64; ++i) {
        REQUIRE(counts.any({i << 12, (i + 1) << 12}) == (model[i] != 0));
        bytes += model[i] ? 4096 : 0;
        runs += model[i] && (i == 0 || model[i - 1] != model[i]);
      }
      REQUIRE(counts.bytes() == bytes);
      REQUIRE(runs_of(counts) == runs);
    }
  }
}

TEST_CASE("A set of pages forgets parts and finds the first overlap") {
  PageCounts pages(std::pmr::new_delete_resource());
  pages.insert({0x10000, 0x20000});
  pages.insert({0x18000, 0x30000});
  CHECK(runs_of(pages) == 1);
  pages.erase({0x14000, 0x15000});
  CHECK(pages.bytes() == 0x1f000);
  CHECK(pages.first_overlap({0x14000, 0x40000}) == Range{0x15000, 0x30000});
  CHECK_FALSE(pages.any({0x14000, 0x15000}));
  CHECK(pages.bounds() == Range{0x10000, 0x30000});
}
