#include "vmkernel_svc/hosts/state.hpp"

#include <algorithm>

namespace vrdma::hosts {

const Host* State::find(const std::string& name) const {
  const auto found = hosts_.find(name);
  return found == hosts_.end() ? nullptr : &found->second;
}

const Host* State::holder(std::uint16_t lid) const {
  auto after = blocks_.upper_bound(lid);
  if (after == blocks_.begin()) return nullptr;
  --after;
  return after->second.first < lid ? nullptr : find(after->second.second);
}

bool State::is_free(LidRange lids) const {
  if (lids.first == 0 || lids.last < lids.first || lids.last > lid_max) return false;
  const auto after = blocks_.upper_bound(lids.last);
  return after == blocks_.begin() || std::prev(after)->second.first < lids.first;
}

std::optional<LidRange> State::allocate(std::uint16_t count) {
  if (count == 0 || count > lid_max) return std::nullopt;
  // First from where the last one ended, then from the beginning: from gap to gap.
  for (const std::uint32_t start : {std::uint32_t{next_lid_}, 1u}) {
    std::uint32_t at = start;
    while (at + count - 1 <= lid_max) {
      const LidRange wanted{static_cast<std::uint16_t>(at), static_cast<std::uint16_t>(at + count - 1)};
      const auto after = blocks_.upper_bound(wanted.last);
      if (after == blocks_.begin() || std::prev(after)->second.first < wanted.first) {
        next_lid_ = static_cast<std::uint16_t>(wanted.last >= lid_max ? 1 : wanted.last + 1);
        return wanted;
      }
      at = std::prev(after)->second.first + 1u;
    }
  }
  return std::nullopt;
}

void State::forget(const std::string& name) {
  const auto found = hosts_.find(name);
  if (found == hosts_.end()) return;
  blocks_.erase(found->second.lids.first);
  hosts_.erase(found);
}

const Host& State::put(Host host) {
  if (host.id == 0) host.id = next_host_id_++;
  host.changed = id_.version;
  forget(host.name);
  blocks_[host.lids.first] = {host.lids.last, host.name};
  return hosts_[host.name] = std::move(host);
}

void State::remove(const std::string& name) {
  const Host* const host = find(name);
  if (host == nullptr) return;
  const Removed gone{host->serial, name, host->lids, id_.version};
  forget(name);
  blocks_[gone.resting.first] = {gone.resting.last, "/" + gone.serial};  // no host has such a name
  removed_[gone.serial] = gone;
}

void State::revoke(const std::string& serial, const std::string& name) {
  removed_.try_emplace(serial, Removed{serial, name, no_lids, id_.version});
}

void State::end_rest(const std::string& serial) {
  const auto found = removed_.find(serial);
  if (found == removed_.end() || found->second.resting == no_lids) return;
  blocks_.erase(found->second.resting.first);
  found->second.resting = no_lids;
  found->second.changed = id_.version;
}

void State::set(Partitions partitions) {
  partitions_ = std::move(partitions);
  partitions_changed_ = id_.version;
}

Delta State::since(StateId from) const {
  Delta delta{from, id_, next_host_id_, next_lid_, {}, {}};
  delta.origin = origin_;
  if (partitions_changed_ > from.version) delta.partitions = partitions_;
  for (const auto& [name, host] : hosts_)
    if (host.changed > from.version) delta.hosts.push_back(host);
  for (const auto& [serial, gone] : removed_)
    if (gone.changed > from.version) delta.removed.push_back(gone);
  return delta;
}

bool State::apply(const Delta& delta) {
  State next;
  if (delta.from != StateId{}) {
    if (delta.from.version != id_.version || (delta.origin != 0 && origin_ != 0 && delta.origin != origin_)) return false;
    next = *this;
  }
  next.id_ = delta.to;
  if (delta.origin != 0) next.origin_ = delta.origin;
  next.next_host_id_ = delta.next_host_id;
  next.next_lid_ = delta.next_lid == 0 || delta.next_lid > lid_max ? 1 : delta.next_lid;
  if (delta.partitions) {
    next.partitions_ = *delta.partitions;
    next.partitions_changed_ = delta.to.version;  // or before: then it is sent once more
  }
  // What leaves before what comes: a block may have gone from one to the other.
  for (const auto& gone : delta.removed) {
    if (const Host* const host = next.find(gone.name); host != nullptr && host->serial == gone.serial) next.forget(gone.name);
    if (const auto known = next.removed_.find(gone.serial); known != next.removed_.end() && known->second.resting != no_lids)
      next.blocks_.erase(known->second.resting.first);
    next.removed_[gone.serial] = gone;
  }
  for (const auto& host : delta.hosts) next.forget(host.name);
  for (const auto& gone : delta.removed) {
    if (gone.resting == no_lids) continue;
    if (!next.is_free(gone.resting)) return false;
    next.blocks_[gone.resting.first] = {gone.resting.last, "/" + gone.serial};
  }
  for (const auto& host : delta.hosts) {
    if (!next.is_free(host.lids)) return false;
    next.blocks_[host.lids.first] = {host.lids.last, host.name};
    next.hosts_[host.name] = host;
  }
  *this = std::move(next);
  return true;
}

}  // namespace vrdma::hosts
