#include "vmkernel_svc/turn_order.hpp"

#include <doctest/doctest.h>

#include <random>

using vrdma::svc::TurnOrder;

namespace {
struct Member {
  bool there = false;
  std::vector<int> seen;  // turns of each member since the last turn of this one; -1: it was not there all the time
};
}  // namespace

TEST_CASE("Between two turns of one, each other that was there all the time has exactly one, whoever comes and goes") {
  constexpr std::size_t members_max = 9;
  std::mt19937 random(20261125);
  const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random() % bound); };
  for (int round = 0; round < 200; ++round) {
    TurnOrder<Member> order;
    std::vector<Member> members(members_max);
    const auto index_of = [&](const Member& member) { return static_cast<std::size_t>(&member - members.data()); };
    for (auto& member : members) member.seen.assign(members_max, -1);
    const auto leave = [&](Member& member) {
      member.there = false;
      for (auto& other : members) other.seen[index_of(member)] = -1;
      member.seen.assign(members_max, -1);
    };
    for (int step = 0; step < 300; ++step) {
      Member& member = members[below(members_max)];
      switch (below(8)) {
        case 0:
          if (!member.there) order.add(member), member.there = true;
          break;
        case 1:
          CHECK(order.remove(member) == member.there);
          leave(member);
          break;
        case 2: {  // several at once, whoever's turn it is
          const std::size_t kind = below(3);
          const std::size_t before = order.size();
          const std::size_t gone = order.remove_if([&](const Member& one) { return index_of(one) % 3 == kind; });
          CHECK(order.size() == before - gone);
          for (auto& one : members)
            if (index_of(one) % 3 == kind) leave(one);
          break;
        }
        default: {
          if (order.empty()) break;
          Member& now = order.current();
          REQUIRE(now.there);
          CHECK(&order.current() == &now);
          for (auto& other : members)
            if (&other != &now && other.there && other.seen[index_of(now)] != -1) ++other.seen[index_of(now)];
          for (auto& other : members)
            if (&other != &now && now.seen[index_of(other)] != -1) CHECK(now.seen[index_of(other)] == 1);
          for (auto& other : members) now.seen[index_of(other)] = &other != &now && other.there ? 0 : -1;
          order.pass();
        }
      }
    }
  }
}
