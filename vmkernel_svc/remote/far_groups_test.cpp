#include "vmkernel_svc/remote/far_groups.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <utility>

#include "vmkernel_svc/remote/link_head.hpp"
#include "vrdma/limits.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using engine::FarFrame;
using engine::FarFramePtr;
using remote::HostId;

namespace {

Gid group_of(unsigned number) { return Gid{0xff, 0x12, static_cast<std::uint8_t>(number >> 16), static_cast<std::uint8_t>(number >> 8), static_cast<std::uint8_t>(number)}; }

// Hosts that know each other: every record goes where it is to go, when deliver() lets it.
struct World {
  struct Host final : FarGroups::Post {
    World* world = nullptr;
    HostId id = 0;
    FarGroups groups{*this};
    bool has_room = true, connected = true, meets = false;
    std::deque<std::pair<HostId, FarFramePtr>> sent;
    std::size_t malformed = 0;

    bool may_tell(HostId) override { return has_room; }
    bool is_connected(HostId other) override { return connected && world->hosts[other].connected; }
    bool meets_others() override { return meets; }
    void tell(HostId other, FarFramePtr frame) override { sent.emplace_back(other, std::move(frame)); }
  };
  std::array<Host, 3> hosts;

  explicit World(std::uint64_t features = remote::link_knows_groups) {
    for (HostId id = 0; id < hosts.size(); ++id) hosts[id].world = this, hosts[id].id = id;
    for (auto& one : hosts)
      for (auto& other : hosts)
        if (&one != &other) one.groups.new_session(other.id, features);
  }
  FarGroups& operator[](HostId id) { return hosts[id].groups; }
  // One round: what was told arrives. False: nothing was.
  bool deliver() {
    bool any = false;
    for (auto& host : hosts) {
      host.groups.turn();
      for (auto& [to, frame] : std::exchange(host.sent, {})) {
        any = true;
        hosts[to].malformed += !hosts[to].groups.arrived(host.id, *frame);
      }
    }
    return any;
  }
  void settle() {
    for (int rounds = 0; deliver(); ++rounds) REQUIRE(rounds < 100);
  }
  bool knows(HostId one, HostId of, const Gid& group) {
    const auto& to = hosts[one].groups.receivers(group);
    return std::find(to.begin(), to.end(), of) != to.end();
  }
};

FarFramePtr record(GroupsWord word, const std::vector<Gid>& groups, std::uint64_t number = 0, std::uint8_t flags = 0) {
  auto frame = FarFrame::make(static_cast<std::uint32_t>(groups.size() * sizeof(Gid)));
  frame->record().kind = engine::FarKind::groups;
  frame->record().opcode = static_cast<std::uint8_t>(word);
  frame->record().flags = flags;
  frame->record().bytes = number;
  frame->record().payload_bytes = frame->capacity();
  if (!groups.empty()) std::memcpy(frame->payload(), groups.data(), frame->capacity());
  return frame;
}
constexpr std::uint8_t whole = groups_first | groups_last;

}  // namespace

TEST_CASE("A datagram to a group goes to the hosts that have members, from the join on and until the last one leaves") {
  World world;
  world.settle();
  const Gid group = group_of(1);
  CHECK(world[0].receivers(group).empty());
  world[1].joined(group);
  CHECK(!world[1].is_heard(group));  // nobody has been told
  world.settle();
  CHECK(world[1].is_heard(group));
  CHECK(world[0].receivers(group) == std::vector<HostId>{1});
  CHECK(world[2].receivers(group) == std::vector<HostId>{1});
  CHECK(world[1].receivers(group).empty());  // its own members are no other host's affair
  world[2].joined(group);
  world.settle();
  CHECK(world[0].receivers(group) == std::vector<HostId>{1, 2});
  CHECK(world[1].receivers(group) == std::vector<HostId>{2});
  world[1].left(group);
  world.settle();
  CHECK(world[0].receivers(group) == std::vector<HostId>{2});
  CHECK(world[0].receivers(group_of(2)).empty());
  CHECK(world[0].count(2) == 1);
  for (const auto& host : world.hosts) CHECK(host.malformed == 0);
}

