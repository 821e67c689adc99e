#include "guest_agent/ballast.hpp"

#include <doctest/doctest.h>

using vrdma::agent::Ballast;
using vrdma::vm::Run;

namespace {
const auto all = [](const Run&) { return true; };
const auto none = [](const Run&) { return false; };
// False, and says so: frames are hidden here, or there is too little memory.
bool can_hold() {
  const auto grown = Ballast(Ballast::block_bytes).grow(0, all);
  if (!grown) MESSAGE("SKIPPED: no ballast can be held here (root, and some memory, are needed): ", value(grown.error()));
  return grown.has_value();
}
}  // namespace

TEST_CASE("Ballast keeps what may not be lent, and gives back what may") {
  if (!can_hold()) return;
  Ballast ballast(4 * Ballast::block_bytes);
  auto given_back = ballast.grow(0, none);
  REQUIRE(given_back.has_value());
  CHECK(*given_back == 0);
  CHECK(ballast.held_bytes() == Ballast::block_bytes);
  given_back = ballast.grow(0, all);
  REQUIRE(given_back.has_value());
  CHECK(*given_back == Ballast::block_bytes);
  CHECK(ballast.held_bytes() == Ballast::block_bytes);
  ballast.release();
  CHECK(ballast.held_bytes() == 0);
}

TEST_CASE("Ballast is no more than was allowed, nor than leaves what is wanted") {
  if (!can_hold()) return;
  Ballast ballast(Ballast::block_bytes);
  CHECK(value(ballast.grow(std::uint64_t{1} << 50, none).error()) == ENOMEM);
  CHECK(ballast.grow(0, none).has_value());
  CHECK(value(ballast.grow(0, none).error()) == ENOMEM);
  CHECK(ballast.held_bytes() == Ballast::block_bytes);
}
