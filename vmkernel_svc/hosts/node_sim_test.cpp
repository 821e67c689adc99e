// The code of node.hpp on a virtual network and clock: messages are lost, late and out of order; hosts crash, come back with what
// was on disk, or with nothing, are cut off, removed, and copied. Whatever happens, no LID may be given by two, and nothing that was
// committed is forgotten; when it ends, all have a lease.
// Seeded: a failure names its seed, and VRDMA_SIM_SEED runs that alone. VRDMA_SIM_SHARE=N runs an N-th of it, for slow builds.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <queue>

#include "vmkernel_svc/hosts/node.hpp"

using namespace vrdma::hosts;

namespace {

constexpr std::uint64_t tick_ms = 100;

class Subnet {
 public:
  Subnet(std::uint64_t seed, std::size_t hosts, std::size_t managers, std::uint16_t lids) : random_(seed), lids_(lids) {
    for (std::size_t i = 0; i < managers; ++i) managers_.push_back(name_of(i));
    for (std::size_t i = 0; i < hosts; ++i) add(name_of(i));
  }

  static std::string name_of(std::size_t i) { return "h" + std::to_string(i); }
  std::size_t add(const std::string& name) {
    auto host = std::make_unique<SimHost>();
    host->name = name;
    host->serial = fmt::format("{:x}", hosts_.size() + 1);
    host->clock_ahead_ms = below(1'000'000);
    hosts_.push_back(std::move(host));
    start(hosts_.size() - 1);
    return hosts_.size() - 1;
  }

  // --- what happens to them
  void crash(std::size_t i) { hosts_[i]->node.reset(), ++hosts_[i]->life; }
  void start(std::size_t i) {
    SimHost& host = *hosts_[i];
    if (host.node) return;
    const Member::Self self{host.name, host.serial, fmt::format("{:x}", random_()), "10.0.0.1", static_cast<std::uint16_t>(10 + i), 1, lids_};
    host.node = std::make_unique<Node>(self, host.managers.empty() ? managers_ : host.managers, Timing{}, random_(), host.disk);
    const auto life = ++host.life;
    at(now_ + below(tick_ms), [this, i, life] { tick(i, life); });
  }
  // A manager's file is lost. At least one other has what was committed last: of what nobody has, nobody can know.
  bool lose_file(std::size_t i) {
    bool safe = false;
    for (std::size_t j = 0; j < managers_.size(); ++j) safe |= j != i && hosts_[j]->disk.consensus.state.id() >= committed_.id();
    if (!safe) return false;
    crash(i);
    hosts_[i]->disk = {};
    return true;
  }
  // The same list of managers on all hosts, and all of them start anew.
  void set_managers(std::size_t count) {
    managers_.clear();
    for (std::size_t i = 0; i < count; ++i) managers_.push_back(name_of(i));
    for (std::size_t i = 0; i < hosts_.size(); ++i) crash(i), start(i);
  }
  // `hosts` begin a subnet of their own, led by one of the first of them. What two subnets hold is not compared until they are merged.
  void begin_apart(const std::vector<std::size_t>& hosts, std::size_t managers) {
    apart_ = true;
    for (const auto i : hosts) {
      crash(i);
      hosts_[i]->disk = {};
      hosts_[i]->managers.clear();
      for (std::size_t k = 0; k < managers; ++k) hosts_[i]->managers.push_back(name_of(hosts[k]));
      start(i);
    }
  }
  // All are given the common list of managers, and start anew.
  void merge() {
    for (std::size_t i = 0; i < hosts_.size(); ++i) crash(i), hosts_[i]->managers.clear();
    apart_ = false;
    given_.clear();
    for (std::size_t i = 0; i < hosts_.size(); ++i) start(i);
  }
  // As an administrator does it, who is told to.
  void remove_file(std::size_t i) {
    crash(i);
    hosts_[i]->disk = {};
    start(i);
  }
  void part(std::size_t i, int island) { hosts_[i]->island = island; }
  void heal() {
    for (auto& host : hosts_) host->island = 0;
    lost_percent = 0;
    delay_most_ms = 20;
  }
  // An administrator takes a host out, which knows nothing of it; later it joins again with another certificate.
  bool remove(std::size_t i) { return ask(Remove{hosts_[i]->name}); }
  // The certificate of a host that is not there yet.
  bool revoke_next() { return ask(Remove{name_of(hosts_.size()), fmt::format("{:x}", hosts_.size() + 1)}); }
  bool ask(const Remove& wish) {
    for (std::size_t j = 0; j < managers_.size(); ++j)
      if (auto& host = *hosts_[j]; host.node && host.node->leads(time_of(host))) {
        perform(j, host.node->receive(time_of(host), {"administrator", "", admin_route}, wish));
        return true;
      }
    return false;
  }
  void certify_again(std::size_t i) {
    crash(i);
    hosts_[i]->serial += "f";
    start(i);
  }

