// A subnet that is simply configured: every host's file names all of them, with their LIDs, and all share one secret. For a few
// hosts on a network that they trust, and for tests.
#pragma once

#include <vector>

#include "vmkernel_svc/config.hpp"
#include "vmkernel_svc/hosts/directory.hpp"

namespace vrdma::remote {

class ConfiguredSubnet final : public Directory {
 public:
  // Reads the secret. Throws std::runtime_error with a message for a person.
  explicit ConfiguredSubnet(const svc::RemoteConfig& config);

  LidRange ours() const override { return ours_; }
  std::optional<HostId> host_of(std::uint16_t lid) const override;
  std::vector<LidHolder> holders() const override;
  std::shared_ptr<const PeerHost> host(HostId id) const override;
  std::shared_ptr<const PeerHost> host_named(std::string_view name) const override;
  void when_changed(std::function<void()>) override {}  // never
  std::optional<LidRange> written(HostId id) const override;

 private:
  struct Entry {
    LidRange lids;
    std::shared_ptr<const PeerHost> host;
  };
  LidRange ours_{1, 1};
  std::vector<Entry> others_;  // a host's id is its index
};

}  // namespace vrdma::remote
