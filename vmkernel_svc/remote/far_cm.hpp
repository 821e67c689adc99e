// The connection managers of other hosts (cm/message.hpp), by records of FarKind::cm: a message each. What one says of its guests is
// believed as far as a host can have such guests. Records arrive in a shard's turn, and what they change is changed by who is alone: a task.
//
// Used by the shard's thread only.
#pragma once

#include <map>

#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/engine/far_frame.hpp"
#include "vmkernel_svc/hosts/directory.hpp"

namespace vrdma::svc {

class FarDesk;
class Shard;

class FarCm final : public ConnectionManager::Post {
 public:
  FarCm(FarDesk& desk, Shard& shard);
  ~FarCm();

  // features: LinkHead's.
  void new_session(remote::HostId host, std::uint64_t features);
  // A record of FarKind::cm. False: it makes no sense.
  bool arrived(remote::HostId host, engine::FarFrame& frame);

  void tell(std::uint32_t host, const CmMessage& message) override;
  std::vector<std::uint32_t> who_may_have(const control::CmAddress& address) override;
  std::uint64_t silent_ns(std::uint32_t host) override;

 private:
  bool is_awaited(remote::HostId host) const;
  void refuse(remote::HostId host, const CmMessage& message);

  FarDesk& desk_;
  Shard& shard_;
  std::map<remote::HostId, std::uint64_t> features_;  // of those that know such records
};

}  // namespace vrdma::svc