  void run_for(std::uint64_t ms) {
    const std::uint64_t until = now_ + ms;
    while (!events_.empty() && events_.top().at_ms <= until && failure.empty()) {
      const Event event = std::move(const_cast<Event&>(events_.top()));
      events_.pop();
      now_ = event.at_ms;
      event.run();
    }
    now_ = until;
  }

  bool alive(std::size_t i) const { return hosts_[i]->node != nullptr; }
  bool may_give(std::size_t i) const { return alive(i) && hosts_[i]->node->member().may_give(time_of(*hosts_[i])); }
  LidRange lids(std::size_t i) const { return hosts_[i]->node->member().lids(); }
  bool is_blank(std::size_t i) const { return hosts_[i]->node->consensus().blank(); }
  std::uint64_t origin(std::size_t i) const { return hosts_[i]->disk.consensus.origin; }
  std::size_t apart_from(std::size_t i) const { return hosts_[i]->node->consensus().apart(time_of(*hosts_[i])).size(); }
  const State& state(std::size_t i) const { return hosts_[i]->disk.consensus.state; }
  bool knows(std::size_t i, const std::string& name) const { return hosts_[i]->node->member().known().find(name) != nullptr; }
  std::size_t leader() const {
    for (std::size_t i = 0; i < hosts_.size(); ++i)
      if (alive(i) && hosts_[i]->node->leads(time_of(*hosts_[i]))) return i;
    return hosts_.size();
  }
  std::size_t size() const { return hosts_.size(); }
  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }

  // All that run have a lease, and know the same subnet; empty: so it is.
  std::string unsettled() const {
    const State* known = nullptr;
    std::size_t leaders = 0;
    for (std::size_t i = 0; i < hosts_.size(); ++i) {
      if (!alive(i)) continue;
      const auto& host = *hosts_[i];
      if (!may_give(i)) return fmt::format("{} has no lease: {}", host.name, host.node->member().problem());
      leaders += host.node->leads(time_of(host));
      const State& its = host.node->member().known();
      if (known != nullptr && known->hosts() != its.hosts()) return fmt::format("{} knows another subnet", host.name);
      known = &its;
    }
    return leaders == 1 ? "" : fmt::format("{} lead", leaders);
  }

  std::string failure;
  std::uint64_t lost_percent = 0, delay_most_ms = 20;
  std::uint64_t delivered = 0;

 private:
  static constexpr std::uint64_t admin_route = ~0ull;
  struct SimHost {
    std::string name, serial;
    std::vector<std::string> managers;  // empty: the common list
    std::unique_ptr<Node> node;
    Node::Memory disk;
    int island = 0;
    std::uint64_t life = 0, clock_ahead_ms = 0;
  };
  struct Event {
    std::uint64_t at_ms, number;
    std::function<void()> run;
    bool operator<(const Event& other) const { return at_ms != other.at_ms ? at_ms > other.at_ms : number > other.number; }
  };

  std::uint64_t time_of(const SimHost& host) const { return now_ + host.clock_ahead_ms + 1; }
  void at(std::uint64_t ms, std::function<void()> run) { events_.push({ms, ++numbers_, std::move(run)}); }

