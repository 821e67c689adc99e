// Address handles: local to the guest, since an address vector travels in every UD work request. What a receiver knows of a
// sender (its GRH, its LID) becomes an address vector here too.
#include <arpa/inet.h>

#include <cstring>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/device.hpp"
#include "guest_lib/namesakes.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/verbs_result.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::guest {

AddressVector to_wire(const ibv_ah_attr& from) {
  AddressVector to{};
  std::memcpy(to.dgid, from.grh.dgid.raw, sizeof(to.dgid));
  to.flow_label = from.grh.flow_label;
  to.dlid = from.dlid;
  to.sgid_index = from.grh.sgid_index;
  to.hop_limit = from.grh.hop_limit;
  to.traffic_class = from.grh.traffic_class;
  to.sl = from.sl;
  to.src_path_bits = from.src_path_bits;
  to.static_rate = from.static_rate;
  to.is_global = from.is_global;
  to.port_num = from.port_num;
  return to;
}

ibv_ah_attr from_wire(const AddressVector& from) {
  ibv_ah_attr to{};
  copy_address(from, to);
  return to;
}

namespace {

Result<ibv_ah*> create_ah(ibv_pd* pd, const ibv_ah_attr& attributes) {
  if (attributes.port_num != only_port) return Errno{EINVAL};
  auto device = Context::of(pd->context).device();
  if (!device) return device.error();
  if (attributes.is_global) {
    if (attributes.grh.sgid_index >= limits::gid_table) return Errno{EINVAL};
    if (device->gids[attributes.grh.sgid_index].gid == Gid{}) return Errno{ENODATA};
  } else if (device->link_layer == control::link_layer_ethernet) {
    return Errno{EINVAL};  // RoCE has no other address than a GID
  }
  auto ah = std::make_unique<Ah>();
  ah->verbs.context = pd->context;
  ah->verbs.pd = pd;
  UdOperand& route = ah->route;
  route.dlid = attributes.dlid;
  route.sl = attributes.sl;
  route.route_flags = attributes.is_global ? route_global : 0;
  route.sgid_index = attributes.grh.sgid_index;
  route.hop_limit = attributes.grh.hop_limit;
  route.traffic_class = attributes.grh.traffic_class;
  const auto attachment = Context::of(pd->context).usable();
  if (attributes.is_global && attachment && (*attachment)->service_minor() >= control::minor_of_flow_labels)
    set_flow_label(route, attributes.grh.flow_label);
  std::memcpy(route.dgid, attributes.grh.dgid.raw, sizeof(route.dgid));
  Pd::of(pd).users.fetch_add(1, std::memory_order_relaxed);
  return &ah.release()->verbs;
}

struct GrhAddresses {
  Gid source, destination;
  std::uint32_t flow_label = 0;
  std::uint8_t traffic_class = 0;
};

Gid ipv4_mapped(const std::uint8_t* address) {
  Gid gid{};
  gid[10] = gid[11] = 0xff;
  std::memcpy(gid.data() + 12, address, 4);
  return gid;
}

// The 40 bytes before a datagram: a GRH (IBA 8.3), an IPv6 header, which has the same layout, or, for RoCE v2 over IPv4,
// an IPv4 header in the last 20 of them (IBA annex A17.4.5.2).
Result<GrhAddresses> parse(const ibv_grh& grh) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&grh);
  if (bytes[0] >> 4 == 6) {
    const std::uint32_t first = ntohl(grh.version_tclass_flow);
    GrhAddresses found{};
    std::memcpy(found.source.data(), grh.sgid.raw, found.source.size());
    std::memcpy(found.destination.data(), grh.dgid.raw, found.destination.size());
    found.flow_label = first & 0xfffff;
    found.traffic_class = static_cast<std::uint8_t>(first >> 20);
    return found;
  }
  const std::uint8_t* ip = bytes + 20;
  if (ip[0] != 0x45) return Errno{EBADMSG};
  std::uint32_t sum = 0;
  for (int i = 0; i < 20; i += 2) sum += static_cast<std::uint32_t>(ip[i] << 8 | ip[i + 1]);
  sum = (sum & 0xffff) + (sum >> 16);
  if (((sum & 0xffff) + (sum >> 16)) != 0xffff) return Errno{EBADMSG};
  return GrhAddresses{ipv4_mapped(ip + 12), ipv4_mapped(ip + 16), 0, ip[1]};
}

