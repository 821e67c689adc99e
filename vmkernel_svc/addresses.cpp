#include "vmkernel_svc/addresses.hpp"

#include <endian.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "vrdma/limits.hpp"

namespace vrdma::svc {

namespace {

using namespace control;

std::uint64_t mix(std::uint64_t hash, std::string_view text) {  // FNV-1a
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001b3u;
  return hash;
}

std::uint64_t host_identity() {
  static const std::uint64_t identity = [] {
    std::string id = "vrdma";
    for (const char* path : {"/etc/machine-id", "/proc/sys/kernel/random/boot_id"}) {
      std::ifstream file(path);
      std::string line;
      if (file >> line) {
        id += line;
        break;
      }
    }
    return mix(0xcbf29ce484222325u, id);
  }();
  return identity;
}

// EUI-64 in host order, locally administered.
std::uint64_t eui64(std::uint64_t hash) {
  return (hash & 0x00ffff0000ffffffu) | 0x0200'00ff'fe00'0000u;
}

Gid link_local(std::uint64_t guid, bool from_mac) {
  Gid gid{};
  gid[0] = 0xfe, gid[1] = 0x80;
  // RoCE's default GID carries the EUI-64 with the universal/local bit inverted; InfiniBand's the port GUID as it is.
  const std::uint64_t big = htobe64(from_mac ? guid ^ 0x0200'0000'0000'0000u : guid);
  std::memcpy(gid.data() + 8, &big, 8);
  return gid;
}

Gid ipv4_mapped(std::uint32_t address) {
  Gid gid{};
  gid[10] = gid[11] = 0xff;
  const std::uint32_t big = htobe32(address);
  std::memcpy(gid.data() + 12, &big, 4);
  return gid;
}

}  // namespace

std::array<GidEntry, 16> gids_of(std::uint64_t guid, std::uint16_t lid, std::uint32_t link_layer) {
  constexpr std::uint32_t type_ib = 0, type_v1 = 1, type_v2 = 2;
  std::array<GidEntry, 16> gids{};
  if (link_layer == link_layer_infiniband) {
    gids[0] = {link_local(guid, false), type_ib, 0};
    return gids;
  }
  // The usual order of a RoCE port: link-local v1, v2, then the IPv4 address v1, v2. The address is from the benchmarking
  // network 198.18.0.0/15 (RFC 2544): a virtual HCA has no interface of its own, and this one is nobody else's.
  const Gid local = link_local(guid, true), v4 = ipv4_mapped(0xc6120000u | lid);
  gids[0] = {local, type_v1, 0};
  gids[1] = {local, type_v2, 0};
  gids[2] = {v4, type_v1, 0};
  gids[3] = {v4, type_v2, 0};
  return gids;
}

std::uint64_t system_image_guid() { return eui64(host_identity()); }
std::uint64_t subnet_manager_guid() { return eui64(mix(host_identity(), "subnet manager")) | subnet_manager_lid; }

void assign_addresses(Guest& guest) {
  const std::uint64_t hash = mix(host_identity(), guest.name);
  guest.guid = (eui64(hash ^ (static_cast<std::uint64_t>(guest.id.value) * 0x9e3779b1u & 0xffffff)) & ~std::uint64_t{0xffff}) | guest.lid;
  guest.gids = gids_of(guest.guid, guest.lid, guest.link_layer);
}

std::uint16_t multicast_lid(const Gid& group) {
  constexpr std::uint32_t count = 0x3ffe;
  std::uint32_t hash = 0;
  for (const std::uint8_t byte : group) hash = hash * 31 + byte;
  return static_cast<std::uint16_t>(first_multicast_lid | hash % count);
}

DeviceReply device_reply(const Guest& guest, const Config& config, std::uint32_t generation) {
  DeviceReply reply{};
  reply.node_guid = htobe64(guest.guid);
  reply.sys_image_guid = htobe64(system_image_guid());
  reply.generation = generation;
  reply.link_layer = guest.link_layer;
  reply.lid = guest.link_layer == link_layer_infiniband ? guest.lid : 0;
  reply.sm_lid = guest.link_layer == link_layer_infiniband ? subnet_manager_lid : 0;
  reply.port_state = 4;  // IBV_PORT_ACTIVE
  reply.max_mtu = 5;
  reply.active_mtu = config.mtu();
  reply.qp_max = limits::qp_max;
  reply.cq_max = limits::cq_max;
  reply.srq_max = limits::srq_max;
  reply.mr_max = limits::mr_max;
  reply.pd_max = limits::pd_max;
  reply.qp_wr_max = limits::qp_wr_max;
  reply.srq_wr_max = limits::srq_wr_max;
  reply.cqe_max = limits::cqe_max;
  reply.sge_max = limits::sge_max;
  reply.inline_max = limits::inline_max;
  reply.rd_atomic_max = limits::rd_atomic_max;
  reply.comp_vectors = limits::comp_vectors;
  reply.mr_bytes_max = limits::mr_bytes_max;
  std::transform(guest.tenant->pkeys.begin(), guest.tenant->pkeys.end(), std::begin(reply.pkeys), [](std::uint16_t pkey) { return htobe16(pkey); });
  std::copy(guest.gids.begin(), guest.gids.end(), std::begin(reply.gids));
  std::strncpy(reply.fw_version, VRDMA_VERSION, sizeof(reply.fw_version) - 1);
  return reply;
}

}  // namespace vrdma::svc
