// Multicast groups as subnet administration knows them (IBA 15.2.5.17): what a group is like, and which ports have joined it. Who receives is
// not said here: queue pairs are attached by verbs. A group is there as long as somebody is in it. Used by the shard's thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/tenant.hpp"

namespace vrdma::svc::mad {

constexpr std::size_t groups_max = 8192, members_max = 1024;  // of a group

struct Group {
  std::uint32_t qkey = 0;
  std::uint16_t pkey = 0;
  std::uint8_t traffic_class = 0, service_level = 0, hop_limit = 0;
  std::uint32_t flow_label = 0;
  struct Member {
    std::uint8_t join_state;
    Tenant* tenant;  // among whose memberships it counts
  };
  std::map<Gid, Member> members;  // by port
};

class Groups {
 public:
  const std::map<Gid, Group>& all() const { return groups_; }
  Group* find(const Gid& gid) {
    const auto found = groups_.find(gid);
    return found == groups_.end() ? nullptr : &found->second;
  }
  // Whoever has a multicast LID.
  const std::multimap<std::uint16_t, const Gid*>& by_lid() const { return by_lid_; }
  Group& add(const Gid& gid, const Group& group) {
    const auto made = groups_.emplace(gid, group).first;
    by_lid_.emplace(multicast_lid(gid), &made->first);
    return made->second;
  }
  // False: its tenant is in as many as it may be.
  bool join(Group& group, const Gid& port, std::uint8_t join_state, Tenant& tenant) {
    const auto found = group.members.find(port);
    if (found != group.members.end()) return found->second.join_state |= join_state, true;
    if (tenant.memberships >= tenant.quota.memberships) return false;
    ++tenant.memberships;
    group.members.emplace(port, Group::Member{join_state, &tenant});
    return true;
  }
  void leave(const Gid& gid, const Gid& port) {
    const auto found = groups_.find(gid);
    if (found == groups_.end()) return;
    if (const auto member = found->second.members.find(port); member != found->second.members.end()) {
      --member->second.tenant->memberships;
      found->second.members.erase(member);
    }
    remove_if_empty(found);
  }
  void leave_all(const Gid& port) {
    for (auto at = groups_.begin(); at != groups_.end();) {
      const auto next = std::next(at);
      if (at->second.members.contains(port)) leave(Gid(at->first), port);
      at = next;
    }
  }
  void remove_if_empty(const Gid& gid) {
    if (const auto found = groups_.find(gid); found != groups_.end()) remove_if_empty(found);
  }

 private:
  void remove_if_empty(std::map<Gid, Group>::iterator at) {
    if (!at->second.members.empty()) return;
    const auto [first, last] = by_lid_.equal_range(multicast_lid(at->first));
    by_lid_.erase(std::find_if(first, last, [&](const auto& one) { return one.second == &at->first; }));
    groups_.erase(at);
  }

  std::map<Gid, Group> groups_;
  std::multimap<std::uint16_t, const Gid*> by_lid_;
};

}  // namespace vrdma::svc::mad