Status init_ah_from_wc(ibv_context* context, std::uint8_t port, const ibv_wc& wc, const ibv_grh* grh, ibv_ah_attr& to) {
  if (port != only_port) return Errno{EINVAL};
  to = {};
  to.dlid = wc.slid;
  to.sl = wc.sl;
  to.src_path_bits = wc.dlid_path_bits;
  to.port_num = port;
  if ((wc.wc_flags & IBV_WC_GRH) == 0) return ok();
  if (grh == nullptr) return Errno{EINVAL};
  auto addresses = parse(*grh);
  if (!addresses) return addresses.error();
  auto device = Context::of(context).device();
  if (!device) return device.error();
  // RoCE v1 and v2 have entries with the same GID: the kind of header that came decides.
  const bool over_udp = reinterpret_cast<const std::uint8_t*>(grh)[0] >> 4 != 6 || grh->next_hdr == IPPROTO_UDP;
  const bool ethernet = device->link_layer == control::link_layer_ethernet;
  // A datagram to a multicast group names no GID of ours; it is answered from the first to which its sender's can answer.
  const bool to_group = is_multicast(addresses->destination), from_ipv4 = is_ipv4_mapped(addresses->source);
  int index = -1;
  for (std::uint32_t i = 0; i < limits::gid_table && index < 0; ++i) {
    const Gid& mine = device->gids[i].gid;
    const bool fits = to_group ? mine != Gid{} && is_ipv4_mapped(mine) == from_ipv4 : mine == addresses->destination;
    if (fits && (!ethernet || (device->gids[i].type == IBV_GID_TYPE_ROCE_V2) == over_udp)) index = static_cast<int>(i);
  }
  if (index < 0) return Errno{ENOENT};
  to.is_global = 1;
  std::memcpy(to.grh.dgid.raw, addresses->source.data(), addresses->source.size());
  to.grh.sgid_index = static_cast<std::uint8_t>(index);
  to.grh.flow_label = addresses->flow_label;
  to.grh.traffic_class = addresses->traffic_class;
  to.grh.hop_limit = 0xff;
  return ok();
}

}  // namespace
}  // namespace vrdma::guest

using namespace vrdma;
using namespace vrdma::guest;

VRDMA_EXPORT ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attributes) {
  return as_ptr([&] { return create_ah(pd, *attributes); });
}

VRDMA_EXPORT int ibv_init_ah_from_wc(ibv_context* context, std::uint8_t port, ibv_wc* wc, ibv_grh* grh,
                                     ibv_ah_attr* attributes) {
  return as_minus_one([&] { return init_ah_from_wc(context, port, *wc, grh, *attributes); });
}

VRDMA_EXPORT ibv_ah* ibv_create_ah_from_wc(ibv_pd* pd, ibv_wc* wc, ibv_grh* grh, std::uint8_t port) {
  return as_ptr([&]() -> Result<ibv_ah*> {
    ibv_ah_attr attributes;
    Status initialised = init_ah_from_wc(pd->context, port, *wc, grh, attributes);
    if (!initialised) return initialised.error();
    return create_ah(pd, attributes);
  });
}

VRDMA_EXPORT int ibv_destroy_ah(ibv_ah* verbs) {
  Pd::of(verbs->pd).users.fetch_sub(1, std::memory_order_relaxed);
  delete &Ah::of(verbs);
  return 0;
}
