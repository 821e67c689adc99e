// What librdmacm asks of an identifier: its addresses, its path, what its queue pair is to be given.
#include <endian.h>
#include <infiniband/verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_cm.h>

#include "guest_lib/cm/command.hpp"
#include "guest_lib/cm/place.hpp"
#include "guest_lib/namesakes.hpp"

namespace vrdma::guest::cm {

using control::CmQueryReply;
using control::Request;

namespace {

constexpr std::uint32_t vrdma_index = 0;  // as ibv_get_device_index() says
constexpr std::uint8_t hop_limit = 64;

// What is known of an identifier, and the GUID of its device: 0 where it has none yet.
struct Known : CmQueryReply {
  std::uint64_t node_guid = 0;
};

Result<Known> ask(const Command& command, std::uint32_t id) {
  const auto answer = command.attachment.call<Request::cm_query>(command.id(id));
  if (!answer) return answer.error();
  Known known{*answer};
  if (known.has_device == 0) return known;
  const auto device = command.attachment.device();
  if (!device) return device.error();
  known.node_guid = device->node_guid;
  return known;
}

// As the address that it is, if it is one of AF_IB.
std::uint16_t put_gid(sockaddr_storage& out, const std::array<std::uint8_t, 16>& gid, std::uint16_t pkey, const control::CmAddress& address) {
  const bool is_ib = address.family == AF_IB;
  return static_cast<std::uint16_t>(put_address(out, is_ib ? address : control::CmAddress{AF_IB, 0, pkey, gid}));
}

// IBA 15.2.5.16.
struct PathRecord {
  std::uint64_t service;
  std::array<std::uint8_t, 16> dgid, sgid;
  std::uint16_t dlid, slid;
  std::uint32_t flow_and_hops;
  std::uint8_t traffic_class, reversible_and_paths;
  std::uint16_t pkey, qos_and_sl;
  std::uint8_t mtu, rate, lifetime, preference;
  std::uint8_t reserved[6];
};
static_assert(sizeof(PathRecord) == sizeof(ib_path_rec_data::path_rec));

PathRecord path_record(const CmQueryReply& known) {
  constexpr std::uint8_t exactly = 2 << 6, reversible = 0x80;
  PathRecord record{};
  record.dgid = known.dgid;
  record.sgid = known.sgid;
  record.dlid = htobe16(known.dlid);
  record.slid = htobe16(known.slid);
  record.flow_and_hops = htobe32(hop_limit);
  record.traffic_class = known.traffic_class;
  record.reversible_and_paths = reversible | 1;
  record.pkey = htobe16(known.pkey);
  record.mtu = exactly | known.mtu;
  record.rate = exactly | IBV_RATE_100_GBPS;
  record.lifetime = exactly | known.lifetime;
  return record;
}

Status answer_path(const Command& command, std::uint64_t response, const Known& known) {
  struct Paths {  // rdma_ucm_query_path_resp of one
    std::uint32_t count, reserved;
    ib_path_rec_data path;
  } paths{};
  static_assert(offsetof(Paths, path) == sizeof(rdma_ucm_query_path_resp));
  paths.count = known.has_path;
  paths.path.flags = IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL;
  const PathRecord record = path_record(known);
  std::memcpy(paths.path.path_rec, &record, sizeof(record));
  return command.answer(response, paths, offsetof(Paths, path));
}

}  // namespace

Status query_route(const Command& command) {
  const auto body = command.body<rdma_ucm_query>(offsetof(rdma_ucm_query, option));
  if (!body) return Errno{EINVAL};
  const auto known = ask(command, body->id);
  if (!known) return known.error();
  rdma_ucm_query_route_resp route{};
  route.node_guid = known->node_guid;
  route.port_num = known->has_device;
  route.ibdev_index = vrdma_index;
  sockaddr_storage address;
  put_address(address, known->source);
  std::memcpy(&route.src_addr, &address, sizeof(route.src_addr));
  put_address(address, known->destination);
  std::memcpy(&route.dst_addr, &address, sizeof(route.dst_addr));
  route.num_paths = known->has_path;
  ib_user_path_rec& path = route.ib_route[0];
  std::copy(known->sgid.begin(), known->sgid.end(), path.sgid);
  std::copy(known->dgid.begin(), known->dgid.end(), path.dgid);
  path.slid = htobe16(known->slid);
  path.dlid = htobe16(known->dlid);
  path.pkey = htobe16(known->pkey);
  path.reversible = path.numb_path = known->has_path;
  path.mtu_selector = path.rate_selector = path.packet_life_time_selector = 2;  // exactly
  path.mtu = known->mtu;
  path.rate = IBV_RATE_100_GBPS;
  path.packet_life_time = known->lifetime;
  path.hop_limit = hop_limit;
  path.traffic_class = known->traffic_class;
  return command.answer(body->response, route, offsetof(rdma_ucm_query_route_resp, ibdev_index));
}

Status query(const Command& command) {
  const auto body = command.body<rdma_ucm_query>();
  if (!body) return Errno{EINVAL};
  const auto known = ask(command, body->id);
  if (!known) return known.error();
  if (body->option == RDMA_USER_CM_QUERY_PATH) return answer_path(command, body->response, *known);
  rdma_ucm_query_addr_resp addresses{};
  addresses.node_guid = known->node_guid;
  addresses.port_num = known->has_device;
  addresses.pkey = htobe16(known->pkey);
  addresses.ibdev_index = vrdma_index;
  sockaddr_storage source, destination;
  static_assert(sizeof(addresses.src_addr) == sizeof(source));
  switch (body->option) {
    case RDMA_USER_CM_QUERY_ADDR:
      addresses.src_size = static_cast<std::uint16_t>(put_address(source, known->source));
      addresses.dst_size = static_cast<std::uint16_t>(put_address(destination, known->destination));
      break;
    case RDMA_USER_CM_QUERY_GID:
      addresses.src_size = put_gid(source, known->sgid, known->pkey, known->source);
      addresses.dst_size = put_gid(destination, known->dgid, known->pkey, known->destination);
      break;
    default: return Errno{ENOSYS};
  }
  std::memcpy(&addresses.src_addr, &source, sizeof(source));
  std::memcpy(&addresses.dst_addr, &destination, sizeof(destination));
  return command.answer(body->response, addresses, offsetof(rdma_ucm_query_addr_resp, ibdev_index));
}

Status init_qp_attr(const Command& command) {
  const auto body = command.body<rdma_ucm_init_qp_attr>();
  if (!body || body->qp_state > IBV_QPS_ERR) return Errno{EINVAL};
  const auto known = command.attachment.call<Request::cm_attributes>({command.id(body->id), body->qp_state, 0});
  if (!known) return known.error();
  const QpAttributes& from = known->attributes;
  ib_uverbs_qp_attr to{};
  to.qp_attr_mask = known->mask;
  to.qp_state = from.state;
  to.qp_access_flags = from.access_flags;
  copy_address(from.path, to.ah_attr);
  copy_namesakes(from, to);
  return command.answer(body->response, to);
}

}  // namespace vrdma::guest::cm
