// Managers whose messages arrive at once, or when the test says; what goes wrong on a network is node_sim_test.cpp's.
#include "vmkernel_svc/hosts/consensus.hpp"

#include <doctest/doctest.h>

#include <memory>

using namespace vrdma::hosts;

namespace {

class Managers {
 public:
  explicit Managers(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) names_.push_back({static_cast<char>('a' + i)});
  }

  void start(const std::string& name) {
    nodes_[name] = std::make_unique<Consensus>(name, names_, Timing{}, ++seed_, disks_[name]);
  }
  void start_all() {
    for (const auto& name : names_) start(name);
  }
  void stop(const std::string& name) { nodes_.erase(name); }
  // Its file is lost, or an old one is put in its place.
  void start_with(const std::string& name, Consensus::Memory memory) {
    stop(name);
    disks_[name] = std::move(memory);
    start(name);
  }
  Consensus& at(const std::string& name) { return *nodes_.at(name); }
  const Consensus::Memory& disk(const std::string& name) { return disks_[name]; }

  void run_for(std::uint64_t ms) {
    for (const std::uint64_t until = now_ + ms; now_ < until; now_ += 100)
      for (const auto& name : names_)
        if (nodes_.contains(name)) {
          Outbox out;
          at(name).tick(now_, out);
          perform(name, std::move(out));
        }
  }
  std::string leader() const {
    for (const auto& [name, node] : nodes_)
      if (node->leads(now_)) return name;
    return "";
  }
  std::string other_than(const std::string& one, const std::string& another = "") const {
    for (const auto& name : names_)
      if (name != one && name != another) return name;
    return "";
  }
  // The leader commits a host.
  bool change(const std::string& host) {
    Consensus& node = at(leader());
    if (!node.can_propose(now_)) return false;
    State next = node.committed();
    next.begin(node.term());
    next.put({host, "10.0.0.1", 1, 2, 0, *next.allocate(8), "ab", 0});
    Outbox out;
    const std::string by = leader();
    node.propose(now_, std::move(next), out);
    perform(by, std::move(out));
    return node.committed().find(host) != nullptr;
  }
  // Something that was under way for long.
  void receive(const std::string& to, const std::string& from, const Message& message) {
    Outbox out;
    at(to).receive(now_, {from, "", 1}, message, out);
    perform(to, std::move(out));
  }

  std::uint64_t now() const { return now_; }
  std::map<std::pair<std::string, std::string>, std::vector<Message>> sent;  // by who to whom

 private:
  void perform(const std::string& name, Outbox out) {
    if (out.save) disks_[name] = at(name).memory();
    for (auto& letter : out.letters) {
      sent[{name, letter.to.name}].push_back(letter.message);
      if (nodes_.contains(letter.to.name)) receive(letter.to.name, name, letter.message);
    }
  }

  std::vector<std::string> names_;
  std::map<std::string, std::unique_ptr<Consensus>> nodes_;
  std::map<std::string, Consensus::Memory> disks_;
  std::uint64_t now_ = 1, seed_ = 0;
};

}  // namespace

