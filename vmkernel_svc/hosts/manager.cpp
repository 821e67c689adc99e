#include "vmkernel_svc/hosts/manager.hpp"

#include <fmt/format.h>

#include <utility>

namespace vrdma::hosts {

namespace {

std::pair<Partitions, std::string> changed_by(const Partitions& before, const ChangePartition& wish) {
  Partitions partitions = before;
  if (!wish.add && wish.members.empty() && partitions.remove_partition(partition_of(wish.pkey)) == 0)
    return {before, fmt::format("there is no partition {}", pkey_text(partition_of(wish.pkey)))};
  for (const Membership& one : wish.members) {
    if (wish.add) {
      if (!before.memberships().contains(one) && !partitions.add(one)) return {before, fmt::format("partitions have {} members, and no room for more", memberships_max)};
    } else if (!partitions.remove(one)) {
      return {before, fmt::format("{} has no P_Key {}: vrdma host partition list", one.member(), pkey_text(one.pkey))};
    }
  }
  return {partitions, ""};
}

}  // namespace

void Manager::tick(std::uint64_t now_ms, Outbox& out) {
  const bool leads = agreement_.leads(now_ms);
  if (leads != led_) {
    led_ = leads;
    holders_.clear();
    queue_.clear();
    waiting_.clear();
    removals_.clear();
    removers_.clear();
    partition_changes_.clear();
    partition_changers_.clear();
    resting_since_.clear();
    refused_.clear();
    // Who had a lease of the leader before may have it still.
    if (leads)
      for (const auto& [name, host] : agreement_.committed().hosts()) holders_[name] = {"", host.address, host.port, now_ms};
  }
  if (!leads || !agreement_.can_propose(now_ms)) return;
  answer_waiting(now_ms, out);
  change(now_ms, out);
}

void Manager::receive(std::uint64_t now_ms, const Peer& from, const Renew& m, Outbox& out) {
  if (!agreement_.leads(now_ms)) return out.send(from, Redirect{m.sequence, agreement_.leader()});
  tick(now_ms, out);  // begins anew where we have just come to lead
  const Asked asked{from, m};
  if (agreement_.committed().removed().contains(from.serial))
    return out.send(from, Refused{m.sequence, "this host was removed from the subnet: make it another certificate by \"vrdma host add\", and join with that"});
  if (const auto why = duplicate(now_ms, asked); !why.empty()) return out.send(from, Refused{m.sequence, why});
  holders_[from.name] = {m.run, m.address, m.port, now_ms};
  if (!needs_change(asked)) return grant(now_ms, asked, out);
  queue_.insert_or_assign(from.name, asked);
  tick(now_ms, out);
}

void Manager::receive(std::uint64_t now_ms, const Peer& from, const Remove& m, Outbox& out) {
  if (!agreement_.leads(now_ms)) return out.send(from, RemoveReply{"not the leader", "", 0});
  if (agreement_.committed().find(m.name) == nullptr && m.serial.empty()) return out.send(from, RemoveReply{fmt::format("the subnet has no host \"{}\"", m.name), "", 0});
  removals_.emplace_back(from, m);
  tick(now_ms, out);
}

void Manager::receive(std::uint64_t now_ms, const Peer& from, const ChangePartition& m, Outbox& out) {
  if (!agreement_.leads(now_ms)) return out.send(from, PartitionsReply{"not the leader", "", 0, {}});
  if (m.pkey == 0) return out.send(from, PartitionsReply{"", "", 0, agreement_.committed().partitions()});
  partition_changes_.emplace_back(from, m);
  tick(now_ms, out);
}

bool Manager::needs_change(const Asked& asked) const {
  const Host* const host = agreement_.committed().find(asked.from.name);
  return host == nullptr || host->address != asked.renew.address || host->port != asked.renew.port || host->carrier_port != asked.renew.carrier_port ||
         host->serial != asked.from.serial || (asked.renew.held != no_lids && asked.renew.held != host->lids);
}

std::string Manager::duplicate(std::uint64_t now_ms, const Asked& asked) const {
  const auto found = holders_.find(asked.from.name);
  if (found == holders_.end() || found->second.run == asked.renew.run) return {};
  const Holder& other = found->second;
  // Two cannot listen at one place: the one before has gone.
  if (other.address == asked.renew.address && other.port == asked.renew.port) return {};
  // It moved, and whoever may have stayed behind has no lease any more.
  if (now_ms - other.at_ms >= timing_.lease_ms + timing_.election_ms) return {};
  return fmt::format("another host is \"{}\", at {} port {}: give this one a name and a certificate of its own, or wait {} s if it moved", asked.from.name,
                     other.address, other.port, (timing_.lease_ms + timing_.election_ms + 999) / 1000);
}

std::string Manager::admit(State& state, const Asked& asked) const {
  const Renew& m = asked.renew;
  const Host* const known = state.find(asked.from.name);
  Host host = known != nullptr ? *known : Host{};
  host.name = asked.from.name;
  host.address = m.address;
  host.port = m.port;
  host.carrier_port = m.carrier_port;
  host.serial = asked.from.serial;
  if (known != nullptr && m.held != no_lids && m.held != known->lids)
    return fmt::format("its file says that its LIDs are {}-{}, the subnet's that they are {}-{}: one of them is an old copy. Stop it, remove its subnet.json, start it",
                       m.held.first, m.held.last, known->lids.first, known->lids.last);
  if (known == nullptr && m.held != no_lids) {
    // The managers have lost their file, or it was restored: what hosts hold is right, as far as it does not clash.
    const Host* const other = state.holder(m.held.first) != nullptr ? state.holder(m.held.first) : state.holder(m.held.last);
    if (!state.is_free(m.held))
      return fmt::format("its file says that its LIDs are {}-{}, of which {} has some: its subnet.json is an old copy. Stop it, remove that file, start it",
                         m.held.first, m.held.last, other != nullptr ? "\"" + other->name + "\"" : "another host");
    host.lids = m.held;
  } else if (known == nullptr) {
    const auto lids = state.allocate(m.lids_wanted);
    if (!lids) return fmt::format("there are no {} LIDs in one piece left: lower \"lids\", or remove hosts that are no more", m.lids_wanted);
    host.lids = *lids;
  }
  state.put(std::move(host));
  return {};
}

void Manager::change(std::uint64_t now_ms, Outbox& out) {
  // No lease of a removed host can be left: it was renewed at most until it was removed, by a leader that this one outlived.
  const std::uint64_t rest_ms = timing_.lease_ms + 2 * timing_.election_ms;
  std::vector<std::string> rested;
  for (const auto& [serial, gone] : agreement_.committed().removed()) {
    if (gone.resting == no_lids) continue;
    const auto since = resting_since_.try_emplace(serial, now_ms).first->second;
    if (now_ms - since >= rest_ms) rested.push_back(serial);
  }
  if (queue_.empty() && removals_.empty() && partition_changes_.empty() && rested.empty()) return;

  State next = agreement_.committed();
  next.begin(agreement_.term());
  bool changed = false;
  for (const auto& serial : rested) next.end_rest(serial), changed = true;
  for (const auto& [by, wish] : removals_) {
    const bool was_there = next.find(wish.name) != nullptr;
    out.log.push_back(was_there ? fmt::format("\"{}\" is removed from the subnet", wish.name)
                                : fmt::format("the invitation of \"{}\" is void: nobody is let in by its certificate {}", wish.name, wish.serial));
    next.remove(wish.name);
    if (!wish.serial.empty()) next.revoke(wish.serial, wish.name);
    holders_.erase(wish.name);
    removers_.push_back(by);
    changed = true;
  }
  removals_.clear();
  for (const auto& [by, wish] : std::exchange(partition_changes_, {})) {
    const auto [partitions, error] = changed_by(next.partitions(), wish);
    if (!error.empty() || partitions == next.partitions()) {  // it is so already
      out.send(by, PartitionsReply{error, "", 0, next.partitions()});
      continue;
    }
    out.log.push_back(fmt::format("partition {}: {} {} member(s)", pkey_text(wish.pkey), wish.add ? "has new" : "loses", wish.members.empty() ? "all" : std::to_string(wish.members.size())));
    next.set(partitions);
    partition_changers_.push_back(by);
    changed = true;
  }
  for (const auto& [name, asked] : queue_) {
    const bool was_there = next.find(name) != nullptr;
    const std::string why = next.removed().contains(asked.from.serial) ? "this host was removed from the subnet" : admit(next, asked);
    if (!why.empty()) {
      if (std::exchange(refused_[name], why) != why) out.log.push_back(fmt::format("\"{}\" ({} port {}) is refused: {}", name, asked.renew.address, asked.renew.port, why));
      out.send(asked.from, Refused{asked.renew.sequence, why});
      continue;
    }
    if (const Host& host = *next.find(name); !was_there)
      out.log.push_back(fmt::format("\"{}\" ({} port {}) joins with LIDs {}-{}", name, host.address, host.port, host.lids.first, host.lids.last));
    refused_.erase(name);
    waiting_.push_back(asked);
    changed = true;
  }
  queue_.clear();
  if (!changed) return;
  agreement_.propose(now_ms, std::move(next), out);
  if (agreement_.can_propose(now_ms)) answer_waiting(now_ms, out);  // one manager alone is its own majority
}

void Manager::answer_waiting(std::uint64_t now_ms, Outbox& out) {
  for (const auto& asked : std::exchange(waiting_, {})) grant(now_ms, asked, out);
  for (const auto& by : std::exchange(removers_, {})) out.send(by, RemoveReply{});
  for (const auto& by : std::exchange(partition_changers_, {})) out.send(by, PartitionsReply{"", "", 0, agreement_.committed().partitions()});
}

void Manager::grant(std::uint64_t, const Asked& asked, Outbox& out) {
  const State& state = agreement_.committed();
  const Host* const host = state.find(asked.from.name);
  if (host == nullptr || host->serial != asked.from.serial) return;  // removed meanwhile: it will ask again, and hear of it
  // What it knows is of our history where it is not newer: what was committed once is in every later leader's.
  const StateId known = asked.renew.known <= state.id() ? asked.renew.known : StateId{};
  out.send(asked.from, Lease{asked.renew.sequence, static_cast<std::uint32_t>(timing_.lease_ms), host->lids, state.since(known)});
}

}  // namespace vrdma::hosts
