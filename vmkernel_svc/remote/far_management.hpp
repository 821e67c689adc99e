// Management datagrams of other hosts' guests (mad/management.hpp), by records of FarKind::mad: one each. What a host says of its guests is
// believed as far as it can have such guests. What records change is changed by who is alone: a task.
//
// Used by the shard's thread only.
#pragma once

#include <set>

#include "vmkernel_svc/engine/far_frame.hpp"
#include "vmkernel_svc/hosts/directory.hpp"
#include "vmkernel_svc/mad/management.hpp"

namespace vrdma::svc {

class FarDesk;
class Shard;

class FarManagement final : public Management::Post {
 public:
  FarManagement(FarDesk& desk, Shard& shard);
  ~FarManagement();

  // features: LinkHead's.
  void new_session(remote::HostId host, std::uint64_t features);
  // A record of FarKind::mad. False: it makes no sense.
  bool arrived(remote::HostId host, engine::FarFrame& frame);

  std::optional<std::uint32_t> host_of(std::uint16_t lid) override;
  void tell(std::uint32_t host, const MadMessage& head, std::span<const std::uint8_t> mad) override;

 private:
  FarDesk& desk_;
  Shard& shard_;
  std::set<remote::HostId> knowing_;  // such records
};

}  // namespace vrdma::svc
