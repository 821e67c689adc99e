#include "guest_lib/kept_records.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <deque>
#include <new>

using vrdma::guest::KeptRecords;

TEST_CASE("Kept records come in the order in which they were put, whatever room was made and taken back meanwhile") {
  KeptRecords<int> kept;
  std::deque<int> expected;
  std::uint32_t random = 7;
  for (int next = 0; next < 20'000;) {
    random = random * 1664525 + 1013904223;
    const auto some = (random >> 8) % 12;
    switch (random >> 24 & 3) {
      case 0:
      case 1:
        REQUIRE(kept.make_room(some));
        for (std::uint32_t i = 0; i < some; ++i) kept.put(next), expected.push_back(next++);
        break;
      case 2:
        for (std::uint32_t i = 0; i < some && !expected.empty(); ++i) {
          REQUIRE(kept.take() == expected.front());
          expected.pop_front();
        }
        break;
      default: {
        const auto matches = [some](int record) { return record % 12 == static_cast<int>(some); };
        kept.erase_if(matches);
        std::erase_if(expected, matches);
      }
    }
    REQUIRE(kept.count() == expected.size());
  }
}

// As if there were no memory for more of them; a request that no allocator grants ends a sanitized program.
struct Dear {
  static inline bool none_left = false;
  Dear(int value_in = 0) : value(value_in) {
    if (none_left) throw std::bad_alloc();
  }
  int value;
};

TEST_CASE("Without memory there is no room, and what was there stays") {
  KeptRecords<Dear> kept;
  REQUIRE(kept.make_room(2));
  kept.put(1);
  kept.put(2);
  Dear::none_left = true;
  CHECK_FALSE(kept.make_room(1));
  Dear::none_left = false;
  CHECK(kept.take().value == 1);
  CHECK(kept.take().value == 2);
  CHECK(kept.make_room(2));
}