TEST_CASE("A join is over when the last of the hosts that are connected has heard of it") {
  World world;
  world.settle();
  const Gid group = group_of(7);
  world[0].joined(group);
  auto told = std::exchange(world.hosts[0].sent, {});
  REQUIRE(told.size() == 2);
  CHECK(world[1].arrived(0, *told[0].second));
  world.settle();
  CHECK(!world[0].is_heard(group));  // the other one's is still on its way
  SUBCASE("and hears of it") {
    CHECK(world[2].arrived(0, *told[1].second));
    world.settle();
    CHECK(world[0].is_heard(group));
  }
  SUBCASE("or is lost, and is not waited for") {
    world.hosts[2].connected = false;
    CHECK(world[0].is_heard(group));
  }
  SUBCASE("or begins anew: it is sent all, and is waited for") {
    world[0].new_session(2, remote::link_knows_groups);
    CHECK(!world[0].is_heard(group));
    world.settle();
    CHECK(world[0].is_heard(group));
  }
  SUBCASE("or is no host of the subnet any more") {
    world[0].forget(2);
    CHECK(world[0].is_heard(group));
  }
}

TEST_CASE("A join waits for hosts that are about to be met") {
  World world;
  for (HostId id : {1u, 2u}) world[0].forget(id), world.hosts[0].meets = true;  // its service has just begun
  const Gid group = group_of(7);
  world[0].joined(group);
  CHECK(!world[0].is_heard(group));
  SUBCASE("and until they have heard of it") {
    for (HostId id : {1u, 2u}) world[0].new_session(id, remote::link_knows_groups), world[id].new_session(0, remote::link_knows_groups);
    world.hosts[0].meets = false;
    CHECK(!world[0].is_heard(group));
    world.settle();
    CHECK(world[0].is_heard(group));
    CHECK(world.knows(1, 0, group));
  }
  SUBCASE("but not for those that do not come") {
    world.hosts[0].meets = false;
    CHECK(world[0].is_heard(group));
  }
}

TEST_CASE("At a new session all groups are told again, and what was known before is forgotten") {
  World world;
  const unsigned many = 3 * groups_per_record + 5;  // several records
  for (unsigned i = 0; i < many; ++i) world[1].joined(group_of(i));
  world.settle();
  CHECK(world[0].count(1) == many);
  world[1].left(group_of(0));
  // The other way, everything that was under way is lost.
  world.hosts[1].sent.clear();
  world[1].new_session(0, remote::link_knows_groups);
  world[0].new_session(1, remote::link_knows_groups);
  CHECK(!world[0].count(1));
  CHECK(world.knows(0, 1, group_of(0)));  // until it has said all it is sent everything
  world.settle();
  CHECK(world[0].count(1) == many - 1);
  CHECK(!world.knows(0, 1, group_of(0)));
  CHECK(world.knows(0, 1, group_of(many - 1)));
  world[0].forget(1);
  CHECK(!world.knows(0, 1, group_of(many - 1)));
}

TEST_CASE("While a host has said only a part of its groups it is sent everything") {
  World world;
  world.settle();
  CHECK(world[0].arrived(1, *record(GroupsWord::all, {group_of(1)}, 0, groups_first)));
  CHECK(world.knows(0, 1, group_of(99)));
  CHECK(world[0].arrived(1, *record(GroupsWord::all, {group_of(2)}, 0, groups_last)));
  CHECK(!world.knows(0, 1, group_of(99)));
  CHECK(world.knows(0, 1, group_of(1)));
  CHECK(world.knows(0, 1, group_of(2)));
}

TEST_CASE("A host that knows nothing of such records is told nothing, waited for never, and sent everything") {
  World world(0);
  const Gid group = group_of(3);
  world[0].joined(group);
  CHECK(world[0].is_heard(group));
  CHECK(!world.deliver());
  CHECK(world[0].receivers(group) == std::vector<HostId>{1, 2});
  CHECK(!world[0].count(1));
  CHECK(!world[0].arrived(1, *record(GroupsWord::join, {group}, 1)));  // it says so all the same
}

