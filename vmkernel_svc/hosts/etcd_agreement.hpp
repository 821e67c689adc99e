// Agreement of the hosts of a subnet by an etcd: the state is a key, and who leads holds another one under a lease.
//
//     PREFIX/leader   {"name", "address", "port"} of who leads; gone when his lease is not renewed
//     PREFIX/state    the State as text
//
// Every write of the state is a transaction that holds only while the leader's key is still the one that this host made, and the
// state the one that it knows: whoever was cut off and does not know it changes nothing. A host counts its lease from when it
// asked, the etcd from when it granted, so nobody leads when another may.
//
// Nobody watches: who leads renews its lease at every heartbeat, who does not tries for the leader's key as often, and learns by
// the same transaction who has it.
#pragma once

#include <functional>
#include <memory>
#include <set>

#include "vmkernel_svc/hosts/agreement.hpp"
#include "vmkernel_svc/hosts/etcd_client.hpp"

namespace vrdma::hosts {

class EtcdAgreement final : public Agreement {
 public:
  // news: called when an answer has changed something.
  EtcdAgreement(EtcdCalls& calls, std::string prefix, Endpoint us, Timing timing, std::function<std::uint64_t()> clock_ms, std::function<void()> news)
      : calls_(calls), prefix_(std::move(prefix)), us_(std::move(us)), timing_(timing), clock_ms_(std::move(clock_ms)), news_(std::move(news)) {}

  void tick(std::uint64_t now_ms, Outbox& out) override;
  bool leads(std::uint64_t now_ms) const override { return leader_revision_ != 0 && now_ms < lease_until_ms_; }
  const std::string& leader() const override { return leader_.name; }
  const State& committed() const override { return committed_; }
  std::uint64_t term() const override { return leader_revision_; }
  bool can_propose(std::uint64_t now_ms) const override { return leads(now_ms) && !proposed_; }
  void propose(std::uint64_t now_ms, State changed, Outbox& out) override;

  const Endpoint& leader_endpoint() const { return leader_; }
  const std::string& problem() const { return problem_; }  // why the etcd is of no use now; empty: it is

 private:
  using json = nlohmann::json;
  void post(const std::string& path, const json& body, std::function<void(const json& reply)> take);
  void note(const std::string& path, const std::string& problem);
  void grant();
  void renew(std::uint64_t now_ms);
  void campaign();
  void write();
  void lost(const std::string& why);
  bool take_state(const json& range);
  std::string key(const char* name) const { return prefix_ + "/" + name; }

  EtcdCalls& calls_;
  const std::string prefix_;
  const Endpoint us_;
  const Timing timing_;
  const std::function<std::uint64_t()> clock_ms_;
  const std::function<void()> news_;
  bool asking_ = false;               // one request at a time
  std::uint64_t next_ms_ = 0;         // when to renew, or to try, next
  std::string lease_;                 // empty: none
  std::uint64_t lease_until_ms_ = 0;  // at least
  std::uint64_t leader_revision_ = 0; // of our own leader's key; 0: we do not lead
  std::uint64_t state_revision_ = 0;  // 0: there is no state yet
  State committed_;
  std::optional<State> proposed_;
  Endpoint leader_;
  std::string problem_, failed_at_;   // and what was asked for then
  std::set<std::string> said_;        // of the problems since the etcd was of use last
  std::vector<std::string> log_, warnings_;  // for the next tick
};

}  // namespace vrdma::hosts
