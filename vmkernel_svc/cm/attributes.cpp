// What identifiers tell of their paths, what their queue pairs are to be given, and multicast groups.
#include <endian.h>
#include <rdma/rdma_user_cm.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/engine/qp_state.hpp"
#include "vmkernel_svc/fabric.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::svc {

using namespace control;
using namespace engine;

namespace {

// Of GID tables, as assign_addresses() fills them: the IPv4 address by RoCE v2, InfiniBand's only one.
constexpr std::uint8_t gid_index_of(std::uint32_t link_layer) { return link_layer == link_layer_ethernet ? 3 : 0; }
constexpr std::uint8_t ipv6_gid_index = 1;  // RoCE v2's, of the link-local address
constexpr std::uint8_t packet_lifetime = 14;  // 67 ms; timers of the connection are twice that, and the answer's delay
constexpr std::uint8_t default_ack_timeout = 18;  // 1 s
// 0.64 ms. The kernel's is 655 ms, of which no program here would see why it waits.
constexpr std::uint8_t rnr_timer = 12;
constexpr std::uint32_t multicast_qpn = 0xffffff;

Gid gid_of(const CmPort& port) {
  return port.guid == 0 ? Gid{} : gids_of(port.guid, port.lid, port.link_layer)[gid_index_of(port.link_layer)].gid;
}

// As the kernel's connection manager makes them for RoCE (cma_iboe_set_mgid): the address itself; an IPv4 one as v2 has it, or v1 (IBA
// annexes A17, A16). Any, and a loopback, is none, to which nobody can be attached.
Gid roce_group_gid(const CmAddress& group, bool v2) {
  if (group.is_any() || group.is_loopback()) return {};
  if (group.family == AF_INET6) return group.ip;
  Gid gid{};
  if (!v2) gid[0] = 0xff, gid[1] = 0x0e;
  gid[10] = gid[11] = 0xff;
  std::copy_n(group.ip.begin(), 4, gid.begin() + 12);
  return gid;
}

// A group's that a subnet administrator has chosen, whatever its scope: as the kernel's connection manager tells them from IPv6 addresses.
bool is_assigned(const std::array<std::uint8_t, 16>& gid) { return gid[0] == 0xff && gid[1] >> 4 == 1 && gid[2] == 0xa0 && gid[3] == 0x1b; }

// RFC 4391 section 4 and RFC 1112 for InfiniBand, with rdma_cm's signature for its own port space. Any address may be a group's, as in the
// kernel (cma_set_mgid). Of any, and a loopback, it is a new group, whose MGID its first member tells others: as administrators choose them,
// from what is that port's and that membership's alone.
Gid ib_group_gid(const CmAddress& group, std::uint32_t port_space, std::uint16_t pkey, std::uint64_t guid, std::uint32_t membership) {
  if (group.is_any() || group.is_loopback()) {
    Gid gid{0xff, 0x12, 0xa0, 0x1b};
    const std::uint64_t port = htobe64(guid);
    const std::uint32_t number = htobe32(membership);
    std::memcpy(gid.data() + 4, &port, sizeof(port));
    std::memcpy(gid.data() + 12, &number, sizeof(number));
    return gid;
  }
  if (group.family == AF_IB || (group.family == AF_INET6 && is_assigned(group.ip))) return group.ip;
  Gid gid{0xff, 0x12};
  gid[2] = group.family == AF_INET ? 0x40 : 0x60;
  gid[3] = port_space == RDMA_PS_UDP ? 0x01 : 0x1b;
  gid[4] = static_cast<std::uint8_t>(pkey >> 8), gid[5] = static_cast<std::uint8_t>(pkey);
  if (group.family == AF_INET) {
    std::copy_n(group.ip.begin(), 4, gid.begin() + 12);
    gid[12] &= 0x0f;
  } else {
    std::copy(group.ip.begin() + 6, group.ip.end(), gid.begin() + 6);
  }
  return gid;
}

}  // namespace

