// Addresses of the family AF_IB: a GID, a P_Key and a service ID. Ports on Ethernet have none, as in the kernel.
#include <endian.h>
#include <rdma/rdma_user_cm.h>

#include <algorithm>
#include <cstring>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/fabric.hpp"

namespace vrdma::svc {

using namespace control;

namespace {

constexpr std::ptrdiff_t prefix_bytes = 8;

// Whose ports an identifier's may be: those of its own space; where that is RDMA_PS_IB, TCP's and UDP's, too. 0: it may not.
std::uint16_t port_space_for(const CmIdentifier& one, std::uint16_t wanted) {
  if (one.port_space == RDMA_PS_IPOIB) return 0;
  if (wanted == 0 || wanted == one.port_space) return static_cast<std::uint16_t>(one.port_space);
  return one.port_space == RDMA_PS_IB && (wanted == RDMA_PS_TCP || wanted == RDMA_PS_UDP) ? wanted : 0;
}

}  // namespace

bool ConnectionManager::is_address_of(const Guest& guest, const CmAddress& address) {
  if (address.family == AF_IB) return guest.link_layer == link_layer_infiniband && guest.gids[0].gid == address.ip;
  // It ends in the LID: it is made up only for who may have it.
  return (address.ip[2] << 8 | address.ip[3]) == guest.lid && mapped_address(guest).same_host(address);
}

std::uint16_t ConnectionManager::pkey_of(const Guest& guest, std::uint16_t wanted) {
  const auto& table = guest.tenant->pkeys;
  const auto found = std::find_if(table.begin(), table.end(), [&](std::uint16_t own) { return hosts::partition_of(own) == hosts::partition_of(wanted); });
  return found == table.end() || hosts::partition_of(wanted) == 0 ? 0 : *found;
}

// May it be bound to that? Its port space is chosen.
Status ConnectionManager::take_gid(const Guest& guest, const CmIdentifier& one, CmAddress& address) {
  if (!address.is_any() && !is_address_of(guest, address)) return Errno{ENODEV};
  const std::uint16_t port_space = port_space_for(one, address.port_space());
  if (port_space == 0) return Errno{EPROTONOSUPPORT};
  address.scope = CmAddress::ib_scope(address.pkey(), port_space);
  return ok();
}

// It is bound. Its port, unless that is known, is one that has the P_Key, and a GID of the same subnet.
Status ConnectionManager::call_from_gid(const Guest& guest, CmIdentifier& one, const CmAddress& destination) {
  if (guest.link_layer != link_layer_infiniband) return Errno{ENODEV};
  const Gid& own = guest.gids[0].gid;
  std::uint16_t pkey = one.source.pkey() != 0 ? one.source.pkey() : destination.pkey();
  if (!one.has_device && destination.is_any()) pkey = guest.tenant->pkeys[0];
  else if (!one.has_device && !std::equal(own.begin(), own.begin() + prefix_bytes, destination.ip.begin())) return Errno{ENODEV};
  const std::uint16_t in_table = pkey_of(guest, pkey);
  if (in_table == 0) return Errno{ENODEV};
  one.pkey = in_table;
  one.source.ip = own;
  one.source.scope = CmAddress::ib_scope(pkey, one.source.port_space());
  return ok();
}

// What a GID says of the port that has it.
CmPort ConnectionManager::port_at(const CmAddress& address, const Guest& caller) const {
  std::uint64_t guid;
  std::memcpy(&guid, address.ip.data() + prefix_bytes, sizeof(guid));
  return {be64toh(guid), link_layer_infiniband, lid_of(address.ip.data()), port_of(caller).mtu, 0};
}

}  // namespace vrdma::svc
