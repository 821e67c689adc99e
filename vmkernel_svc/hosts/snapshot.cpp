// What the service says to other threads.
#include <fmt/format.h>

#include <utility>

#include "vmkernel_svc/hosts/etcd_agreement.hpp"
#include "vmkernel_svc/hosts/service.hpp"
#include "vmkernel_svc/hosts/session.hpp"

namespace vrdma::hosts {

void Service::publish() {
  auto next = std::make_shared<Snapshot>();
  const Member& member = node_->member();
  const std::uint64_t now = now_ms();
  // What is not on disk is shown to nobody.
  const bool may_give = unsaved_ ? may_give_ : member.may_give(now);
  const auto lids = unsaved_ ? snapshot_->lids : member.lids();
  bool news = std::exchange(may_give_, may_give) != may_give;  // for those who listen
  const State& known = member.known();
  next->us = {settings_.name, settings_.address, settings_.port, settings_.carrier_port, 0, lids, tls_->us().serial, 0};
  next->version = known.id().version;
  next->partitions = known.partitions() == *snapshot_->partitions ? snapshot_->partitions : std::make_shared<Partitions>(known.partitions());
  if (const Host* const us = known.find(settings_.name)) next->us.id = us->id;
  next->lids = lids;
  if (unsaved_) next->lease_until = snapshot_->lease_until;
  else next->lease_until = may_give ? began_ + std::chrono::milliseconds(now + member.lease_left_ms(now)) : began_;
  if (!unsaved_) next->leader = member.leader();  // else it neither leads nor follows
  next->problem = problem();
  next->manager_problem = manager_problem();
  next->manages = etcd_ || node_->consensus().votes();
  next->term = node_->consensus().memory().term;
  next->strangers = strangers_;
  next->last_stranger = last_stranger_;
  const auto add = [&](const Host& host) {
    Other& other = next->others[host.name];
    other.host = host;
    for (const auto& one : managers_) other.manages |= one.name == host.name;
    const auto session = session_with(host.name);
    other.expired = have_expired() || expired_.contains(session ? session->certificate().serial : host.serial);
    if (session) {
      other.reachable = true;
      other.version = session->peer().version;
      other.key = session->key();
    } else if (const auto dial = dials_.find(host.name); dial != dials_.end()) {
      other.problem = dial->second.problem;
    }
  };
  for (const auto& one : managers_)
    if (one.name != settings_.name && known.find(one.name) == nullptr) add({one.name, one.address, one.port, 0, 0, no_lids, "", 0});
  for (const auto& [name, host] : known.hosts()) {
    if (name == settings_.name) continue;
    add(host);
    Other& other = next->others[name];
    // Managers who have lost their files count anew; who has connections of that host's number must not come upon another's.
    other.host.id = ids_.try_emplace(name + "/" + host.serial, static_cast<std::uint32_t>(ids_.size() + 1)).first->second;
    next->blocks[host.lids.first] = {host.lids.last, other.host.id};
    // A host of that name whose certificate is not known yet will have another number.
    const auto session = session_with(name);
    const bool is_this = session && session->certificate().serial == host.serial;
    next->peers[other.host.id] = std::make_shared<remote::PeerHost>(remote::PeerHost{other.host.id, host.name, host.address, host.carrier_port,
                                                                                     is_this ? other.key : decltype(other.key){}, is_this, other.expired});
  }
  std::vector<std::function<void()>> calls;
  {
    const std::lock_guard lock(mutex_);
    // Who holds a snapshot's PeerHost compares pointers: what is as before stays the same object.
    news |= next->problem != snapshot_->problem || next->lids != snapshot_->lids || next->blocks != snapshot_->blocks || next->peers.size() != snapshot_->peers.size() || next->partitions != snapshot_->partitions;
    for (auto& [id, peer] : next->peers) {
      const auto old = snapshot_->peers.find(id);
      if (old != snapshot_->peers.end() && old->second->name == peer->name && old->second->address == peer->address &&
          old->second->carrier_port == peer->carrier_port && old->second->tag_key == peer->tag_key && old->second->reachable == peer->reachable && old->second->expired == peer->expired)
        peer = old->second;
      else
        news = true;
    }
    snapshot_ = std::move(next);
    if (news) calls = listeners_;
  }
  for (const auto& call : calls) call();
}

std::string Service::problem() const {
  if (unsaved_) return "its file cannot be written, and it takes no part until that can be";
  if (have_expired()) return "its certificate has expired: make another by \"vrdma host add\", and join with that";
  if (!node_->member().problem().empty() || !etcd_) return node_->member().problem();
  return etcd_->problem();
}

std::string Service::manager_problem() const {
  const Consensus& consensus = node_->consensus();
  if (!consensus.votes() || unsaved_) return "";
  if (consensus.blank())
    return "this manager does not have the subnet's state yet, and counts for nothing until who leads gives it: where a majority of the managers has none, all must run";
  if (const auto apart = consensus.apart(now_ms()); !apart.empty()) {
    std::string who;
    for (const auto& name : apart) who += (who.empty() ? "\"" : ", \"") + name + "\"";
    return fmt::format("of the managers, {} and this one belong to subnets that began apart from each other, which cannot be merged: choose one, and on each manager of the other "
                       "stop vrdmad, remove its subnet.json, and start it", who);
  }
  if (consensus.is_stuck(now_ms()))
    return "this host leads, and what it changes does not come to a majority of the managers: nobody joins, and nothing else is changed, until it does";
  return "";
}

std::shared_ptr<const Service::Snapshot> Service::snapshot() const {
  const std::lock_guard lock(mutex_);
  return snapshot_;
}

std::optional<remote::HostId> Service::host_of(std::uint16_t lid) const {
  const auto now = snapshot();
  const auto after = now->blocks.upper_bound(lid);
  if (after == now->blocks.begin() || std::prev(after)->second.first < lid) return std::nullopt;
  return std::prev(after)->second.second;
}

std::vector<remote::LidHolder> Service::holders() const {
  std::vector<remote::LidHolder> all;
  const auto now = snapshot();
  for (const auto& [first, block] : now->blocks)
    if (first != no_lids.first) all.push_back({block.second, {first, block.first}});
  return all;
}

std::shared_ptr<const remote::PeerHost> Service::host(remote::HostId id) const {
  const auto now = snapshot();
  const auto found = now->peers.find(id);
  return found == now->peers.end() ? nullptr : found->second;
}

std::shared_ptr<const remote::PeerHost> Service::host_named(std::string_view name) const {
  const auto now = snapshot();
  const auto found = now->others.find(std::string(name));
  return found == now->others.end() ? nullptr : host(found->second.host.id);
}

void Service::when_changed(std::function<void()> call) {
  const std::lock_guard lock(mutex_);
  listeners_.push_back(std::move(call));
}

}  // namespace vrdma::hosts
