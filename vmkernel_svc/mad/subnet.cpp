#include "vmkernel_svc/mad/subnet.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>

namespace vrdma::svc::mad {

bool Subnet::sees(const Viewer& viewer, const Guest& other) const {
  if (other.link_layer != control::link_layer_infiniband) return false;
  if (viewer.tenant == other.tenant) return true;
  for (const std::uint16_t mine : viewer.pkeys)
    for (const std::uint16_t theirs : other.tenant->pkeys)
      if (hosts::pkeys_match(mine, theirs)) return true;
  return false;
}

// A port is kept as long as somebody has its LID.
void Subnet::assign_ports() {
  std::map<std::uint16_t, std::uint8_t> before;
  before.swap(port_by_lid_);
  std::bitset<switch_ports_max + 1> taken;
  taken.set(0);
  std::vector<std::uint16_t> lids;
  for (const auto& [id, guest] : fabric_.guests)
    if (guest->link_layer == control::link_layer_infiniband) lids.push_back(guest->lid);
  std::sort(lids.begin(), lids.end());
  lids.erase(std::unique(lids.begin(), lids.end()), lids.end());
  for (const std::uint16_t lid : lids)
    if (const auto had = before.find(lid); had != before.end()) port_by_lid_.insert(*had), taken.set(had->second);
  std::uint8_t next = 1;
  for (const std::uint16_t lid : lids) {
    if (port_by_lid_.contains(lid)) continue;
    while (next <= switch_ports_max && taken[next]) ++next;
    if (next > switch_ports_max) return;
    port_by_lid_[lid] = next;
    taken.set(next);
    while (next > switch_ports_) switch_ports_ = static_cast<std::uint8_t>(std::min<unsigned>(switch_ports_ + switch_ports_step, switch_ports_max));
  }
}

std::uint8_t Subnet::port_of(const Guest& guest) {
  auto found = port_by_lid_.find(guest.lid);
  if (found == port_by_lid_.end()) assign_ports(), found = port_by_lid_.find(guest.lid);
  return found == port_by_lid_.end() ? 0 : found->second;
}

std::vector<Node> Subnet::nodes(const Viewer& viewer) {
  assign_ports();
  std::map<std::uint16_t, Node> by_lid;
  for (const auto& [id, guest] : fabric_.guests)
    if (sees(viewer, *guest))
      if (const auto [at, is_new] = by_lid.try_emplace(guest->lid, Node{guest.get(), port_of(*guest)}); !is_new && guest->id.value < at->second.guest->id.value)
        at->second.guest = guest.get();
  std::vector<Node> all{Node{}};
  for (const auto& [lid, node] : by_lid) all.push_back(node);
  return all;
}

std::optional<Node> Subnet::at_lid(const Viewer& viewer, std::uint16_t lid) {
  if (lid == subnet_manager_lid) return Node{};
  for (const Node& node : nodes(viewer))
    if (!node.is_switch() && node.guest->lid == lid) return node;
  return std::nullopt;
}

std::optional<Node> Subnet::at_port(const Viewer& viewer, std::uint8_t port) {
  for (const Node& node : nodes(viewer))
    if (!node.is_switch() && node.port == port) return node;
  return std::nullopt;
}

std::string Subnet::description(const Viewer& viewer, const Node& node) const {
  if (node.is_switch()) {
    char own_name[65] = {};
    ::gethostname(own_name, sizeof(own_name) - 1);
    return fmt::format("vrdmad {}", fabric_.host_name.empty() ? own_name : fabric_.host_name).substr(0, 64);
  }
  // Names, which may be those of programs, are their user's.
  return node.guest->tenant == viewer.tenant ? fmt::format("{} vrdma0", node.guest->name).substr(0, 64) : "vrdma0";
}

}  // namespace vrdma::svc::mad