  void tick(std::size_t i, std::uint64_t life) {
    SimHost& host = *hosts_[i];
    if (host.life != life) return;
    perform(i, host.node->tick(time_of(host)));
    at(now_ + tick_ms, [this, i, life] { tick(i, life); });
  }

  void perform(std::size_t i, Outbox out) {
    SimHost& host = *hosts_[i];
    if (out.save) host.disk = host.node->memory();
    if (out.save && chaos && below(400) == 0) {  // it is on disk, and nobody heard of it
      crash(i);
      at(now_ + 500 + below(5000), [this, i] { start(i); });
      return;
    }
    for (auto& letter : out.letters) {
      if (letter.to.route == admin_route) continue;
      const auto to = letter.to.route != 0 ? letter.to.route - 1 : find(letter.to.name, i);
      if (to == hosts_.size() || below(100) < lost_percent) continue;
      // Through the form that it has on the wire, now and then: it costs most of the time.
      auto message = std::make_shared<Message>(std::move(letter.message));
      if (hosts_.size() < 20 || below(100) == 0) {
        std::string why;
        auto again = decode(encode(*message), why);
        if (!again) failure = "a message of ours is refused: " + why;
        else *message = std::move(*again);
      }
      at(now_ + 1 + below(delay_most_ms), [this, i, to, message] {
        SimHost& receiver = *hosts_[to];
        if (!receiver.node || receiver.island != hosts_[i]->island) return;
        ++delivered;
        perform(to, receiver.node->receive(time_of(receiver), {hosts_[i]->name, hosts_[i]->serial, i + 1}, *message));
      });
    }
    if (apart_) return;
    check(i);
    check_committed(i);
  }

  std::size_t find(const std::string& name, std::size_t from) const {
    const auto number = static_cast<std::size_t>(std::atoi(name.c_str() + 1));  // copies come later in the list
    return number < hosts_.size() && hosts_[number]->name == name && number != from ? number : hosts_.size();
  }

  // Of two states that were committed, the later one knows all of the earlier one, whoever committed them, and when.
  void check_committed(std::size_t i) {
    const SimHost& host = *hosts_[i];
    if (!host.node || !host.node->leads(time_of(host))) return;
    const State& state = host.node->consensus().committed();
    if (state.id() == committed_.id()) {
      if (state.hosts() != committed_.hosts()) failure = fmt::format("at {} ms {} has committed another state {}/{}", now_, host.name, state.id().term, state.id().version);
      return;
    }
    const State& before = state.id() < committed_.id() ? state : committed_;
    const State& after = state.id() < committed_.id() ? committed_ : state;
    std::string lost;
    for (const auto& [serial, gone] : before.removed())
      if (!after.removed().contains(serial)) lost = "that " + gone.name + " was removed";
    for (const auto& [name, known] : before.hosts()) {
      const Host* const still = after.find(name);
      if (still != nullptr && still->lids == known.lids) continue;
      const bool was_removed = std::ranges::any_of(after.removed(), [&host = known, &before](const auto& entry) {
        return entry.second.name == host.name && entry.second.changed > before.id().version;
      });
      if (!was_removed) lost = "the LIDs of " + name;
    }
    if (!lost.empty())
      failure = fmt::format("at {} ms {} leads, and the subnet has forgotten {}: {}/{} after {}/{}", now_, host.name, lost, after.id().term, after.id().version,
                            before.id().term, before.id().version);
    if (&after == &state) committed_ = State(state);
  }

  // Nobody else may give what this one may give.
  void check(std::size_t i) {
    if (!may_give(i)) return;
    const LidRange ours = lids(i);
    auto near = given_.upper_bound(ours.last);
    while (near != given_.begin()) {
      --near;
      const std::size_t other = near->second.second;
      if (near->second.first < ours.first) break;
      if (other != i && may_give(other) && overlap(lids(other), ours))
        failure = fmt::format("at {} ms {} (host {}) and {} (host {}) may both give LIDs {}-{}", now_, hosts_[i]->name, i, hosts_[other]->name, other, ours.first, ours.last);
    }
    given_[ours.first] = {ours.last, i};
  }