Result<CmQueryReply> ConnectionManager::query(Guest& guest, const CmId& id) {
  const auto found = find(guest, id);
  if (!found) return found.error();
  const CmIdentifier& one = **found;
  CmQueryReply reply{};
  reply.source = one.source;
  reply.destination = one.destination;
  if (reply.destination.family == 0) reply.destination.family = one.source.family;  // of nobody yet, as in the kernel (rdma_bind_addr())
  reply.has_device = one.has_device;
  reply.link_layer = guest.link_layer;
  if (!one.has_device) return reply;
  const CmPort mine = port_of(guest);
  reply.sgid = gid_of(mine);
  reply.dgid = gid_of(one.peer_port);
  if (guest.link_layer == link_layer_infiniband) reply.slid = guest.lid, reply.dlid = one.peer_port.lid;
  reply.pkey = one.pkey != 0 ? one.pkey : guest.tenant->pkeys[0];
  // A request for a queue pair of datagrams names no path, as in the kernel (cma_ib_new_udp_id()).
  reply.has_path = one.state >= CmState::routed && one.state != CmState::listening && !(one.type == QpType::ud && was_called(one));
  reply.mtu = one.peer_port.guid == 0 ? mine.mtu : std::min(mine.mtu, one.peer_port.mtu);
  reply.lifetime = packet_lifetime;
  reply.traffic_class = one.traffic_class;
  return reply;
}

AddressVector ConnectionManager::address_vector(const CmIdentifier& one) const {
  AddressVector path{};
  const Guest& guest = *one.guest;
  path.port_num = 1;
  path.sgid_index = gid_index_of(guest.link_layer);
  const Gid dgid = gid_of(one.peer_port);
  std::copy(dgid.begin(), dgid.end(), path.dgid);
  path.hop_limit = 64;
  path.traffic_class = one.traffic_class;
  if (guest.link_layer == link_layer_infiniband) path.dlid = one.peer_port.lid;
  else path.is_global = 1;
  return path;
}

std::uint16_t ConnectionManager::pkey_index(const CmIdentifier& one) const {
  const auto& table = one.guest->tenant->pkeys;
  const auto at = std::find(table.begin(), table.end(), one.pkey);
  return one.pkey == 0 || at == table.end() ? 0 : static_cast<std::uint16_t>(at - table.begin());
}

Result<CmAttributesReply> ConnectionManager::attributes(Guest& guest, const CmAttributesRequest& request) {
  const auto found = find(guest, request.id);
  if (!found) return found.error();
  const CmIdentifier& one = **found;
  if (!one.has_device) return Errno{EINVAL};
  // As rdma_init_qp_attr() of the kernel: who sends datagrams, or has not begun to connect, is told what INIT takes, whatever it asks for; who
  // listens, or is not connected any more, is told nothing.
  const bool has_begun = one.type != QpType::ud && one.state >= CmState::listening;
  if (has_begun && (one.state == CmState::listening || one.state >= CmState::disconnecting)) return Errno{EINVAL};
  const bool knows_peer = one.state != CmState::connecting;
  const bool reliable = engine::is_reliable(one.type);
  CmAttributesReply reply{};
  QpAttributes& a = reply.attributes;
  a.state = request.state;
  a.port_num = 1;
  reply.mask = qp_attr_state;
  switch (has_begun ? static_cast<QpState>(request.state) : QpState::init) {
    case QpState::init:
      reply.mask |= qp_attr_pkey_index | qp_attr_port;
      a.pkey_index = pkey_index(one);
      if (one.type == QpType::ud) {
        reply.mask |= qp_attr_qkey;
        a.qkey = cm_udp_qkey;
        return reply;
      }
      reply.mask |= qp_attr_access_flags;
      if (has_begun) {
        a.access_flags = access_remote_write;
        if (reliable && one.responder_resources != 0) a.access_flags |= access_remote_read | access_remote_atomic;
      }
      return reply;
    case QpState::rtr:
      if (!knows_peer) return Errno{EINVAL};
      reply.mask |= qp_attr_av | qp_attr_path_mtu | qp_attr_dest_qpn | qp_attr_rq_psn;
      a.path = address_vector(one);
      a.path_mtu = std::min(port_of(guest).mtu, one.peer_port.mtu);
      a.dest_qp_num = one.peer_qpn;
      a.rq_psn = one.peer_psn;
      if (reliable) {
        reply.mask |= qp_attr_max_dest_rd_atomic | qp_attr_min_rnr_timer;
        a.max_dest_rd_atomic = std::min<std::uint8_t>(one.responder_resources, limits::rd_atomic_max);
        a.min_rnr_timer = rnr_timer;
      }
      return reply;
    case QpState::rts:
      if (!knows_peer) return Errno{EINVAL};
      reply.mask |= qp_attr_sq_psn;
      a.sq_psn = one.psn;
      if (reliable) {
        reply.mask |= qp_attr_timeout | qp_attr_retry_cnt | qp_attr_rnr_retry | qp_attr_max_qp_rd_atomic;
        a.timeout = one.ack_timeout ? *one.ack_timeout : one.peer_ack_timeout != 0 ? one.peer_ack_timeout : default_ack_timeout;
        a.retry_cnt = std::min<std::uint8_t>(one.retry_count, 7);
        a.rnr_retry = std::min<std::uint8_t>(one.rnr_retry_count, 7);
        a.max_rd_atomic = std::min<std::uint8_t>(one.initiator_depth, limits::rd_atomic_max);
      }
      return reply;
    default:
      return Errno{EINVAL};
  }
}

