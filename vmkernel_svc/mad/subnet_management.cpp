#include "vmkernel_svc/mad/subnet_management.hpp"

#include <cstring>

namespace vrdma::svc::mad {

namespace {

constexpr std::uint64_t gid_prefix = 0xfe80'0000'0000'0000u;
constexpr std::uint32_t vendor = 0x020000;  // of the locally administered GUIDs
constexpr std::uint8_t node_is_adapter = 1, node_is_switch = 2;
constexpr std::uint8_t port_down = 1, port_active = 4, physical_polling = 2, physical_link_up = 5;
constexpr std::uint8_t width_4x = 2, speed_all = 7, speed_qdr = 4, extended_edr = 2;  // 100 Gb/s, as ibv_query_port says
constexpr std::uint32_t is_sm = 1u << 1;  // among a port's capabilities
constexpr std::uint16_t forwarding_entries = 0xc000, multicast_entries = 0x3ffe;
constexpr std::uint8_t no_port = 0xff;

SmpData forwarding_table(const View& view, std::uint32_t block) {
  SmpData out;
  out.fill(no_port);
  if (subnet_manager_lid / out.size() == block) out[subnet_manager_lid % out.size()] = 0;
  for (const Node& node : view.nodes)
    if (!node.is_switch() && node.port != 0 && node.guest->lid / out.size() == block) out[node.guest->lid % out.size()] = node.port;
  return out;
}

// A block of 32 LIDs, and of their ports 16: a bit each.
SmpData multicast_table(Subnet& subnet, const Groups& groups, const View& view, std::uint32_t block, std::uint32_t position) {
  constexpr std::uint32_t lids = 32, ports = 16;
  SmpData out{};
  const auto first = static_cast<std::uint16_t>(first_multicast_lid + block * lids);
  for (auto at = groups.by_lid().lower_bound(first); at != groups.by_lid().end() && at->first < first + lids; ++at) {
    const Field field{at->first % lids * 16, 16};
    for (const auto& [member, how] : groups.all().at(*at->second).members) {
      const std::uint8_t port = subnet.port_of(lid_of(member.data()));
      if (port / ports == position && view.at_port(port) != nullptr) put(out, field, get(out, field) | 1u << port % ports);
    }
  }
  return out;
}

}  // namespace

SmpData node_info(const Subnet& subnet, const Node& node, std::uint8_t arrived_at) {
  SmpData out{};
  const std::uint64_t guid = subnet.guid_of(node);
  put(out, {0, 8}, 1);    // base and class versions
  put(out, {8, 8}, 1);
  put(out, {16, 8}, node.is_switch() ? node_is_switch : node_is_adapter);
  put(out, {24, 8}, node.is_switch() ? subnet.switch_ports() : 1);
  put(out, {32, 64}, system_image_guid());
  put(out, {96, 64}, guid);
  put(out, {160, 64}, guid);
  put(out, {224, 16}, limits::pkey_table);
  put(out, {288, 8}, arrived_at);
  put(out, {296, 24}, vendor);
  return out;
}

SmpData node_description(Subnet& subnet, const Viewer& viewer, const Node& node) {
  SmpData out{};
  const std::string text = subnet.description(viewer, node);
  std::memcpy(out.data(), text.data(), std::min(text.size(), out.size()));
  return out;
}

std::optional<SmpData> port_info(const Subnet& subnet, const View& view, const Node& node, std::uint32_t port, std::uint8_t arrived_at) {
  const bool own_port = node.is_switch() && port == 0;  // the switch's, for management
  if (node.is_switch() ? port > subnet.switch_ports() : port > 1) return std::nullopt;
  const bool is_linked = !node.is_switch() || own_port || view.at_port(port) != nullptr;
  SmpData out{};
  if (!node.is_switch() || own_port) {
    put(out, {64, 64}, gid_prefix);
    put(out, {128, 16}, subnet.lid_of(node));
    put(out, {144, 16}, subnet_manager_lid);
    put(out, {160, 32}, limits::port_capabilities | (own_port ? is_sm : 0));
    put(out, {400, 8}, 1);     // one GUID
    put(out, {411, 5}, 18);    // a subnet's timeout, as ibv_query_port says: 1 s
  }
  put(out, {224, 8}, arrived_at);
  for (const unsigned bit : {232u, 240u, 248u}) put(out, {bit, 8}, width_4x);
  put(out, {256, 4}, speed_all);
  put(out, {260, 4}, is_linked ? port_active : port_down);
  put(out, {264, 4}, is_linked ? physical_link_up : physical_polling);
  put(out, {268, 4}, physical_polling);  // what it is when it is down
  put(out, {280, 4}, speed_qdr);
  put(out, {284, 4}, speed_all);
  put(out, {288, 4}, subnet.mtu());
  put(out, {296, 4}, 1);       // one virtual lane
  put(out, {332, 4}, 5);       // 4096 bytes at most
  put(out, {344, 4}, 1);
  put(out, {496, 4}, is_linked ? extended_edr : 0);
  put(out, {500, 4}, extended_edr);
  put(out, {507, 5}, extended_edr);
  return out;
}

SmpData switch_info(const View& view) {
  std::uint16_t top = subnet_manager_lid;
  if (view.nodes.size() > 1) top = std::max(top, view.nodes.back().guest->lid);
  SmpData out{};
  put(out, {0, 16}, forwarding_entries);
  put(out, {32, 16}, multicast_entries);
  put(out, {48, 16}, top);
  put(out, {64, 8}, no_port);
  put(out, {72, 8}, no_port);
  put(out, {80, 8}, no_port);
  put(out, {88, 5}, 18);
  put(out, {112, 16}, 32);
  put(out, {132, 1}, 1);  // its own port is a full one
  return out;
}

SmpData sm_info() {
  constexpr std::uint8_t master = 3, highest_priority = 15;
  constexpr std::uint64_t default_key = 1;  // as OpenSM has it, which gives way to a manager with its own key only
  SmpData out{};
  put(out, {0, 64}, subnet_manager_guid());
  put(out, {64, 64}, default_key);
  put(out, {128, 32}, 1);
  put(out, {160, 4}, highest_priority);
  put(out, {164, 4}, master);
  return out;
}

SmpData pkey_table(const Node& node) {
  SmpData out{};
  if (node.is_switch()) return put(out, {0, 16}, hosts::pkey_default), out;
  for (unsigned i = 0; i < limits::pkey_table; ++i) put(out, {i * 16, 16}, node.guest->tenant->pkeys[i]);
  return out;
}

bool answer_subnet_management(Subnet& subnet, const Groups& groups, const Viewer& viewer, const Node& node, std::uint8_t arrived_at, Mad& mad) {
  if (mad.class_version() != 1) return mad.respond(status_bad_version), true;
  if (mad.method() == method_trap && node.is_switch()) return mad.bytes[3] = method_repress, true;  // IBA 13.4.9: it has been heard
  if (mad.method() != method_get) {
    if (mad.method() != method_set) return false;
    return mad.respond(status_bad_attribute), true;  // nothing of it can be set
  }
  const std::uint32_t modifier = mad.modifier();
  const View view = node.is_switch() ? subnet.view(viewer) : View{};
  std::optional<SmpData> data = SmpData{};
  switch (mad.attribute()) {
    case attribute_node_description: data = node_description(subnet, viewer, node); break;
    case attribute_node_info: data = node_info(subnet, node, arrived_at); break;
    case attribute_port_info: data = port_info(subnet, view, node, modifier == 0 && !node.is_switch() ? 1 : modifier, arrived_at); break;
    case attribute_pkey_table:
      if ((modifier & 0xffff) == 0) data = pkey_table(node);
      break;
    case attribute_guid_info:
      if (modifier == 0) put(*data, {0, 64}, subnet.guid_of(node));
      break;
    case attribute_sl_to_vl:
    case attribute_vl_arbitration: break;
    case attribute_sm_info:
      if (!node.is_switch()) return false;
      data = sm_info();
      break;
    case attribute_switch_info:
    case attribute_forwarding_table:
    case attribute_multicast_table:
      if (!node.is_switch()) return mad.respond(status_bad_attribute), true;
      if (mad.attribute() == attribute_switch_info) data = switch_info(view);
      if (mad.attribute() == attribute_forwarding_table) data = forwarding_table(view, modifier & 0xffff);
      if (mad.attribute() == attribute_multicast_table) data = multicast_table(subnet, groups, view, modifier & 0x1ff, modifier >> 28);
      break;
    default: return mad.respond(status_bad_attribute), true;
  }
  if (!data) return mad.respond(status_bad_value), true;
  std::copy(data->begin(), data->end(), mad.data(smp_data, smp_data_bytes).begin());
  mad.respond(status_ok);
  return true;
}

std::optional<Arrival> follow_route(Subnet& subnet, const Viewer& sender, const Node& from, Mad& mad) {
  const std::uint8_t hops = mad.bytes[7];
  if (hops >= smp_data_bytes) return std::nullopt;
  std::optional<View> view;
  Arrival at{from, static_cast<std::uint8_t>(from.is_switch() ? 0 : 1)};
  for (std::uint8_t hop = 1; hop <= hops; ++hop) {
    const std::uint8_t out_of = mad.bytes[initial_path + hop];
    if (at.node.is_switch()) {
      if (!view) view = subnet.view(sender);
      const Node* const adapter = view->at_port(out_of);
      if (adapter == nullptr) return std::nullopt;
      at = {*adapter, 1};
    } else {
      const std::uint8_t port = subnet.port_of(at.node.guest->lid);
      if (out_of != 1 || port == 0 || hop != 1) return std::nullopt;  // an adapter passes nothing on
      at = {Node{}, port};
    }
    mad.bytes[return_path + hop] = at.port;
  }
  return at;
}

}  // namespace vrdma::svc::mad