 public:
  bool chaos = false;

 private:
  std::mt19937_64 random_;
  std::uint16_t lids_;
  std::vector<std::string> managers_;
  std::vector<std::unique_ptr<SimHost>> hosts_;
  std::priority_queue<Event> events_;
  std::map<std::uint16_t, std::pair<std::uint16_t, std::size_t>> given_;  // first → last, who gave last
  std::uint64_t now_ = 0, numbers_ = 0;
  State committed_;  // the last that anybody has seen a leader commit
  bool apart_ = false;
};

// A minute or two of trouble for everybody.
void trouble(Subnet& subnet, std::size_t managers, std::uint64_t seconds) {
  subnet.chaos = true;
  for (std::uint64_t second = 0; second < seconds && subnet.failure.empty(); ++second) {
    const std::size_t anybody = subnet.below(subnet.size()), manager = subnet.below(managers);
    switch (subnet.below(11)) {
      case 0: subnet.crash(anybody); break;
      case 1: subnet.crash(manager); break;
      case 2: case 3: subnet.start(anybody), subnet.start(manager); break;
      case 4: subnet.part(manager, static_cast<int>(subnet.below(3))); break;
      case 5:
        for (std::size_t i = 0; i < subnet.size(); ++i) subnet.part(i, static_cast<int>(subnet.below(2)));
        break;
      case 6: subnet.heal(); break;
      case 7: subnet.lost_percent = subnet.below(40), subnet.delay_most_ms = 1 + subnet.below(1500); break;
      case 8: subnet.remove(anybody); break;
      case 9: subnet.certify_again(anybody); break;
      case 10: subnet.lose_file(manager); break;
    }
    subnet.run_for(500 + subnet.below(5000));
  }
  subnet.chaos = false;
  subnet.heal();
}

// How to run what has failed alone.
std::string again(std::uint64_t seed) {
  const char* const share = std::getenv("VRDMA_SIM_SHARE");
  return "VRDMA_SIM_SEED=" + std::to_string(seed) + (share != nullptr ? std::string(" VRDMA_SIM_SHARE=") + share : "");
}

void settle(Subnet& subnet, std::uint64_t seed) {
  // Removed ones that do not know it join with another certificate.
  for (std::size_t i = 0; i < subnet.size(); ++i) subnet.crash(i);
  for (std::size_t i = 0; i < subnet.size(); ++i) subnet.certify_again(i);
  for (int round = 0; round < 60 && subnet.failure.empty(); ++round) {
    subnet.run_for(5000);
    if (subnet.unsettled().empty()) break;
  }
  CHECK_MESSAGE(subnet.failure == "", again(seed));
  CHECK_MESSAGE(subnet.unsettled() == "", again(seed));
}

std::uint64_t soak_factor() { return std::getenv("VRDMA_SOAK") != nullptr ? 50 : 1; }

std::uint64_t share_of(std::uint64_t count) {
  const char* const share = std::getenv("VRDMA_SIM_SHARE");
  return share == nullptr ? count : std::max<std::uint64_t>(1, count / std::max<std::uint64_t>(1, std::strtoull(share, nullptr, 10)));
}

template <class Run>
void seeds(std::uint64_t count, Run run) {
  if (const char* const chosen = std::getenv("VRDMA_SIM_SEED")) return run(std::strtoull(chosen, nullptr, 10));
  for (std::uint64_t seed = 1; seed <= share_of(count) * soak_factor(); ++seed) run(seed);
}

}  // namespace

