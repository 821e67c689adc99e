#include "vmkernel_svc/lids.hpp"

#include <doctest/doctest.h>

namespace vrdma::svc {
namespace {

constexpr Lids::Secret mine{1}, others{2};
constexpr Lids::Address address{0xaaaa, 1, 1000};

TEST_CASE("LIDs are given in turn, and rest before they are given again") {
  Lids lids(5, 3);
  CHECK(lids.take(1000) == 5);
  CHECK(lids.take(1000) == 6);
  lids.give_back(5);
  CHECK(lids.take(1000) == 7);
  CHECK(lids.take(1000) == 5);
  CHECK(lids.take(1000) == 0);
  lids.give_back(7);
  lids.give_back(6);
  CHECK(lids.take(1000) == 7);
}

TEST_CASE("Until they are leased there are none, and a lease is for good") {
  Lids lids(0, 0);
  CHECK(lids.take(1000) == 0);
  lids.lease({100, 101});
  lids.lease({200, 300});
  CHECK(lids.take(1000) == 100);
  CHECK(lids.take(1000) == 101);
  CHECK(lids.take(1000) == 0);
}

TEST_CASE("Who names the same secret has the same address, which rests when the last of them has gone") {
  Lids lids(1, 3);
  const std::uint16_t first = lids.take(1000);
  CHECK_FALSE(lids.share(mine, first, address));
  const std::uint16_t second = lids.take(1000);
  const auto shared = lids.share(mine, second, {0xbbbb, 1, 1000});
  REQUIRE(shared);
  CHECK(shared->lid == first);
  CHECK(shared->guid == 0xaaaa);
  lids.give_back(first);
  CHECK(lids.take(1000) == 3);
  CHECK(lids.take(1000) == second);
  CHECK(lids.take(1000) == 0);  // the child has it
  lids.give_back(first);
  CHECK(lids.take(1000) == first);
}

TEST_CASE("An address that rests is had again, unless it has become somebody else's") {
  Lids lids(1, 2);
  const std::uint16_t first = lids.take(1000);
  CHECK_FALSE(lids.share(mine, first, address));
  lids.give_back(first);  // the parent has ended
  const std::uint16_t child = lids.take(1000);
  CHECK_FALSE(lids.share(mine, child, address, false));
  REQUIRE(lids.share(mine, child, address));
  CHECK(lids.take(1000) == child);  // it rests, and the shared one does not
  CHECK(lids.take(1000) == 0);
  lids.give_back(first);
  CHECK(lids.take(1000) == first);  // somebody else
  CHECK_FALSE(lids.share(mine, child, address));
}

TEST_CASE("A secret of another user or link layer, or another secret, opens nothing") {
  Lids lids(1, 9);
  const std::uint16_t first = lids.take(1000);
  CHECK_FALSE(lids.share(mine, first, address));
  CHECK_FALSE(lids.share(others, first, address));  // it has named one
  CHECK_FALSE(lids.share(mine, lids.take(1000), {0xbbbb, 1, 1001}));
  CHECK_FALSE(lids.share(mine, lids.take(1000), {0xbbbb, 2, 1000}));
  CHECK_FALSE(lids.share(others, lids.take(1000), address));
}

TEST_CASE("TheLastLidsAreForRootWhoeverHasTheOthers") {
  Lids lids(1, 320);
  std::uint16_t last = 0;
  int taken = 0;
  for (std::uint16_t lid; taken < 1000 && (lid = lids.take(1000 + static_cast<uid_t>(taken))) != 0; ++taken) last = lid;
  CHECK(taken == 312);
  for (int i = 0; i < 8; ++i) CHECK(lids.take(0) != 0);
  CHECK(lids.take(0) == 0);
  lids.give_back(last);
  CHECK(lids.take(1000) == 0);
  CHECK(lids.take(0) == last);
}

}  // namespace
}  // namespace vrdma::svc
