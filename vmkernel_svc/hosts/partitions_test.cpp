#include "vmkernel_svc/hosts/partitions.hpp"

#include <doctest/doctest.h>

#include <set>

#include "vmkernel_svc/hosts/messages.hpp"

using namespace vrdma;
using namespace vrdma::hosts;

namespace {
Partitions made(std::initializer_list<std::pair<std::uint16_t, const char*>> members) {
  Partitions partitions;
  for (const auto& [pkey, member] : members) REQUIRE(partitions.add(*membership_of(pkey, member)));
  return partitions;
}
using Keys = std::vector<std::uint16_t>;
}  // namespace

TEST_CASE("KeysMatchWithinAPartitionUnlessBothAreLimited") {
  CHECK(pkeys_match(0xffff, 0xffff));
  CHECK(pkeys_match(0x8001, 0x0001));
  CHECK(pkeys_match(0x0001, 0x8001));
  CHECK_FALSE(pkeys_match(0x0001, 0x0001));
  CHECK_FALSE(pkeys_match(0x8001, 0x8002));
  CHECK_FALSE(pkeys_match(0x8000, 0x8000));  // no partition
  CHECK_FALSE(pkeys_match(0, 0));
}

TEST_CASE("TextsOfKeysAndMembers") {
  CHECK(pkey_of("0x8001") == 0x8001);
  CHECK(pkey_of("0xFFFF") == 0xffff);
  for (const char* const bad : {"", "8001", "0x", "0x80011", "0x8000", "0x0000", "0x 001", "0x+001", "0xg001"}) CHECK_FALSE(pkey_of(bad));
  for (const char* const good : {"1000", "*", "b/1000", "b/*", "4294967295"}) CHECK(membership_of(0x8001, good)->member() == good);
  CHECK(membership_of(0x8001, "*/7")->member() == "7");
  for (const char* const bad : {"", "/", "b/", "/1", "B/1", "b/1/2", "-1", "4294967296", "1 ", "b/x"}) CHECK_FALSE(membership_of(0x8001, bad));
}

TEST_CASE("WhoIsNamedHasWhatHeIsGivenAndOthersTheDefaultPartition") {
  const Partitions partitions = made({{0x8002, "1000"}, {0x0001, "b/1000"}, {0x0001, "b/1001"}, {0x8001, "b/1001"}, {0x8003, "c/*"}, {0xffff, "c/7"}});
  CHECK(partitions.keys_of("a", 1) == Keys{0xffff});
  CHECK(partitions.keys_of("a", 1000) == Keys{0x8002});
  CHECK(partitions.keys_of("b", 1000) == Keys{0x0001, 0x8002});
  CHECK(partitions.keys_of("b", 1001) == Keys{0x8001});  // full outdoes limited
  CHECK(partitions.keys_of("c", 1) == Keys{0x8003});
  CHECK(partitions.keys_of("c", 7) == Keys{0xffff, 0x8003});
}

TEST_CASE("AHostMayClaimWhatATenantOfItMayHave") {
  const Partitions partitions = made({{0x8002, "1000"}, {0x0001, "b/1000"}, {0x8003, "c/*"}});
  CHECK(partitions.may_be_of("a", 0xffff));
  CHECK(partitions.may_be_of("a", 0x8002));
  CHECK_FALSE(partitions.may_be_of("a", 0x0001));
  CHECK(partitions.may_be_of("b", 0x0001));
  CHECK_FALSE(partitions.may_be_of("b", 0x8001));  // the same partition, of which it has no full member
  CHECK_FALSE(partitions.may_be_of("c", 0xffff));  // everybody there is named
  CHECK_FALSE(partitions.may_be_of("a", 0));
  CHECK_FALSE(partitions.may_be_of("a", 0x8000));
  CHECK(Partitions{}.may_be_of("a", 0xffff));
  CHECK_FALSE(Partitions{}.may_be_of("a", 0x8001));
}

TEST_CASE("AKeyThatStaysKeepsItsPlaceInTheTable") {
  PkeyTable table{};
  Partitions partitions;
  CHECK(partitions.fill(table, "a", 1));
  CHECK(table[0] == 0xffff);
  partitions = made({{0x8001, "1"}, {0x8002, "1"}, {0x8003, "1"}});
  CHECK(partitions.fill(table, "a", 1));
  CHECK((table[0] == 0x8001 && table[1] == 0x8002 && table[2] == 0x8003));
  REQUIRE(partitions.remove(*membership_of(0x8002, "1")));
  REQUIRE(partitions.remove(*membership_of(0x8003, "1")));
  REQUIRE(partitions.add(*membership_of(0x0003, "1")));
  CHECK(partitions.fill(table, "a", 1));
  CHECK((table[0] == 0x8001 && table[1] == 0 && table[2] == 0x0003));  // another member of the same partition
  for (std::uint16_t key = 0x9000; key < 0x9010; ++key) partitions.add(Membership{key, "", 1});
  CHECK_FALSE(partitions.fill(table, "a", 1));
  CHECK((table[0] == 0x8001 && table[1] == 0x9000 && table[2] == 0x0003 && table[15] != 0));
  CHECK(partitions.remove_partition(3) == 1);
  CHECK(partitions.remove_partition(3) == 0);
}

