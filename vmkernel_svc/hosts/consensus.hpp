// How the managers of a subnet agree on its State, and on who leads: after Raft (Ongaro and Ousterhout, 2014), with a log of one
// entry, as every entry is the whole state.
//
//   vote:   a manager votes once a term, and only for one whose state is not older than its own
//   change: the leader makes it, sends it, and believes in it when a majority has it on disk
//
// A majority that has a change and a majority that votes have a manager in common, so a new leader knows all that was ever
// committed. It believes in nothing before a state of its own term is committed (Raft 5.4.2).
//
// A manager without any state (`blank`) is new, or has lost its file, and with it what it voted and had on disk. It counts for nothing,
// or a majority of such ones would lead without what was committed:
//
//   - its vote counts only where all managers have voted for the same one: nobody else can know more then. So a subnet begins, and
//     goes on where a majority lost their files
//   - for two elections' time it votes for nobody who has a state, and answers no leader but one that it has voted for, as then all have:
//     whoever else it may have voted for has won by then, or never will
//   - it takes the state only from a leader who names its number, which is another each time: from one whom all elected, or who has
//     heard, after it heard of that number, of a majority of those who have one. No other led then, nor could have won by its old vote
//
// With the state it is as good as any. (An old copy of the file that is put back looks like a good one: nobody can know.)
//
// Two subnets that began apart have states of the same numbers. So a subnet has an *origin*, a random number: part of the state like
// anything else, put into it by the first leader to whom all managers answer in a version that knows of origins. A manager believes
// in it (`Memory::origin`) when it is committed, as the leader sees, or as the leader says of the state that the manager has. Every later
// leader has what was committed, so no second origin is ever committed in one subnet. What a manager says to another that
// believes in another origin is not heard at all, neither its vote nor its term: of each origin there would have to be a majority
// for two to lead, and no state is put in the place of one of another origin. 0, not known or of an older version, goes with all; a manager
// without a state has none, and takes it with the state.
//
// Elections are tried first (`trial`): who comes back from a partition does not unseat a leader that is well. A leader that has
// not heard of a majority for election_ms stops leading.
#pragma once

#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "vmkernel_svc/hosts/agreement.hpp"

namespace vrdma::hosts {

class Consensus final : public Agreement {
 public:
  // What has to survive a crash.
  struct Memory {
    std::uint64_t term = 0;
    std::string voted_for;
    State state;
    std::uint64_t origin = 0;  // of our subnet, once it is committed; 0: not known
  };

  // `managers` without `me`: never votes, never leads.
  Consensus(std::string me, std::vector<std::string> managers, Timing timing, std::uint64_t seed, Memory memory);

  void tick(std::uint64_t now_ms, Outbox& out) override;
  void receive(std::uint64_t now_ms, const Peer& from, const Message& message, Outbox& out);

  // Leads, knows all that was committed, and has heard of a majority lately.
  bool leads(std::uint64_t now_ms) const override;
  const std::string& leader() const override { return leader_; }
  const State& committed() const override { return committed_; }
  std::uint64_t term() const override { return memory_.term; }
  const Memory& memory() const { return memory_; }
  bool votes() const { return voter_; }
  bool blank() const { return memory_.state.id() == StateId{}; }
  // Managers by our list who belong to a subnet that began apart from ours, as they said lately: each asks for votes more often than that.
  std::vector<std::string> apart(std::uint64_t now_ms) const;
  // Leads, and what it changed has not come to a majority's disks for longer than an election takes.
  bool is_stuck(std::uint64_t now_ms) const {
    return stance_ == Stance::leader && committed_.id() != memory_.state.id() && now_ms - changed_ms_ >= timing_.election_ms;
  }

  bool can_propose(std::uint64_t now_ms) const override { return leads(now_ms) && memory_.state.id() == committed_.id(); }
  void propose(std::uint64_t now_ms, State changed, Outbox& out) override;

 private:
  enum class Stance { follower, trying, candidate, leader };
  struct Follower {
    StateId has;                    // by its newest answer; a state of ours only where `in_our_history`
    bool in_our_history = false;
    std::uint64_t answered = 0;     // sequence of that
    std::optional<std::uint64_t> blank;  // its number while it has no state
    std::uint64_t blank_since_ms = 0;    // when we heard of that number
    bool elected_us = false;             // under that number, as all others did
    std::optional<std::uint64_t> origin;    // in which it believes; none: it has not said, or knows of none
    std::uint64_t heard_of_ms = 0;  // when the request was sent that it answered last
    std::uint64_t sent_ms = 0;
    std::map<std::uint64_t, std::uint64_t> sent_at;  // sequence → when; few
  };

  std::size_t majority() const { return managers_.size() / 2 + 1; }
  void follow(std::uint64_t term, const std::string& leader, std::uint64_t now_ms, Outbox& out);
  void stand(bool trial, std::uint64_t now_ms, Outbox& out);
  void lead(std::uint64_t now_ms, Outbox& out);
  void send_append(std::uint64_t now_ms, const std::string& to, Outbox& out);
  bool is_apart(std::uint64_t now_ms, const std::string& from, std::uint64_t origin, Outbox& out);
  void give_origin(std::uint64_t now_ms, Outbox& out);
  void believe(std::uint64_t origin, Outbox& out);
  bool may_learn(const Follower& follower) const;
  bool elected() const;
  std::uint64_t number() const { return blank() ? number_ : 0; }
  bool is_silent(std::uint64_t now_ms) const { return blank() && (silent_until_ms_ == 0 || now_ms < silent_until_ms_); }
  void see_commit(Outbox& out);
  void wait_again(std::uint64_t now_ms);
  bool heard_of_majority(std::uint64_t now_ms) const;

  void on(std::uint64_t now_ms, const Peer& from, const VoteRequest& m, Outbox& out);
  void on(std::uint64_t now_ms, const Peer& from, const VoteReply& m, Outbox& out);
  void on(std::uint64_t now_ms, const Peer& from, const Append& m, Outbox& out);
  void on(std::uint64_t now_ms, const Peer& from, const AppendReply& m, Outbox& out);

  const std::string me_;
  const std::vector<std::string> managers_;
  const Timing timing_;
  bool voter_ = false;
  std::mt19937_64 random_;
  const std::uint64_t number_;  // of this life while it is blank; not 0
  std::uint64_t silent_until_ms_ = 0;  // while blank; 0: since before the first tick
  Memory memory_;
  State committed_;
  Stance stance_ = Stance::follower;
  std::string leader_;
  std::uint64_t heard_ms_ = 0;   // of a leader
  std::uint64_t stand_at_ms_ = 0;
  std::uint64_t changed_ms_ = 0;  // the state, by us
  std::uint64_t sequence_ = 0;
  StateId led_from_;             // our state when the term began: with what we make, our history
  std::map<std::string, std::uint64_t> votes_for_us_;  // whose → its number if it is blank
  std::map<std::string, Follower> followers_;
  std::map<std::string, std::uint64_t> apart_;  // when they said so last
};

}  // namespace vrdma::hosts
