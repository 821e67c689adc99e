// What the leading manager does: takes hosts in, leases each its block of LIDs, tells who else is there, and takes hosts out.
//
// A block belongs to a host for good; what runs out is the permission to give LIDs of it to new guests. So a host that was away
// comes back with the LIDs it had, and whatever its guests were connected to still means them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "vmkernel_svc/hosts/agreement.hpp"

namespace vrdma::hosts {

class Manager {
 public:
  Manager(Timing timing, Agreement& agreement) : timing_(timing), agreement_(agreement) {}

  void tick(std::uint64_t now_ms, Outbox& out);
  void receive(std::uint64_t now_ms, const Peer& from, const Renew& m, Outbox& out);
  // An administrator's wish; answered when it is done.
  void receive(std::uint64_t now_ms, const Peer& from, const Remove& m, Outbox& out);
  void receive(std::uint64_t now_ms, const Peer& from, const ChangePartition& m, Outbox& out);

 private:
  struct Asked {
    Peer from;
    Renew renew;
  };
  struct Holder {  // which process renewed last under a name
    std::string run, address;
    std::uint16_t port;
    std::uint64_t at_ms;
  };
  // Why it is refused; empty: it is not.
  std::string admit(State& state, const Asked& asked) const;
  bool needs_change(const Asked& asked) const;
  std::string duplicate(std::uint64_t now_ms, const Asked& asked) const;
  void grant(std::uint64_t now_ms, const Asked& asked, Outbox& out);
  void change(std::uint64_t now_ms, Outbox& out);
  void answer_waiting(std::uint64_t now_ms, Outbox& out);

  const Timing timing_;
  Agreement& agreement_;
  bool led_ = false;
  std::map<std::string, Holder> holders_;
  std::map<std::string, Asked> queue_;     // by name: to be put into the next change
  std::vector<std::pair<Peer, Remove>> removals_;
  std::vector<Asked> waiting_;             // for the change that is under way
  std::vector<Peer> removers_;
  std::vector<std::pair<Peer, ChangePartition>> partition_changes_;
  std::vector<Peer> partition_changers_;
  std::map<std::string, std::uint64_t> resting_since_;  // by serial, since we lead
  std::map<std::string, std::string> refused_;          // by name: why, as it was logged; each asks again all the time
};

}  // namespace vrdma::hosts
