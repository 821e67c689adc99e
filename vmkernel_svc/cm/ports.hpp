// Which ports are taken, as the kernel's rdma_cm has it: for each port space and network namespace, by address. Ports of TCP and UDP are
// others. Used by the shard's thread only.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "vmkernel_svc/cm/identifier.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

class CmPorts {
 public:
  // Gives `one` the port that its source names, or any. EADDRINUSE; EADDRNOTAVAIL: none is free.
  Status take(CmIdentifier& one);
  void give_back(CmIdentifier& one);
  // Who listens at that port and address of the namespace, whoever names the address rather than any; nullptr: nobody.
  CmIdentifier* listener(const CmNetwork& network, std::uint32_t port_space, const control::CmAddress& at) const;
  // Whose that address and port are, whether it listens or not.
  CmIdentifier* holder(const CmNetwork& network, std::uint32_t port_space, const control::CmAddress& at) const;
  // EADDRINUSE: somebody else of that port, who does not let others have it, too, may not be told from it.
  Status may_listen(const CmIdentifier& one) const;

 private:
  struct Key {
    CmNetwork network;
    std::uint32_t port_space;
    std::uint16_t port;
    auto operator<=>(const Key&) const = default;
  };
  CmIdentifier* at(const CmNetwork& network, std::uint32_t port_space, const control::CmAddress& at, bool listening) const;
  bool is_free(const Key& key, const CmIdentifier& one) const;

  std::map<Key, std::vector<CmIdentifier*>> taken_;
  std::uint16_t next_ = 0;  // of the dynamic ones
};

}  // namespace vrdma::svc
