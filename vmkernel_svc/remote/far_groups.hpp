// Which multicast groups have members on which other host: a datagram to a group goes once to each of these, and to no other. The
// receiving host gives it to those of its queue pairs that are members then, so that who has left hears nothing more at once.
//
//     this host                                              another one
//       all, … all   its groups, when a session begins    →    forgets what it knew, and knows all with the last of these
//       leave, join  a group's last member went, …        →
//                                                         ←    heard     it knows all up to the change of that number
//
// - Who joins must miss nothing that is sent after it was told so: the join is over when all hosts that are connected have heard of it, and
//   none is about to be met: a service that has just begun is connected with nobody.
// - A host that has not said all of its groups yet, or does not know of such records, is sent every multicast datagram.
// - What another host says is bounded by what one host can have; what cannot be told now (no room, or nobody there) is told later, at
//   most once for each group, or all anew.
//
// Of the shard's thread. No socket, no clock: those are behind Post.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "cache/generation_cache.hpp"
#include "vmkernel_svc/engine/far_frame.hpp"
#include "vmkernel_svc/hosts/directory.hpp"
#include "vrdma/ids.hpp"

namespace vrdma::svc {

// FarRecord::opcode of FarKind::groups. The payload is MGIDs, groups_per_record at most; `bytes` is the number that is to be heard, or
// that was; 0: nothing is to be said to it.
enum class GroupsWord : std::uint8_t { all = 1, join, leave, heard };
constexpr std::uint8_t groups_first = 1, groups_last = 2;  // FarRecord::flags, of those of GroupsWord::all that belong together
constexpr std::size_t groups_per_record = 256;

class FarGroups {
 public:
  class Post {
   public:
    // Whether it is there, and what it has not taken yet leaves room.
    virtual bool may_tell(remote::HostId host) = 0;
    virtual bool is_connected(remote::HostId host) = 0;
    virtual bool meets_others() = 0;  // there is a host that was never met, and may be in a moment
    virtual void tell(remote::HostId host, engine::FarFramePtr frame) = 0;

   protected:
    ~Post() = default;
  };

  explicit FarGroups(Post& post) : post_(post) {}

  // Of this host: a group has its first member, or has lost the last one.
  void joined(const Gid& group);
  void left(const Gid& group);
  // Whether every host that is connected, or about to be, sends here what its programs send to that group.
  bool is_heard(const Gid& group);

  // Whom a datagram to that group is for. Good until the next call of a member.
  const std::vector<remote::HostId>& receivers(const Gid& group);
  // Of the groups that have members there; nullopt: it is sent everything.
  std::optional<std::size_t> count(remote::HostId host) const;

  // features: LinkHead's.
  void new_session(remote::HostId host, std::uint64_t features);
  void forget(remote::HostId host);  // it is no host of the subnet any more
  // A record of FarKind::groups. False: it makes no sense, in whole or in part.
  bool arrived(remote::HostId host, engine::FarFrame& frame);
  // Tells what is to be told, as far as may be now.
  void turn();

 private:
  struct Host {
    bool knows = false;       // such records
    bool knows_ipv4 = false;  // and RoCE v2's groups
    bool complete = false;    // `groups` are all that it has
    std::set<Gid> groups;     // that have members there
    bool tell_all = false;    // ours, anew
    std::set<Gid> changed;    // not told yet
    std::uint64_t told = 0;   // our changes up to this one, in this session
    std::uint64_t heard = 0;  // by it
    std::uint64_t owed = 0;   // of its changes: which one it is to hear of; 0: none
  };

  struct GidHash {
    std::size_t operator()(const Gid& gid) const;
  };
  // Whether it is told of that group: one that it takes for no group it would refuse, and its programs cannot be in it.
  static bool takes(const Host& host, const Gid& group) { return host.knows && (host.knows_ipv4 || !is_ipv4_mapped(group)); }
  void change(const Gid& group);
  void tell(remote::HostId id, Host& host);
  bool take(Host& host, GroupsWord word, std::uint8_t flags, const std::byte* payload, std::size_t count);

  Post& post_;
  std::set<Gid> ours_;
  std::map<Gid, std::uint64_t> joining_;  // of ours: those that not all hosts may have heard of, by the number of the change
  std::uint64_t last_change_ = 0;
  std::map<remote::HostId, Host> hosts_;  // with whom there is a session
  std::set<remote::HostId> due_;          // who is to be told something
  std::uint64_t generation_ = 1;          // of what others have
  cache::GenerationCache<Gid, std::vector<remote::HostId>, GidHash> found_{256};
};

}  // namespace vrdma::svc
