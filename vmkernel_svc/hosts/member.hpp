// What every host does, a manager or not: finds who leads, has its block of LIDs leased and renewed, and learns who else is there.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "vmkernel_svc/hosts/outbox.hpp"

namespace vrdma::hosts {

class Member {
 public:
  struct Self {
    std::string name, serial, run, address;
    std::uint16_t port, carrier_port, lids_wanted;
  };
  // `held`: the LIDs it had when it ran last, of its own file.
  Member(Self self, std::vector<std::string> managers, Timing timing, LidRange held)
      : self_(std::move(self)), managers_(std::move(managers)), timing_(timing), lids_(held) {}

  void tick(std::uint64_t now_ms, Outbox& out);
  void receive(std::uint64_t now_ms, const Peer& from, const Message& message, Outbox& out);

  LidRange lids() const { return lids_; }  // no_lids: never had any
  // New guests may be given LIDs. The lease is counted from when it was asked for, so never outlives what the manager granted.
  bool may_give(std::uint64_t now_ms) const { return lids_ != no_lids && now_ms < lease_until_ms_; }
  std::uint64_t lease_left_ms(std::uint64_t now_ms) const { return now_ms < lease_until_ms_ ? lease_until_ms_ - now_ms : 0; }
  const State& known() const { return known_; }
  const std::string& leader() const { return leader_; }
  const std::string& problem() const { return problem_; }  // why we have no lease, as the leader says; empty: no reason

  // The managers turned out to be others (learnt of a seed).
  void set_managers(std::vector<std::string> managers) { managers_ = std::move(managers); }

 private:
  void ask(std::uint64_t now_ms, Outbox& out);

  const Self self_;
  std::vector<std::string> managers_;
  const Timing timing_;
  LidRange lids_;
  State known_;
  std::string leader_, problem_, asked_of_;
  std::size_t next_manager_ = 0;
  std::uint64_t sequence_ = 0;
  std::uint64_t asked_ms_ = 0, ask_at_ms_ = 0, lease_until_ms_ = 0;
  bool answered_ = true;
  unsigned unanswered_ = 0;
};

}  // namespace vrdma::hosts