TEST_CASE("TheFirstPlaceOfTheTableIsNeverEmpty") {
  PkeyTable table{};
  Partitions partitions = made({{0x8001, "1"}});
  CHECK(partitions.fill(table, "a", 1));
  REQUIRE(partitions.add(*membership_of(0x8002, "1")));
  CHECK(partitions.fill(table, "a", 1));
  REQUIRE(partitions.remove(*membership_of(0x8001, "1")));
  CHECK(partitions.fill(table, "a", 1));
  CHECK((table[0] == 0x8002 && table[1] == 0x8002 && table[2] == 0));
  REQUIRE(partitions.add(*membership_of(0x8003, "1")));
  CHECK(partitions.fill(table, "a", 1));
  REQUIRE(partitions.remove(*membership_of(0x8002, "1")));
  CHECK(partitions.fill(table, "a", 1));
  CHECK((table[0] == 0x8003 && table[1] == 0 && table[2] == 0x8003));
  // The default partition has it back; and whoever has as many keys as there are places has them all.
  REQUIRE(partitions.add(*membership_of(0xffff, "1")));
  CHECK(partitions.fill(table, "a", 1));
  CHECK((table[0] == 0xffff && table[1] == 0 && table[2] == 0x8003));
  REQUIRE(partitions.remove(*membership_of(0xffff, "1")));
  CHECK(partitions.fill(table, "a", 1));
  CHECK(table[0] == 0x8003);
  for (std::uint16_t key = 0x9000; key < 0x900f; ++key) REQUIRE(partitions.add(Membership{key, "", 1}));
  CHECK(partitions.fill(table, "a", 1));
  CHECK(std::set<std::uint16_t>(table.begin(), table.end()).size() == table.size());
}

TEST_CASE("PartitionsAreOfTheStateAndAChangeBringsAllOfThem") {
  State here, there;
  here.begin(1);
  here.set(made({{0x8001, "1"}, {0x0001, "b/*"}}));
  std::string why;
  const auto first = decode_delta(encode(here.since({})), why);
  REQUIRE_MESSAGE(first, why);
  REQUIRE(there.apply(*first));
  CHECK(there.partitions() == here.partitions());
  const StateId then = there.id();
  here.begin(1);
  here.put({"a", "10.0.0.1", 1, 2, 0, {1, 8}, "ab", 0});
  CHECK_FALSE(here.since(then).partitions);  // they are as before
  REQUIRE(there.apply(here.since(then)));
  CHECK(there.partitions() == here.partitions());
  here.begin(1);
  here.set({});
  REQUIRE(there.apply(here.since(there.id())));
  CHECK(there.partitions().empty());
  State third;
  REQUIRE(third.apply(there.since({})));
  CHECK(third.partitions().empty());
}

TEST_CASE("WishesAboutPartitionsThatMakeNoSenseAreNotUnderstood") {
  const auto understood = [](const std::string& text) {
    std::string why;
    return decode(text, why).has_value();
  };
  CHECK(understood(R"({"type":"partition","pkey":0,"add":false,"members":[]})"));
  CHECK(understood(R"({"type":"partition","pkey":32769,"add":true,"members":["1","b/*"]})"));
  CHECK(understood(R"({"type":"partition","pkey":32769,"add":false,"members":[]})"));
  CHECK_FALSE(understood(R"({"type":"partition","pkey":32769,"add":true,"members":[]})"));
  CHECK_FALSE(understood(R"({"type":"partition","pkey":32768,"add":true,"members":["1"]})"));
  CHECK_FALSE(understood(R"({"type":"partition","pkey":32769,"add":true,"members":[1]})"));
  CHECK_FALSE(understood(R"({"type":"partition","pkey":32769,"add":true,"members":["x"]})"));
  CHECK_FALSE(understood(R"({"type":"partitions","error":"","leader":"","port":0,"partitions":{"0x8001":["1","1"]}})"));
  CHECK_FALSE(understood(R"({"type":"partitions","error":"","leader":"","port":0})"));
}