TEST_CASE("Of IPv4 groups hosts are told that know such ones, and the others are not waited for") {
  const Gid group{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3};
  for (const int way : {0, 1, 2, 3}) {
    CAPTURE(way);
    const bool known = (way & 1) != 0, later = (way & 2) != 0;
    World world(remote::link_knows_groups | (known ? remote::link_knows_ipv4_groups : 0));
    if (later) world.settle();
    world[0].joined(group_of(1));
    world[0].joined(group);
    CHECK(!world[0].is_heard(group_of(1)));
    CHECK(world[0].is_heard(group) == !known);
    world.settle();
    CHECK(world[0].is_heard(group));
    CHECK(world[0].is_heard(group_of(1)));
    CHECK(world.knows(1, 0, group) == known);
    CHECK(world.knows(1, 0, group_of(1)));
    world[0].left(group);
    world.settle();
    CHECK(!world.knows(1, 0, group));
    for (const auto& host : world.hosts) CHECK(host.malformed == 0);
  }
}

TEST_CASE("What cannot be told now is told later: once for each group, or all anew where there is too much") {
  World world;
  world.settle();
  world.hosts[0].has_room = false;
  const Gid group = group_of(1);
  unsigned last = 0;
  SUBCASE("of a few") {
    for (int i = 0; i < 1000; ++i) world[0].joined(group), world[0].left(group);
    world[0].joined(group_of(last = 2));
  }
  SUBCASE("of more than a host can have") {
    for (unsigned i = 0; i < 3 * limits::mcast_groups_max; ++i) world[0].joined(group_of(i)), world[0].left(group_of(i));
    world[0].joined(group_of(last = 5));
  }
  world[0].turn();
  CHECK(world.hosts[0].sent.empty());
  CHECK(!world[0].is_heard(group_of(last)));
  world.hosts[0].has_room = true;
  world[0].turn();
  CHECK(world.hosts[0].sent.size() <= 4);  // to two hosts
  world.settle();
  CHECK(world[0].is_heard(group_of(last)));
  CHECK(world[1].count(0) == 1);
  CHECK(world.knows(1, 0, group_of(last)));
  for (const auto& host : world.hosts) CHECK(host.malformed == 0);
}

TEST_CASE("As many groups as a host can have may all be others at once") {
  World world;
  for (unsigned i = 0; i < limits::mcast_groups_max; ++i) world[0].joined(group_of(i));
  world.settle();
  world.hosts[0].has_room = false;
  for (unsigned i = 0; i < 100; ++i) world[0].left(group_of(i)), world[0].joined(group_of(0x20000 - i));
  world.hosts[0].has_room = true;
  world.settle();
  CHECK(world[1].count(0) == limits::mcast_groups_max);
  CHECK(world.hosts[1].malformed == 0);
  CHECK(!world.knows(1, 0, group_of(99)));
  CHECK(world.knows(1, 0, group_of(0x20000)));
}

