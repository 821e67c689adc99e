#include "vmkernel_svc/remote/far_groups.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "vmkernel_svc/remote/link_head.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::svc {

using engine::FarFrame;
using engine::FarFramePtr;
using engine::FarKind;
using engine::FarRecord;

namespace {
constexpr std::size_t groups_max = limits::mcast_groups_max;  // of one host

FarFramePtr frame_of(GroupsWord word, std::uint32_t payload_bytes = 0) {
  FarFramePtr frame = FarFrame::make(payload_bytes);
  frame->record().kind = FarKind::groups;
  frame->record().opcode = static_cast<std::uint8_t>(word);
  frame->record().payload_bytes = payload_bytes;
  return frame;
}

// In as many records as it takes; of none, one of `all` at least.
std::vector<FarFramePtr> frames_of(GroupsWord word, const std::vector<Gid>& groups) {
  std::vector<FarFramePtr> frames;
  for (std::size_t at = 0; at < groups.size() || (at == 0 && word == GroupsWord::all); at += groups_per_record) {
    const std::size_t count = std::min(groups_per_record, groups.size() - at);
    frames.push_back(frame_of(word, static_cast<std::uint32_t>(count * sizeof(Gid))));
    if (count != 0) std::memcpy(frames.back()->payload(), &groups[at], count * sizeof(Gid));
  }
  if (word == GroupsWord::all) {
    frames.front()->record().flags |= groups_first;
    frames.back()->record().flags |= groups_last;
  }
  return frames;
}
}  // namespace

std::size_t FarGroups::GidHash::operator()(const Gid& gid) const {
  std::uint64_t high, low;
  std::memcpy(&high, gid.data(), 8);
  std::memcpy(&low, gid.data() + 8, 8);
  return (high * 0x9e3779b97f4a7c15u) ^ low;
}

// --- of this host ---------------------------------------------------------------------------------------------

void FarGroups::joined(const Gid& group) {
  ours_.insert(group);
  joining_[group] = last_change_ + 1;
  change(group);
}

void FarGroups::left(const Gid& group) {
  ours_.erase(group);
  joining_.erase(group);
  change(group);
}

void FarGroups::change(const Gid& group) {
  ++last_change_;
  for (auto& [id, host] : hosts_) {
    if (!takes(host, group)) continue;
    host.changed.insert(group);
    if (host.changed.size() > groups_max) host.tell_all = true;
    if (host.tell_all) host.changed.clear();
    due_.insert(id);
  }
  turn();
}

bool FarGroups::is_heard(const Gid& group) {
  const auto joining = joining_.find(group);
  if (joining == joining_.end()) return true;
  if (post_.meets_others()) return false;
  for (const auto& [id, host] : hosts_)
    if (takes(host, group) && host.heard < joining->second && post_.is_connected(id)) return false;
  joining_.erase(joining);
  return true;
}

void FarGroups::turn() {
  for (auto due = due_.begin(); due != due_.end();) {
    if (!post_.may_tell(*due)) {
      ++due;
      continue;
    }
    tell(*due, hosts_.at(*due));
    due = due_.erase(due);
  }
}

void FarGroups::tell(remote::HostId id, Host& host) {
  if (host.owed != 0) {
    FarFramePtr frame = frame_of(GroupsWord::heard);
    frame->record().bytes = std::exchange(host.owed, 0);
    post_.tell(id, std::move(frame));
  }
  std::vector<FarFramePtr> frames;
  if (std::exchange(host.tell_all, false)) {
    std::vector<Gid> ours;
    std::copy_if(ours_.begin(), ours_.end(), std::back_inserter(ours), [&](const Gid& group) { return takes(host, group); });
    frames = frames_of(GroupsWord::all, ours);
  } else if (!host.changed.empty()) {
    std::vector<Gid> leave, join;
    for (const Gid& group : host.changed) (ours_.contains(group) ? join : leave).push_back(group);
    frames = frames_of(GroupsWord::leave, leave);  // first: it never knows of more than there can be
    for (auto& frame : frames_of(GroupsWord::join, join)) frames.push_back(std::move(frame));
  }
  host.changed.clear();
  if (frames.empty()) return;
  host.told = last_change_;
  frames.back()->record().bytes = last_change_;
  for (auto& frame : frames) post_.tell(id, std::move(frame));
}

// --- of others ------------------------------------------------------------------------------------------------

void FarGroups::new_session(remote::HostId id, std::uint64_t features) {
  Host& host = hosts_[id] = {};
  host.knows = host.tell_all = (features & remote::link_knows_groups) != 0;
  host.knows_ipv4 = (features & remote::link_knows_ipv4_groups) != 0;
  if (host.knows) due_.insert(id);
  ++generation_;
}

void FarGroups::forget(remote::HostId id) {
  due_.erase(id);
  if (hosts_.erase(id) != 0) ++generation_;
}

bool FarGroups::arrived(remote::HostId id, FarFrame& frame) {
  const FarRecord& record = frame.record();
  const auto found = hosts_.find(id);
  if (found == hosts_.end() || !found->second.knows) return false;
  Host& host = found->second;
  const auto word = static_cast<GroupsWord>(record.opcode);
  if (word == GroupsWord::heard) {
    if (record.payload_bytes != 0 || record.bytes > host.told) return false;
    host.heard = std::max(host.heard, record.bytes);
    return true;
  }
  if (record.payload_bytes % sizeof(Gid) != 0 || record.payload_bytes > groups_per_record * sizeof(Gid)) return false;
  if (!take(host, word, record.flags, frame.payload(), record.payload_bytes / sizeof(Gid))) return false;
  if (record.bytes != 0) {
    host.owed = record.bytes;
    due_.insert(id);
  }
  return true;
}

bool FarGroups::take(Host& host, GroupsWord word, std::uint8_t flags, const std::byte* payload, std::size_t count) {
  switch (word) {
    case GroupsWord::all:
      if ((flags & groups_first) != 0) host.groups.clear(), host.complete = false;
      else if (host.complete) return false;
      break;
    case GroupsWord::join:
    case GroupsWord::leave: break;
    default: return false;
  }
  ++generation_;
  bool good = true;
  for (std::size_t i = 0; i < count; ++i) {
    Gid group;
    std::memcpy(group.data(), payload + i * sizeof(Gid), sizeof(Gid));
    if (word == GroupsWord::leave) host.groups.erase(group);
    else if (!is_multicast(group) || (host.groups.size() >= groups_max && !host.groups.contains(group))) good = false;
    else host.groups.insert(group);
  }
  if (word == GroupsWord::all && (flags & groups_last) != 0) host.complete = true;
  return good;
}

const std::vector<remote::HostId>& FarGroups::receivers(const Gid& group) {
  if (const auto* const known = found_.find(group, generation_)) return *known;
  std::vector<remote::HostId> to;
  for (const auto& [id, host] : hosts_)
    if (!host.complete || host.groups.contains(group)) to.push_back(id);
  found_.insert(group, generation_, to);
  return *found_.find(group, generation_);
}

std::optional<std::size_t> FarGroups::count(remote::HostId id) const {
  const auto found = hosts_.find(id);
  if (found == hosts_.end() || !found->second.complete) return std::nullopt;
  return found->second.groups.size();
}

}  // namespace vrdma::svc
