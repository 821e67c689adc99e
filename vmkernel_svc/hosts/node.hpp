// One host of a subnet, without socket, clock, thread and file: member, and consensus and manager where it is one of those that
// may lead. The service (service.hpp) and the simulation (node_sim_test.cpp) run the same.
#pragma once

#include <deque>
#include <optional>

#include "vmkernel_svc/hosts/consensus.hpp"
#include "vmkernel_svc/hosts/manager.hpp"
#include "vmkernel_svc/hosts/member.hpp"

namespace vrdma::hosts {

class Node {
 public:
  // What is in its file.
  struct Memory {
    Consensus::Memory consensus;
    std::string serial;           // of the certificate under which `lids` were leased
    LidRange lids = no_lids;
  };

  // other: by which the managers agree, where they do not among themselves.
  Node(Member::Self self, std::vector<std::string> managers, Timing timing, std::uint64_t seed, Memory memory, Agreement* other = nullptr)
      : self_(self),
        consensus_(self.name, other == nullptr ? managers : std::vector<std::string>{}, timing, seed, std::move(memory.consensus)),
        agreement_(other == nullptr ? consensus_ : *other),
        manager_(timing, agreement_),
        member_(self, managers, timing, memory.serial == self.serial ? memory.lids : no_lids) {}

  Outbox tick(std::uint64_t now_ms) {
    Outbox out;
    agreement_.tick(now_ms, out);
    manager_.tick(now_ms, out);
    member_.tick(now_ms, out);
    settle(now_ms, out);
    return out;
  }

  Outbox receive(std::uint64_t now_ms, const Peer& from, const Message& message) {
    Outbox out;
    deliver(now_ms, from, message, out);
    settle(now_ms, out);
    return out;
  }

  const Member& member() const { return member_; }
  Member& member() { return member_; }
  const Consensus& consensus() const { return consensus_; }
  bool leads(std::uint64_t now_ms) const { return agreement_.leads(now_ms); }
  Memory memory() const { return {consensus_.memory(), self_.serial, member_.lids()}; }

 private:
  void deliver(std::uint64_t now_ms, const Peer& from, const Message& message, Outbox& out) {
    if (const auto* renew = std::get_if<Renew>(&message)) return manager_.receive(now_ms, from, *renew, out);
    if (const auto* remove = std::get_if<Remove>(&message)) return manager_.receive(now_ms, from, *remove, out);
    if (const auto* change = std::get_if<ChangePartition>(&message)) return manager_.receive(now_ms, from, *change, out);
    consensus_.receive(now_ms, from, message, out);
    manager_.tick(now_ms, out);  // a change may have been committed
    member_.receive(now_ms, from, message, out);
  }

  // Letters to ourselves do not leave the house.
  void settle(std::uint64_t now_ms, Outbox& out) {
    const Peer us{self_.name, self_.serial, 0};
    for (std::size_t i = 0; i < out.letters.size();) {
      if (out.letters[i].to.name != self_.name || out.letters[i].to.route != 0) {
        ++i;
        continue;
      }
      const Message message = std::move(out.letters[i].message);
      out.letters.erase(out.letters.begin() + static_cast<std::ptrdiff_t>(i));
      deliver(now_ms, us, message, out);
    }
  }

  const Member::Self self_;
  Consensus consensus_;
  Agreement& agreement_;
  Manager manager_;
  Member member_;
};

}  // namespace vrdma::hosts