TEST_CASE("FewHostsConvergeAfterAnyTroubleAndNoLidIsHeldByTwo") {
  seeds(150, [](std::uint64_t seed) {
    const std::size_t managers = 1 + seed % 5, hosts = managers + seed % 4;
    // Hardly more LIDs than are wanted: what one gives back is another's soon.
    Subnet subnet(seed, hosts, managers, static_cast<std::uint16_t>(seed % 3 == 0 ? 64 : lid_max / (hosts + 1)));
    trouble(subnet, managers, 40);
    settle(subnet, seed);
  });
}

TEST_CASE("ACopyOfAHostNeverHasItsLids") {
  seeds(60, [](std::uint64_t seed) {
    Subnet subnet(seed, 5, 3, 64);
    subnet.run_for(20'000);
    const std::size_t copy = subnet.add("h4");  // the same name, another place
    for (int round = 0; round < 30 && subnet.failure.empty(); ++round) {
      if (subnet.below(3) == 0) subnet.crash(subnet.below(3));
      subnet.run_for(subnet.below(8000));
      for (std::size_t i = 0; i < 3; ++i) subnet.start(i);
    }
    CHECK_MESSAGE(subnet.failure == "", again(seed));
    // When the other has gone for good, its LIDs are the copy's: it was moved.
    subnet.crash(4);
    subnet.run_for(120'000);
    CHECK_MESSAGE(subnet.may_give(copy), again(seed));
  });
}

TEST_CASE("AHostComesBackWithTheLidsItHadAndALeaseLapsesWithoutManagers") {
  Subnet subnet(7, 6, 3, 32);
  subnet.run_for(30'000);
  REQUIRE(subnet.unsettled() == "");
  const LidRange before = subnet.lids(5);
  subnet.crash(5);
  subnet.run_for(100'000);
  subnet.start(5);
  subnet.run_for(20'000);
  REQUIRE(subnet.unsettled() == "");
  CHECK(subnet.lids(5).first == before.first);
  CHECK(subnet.lids(5).last == before.last);
  subnet.crash(0);
  subnet.crash(1);  // no majority: nothing new for anybody, when the leases end
  subnet.run_for(10'000);
  CHECK(subnet.may_give(5));
  subnet.run_for(60'000);
  CHECK_FALSE(subnet.may_give(5));
  CHECK(subnet.lids(5).first == before.first);
  subnet.start(0);
  subnet.run_for(30'000);
  CHECK(subnet.may_give(5));
}

TEST_CASE("WhatWasAgreedIsKnownToWhoeverLeadsNext") {
  seeds(20, [](std::uint64_t seed) {
    Subnet subnet(seed, 3, 3, 64);
    subnet.run_for(20'000);
    const std::size_t leader = subnet.leader(), cut_off = (leader + 1) % 3;
    subnet.part(cut_off, 1);
    const std::size_t fourth = subnet.add("h3");  // two of three managers know
    subnet.run_for(10'000);
    REQUIRE(subnet.may_give(fourth));
    subnet.part(fourth, 2);  // and it cannot tell the third
    subnet.crash(leader);
    subnet.part(cut_off, 0);
    subnet.run_for(60'000);
    CHECK_MESSAGE(subnet.knows(cut_off, "h3"), again(seed));
  });
}

TEST_CASE("ManagersThatLoseTheirFilesOneAfterTheOtherLoseNothingThatWasCommitted") {
  seeds(20, [](std::uint64_t seed) {
    Subnet subnet(seed, 5, 3, 64);
    subnet.run_for(20'000);
    REQUIRE(subnet.unsettled() == "");
    const LidRange before = subnet.lids(4);
    for (std::size_t step = 1; step <= 6 && subnet.failure.empty(); ++step) {
      const std::size_t leader = subnet.leader(), one = (leader + step) % 3;  // of others twice, then of who leads
      REQUIRE(subnet.lose_file(one));
      subnet.certify_again(one);
      subnet.run_for(25'000);
      CHECK_MESSAGE(subnet.unsettled() == "", again(seed));
      CHECK_MESSAGE(!subnet.is_blank(one), again(seed));
    }
    CHECK_MESSAGE(subnet.failure == "", again(seed));
    CHECK(subnet.lids(4) == before);
  });
}

TEST_CASE("TwoOfThreeManagersThatLoseTheirFilesAtOnceLearnFromTheThirdWhenAllRun") {
  seeds(20, [](std::uint64_t seed) {
    Subnet subnet(seed, 5, 3, 64);
    subnet.run_for(20'000);
    const std::size_t leader = subnet.leader(), third = seed % 2 == 0 ? leader : (leader + 1) % 3;
    subnet.crash(third);
    for (std::size_t i = 0; i < 3; ++i)
      if (i != third) subnet.lose_file(i), subnet.start(i);
    subnet.run_for(100'000);
    for (std::size_t i = 0; i < 5; ++i) CHECK_MESSAGE((i == third || !subnet.may_give(i)), again(seed));
    subnet.start(third);
    subnet.run_for(60'000);
    CHECK_MESSAGE(subnet.failure == "", again(seed));
    CHECK_MESSAGE(subnet.unsettled() == "", again(seed));
    for (std::size_t i = 0; i < 3; ++i) CHECK_MESSAGE(!subnet.is_blank(i), again(seed));
  });
}

TEST_CASE("ManagersThatAreAddedLaterLearnWhatTheFirstOneKnows") {
  seeds(20, [](std::uint64_t seed) {
    Subnet subnet(seed, 6, 1, 64);
    for (const std::size_t managers : {3, 5, 2, 4, 1}) {
      subnet.run_for(60'000);
      REQUIRE_MESSAGE(subnet.unsettled() == "", again(seed));
      subnet.set_managers(managers);
    }
    subnet.run_for(60'000);
    CHECK_MESSAGE(subnet.failure == "", again(seed));
    CHECK_MESSAGE(subnet.unsettled() == "", again(seed));
  });
}

TEST_CASE("SubnetsThatBeganApartAndAreMergedKeepTheirStatesAndSaySoUntilOneIsGivenUp") {
  seeds(40, [](std::uint64_t seed) {
    // Managers h0, h1 and h2; h3 and h4 are members. Two of the managers are of one subnet, or each of its own.
    const bool pair = seed % 2 == 0;
    Subnet subnet(seed, 5, 3, 64);
    if (pair) subnet.begin_apart({0, 1, 3}, 2);
    else subnet.begin_apart({0, 3}, 1), subnet.begin_apart({1}, 1);
    subnet.begin_apart({2, 4}, 1);
    subnet.run_for(30'000);
    const std::uint64_t ours = subnet.origin(0), theirs = subnet.origin(2);
    REQUIRE_MESSAGE((ours != 0 && theirs != 0 && ours != theirs), again(seed));
    const auto hosts_of = [&](std::size_t i) { return subnet.state(i).hosts().size(); };
    const std::size_t theirs_had = hosts_of(2);
    subnet.merge();
    for (int round = 0; round < 20 && subnet.failure.empty(); ++round) {
      subnet.run_for(3'000 + subnet.below(8'000));
      const std::size_t one = subnet.below(3);
      switch (subnet.below(4)) {
        case 0: subnet.crash(one); break;
        case 1: subnet.part(one, 1); break;
        case 2: subnet.lost_percent = subnet.below(30); break;
        case 3: subnet.heal();
      }
      for (std::size_t i = 0; i < 3; ++i) subnet.start(i);
    }
    subnet.heal();
    subnet.run_for(30'000);
    CHECK_MESSAGE(subnet.failure == "", again(seed));
    // Nobody's state was put in the place of another's, and all managers have been told.
    CHECK_MESSAGE(subnet.origin(0) == ours, again(seed));
    CHECK_MESSAGE(subnet.origin(2) == theirs, again(seed));
    CHECK_MESSAGE(hosts_of(2) == theirs_had, again(seed));
    for (std::size_t i = 0; i < 3; ++i) CHECK_MESSAGE(subnet.apart_from(i) != 0, again(seed));
    CHECK_MESSAGE((subnet.leader() < 2) == pair, again(seed));
    for (std::size_t i = 0; i < 5; ++i) CHECK_MESSAGE((pair || !subnet.may_give(i)), again(seed));
    // The subnet of h0 is chosen. Their hosts have LIDs that are others' there, perhaps.
    for (std::size_t i = 1; i < 5; ++i)
      if (i == 2 || i == 4 || (i == 1 && !pair)) subnet.remove_file(i);
    for (int round = 0; round < 40 && !subnet.unsettled().empty(); ++round) subnet.run_for(5'000);
    subnet.run_for(20'000);
    CHECK_MESSAGE(subnet.failure == "", again(seed));
    CHECK_MESSAGE(subnet.unsettled() == "", again(seed));
    for (std::size_t i = 0; i < 3; ++i) CHECK_MESSAGE((subnet.origin(i) == ours && subnet.apart_from(i) == 0), again(seed));
  });
}

TEST_CASE("TheLidsOfARemovedHostAreGivenToOthersOnlyWhenItsLeaseIsOver") {
  seeds(20, [](std::uint64_t seed) {
    Subnet subnet(seed, 4, 3, lid_max / 4);
    subnet.run_for(20'000);
    REQUIRE(subnet.unsettled() == "");
    subnet.part(3, 1);  // it will not hear of it
    REQUIRE(subnet.remove(3));
    const std::size_t next = subnet.add("h4");  // there are LIDs for four
    for (int step = 0; step < 200 && subnet.failure.empty() && !subnet.may_give(next); ++step) subnet.run_for(1000);
    CHECK_MESSAGE(subnet.failure == "", again(seed));
    CHECK_MESSAGE(subnet.may_give(next), again(seed));
    CHECK_FALSE(subnet.may_give(3));
  });
}

TEST_CASE("AnInvitationIsVoidOnceItIsRevokedEvenIfItsHostNeverCame") {
  Subnet subnet(7, 4, 3, 32);
  subnet.run_for(20'000);
  REQUIRE(subnet.unsettled() == "");
  REQUIRE(subnet.revoke_next());
  subnet.run_for(5'000);
  const std::size_t late = subnet.add("h4");
  subnet.run_for(60'000);
  CHECK_FALSE(subnet.may_give(late));
  CHECK_FALSE(subnet.knows(0, "h4"));
  subnet.certify_again(late);
  subnet.run_for(20'000);
  CHECK(subnet.unsettled() == "");
  CHECK(subnet.knows(0, "h4"));
}

TEST_CASE("AThousandHostsConvergeAfterAnyTrouble") {
  seeds(1, [](std::uint64_t seed) {
    const auto began = std::chrono::steady_clock::now();
    const std::uint64_t hosts = share_of(1000);
    Subnet subnet(seed, hosts, 5, 48);
    subnet.run_for(30'000);
    CHECK_MESSAGE(subnet.unsettled() == "", again(seed));
    trouble(subnet, 5, 15);
    settle(subnet, seed);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    MESSAGE(hosts << " hosts: " << subnet.delivered << " messages in " << took.count() << " s");
  });
}

TEST_CASE("WhoIsRefusedALeaseAgainAndAgainIsLoggedOnceForEachReason") {
  Node leader({"a", "1", "run", "10.0.0.1", 1, 2, 16}, {"a"}, Timing{}, 1, {});
  std::uint64_t now = 1;
  for (; now < 1000; now += tick_ms) leader.tick(now);
  REQUIRE(leader.leads(now));
  const auto told = [&](LidRange held) {
    std::size_t lines = 0;
    for (int i = 0; i < 5; ++i, now += 2000) {
      const Outbox out = leader.receive(now, {"b", "2", 1}, Renew{static_cast<std::uint64_t>(now), "run of b", "10.0.0.2", 1, 2, 16, held, {}});
      for (const auto& line : out.log) lines += line.find("is refused") != std::string::npos;
    }
    return lines;
  };
  CHECK(told({1, 16}) == 1);
  CHECK(told({2, 17}) == 1);
}
