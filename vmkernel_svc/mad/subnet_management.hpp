// What nodes say of themselves (IBA 14.2.5): the attributes of subnet management, as datagrams and the records of subnet administration
// carry them. All is read-only: there is nothing to configure in a virtual subnet.
#pragma once

#include <array>
#include <optional>

#include "vmkernel_svc/mad/datagram.hpp"
#include "vmkernel_svc/mad/groups.hpp"
#include "vmkernel_svc/mad/subnet.hpp"

namespace vrdma::svc::mad {

using SmpData = std::array<std::uint8_t, smp_data_bytes>;

// arrived_at: the port of the node by which it was asked.
SmpData node_info(const Subnet& subnet, const Node& node, std::uint8_t arrived_at);
SmpData node_description(Subnet& subnet, const Viewer& viewer, const Node& node);
// nullopt: it has no such port.
std::optional<SmpData> port_info(const Subnet& subnet, const View& view, const Node& node, std::uint32_t port, std::uint8_t arrived_at);
SmpData switch_info(const View& view);
SmpData sm_info();
SmpData pkey_table(const Node& node);

// Turns a request to `node`, where it has arrived at that port, into the answer. False: nobody answers.
bool answer_subnet_management(Subnet& subnet, const Groups& groups, const Viewer& viewer, const Node& node, std::uint8_t arrived_at, Mad& mad);

// IBA 14.2.2: where a directed-route request of the sender's leads, and its way back, which is noted in it.
struct Arrival {
  Node node;
  std::uint8_t port;
};
std::optional<Arrival> follow_route(Subnet& subnet, const Viewer& sender, const Node& from, Mad& mad);

}  // namespace vrdma::svc::mad
