// Which ports are taken, as the kernel's rdma_cm has it: for each port space and network namespace, by address. Ports of TCP and UDP are
// others. However many share a port, at different addresses or because they let each other, each question looks at one or two of them.
// Used by the shard's thread only.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "vmkernel_svc/cm/identifier.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

class CmPorts {
 public:
  // Gives `one` the port that its source names, or any. EADDRINUSE: another one has it at this address; EADDRNOTAVAIL: at any, or `one` wants it there;
  // or no port is free.
  Status take(CmIdentifier& one);
  void give_back(CmIdentifier& one);
  // To be called when its source, its options or whether it listens have changed.
  void update(CmIdentifier& one);
  // Who listens at that port and address of the namespace, whoever names the address rather than any; nullptr: nobody.
  CmIdentifier* listener(const CmNetwork& network, std::uint32_t port_space, const control::CmAddress& at) const;
  // Whose that address and port are, whether it listens or not.
  CmIdentifier* holder(const CmNetwork& network, std::uint32_t port_space, const control::CmAddress& at) const;
  // The same where others may not be told from it, which does not listen yet: those who listen, and, of one that shares its port, all who have it.
  Status may_listen(const CmIdentifier& one) const;

 private:
  struct Key {
    CmNetwork network;
    std::uint32_t port_space;
    std::uint16_t port;
    auto operator<=>(const Key&) const = default;
  };
  // Of a port: by family, claim and address (zeros: any), and by number. Any of IPv6 that is any of IPv4, too, is there twice.
  using Holders = std::map<std::tuple<std::uint16_t, CmClaim, std::array<std::uint8_t, 16>, std::uint32_t>, CmIdentifier*>;

  static Key key_of(const CmIdentifier& one) { return {one.network, one.space_of_port(), one.source.port}; }
  const Holders* holders_of(const Key& key) const;
  static void enter(Holders& holders, CmIdentifier& one);
  static void strike(Holders& holders, const CmIdentifier& one);
  static CmIdentifier* first(const Holders& holders, CmClaim claim, std::uint16_t family, const std::array<std::uint8_t, 16>& ip, const CmIdentifier* but = nullptr);
  static bool meets(const Holders& holders, CmClaim claim, const CmIdentifier& one);
  static bool meets_at_its_address(const Holders& holders, CmClaim claim, const CmIdentifier& one);
  Status free_of(std::initializer_list<CmClaim> claims, const Key& key, const CmIdentifier& one) const;

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

  std::map<Key, Holders> taken_;
  std::map<std::pair<CmNetwork, std::uint32_t>, Dynamic> dynamic_;
  std::uint16_t next_ = 0;  // of the dynamic ones
};

}  // namespace vrdma::svc
