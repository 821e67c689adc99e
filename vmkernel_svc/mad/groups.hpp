// Multicast groups as subnet administration knows them (IBA 15.2.5.17): what a group is like, and which ports have joined it. Who receives is
// not said here: queue pairs are attached by verbs. A group is there as long as somebody is in it. Used by the shard's thread only.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "vrdma/ids.hpp"

namespace vrdma::svc::mad {

constexpr std::size_t groups_max = 8192, members_max = 1024;  // of a group

struct Group {
  std::uint32_t qkey = 0;
  std::uint16_t pkey = 0;
  std::uint8_t traffic_class = 0, service_level = 0, hop_limit = 0;
  std::uint32_t flow_label = 0;
  std::map<Gid, std::uint8_t> members;  // JoinState of ports
};

class Groups {
 public:
  const std::map<Gid, Group>& all() const { return groups_; }
  Group* find(const Gid& gid) {
    const auto found = groups_.find(gid);
    return found == groups_.end() ? nullptr : &found->second;
  }
  Group& add(const Gid& gid, const Group& group) { return groups_.emplace(gid, group).first->second; }
  void leave(const Gid& gid, const Gid& port) {
    const auto found = groups_.find(gid);
    if (found == groups_.end()) return;
    found->second.members.erase(port);
    if (found->second.members.empty()) groups_.erase(found);
  }
  void leave_all(const Gid& port) {
    for (auto at = groups_.begin(); at != groups_.end();) {
      const auto next = std::next(at);
      leave(Gid(at->first), port);
      at = next;
    }
  }

 private:
  std::map<Gid, Group> groups_;
};

}  // namespace vrdma::svc::mad
