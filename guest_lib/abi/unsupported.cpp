// Verbs that a device may lack, answered as libibverbs answers for such a device: EOPNOTSUPP, never a success that did
// nothing. The fork functions belong here because they have nothing to do: the kernel pins no page of the application,
// so a child never takes one away (docs: ibv_is_fork_initialized, IBV_FORK_UNNEEDED).
#include <infiniband/verbs.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/abi/private_abi.hpp"
#include "guest_lib/synthetic_tree.hpp"

namespace {

template <class T>
T* no_object() {
  errno = EOPNOTSUPP;
  return nullptr;
}

int unsupported() { return errno = EOPNOTSUPP; }

constexpr std::uint16_t no_vlan = 0xffff;

bool is_ipv4_mapped(const std::uint8_t (&gid)[16]) {
  constexpr std::uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid, prefix, sizeof prefix) == 0;
}

// The MAC address inside a modified EUI-64 interface identifier (RFC 4291, appendix A); false when it holds none.
bool mac_of_interface_id(const std::uint8_t* id, std::uint8_t* mac) {
  if (id[3] != 0xff || id[4] != 0xfe) return false;
  const std::uint8_t out[6] = {static_cast<std::uint8_t>(id[0] ^ 2), id[1], id[2], id[5], id[6], id[7]};
  std::memcpy(mac, out, sizeof out);
  return true;
}

// The MAC address of the port that has this GID. A link-local GID carries it; an IPv4-mapped one is known only when it
// is among the device's own, next to the link-local GID of the same port.
bool mac_of_gid(const vrdma::SyntheticDevice& device, const std::uint8_t (&gid)[16], std::uint8_t* mac) {
  if (gid[0] == 0xfe && gid[1] == 0x80) return mac_of_interface_id(&gid[8], mac);
  if (!is_ipv4_mapped(gid)) return false;
  bool own = false;
  for (const auto& entry : device.gids)
    own |= entry.kind != vrdma::GidKind::empty && std::memcmp(entry.raw, gid, sizeof entry.raw) == 0;
  if (!own) return false;
  for (const auto& entry : device.gids)
    if (entry.kind != vrdma::GidKind::empty && entry.raw[0] == 0xfe && entry.raw[1] == 0x80)
      return mac_of_interface_id(&entry.raw[8], mac);
  return false;
}

}  // namespace

VRDMA_EXPORT int ibv_fork_init(void) { return 0; }
VRDMA_EXPORT ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }
VRDMA_EXPORT int ibv_dontfork_range(void*, std::size_t) { return 0; }
VRDMA_EXPORT int ibv_dofork_range(void*, std::size_t) { return 0; }

VRDMA_EXPORT ibv_context* ibv_import_device(int) { return no_object<ibv_context>(); }
VRDMA_EXPORT ibv_pd* ibv_import_pd(ibv_context*, std::uint32_t) { return no_object<ibv_pd>(); }
VRDMA_EXPORT ibv_mr* ibv_import_mr(ibv_pd*, std::uint32_t) { return no_object<ibv_mr>(); }
VRDMA_EXPORT ibv_dm* ibv_import_dm(ibv_context*, std::uint32_t) { return no_object<ibv_dm>(); }
// Nothing was ever imported, so there is nothing to let go of.
VRDMA_EXPORT void ibv_unimport_pd(ibv_pd*) {}
VRDMA_EXPORT void ibv_unimport_mr(ibv_mr*) {}
VRDMA_EXPORT void ibv_unimport_dm(ibv_dm*) {}

VRDMA_EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd*, std::uint64_t, std::size_t, std::uint64_t, int, int) {
  return no_object<ibv_mr>();
}

// librdmacm takes EOPNOTSUPP of these two as "no enhanced connection establishment" and goes on.
VRDMA_EXPORT int ibv_query_ece(ibv_qp*, ibv_ece*) { return unsupported(); }
VRDMA_EXPORT int ibv_set_ece(ibv_qp*, ibv_ece*) { return unsupported(); }

VRDMA_EXPORT int ibv_query_qp_data_in_order(ibv_qp*, ibv_wr_opcode, std::uint32_t) { return 0; }

VRDMA_EXPORT void ibv_register_driver(const char*, void*) {}

VRDMA_EXPORT int ibv_resolve_eth_l2_from_gid(ibv_context* context, ibv_ah_attr* attr, std::uint8_t* eth_mac,
                                             std::uint16_t* vid) {
  vrdma::SyntheticDevice device;
  if (!vrdma::find_synthetic_device(context->device->name, device) || !device.ethernet) return unsupported();
  const std::size_t source = attr->grh.sgid_index;
  if (attr->port_num != 1 || source >= std::size(device.gids) || device.gids[source].kind == vrdma::GidKind::empty)
    return errno = EINVAL;
  if (!mac_of_gid(device, attr->grh.dgid.raw, eth_mac)) return unsupported();
  *vid = no_vlan;
  return 0;
}