TEST_CASE("ManagersThatAreMadeAnewOneAfterTheOtherAreGivenTheStateAndKeepIt") {
  Managers managers(3);
  managers.start_all();
  managers.run_for(20'000);
  const std::string leader = managers.leader();
  REQUIRE(managers.change("x"));
  for (const std::string& one : {managers.other_than(leader), managers.other_than(leader, managers.other_than(leader))}) {
    managers.start_with(one, {});
    managers.run_for(10'000);
    CHECK(managers.leader() == leader);
    CHECK(managers.at(one).memory().state.id() == managers.at(leader).committed().id());
    CHECK(managers.disk(one).state.find("x") != nullptr);
    CHECK(managers.change("with-" + one));
  }
  managers.start_with(leader, managers.disk(leader));
  managers.run_for(20'000);
  REQUIRE(managers.leader() != "");
  CHECK(managers.at(managers.leader()).committed().find("x") != nullptr);
}

TEST_CASE("AManagerWithAnOlderFileIsGivenWhatItLacks") {
  Managers managers(3);
  managers.start_all();
  managers.run_for(20'000);
  const std::string leader = managers.leader(), one = managers.other_than(leader);
  const Consensus::Memory old = managers.disk(one);
  REQUIRE(managers.change("x"));
  managers.start_with(one, old);
  managers.run_for(2'000);
  CHECK(managers.leader() == leader);
  CHECK(managers.at(one).memory().state.find("x") != nullptr);
}

TEST_CASE("ManagersWithoutAStateElectNobodyWhileOneIsAwayWhoMayHaveOne") {
  Managers managers(3);
  managers.start_all();
  managers.run_for(20'000);
  const std::string leader = managers.leader(), second = managers.other_than(leader), third = managers.other_than(leader, second);
  REQUIRE(managers.change("x"));
  managers.stop(leader);
  managers.start_with(second, {});
  managers.start_with(third, {});
  managers.run_for(100'000);
  CHECK(managers.leader() == "");
  managers.start(leader);
  managers.run_for(20'000);
  CHECK(managers.leader() == leader);
  CHECK(managers.at(leader).committed().find("x") != nullptr);
  CHECK_FALSE(managers.at(second).blank());
  CHECK_FALSE(managers.at(third).blank());
  CHECK(managers.change("y"));
}

TEST_CASE("ALeaderThatHearsOfNoMajorityTeachesNobody") {
  Managers managers(3);
  managers.start_all();
  managers.run_for(20'000);
  const std::string leader = managers.leader(), second = managers.other_than(leader), third = managers.other_than(leader, second);
  managers.start_with(third, {});
  managers.run_for(5'900);
  managers.stop(second);  // perhaps it leads elsewhere, elected by the third before that lost its file
  CHECK(managers.leader() == leader);
  managers.run_for(1'500);
  CHECK(managers.leader() == leader);
  CHECK_FALSE(managers.at(leader).is_stuck(managers.now()));
  managers.run_for(100'000);
  CHECK(managers.leader() == "");
  CHECK(managers.at(third).blank());
}

TEST_CASE("AManagerWithoutAStateVotesForNobodyWhoHasOneUntilItsOldVotesAreOver") {
  Managers managers(3);
  managers.start("c");  // alone: nobody has it follow
  managers.run_for(100);
  const VoteRequest wish{7, {5, 9}, false};
  const auto votes = [&] {
    std::size_t count = 0;
    for (const auto& message : managers.sent[{"c", "a"}])
      if (const auto* vote = std::get_if<VoteReply>(&message)) count += vote->granted;
    return count;
  };
  managers.receive("c", "a", wish);
  managers.run_for(5'800);
  managers.receive("c", "a", wish);
  CHECK(votes() == 0);
  managers.run_for(200);
  managers.receive("c", "a", wish);
  CHECK(votes() == 1);
}

TEST_CASE("AManagerWithoutAStateTakesItOnlyUnderItsOwnNumber") {
  Managers managers(3);
  managers.start_all();
  managers.run_for(20'000);
  const std::string leader = managers.leader(), one = managers.other_than(leader);
  managers.start_with(one, {});
  managers.run_for(10'000);
  Append teaching;
  for (const auto& message : managers.sent[{leader, one}])
    if (const auto* append = std::get_if<Append>(&message); append != nullptr && append->blank != 0) teaching = *append;
  REQUIRE(teaching.delta);
  managers.start_with(one, {});
  managers.stop(leader);
  managers.run_for(10'000);
  managers.receive(one, leader, teaching);  // to who it was before
  CHECK(managers.at(one).blank());
  managers.start(leader);
  managers.run_for(20'000);
  CHECK_FALSE(managers.at(one).blank());
}

TEST_CASE("ManagersOfASubnetBelieveInOneOriginAndThoseOfFilesWithoutOneAreGivenOne") {
  Managers managers(3);
  managers.start_all();
  managers.run_for(20'000);
  const std::uint64_t origin = managers.disk("a").origin;
  CHECK(origin != 0);
  for (const std::string name : {"a", "b", "c"}) CHECK(managers.disk(name).origin == origin);

  // As an older version wrote them.
  for (const std::string name : {"a", "b", "c"}) {
    Consensus::Memory old = managers.disk(name);
    old.origin = 0;
    old.state.set_origin(0);
    managers.start_with(name, old);
  }
  managers.stop("c");
  managers.run_for(20'000);
  REQUIRE(managers.leader() != "");
  CHECK(managers.disk("a").origin == 0);  // not before all answer
  CHECK(managers.change("x"));
  managers.start("c");
  managers.run_for(20'000);
  const std::uint64_t later = managers.disk("a").origin;
  CHECK(later != 0);
  for (const std::string name : {"a", "b", "c"}) CHECK(managers.disk(name).origin == later);
  CHECK(managers.at(managers.leader()).committed().find("x") != nullptr);
}

TEST_CASE("AnOriginThatWasLostOnTheWayThroughAnOlderVersionIsTheSameAgain") {
  Managers managers(3);
  managers.start_all();
  managers.run_for(20'000);
  const std::uint64_t origin = managers.disk("a").origin;
  for (const std::string name : {"a", "b", "c"}) {
    Consensus::Memory memory = managers.disk(name);
    memory.state.set_origin(0);  // an older one led, and its states have none
    if (name != "c") memory.origin = 0;
    managers.start_with(name, memory);
  }
  managers.run_for(20'000);
  for (const std::string name : {"a", "b", "c"}) CHECK(managers.disk(name).origin == origin);
}

TEST_CASE("NothingOfAManagerWhoseSubnetBeganApartIsHeard") {
  Managers managers(3);
  managers.start_all();
  managers.run_for(20'000);
  REQUIRE(managers.change("x"));
  const std::string leader = managers.leader(), one = managers.other_than(leader);
  const std::uint64_t term = managers.at(one).term(), other = managers.disk(one).origin ^ 2;
  const auto answers = [&] { return managers.sent[{one, leader}].size(); };
  const std::size_t before = answers();
  State theirs;
  theirs.begin(term + 1);
  theirs.put({"y", "10.0.0.2", 1, 2, 0, *theirs.allocate(8), "ac", 0});
  theirs.set_origin(other);
  managers.receive(one, leader, Append{term + 1, 1, theirs.since({}), 0, other});
  managers.receive(one, leader, VoteRequest{term + 1, {term + 1, 99}, false, other});
  managers.receive(one, leader, AppendReply{term + 1, 1, {}, 0, other});
  CHECK(answers() == before);
  CHECK(managers.at(one).term() == term);
  CHECK(managers.disk(one).state.find("x") != nullptr);
  CHECK(managers.at(one).apart(managers.now()) == std::vector<std::string>{leader});
  managers.run_for(2'000);  // it says otherwise
  CHECK(managers.at(one).apart(managers.now()).empty());
}

TEST_CASE("WhoWasElectedByAllOfANewSubnetLeadsAtOnce") {
  Managers managers(3);
  managers.start_all();
  const auto elected = [&] { return !managers.at("a").leader().empty() && managers.at("a").leader() == managers.at("b").leader(); };
  while (!elected() && managers.now() < 20'000) managers.run_for(100);
  managers.run_for(1'000);
  CHECK(managers.leader() == managers.at("a").leader());
}

TEST_CASE("AManagerOfAnOlderVersionThatHasNoStateCountsAsItAlwaysDid") {
  Managers managers(3);
  managers.start_all();
  managers.run_for(20'000);
  REQUIRE(managers.change("h1"));
  const std::string leader = managers.leader(), other = managers.other_than(leader), third = managers.other_than(leader, other);
  managers.stop(third);
  managers.stop(other);  // an older one answers in its place
  for (int i = 0; i < 100; ++i) {
    managers.run_for(100);
    const auto& asked = managers.sent[{leader, other}];
    if (!asked.empty())
      if (const auto* const append = std::get_if<Append>(&asked.back())) managers.receive(leader, other, AppendReply{append->term, append->sequence, StateId{}, 0});
  }
  CHECK(managers.leader() == leader);
}

TEST_CASE("AnAnswerThatComesLateSaysNothingOfNow") {
  Managers managers(3);
  managers.start_all();
  managers.run_for(20'000);
  const std::string leader = managers.leader(), one = managers.other_than(leader), other = managers.other_than(leader, one);
  REQUIRE(managers.change("x"));
  const AppendReply last = std::get<AppendReply>(managers.sent[{one, leader}].back());
  REQUIRE(last.at == managers.at(leader).committed().id());
  managers.stop(other);
  managers.start_with(one, {});
  managers.receive(leader, one, last);  // under way when its file was lost
  managers.start(other);
  managers.run_for(10'000);
  CHECK_FALSE(managers.at(one).blank());
  // An older one does not make it blank again for the leader.
  managers.receive(leader, one, AppendReply{last.term, last.sequence - 1, {}, 7});
  managers.stop(other);
  managers.run_for(10'000);
  CHECK(managers.leader() == leader);
  CHECK(managers.change("y"));
}
