// The subnet as its subnet manager, which is this service, shows it: each guest on InfiniBand is a channel adapter with one port, and all of
// this host are on one switch, which has the subnet manager. A guest sees those that it has a partition in common with; ports that
// processes share (vmkernel_svc/lids.hpp) are one.
//
// Adapters for which the switch's 254 ports do not suffice have no directed route, but a LID like all. Used by the shard's thread only.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/fabric.hpp"

namespace vrdma::svc::mad {

constexpr std::uint8_t switch_ports_max = 254, switch_ports_step = 36;

// An adapter, or the switch.
struct Node {
  Guest* guest = nullptr;  // nullptr: the switch
  std::uint8_t port = 0;   // of the switch, where the adapter is; 0: on none
  bool is_switch() const { return guest == nullptr; }
};

// Who asks: a guest, or one of another host, of whom only its partitions are known.
struct Viewer {
  const Tenant* tenant = nullptr;
  pid_t pid = 0;
  hosts::PkeyTable pkeys{};

  Viewer(const Guest& guest) : tenant(guest.tenant), pid(guest.machine ? 0 : guest.credentials.pid), pkeys(guest.tenant->pkeys) {}
  explicit Viewer(const hosts::PkeyTable& pkeys_in) : pkeys(pkeys_in) {}
  // Whether names and counters of that one are the viewer's to see.
  bool is_user_of(const Guest& guest) const {
    if (guest.tenant != tenant) return false;
    return !tenant->several_users || (pid != 0 && !guest.machine && guest.credentials.pid == pid);
  }
};

// What a viewer sees, made once for a request: guests come and go between two.
struct View {
  std::vector<Node> nodes;  // the switch first, by LID
  std::array<std::uint16_t, switch_ports_max + 1> by_port{};  // of an adapter: its place among the nodes; 0: nobody is there

  const Node* at_port(std::uint32_t port) const { return port < by_port.size() && by_port[port] != 0 ? &nodes[by_port[port]] : nullptr; }
};

class Subnet {
 public:
  explicit Subnet(Fabric& fabric) : fabric_(fabric) {}

  Fabric& fabric() const { return fabric_; }
  bool sees(const Viewer& viewer, const Guest& other) const;
  View view(const Viewer& viewer);
  // nullopt: nobody is there that `viewer` sees.
  std::optional<Node> at_lid(const Viewer& viewer, std::uint16_t lid);
  // Of the switch, as long as somebody has that LID; 0: none was free.
  std::uint8_t port_of(std::uint16_t lid);
  void left(std::uint16_t lid);
  // How many ports the switch has: as many as were ever needed, in steps.
  std::uint8_t switch_ports() const { return switch_ports_; }

  std::uint16_t lid_of(const Node& node) const { return node.is_switch() ? subnet_manager_lid : node.guest->lid; }
  std::uint64_t guid_of(const Node& node) const { return node.is_switch() ? subnet_manager_guid() : node.guest->guid; }
  std::uint8_t mtu() const { return fabric_.config.mtu(); }  // enum ibv_mtu
  std::string description(const Viewer& viewer, const Node& node) const;  // at most 64 bytes

 private:
  static constexpr std::uint8_t no_port = 0xff;
  Fabric& fabric_;
  std::vector<std::uint8_t> port_by_lid_ = std::vector<std::uint8_t>(subnet_manager_lid);  // 0: not asked for yet
  std::bitset<switch_ports_max + 1> taken_{1};
  bool some_have_none_ = false;
  std::uint8_t switch_ports_ = switch_ports_step;
};

}  // namespace vrdma::svc::mad
