// Which LIDs this host's guests have. A LID rests as long as it can before somebody else gets it, and may be shared: processes of one
// origin, a fork's child and its parent, name the same secret and have one address, as processes that use one HCA have.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <unordered_map>

#include <sys/types.h>

#include "vmkernel_svc/hosts/state.hpp"

namespace vrdma::svc {

class Lids {
 public:
  using Secret = std::array<std::uint8_t, 16>;
  // What those who share have in common.
  struct Address {
    std::uint64_t guid;
    std::uint32_t link_layer;
    uid_t uid;
  };

  // count 0: none until they are leased.
  Lids(std::uint32_t first, std::uint32_t count) : first_(first), count_(count) {}

  // A host's LIDs do not change while it runs.
  void lease(hosts::LidRange lids);

  // 0: none left. The last few are root's: a quota is of a uid, of which one user may have many, and who looks after the host gets in all the same.
  std::uint16_t take(uid_t uid);
  void give_back(std::uint16_t lid);

  // Who has `lid` and `address` names a secret. Where nobody has named it before: nothing, and others may name it from now on. Where
  // somebody of the same user and link layer has: what it gets in place of these; `lid` is given back, and the other one is had by one
  // more, also if it rests and LIDs may be given now. Nothing else.
  struct Shared {
    std::uint16_t lid;
    std::uint64_t guid;
  };
  std::optional<Shared> share(const Secret& secret, std::uint16_t lid, const Address& address, bool may_give = true);

 private:
  struct Entry {
    std::uint16_t lid;
    Address address;
    std::uint32_t users;
  };

  std::uint32_t next_ = 0, first_, count_;
  std::deque<std::uint16_t> resting_;  // oldest first
  std::map<Secret, Entry> shared_;     // until the LID is somebody else's
  std::unordered_map<std::uint16_t, Secret> secret_of_;
};

}  // namespace vrdma::svc
