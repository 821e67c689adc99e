#include "vmkernel_svc/hosts/member.hpp"

#include <algorithm>

namespace vrdma::hosts {

void Member::tick(std::uint64_t now_ms, Outbox& out) {
  if (now_ms < ask_at_ms_ || managers_.empty()) return;
  if (!answered_ && ++unanswered_ >= 2) {  // that one is gone, or leads no more
    leader_.clear();
    unanswered_ = 0;
  }
  ask(now_ms, out);
}

void Member::ask(std::uint64_t now_ms, Outbox& out) {
  const std::string& to = !leader_.empty() ? leader_ : managers_[next_manager_++ % managers_.size()];
  asked_ms_ = now_ms;
  asked_of_ = to;
  answered_ = false;
  ask_at_ms_ = now_ms + timing_.heartbeat_ms * 2;
  out.send(to, Renew{++sequence_, self_.run, self_.address, self_.port, self_.carrier_port, self_.lids_wanted, lids_, known_.id()});
}

void Member::receive(std::uint64_t now_ms, const Peer& from, const Message& message, Outbox& out) {
  if (from.name != asked_of_) return;
  if (const auto* lease = std::get_if<Lease>(&message)) {
    if (lease->sequence != sequence_ || answered_) return;
    // Never with other LIDs than those that guests have: that would be the managers' mistake.
    if (lids_ != no_lids && lids_ != lease->lids) {
      problem_ = "the manager leases other LIDs than this host has: restart it when its guests have gone";
      return;
    }
    if (!known_.apply(lease->news)) known_ = State{};  // all of it, next time
    answered_ = true;
    unanswered_ = 0;
    leader_ = from.name;
    problem_.clear();
    if (lids_ == no_lids) {
      lids_ = lease->lids;
      out.save = true;
    }
    lease_until_ms_ = std::max(lease_until_ms_, asked_ms_ + lease->lease_ms);
    ask_at_ms_ = now_ms + std::min<std::uint64_t>(timing_.refresh_ms, lease->lease_ms / 3);
  } else if (const auto* refused = std::get_if<Refused>(&message)) {
    if (refused->sequence != sequence_ || answered_) return;
    answered_ = true;
    leader_ = from.name;
    if (problem_ != refused->why) out.log.push_back("no lease of LIDs: " + refused->why);
    problem_ = refused->why;
    ask_at_ms_ = now_ms + timing_.refresh_ms;
  } else if (const auto* redirect = std::get_if<Redirect>(&message)) {
    if (redirect->sequence != sequence_ || answered_) return;
    answered_ = true;
    const bool better = !redirect->leader.empty() && redirect->leader != from.name;
    leader_ = better ? redirect->leader : "";
    ask_at_ms_ = now_ms + (better ? 0 : timing_.heartbeat_ms);
  }
}

}  // namespace vrdma::hosts