TEST_CASE("A host that claims more groups than it can have, or what makes no sense, is told apart and bounded") {
  World world;
  world.settle();
  FarGroups& us = world[0];
  std::vector<Gid> batch(groups_per_record);
  for (unsigned i = 0; i < limits::mcast_groups_max; i += groups_per_record) {
    for (unsigned k = 0; k < groups_per_record; ++k) batch[k] = group_of(i + k);
    CHECK(us.arrived(1, *record(GroupsWord::join, batch)));
  }
  CHECK(!us.arrived(1, *record(GroupsWord::join, {group_of(1 << 20)}, 5)));
  CHECK(us.arrived(1, *record(GroupsWord::join, {group_of(1)})));  // one that it has
  CHECK(us.count(1) == limits::mcast_groups_max);
  CHECK(!world.knows(0, 1, group_of(1 << 20)));

  CHECK(!us.arrived(1, *record(GroupsWord::leave, std::vector<Gid>(groups_per_record + 1, group_of(1)))));
  CHECK(world.knows(0, 1, group_of(1)));
  CHECK(us.arrived(1, *record(GroupsWord::all, {}, 0, whole)));
  CHECK(us.count(1) == 0);
  CHECK(!us.arrived(1, *record(GroupsWord::join, {Gid{0xfe, 0x80}})));  // no group
  CHECK(!us.arrived(1, *record(GroupsWord::join, {Gid{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 198, 18, 0, 1}})));
  CHECK(!us.arrived(1, *record(GroupsWord::all, {group_of(1)}, 0, groups_last)));  // no first one before it
  CHECK(!us.arrived(1, *record(static_cast<GroupsWord>(0), {group_of(1)})));
  CHECK(!us.arrived(1, *record(static_cast<GroupsWord>(77), {})));
  CHECK(!us.arrived(9, *record(GroupsWord::join, {group_of(1)})));  // nobody
  auto torn = record(GroupsWord::join, {group_of(1)});
  torn->record().payload_bytes = 15;
  CHECK(!us.arrived(1, *torn));
  CHECK(us.count(1) == 0);

  // It cannot have heard what it was not told, nor unhear it.
  const Gid ours = group_of(4);
  us.joined(ours);
  CHECK(!us.arrived(1, *record(GroupsWord::heard, {}, 1000)));
  CHECK(!us.arrived(1, *record(GroupsWord::heard, {group_of(1)}, 1)));
  CHECK(!us.is_heard(ours));
  world.settle();
  CHECK(us.arrived(1, *record(GroupsWord::heard, {}, 0)));
  CHECK(us.is_heard(ours));
}

TEST_CASE("A host that says much is answered once a turn, and not where there is no room") {
  World world;
  world.settle();
  for (std::uint64_t i = 1; i <= 5000; ++i) CHECK(world[0].arrived(1, *record(GroupsWord::join, {group_of(1)}, i)));
  world.hosts[0].has_room = false;
  world[0].turn();
  CHECK(world.hosts[0].sent.empty());
  world.hosts[0].has_room = true;
  world[0].turn();
  REQUIRE(world.hosts[0].sent.size() == 1);
  CHECK(world.hosts[0].sent[0].second->record().opcode == static_cast<std::uint8_t>(GroupsWord::heard));
  CHECK(world.hosts[0].sent[0].second->record().bytes == 5000);
}

// Against what it is to be: a set for each host.
TEST_CASE("Whatever joins, leaves, stalls and begins anew, all know in the end what is") {
  for (unsigned seed = 1; seed <= 30; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    World world;
    std::array<std::set<Gid>, 3> members;
    for (int step = 0; step < 400; ++step) {
      const auto id = static_cast<HostId>(random() % 3);
      const auto other = static_cast<HostId>((id + 1 + random() % 2) % 3);
      const Gid group = group_of(static_cast<unsigned>(random() % 20));
      switch (random() % 8) {
        case 0: world.hosts[id].has_room = !world.hosts[id].has_room; break;
        case 1:  // the two lose what was under way
          for (const auto& [one, two] : {std::pair{id, other}, std::pair{other, id}}) {
            auto& sent = world.hosts[one].sent;
            std::erase_if(sent, [&, two = two](const auto& entry) { return entry.first == two; });
            world[one].new_session(two, remote::link_knows_groups);
          }
          break;
        case 2: world.deliver(); break;
        default:
          if (members[id].insert(group).second) world[id].joined(group);
          else members[id].erase(group), world[id].left(group);
      }
      // A join that is over is known everywhere.
      for (unsigned i = 0; i < 20; ++i)
        for (HostId one = 0; one < 3; ++one)
          for (HostId two = 0; two < 3; ++two)
            if (one != two && members[one].contains(group_of(i)) && world[one].is_heard(group_of(i))) CHECK(world.knows(two, one, group_of(i)));
    }
    for (auto& host : world.hosts) host.has_room = true;
    world.settle();
    for (unsigned i = 0; i < 20; ++i)
      for (HostId one = 0; one < 3; ++one)
        for (HostId two = 0; two < 3; ++two)
          if (one != two) CHECK(world.knows(two, one, group_of(i)) == members[one].contains(group_of(i)));
    for (const auto& host : world.hosts) CHECK(host.malformed == 0);
  }
}