// --- multicast ------------------------------------------------------------------------------------------------

Result<CmId> ConnectionManager::join(Guest& guest, const CmJoinRequest& request) {
  const auto found = find(guest, request.id);
  if (!found) return found.error();
  CmIdentifier& one = **found;
  if (one.type != QpType::ud || request.flags >= RDMA_MC_JOIN_FLAG_RESERVED) return Errno{EINVAL};
  if (!one.has_device || (one.state != CmState::bound && one.state != CmState::resolved)) return Errno{EINVAL};
  const bool by_gid = request.group.family == AF_IB;
  if (request.group.family != AF_INET && request.group.family != AF_INET6 && !by_gid) return Errno{EAFNOSUPPORT};
  const bool ethernet = guest.link_layer == link_layer_ethernet, roce_v2 = ethernet && guest.minor >= minor_of_ipv4_groups;
  // Addresses that are no group's, too, as in the kernel: on Ethernet it is the attaching to them that fails. But not a GID that is none: that
  // would be the subnet administrator's to refuse.
  if (ethernet ? by_gid || request.group.is_any() : by_gid && !request.group.is_any() && !request.group.is_multicast()) return Errno{EINVAL};
  if (!guest.tenant->take_object()) return Errno{EDQUOT};
  const std::uint32_t handle = new_number();
  one.memberships.insert(handle);
  memberships_.emplace(handle, one.id);

  const std::uint16_t pkey = one.pkey != 0 ? one.pkey : guest.tenant->pkeys[0];
  const Gid gid = ethernet ? roce_group_gid(request.group, roce_v2) : ib_group_gid(request.group, one.port_space, pkey, guest.guid, handle);
  CmEvent event{};
  event.uid = request.uid;
  event.id = handle;
  event.event = cm_multicast_join;
  event.is_datagram = 1;
  event.parameters.qpn = multicast_qpn;
  event.parameters.qkey = cm_udp_qkey;
  std::copy(gid.begin(), gid.end(), event.address.dgid);
  event.address.is_global = 1;
  // The kernel has no IPv6 groups on RoCE v2 (ENOTSUPP). Here they are joined, with a GID to send from that gives an IPv6 header.
  event.address.sgid_index = roce_v2 && request.group.family == AF_INET6 ? ipv6_gid_index : gid_index_of(guest.link_layer);
  event.address.hop_limit = roce_v2 ? 64 : 1;
  event.address.port_num = 1;
  if (guest.link_layer == link_layer_infiniband) event.address.dlid = multicast_lid(gid);
  raise_on(*one.channel, handle, event);
  return CmId{handle, 0};
}

Result<CmGone> ConnectionManager::leave_group(Guest& guest, const CmId& id) {
  const auto of = memberships_.find(id.id);
  if (of == memberships_.end()) return Errno{ENOENT};
  const auto found = find(guest, {of->second, id.channel});
  if (!found) return found.error();
  CmIdentifier& one = **found;
  const CmGone gone{drop_events(*one.channel, {id.id}), 0};
  one.memberships.erase(id.id);
  memberships_.erase(of);
  --guest.tenant->objects;
  return gone;
}

}  // namespace vrdma::svc
