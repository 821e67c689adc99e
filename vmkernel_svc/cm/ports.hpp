// Which ports are taken, as the kernel's rdma_cm has it: for each port space and network namespace, by address. Ports of TCP and UDP are
// others. Used by the shard's thread only.
#pragma once

#include <bitset>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
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

  // Ports that are given to whoever names none: net.ipv4.ip_local_port_range.
  static constexpr std::uint16_t dynamic_first = 32768, dynamic_last = 60999, dynamic_count = dynamic_last - dynamic_first + 1;
  // Those of a namespace's port space, where any are taken. Of many there is a picture, so that looking for a free one among few takes no
  // longer than among many.
  struct Dynamic {
    std::uint32_t count = 0;
    std::unique_ptr<std::bitset<dynamic_count>> taken;
  };
  static constexpr std::uint32_t many = 1024;
  void mark(const Key& key, bool taken);

  std::map<Key, std::vector<CmIdentifier*>> taken_;
  std::map<std::pair<CmNetwork, std::uint32_t>, Dynamic> dynamic_;
  std::uint16_t next_ = 0;  // of the dynamic ones
};

}  // namespace vrdma::svc
