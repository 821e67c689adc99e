#include "vmkernel_svc/mad/subnet.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

namespace vrdma::svc::mad {

bool Subnet::sees(const Viewer& viewer, const Guest& other) const {
  if (other.link_layer != control::link_layer_infiniband) return false;
  if (viewer.tenant == other.tenant) return true;
  for (const std::uint16_t mine : viewer.pkeys)
    for (const std::uint16_t theirs : other.tenant->pkeys)
      if (hosts::pkeys_match(mine, theirs)) return true;
  return false;
}

std::uint8_t Subnet::port_of(std::uint16_t lid) {
  if (lid == 0 || lid >= port_by_lid_.size()) return 0;
  std::uint8_t& port = port_by_lid_[lid];
  if (port == 0) {
    std::uint8_t free = 1;
    while (free <= switch_ports_max && taken_[free]) ++free;
    port = free <= switch_ports_max ? free : no_port;
    some_have_none_ |= port == no_port;
    if (port != no_port) taken_.set(port);
    while (port != no_port && port > switch_ports_) switch_ports_ = static_cast<std::uint8_t>(std::min<unsigned>(switch_ports_ + switch_ports_step, switch_ports_max));
  }
  return port == no_port ? 0 : port;
}

void Subnet::left(std::uint16_t lid) {
  if (lid == 0 || lid >= port_by_lid_.size()) return;
  const std::uint8_t port = std::exchange(port_by_lid_[lid], std::uint8_t{0});
  if (port == 0 || port == no_port) return;
  taken_.reset(port);
  if (std::exchange(some_have_none_, false)) std::replace(port_by_lid_.begin(), port_by_lid_.end(), no_port, std::uint8_t{0});
}

View Subnet::view(const Viewer& viewer) {
  View out;
  out.nodes.push_back({});
  std::map<const Tenant*, bool> seen;
  for (const auto& [id, guest] : fabric_.guests) {
    if (guest->link_layer != control::link_layer_infiniband) continue;
    const auto [known, is_new] = seen.try_emplace(guest->tenant, false);
    if (is_new) known->second = sees(viewer, *guest);
    if (known->second) out.nodes.push_back({guest.get(), port_of(guest->lid)});
  }
  // Of those that share a port the first.
  std::sort(out.nodes.begin() + 1, out.nodes.end(), [](const Node& a, const Node& b) {
    return a.guest->lid != b.guest->lid ? a.guest->lid < b.guest->lid : a.guest->id.value < b.guest->id.value;
  });
  out.nodes.erase(std::unique(out.nodes.begin() + 1, out.nodes.end(), [](const Node& a, const Node& b) { return a.guest->lid == b.guest->lid; }), out.nodes.end());
  for (std::size_t i = 1; i < out.nodes.size(); ++i)
    if (out.nodes[i].port != 0) out.by_port[out.nodes[i].port] = static_cast<std::uint16_t>(i);
  return out;
}

std::optional<Node> Subnet::at_lid(const Viewer& viewer, std::uint16_t lid) {
  if (lid == subnet_manager_lid) return Node{};
  std::optional<Node> found;
  for (const auto& [id, guest] : fabric_.guests)
    if (guest->lid == lid && (!found || guest->id.value < found->guest->id.value) && sees(viewer, *guest)) found = Node{guest.get(), port_of(lid)};
  return found;
}

std::string Subnet::description(const Viewer& viewer, const Node& node) const {
  if (node.is_switch()) {
    char own_name[65] = {};
    ::gethostname(own_name, sizeof(own_name) - 1);
    return fmt::format("vrdmad {}", fabric_.host_name.empty() ? own_name : fabric_.host_name).substr(0, 64);
  }
  // Names, which may be those of programs, are their user's.
  return viewer.is_user_of(*node.guest) ? fmt::format("{} vrdma0", node.guest->name).substr(0, 64) : "vrdma0";
}

}  // namespace vrdma::svc::mad
