#include "guest_lib/cm/commands.hpp"

#include <endian.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_cm.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>

#include "guest_lib/cancellation.hpp"
#include "guest_lib/cm/place.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest::cm {

using control::CmAddress;
using control::CmId;
using control::Request;

namespace {

// A command's body, as long as its program's version of the ABI has it; the rest is zeroes.
class Command {
 public:
  Command(const std::shared_ptr<File>& file_in, const std::byte* body, std::size_t bytes, std::size_t answer_bytes)
      : file(file_in), attachment(*file_in->attachment), body_(body), bytes_(bytes), answer_bytes_(answer_bytes) {}

  // least: of a body that the first version of the ABI has already.
  template <class Body>
  std::optional<Body> body(std::size_t least = sizeof(Body)) const {
    if (bytes_ < least) return std::nullopt;
    Body out{};
    std::memcpy(&out, body_, std::min(bytes_, sizeof(Body)));
    return out;
  }
  // As much of it as the program has room for. `least` of it, or ENOSPC.
  template <class Answer>
  Status answer(std::uint64_t to, const Answer& what, std::size_t least = sizeof(Answer)) const {
    if (answer_bytes_ < least) return Errno{ENOSPC};
    std::memcpy(reinterpret_cast<void*>(to), &what, std::min(answer_bytes_, sizeof(what)));
    return ok();
  }
  std::size_t answer_bytes() const { return answer_bytes_; }

  CmId id(std::uint32_t number) const { return {number, file->channel}; }
  template <Request R>
  Status call(const RequestBody<R>& body) const {
    const auto reply = attachment.call<R>(body);
    if (!reply) return reply.error();
    return ok();
  }

  const std::shared_ptr<File>& file;
  Attachment& attachment;

 private:
  const std::byte* body_;
  std::size_t bytes_, answer_bytes_;
};

control::CmParameters parameters_of(const rdma_ucm_conn_param& from) {
  control::CmParameters to{};
  to.qpn = from.qp_num;
  to.qkey = from.qkey;
  to.private_bytes = from.private_data_len;
  to.srq = from.srq;
  to.responder_resources = from.responder_resources;
  to.initiator_depth = from.initiator_depth;
  to.flow_control = from.flow_control;
  to.retry_count = from.retry_count;
  to.rnr_retry_count = from.rnr_retry_count;
  std::copy_n(from.private_data, from.private_data_len, to.private_data.begin());
  return to;
}

void put(ib_uverbs_ah_attr& to, const AddressVector& from) {
  std::memcpy(to.grh.dgid, from.dgid, sizeof(to.grh.dgid));
  to.grh.flow_label = from.flow_label;
  to.grh.sgid_index = from.sgid_index;
  to.grh.hop_limit = from.hop_limit;
  to.grh.traffic_class = from.traffic_class;
  to.dlid = from.dlid;
  to.sl = from.sl;
  to.src_path_bits = from.src_path_bits;
  to.static_rate = from.static_rate;
  to.is_global = from.is_global;
  to.port_num = from.port_num;
}

// --- identifiers ----------------------------------------------------------------------------------------------

Status create_id(const Command& command) {
  const auto body = command.body<rdma_ucm_create_id>();
  if (!body) return Errno{EINVAL};
  if (command.answer_bytes() < sizeof(rdma_ucm_create_id_resp)) return Errno{ENOSPC};
  const auto made = command.attachment.call<Request::cm_create_id>({command.file->channel, body->ps, body->qp_type, body->uid});
  if (!made) return made.error();
  Files& files = Files::instance();
  std::lock_guard lock(files.mutex);
  files.told[command.file->key(made->id)] = {command.file->key(), body->uid};
  return command.answer(body->response, rdma_ucm_create_id_resp{made->id});
}

// Of an identifier or a membership: how many of its events were read.
Status forget(const Command& command, std::uint64_t response, std::uint32_t handle, const Result<control::CmGone>& gone) {
  // What a service that is gone does not know any more has ended all the same.
  if (!gone && !command.attachment.liveness().gone()) return gone.error();
  if (gone && gone->last != 0) command.file->take_record();
  std::uint32_t events = 0;
  {
    Files& files = Files::instance();
    std::lock_guard lock(files.mutex);
    const auto found = files.told.find(command.file->key(handle));
    if (found == files.told.end() && !gone) return Errno{ENOENT};
    if (found != files.told.end()) events = found->second.events, files.told.erase(found);
  }
  return command.answer(response, rdma_ucm_destroy_id_resp{events});
}

Status destroy_id(const Command& command) {
  const auto body = command.body<rdma_ucm_destroy_id>();
  if (!body) return Errno{EINVAL};
  if (command.answer_bytes() < sizeof(rdma_ucm_destroy_id_resp)) return Errno{ENOSPC};
  return forget(command, body->response, body->id, command.attachment.call<Request::cm_destroy_id>(command.id(body->id)));
}

Status migrate_id(const Command& command) {
  const auto body = command.body<rdma_ucm_migrate_id>();
  if (!body) return Errno{EINVAL};
  const auto from = Files::instance().find(static_cast<int>(body->fd));
  if (!from || from->attachment != command.file->attachment) return Errno{EINVAL};
  const auto moved = command.attachment.call<Request::cm_migrate>({{body->id, from->channel}, command.file->channel, 0});
  if (!moved) return moved.error();
  if (moved->last != 0) from->take_record();
  std::uint32_t events = 0;
  {
    Files& files = Files::instance();
    std::lock_guard lock(files.mutex);
    Told& told = files.told[command.file->key(body->id)];
    told.channel = command.file->key();
    events = told.events;
  }
  return command.answer(body->response, rdma_ucm_migrate_resp{events});
}

// --- addresses ------------------------------------------------------------------------------------------------

Status bind_to(const Command& command, std::uint32_t id, const void* address) {
  const CmAddress wanted = address_of(static_cast<const sockaddr*>(address));
  if (wanted.family == 0) return Errno{EAFNOSUPPORT};
  if (const auto told = tell_place(command.attachment); !told) return told.error();
  return command.call<Request::cm_bind>({command.id(id), wanted});
}

Status bind_ip(const Command& command) {
  const auto body = command.body<rdma_ucm_bind_ip>(offsetof(rdma_ucm_bind_ip, id) + sizeof(std::uint32_t));
  return body ? bind_to(command, body->id, &body->addr) : Errno{EINVAL};
}

Status bind_any(const Command& command) {
  const auto body = command.body<rdma_ucm_bind>();
  return body ? bind_to(command, body->id, &body->addr) : Errno{EINVAL};
}

Status resolve(const Command& command, std::uint32_t id, const void* source, const void* destination, std::uint32_t timeout_ms) {
  control::CmResolveAddressRequest request{};
  request.id = command.id(id);
  request.destination = address_of(static_cast<const sockaddr*>(destination));
  if (request.destination.family == 0) return Errno{EAFNOSUPPORT};
  const auto* const from = static_cast<const sockaddr*>(source);
  request.source = address_of(from);
  if (from->sa_family != 0 && request.source.family == 0) return Errno{EAFNOSUPPORT};
  if (request.source.family == 0 || request.source.is_any()) {
    const CmAddress chosen = source_for(request.destination);
    if (chosen.family != 0) request.source = {chosen.family, request.source.port, chosen.scope, chosen.ip};
  }
  request.is_local = is_local(request.destination);
  request.timeout_ms = timeout_ms;
  if (const auto told = tell_place(command.attachment); !told) return told.error();
  return command.call<Request::cm_resolve_address>(request);
}

Status resolve_ip(const Command& command) {
  const auto body = command.body<rdma_ucm_resolve_ip>();
  return body ? resolve(command, body->id, &body->src_addr, &body->dst_addr, body->timeout_ms) : Errno{EINVAL};
}

Status resolve_addr(const Command& command) {
  const auto body = command.body<rdma_ucm_resolve_addr>();
  return body ? resolve(command, body->id, &body->src_addr, &body->dst_addr, body->timeout_ms) : Errno{EINVAL};
}

Status resolve_route(const Command& command) {
  const auto body = command.body<rdma_ucm_resolve_route>();
  return body ? command.call<Request::cm_resolve_route>(command.id(body->id)) : Errno{EINVAL};
}

Status listen(const Command& command) {
  const auto body = command.body<rdma_ucm_listen>();
  if (!body) return Errno{EINVAL};
  if (const auto told = tell_place(command.attachment); !told) return told.error();
  return command.call<Request::cm_listen>({command.id(body->id), static_cast<int>(body->backlog) > 0 ? body->backlog : 0, 0});
}

// --- queries --------------------------------------------------------------------------------------------------

constexpr std::uint32_t vrdma_index = 0;  // as ibv_get_device_index() says

Result<std::uint64_t> guid_where(const Command& command, bool has_device) {
  if (!has_device) return std::uint64_t{0};
  const auto device = command.attachment.device();
  if (!device) return device.error();
  return device->node_guid;
}

Status query_route(const Command& command) {
  const auto body = command.body<rdma_ucm_query>(offsetof(rdma_ucm_query, option));
  if (!body) return Errno{EINVAL};
  const auto known = command.attachment.call<Request::cm_query>(command.id(body->id));
  if (!known) return known.error();
  const auto guid = guid_where(command, known->has_device != 0);
  if (!guid) return guid.error();
  rdma_ucm_query_route_resp route{};
  route.node_guid = *guid;
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
  path.hop_limit = 64;
  return command.answer(body->response, route, offsetof(rdma_ucm_query_route_resp, ibdev_index));
}

// struct sockaddr_ib of the kernel's <rdma/ib.h>.
struct IbAddress {
  std::uint16_t family;
  std::uint16_t pkey;
  std::uint32_t flow;
  std::array<std::uint8_t, 16> gid;
  std::uint64_t service, service_mask, scope;
};
constexpr std::uint16_t family_ib = 27;

Status query(const Command& command) {
  const auto body = command.body<rdma_ucm_query>();
  if (!body) return Errno{EINVAL};
  const auto known = command.attachment.call<Request::cm_query>(command.id(body->id));
  if (!known) return known.error();
  const auto guid = guid_where(command, known->has_device != 0);
  if (!guid) return guid.error();
  if (body->option == RDMA_USER_CM_QUERY_PATH) {
    struct Paths {  // rdma_ucm_query_path_resp of one
      std::uint32_t count, reserved;
      ib_path_rec_data path;
    } paths{};
    static_assert(offsetof(Paths, path) == sizeof(rdma_ucm_query_path_resp));
    paths.count = known->has_path;
    paths.path.flags = IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL;
    struct Record {  // IBA 15.2.5.16
      std::uint64_t service;
      std::array<std::uint8_t, 16> dgid, sgid;
      std::uint16_t dlid, slid;
      std::uint32_t flow_and_hops;
      std::uint8_t traffic_class, reversible_and_paths;
      std::uint16_t pkey, qos_and_sl;
      std::uint8_t mtu, rate, lifetime, preference;
      std::uint8_t reserved[6];
    } record{};
    static_assert(sizeof(Record) == 64 && sizeof(Record) == sizeof(paths.path.path_rec));
    record.dgid = known->dgid;
    record.sgid = known->sgid;
    record.dlid = htobe16(known->dlid);
    record.slid = htobe16(known->slid);
    record.flow_and_hops = htobe32(64);
    record.reversible_and_paths = 0x80 | 1;
    record.pkey = htobe16(known->pkey);
    constexpr std::uint8_t exactly = 2 << 6;
    record.mtu = exactly | known->mtu;
    record.rate = exactly | IBV_RATE_100_GBPS;
    record.lifetime = exactly | known->lifetime;
    std::memcpy(paths.path.path_rec, &record, sizeof(record));
    return command.answer(body->response, paths, offsetof(Paths, path));
  }
  rdma_ucm_query_addr_resp addresses{};
  addresses.node_guid = *guid;
  addresses.port_num = known->has_device;
  addresses.pkey = htobe16(known->pkey);
  addresses.ibdev_index = vrdma_index;
  sockaddr_storage source, destination;
  if (body->option == RDMA_USER_CM_QUERY_ADDR) {
    addresses.src_size = static_cast<std::uint16_t>(put_address(source, known->source));
    addresses.dst_size = static_cast<std::uint16_t>(put_address(destination, known->destination));
  } else if (body->option == RDMA_USER_CM_QUERY_GID) {
    const std::uint16_t pkey = htobe16(known->pkey);
    const IbAddress from{family_ib, pkey, 0, known->sgid, 0, 0, 0}, to{family_ib, pkey, 0, known->dgid, 0, 0, 0};
    addresses.src_size = addresses.dst_size = sizeof(IbAddress);
    std::memset(&source, 0, sizeof(source));
    std::memset(&destination, 0, sizeof(destination));
    std::memcpy(&source, &from, sizeof(from));
    std::memcpy(&destination, &to, sizeof(to));
  } else {
    return Errno{ENOSYS};
  }
  static_assert(sizeof(addresses.src_addr) == sizeof(source));
  std::memcpy(&addresses.src_addr, &source, sizeof(source));
  std::memcpy(&addresses.dst_addr, &destination, sizeof(destination));
  return command.answer(body->response, addresses, offsetof(rdma_ucm_query_addr_resp, ibdev_index));
}

Status init_qp_attr(const Command& command) {
  const auto body = command.body<rdma_ucm_init_qp_attr>();
  if (!body) return Errno{EINVAL};
  if (body->qp_state > IBV_QPS_ERR) return Errno{EINVAL};
  const auto known = command.attachment.call<Request::cm_attributes>({command.id(body->id), body->qp_state, 0});
  if (!known) return known.error();
  const QpAttributes& from = known->attributes;
  ib_uverbs_qp_attr to{};
  to.qp_attr_mask = known->mask;
  to.qp_state = from.state;
  to.path_mtu = from.path_mtu;
  to.qkey = from.qkey;
  to.rq_psn = from.rq_psn;
  to.sq_psn = from.sq_psn;
  to.dest_qp_num = from.dest_qp_num;
  to.qp_access_flags = from.access_flags;
  put(to.ah_attr, from.path);
  to.pkey_index = from.pkey_index;
  to.max_rd_atomic = from.max_rd_atomic;
  to.max_dest_rd_atomic = from.max_dest_rd_atomic;
  to.min_rnr_timer = from.min_rnr_timer;
  to.port_num = from.port_num;
  to.timeout = from.timeout;
  to.retry_cnt = from.retry_cnt;
  to.rnr_retry = from.rnr_retry;
  return command.answer(body->response, to);
}

// --- connections ----------------------------------------------------------------------------------------------

Status connect(const Command& command) {
  const auto body = command.body<rdma_ucm_connect>(offsetof(rdma_ucm_connect, ece));
  if (!body || body->conn_param.valid == 0) return Errno{EINVAL};
  return command.call<Request::cm_connect>({command.id(body->id), parameters_of(body->conn_param)});
}

Status accept(const Command& command) {
  const auto body = command.body<rdma_ucm_accept>(offsetof(rdma_ucm_accept, ece));
  if (!body) return Errno{EINVAL};
  control::CmAcceptRequest request{command.id(body->id), body->uid, body->conn_param.valid, 0, {}};
  if (body->conn_param.valid != 0) request.parameters = parameters_of(body->conn_param);
  if (const Status accepted = command.call<Request::cm_accept>(request); !accepted) return accepted;
  if (body->conn_param.valid != 0) {
    Files& files = Files::instance();
    std::lock_guard lock(files.mutex);
    files.told[command.file->key(body->id)].uid = body->uid;
  }
  return ok();
}

Status reject(const Command& command) {
  const auto body = command.body<rdma_ucm_reject>();
  if (!body) return Errno{EINVAL};
  control::CmRejectRequest request{command.id(body->id), body->reason, body->private_data_len, {}};
  std::copy_n(body->private_data, body->private_data_len, request.private_data.begin());
  return command.call<Request::cm_reject>(request);
}

Status disconnect(const Command& command) {
  const auto body = command.body<rdma_ucm_disconnect>();
  return body ? command.call<Request::cm_disconnect>(command.id(body->id)) : Errno{EINVAL};
}

Status notify(const Command& command) {
  const auto body = command.body<rdma_ucm_notify>();
  if (!body || body->event != IBV_EVENT_COMM_EST) return Errno{EINVAL};
  return command.call<Request::cm_is_established>(command.id(body->id));
}

Status set_option(const Command& command) {
  const auto body = command.body<rdma_ucm_set_option>();
  if (!body || body->optval == 0) return Errno{EINVAL};
  const auto value = [&](auto example) {
    decltype(example) out{};
    std::memcpy(&out, reinterpret_cast<const void*>(body->optval), sizeof(out));
    return static_cast<std::uint32_t>(out);
  };
  const CmId id = command.id(body->id);
  if (body->level == RDMA_OPTION_IB && body->optname == RDMA_OPTION_IB_PATH) return command.call<Request::cm_resolve_route>(id);
  if (body->level != RDMA_OPTION_ID) return Errno{ENOSYS};
  const bool is_byte = body->optname == RDMA_OPTION_ID_TOS || body->optname == RDMA_OPTION_ID_ACK_TIMEOUT;
  if (body->optlen != (is_byte ? sizeof(std::uint8_t) : sizeof(std::int32_t))) return Errno{EINVAL};
  switch (body->optname) {
    case RDMA_OPTION_ID_TOS: return ok();  // there are no classes of service
    case RDMA_OPTION_ID_REUSEADDR: return command.call<Request::cm_option>({id, control::cm_option_reuse_address, value(std::int32_t{}) != 0});
    case RDMA_OPTION_ID_AFONLY: return command.call<Request::cm_option>({id, control::cm_option_only_ipv6, value(std::int32_t{}) != 0});
    case RDMA_OPTION_ID_ACK_TIMEOUT: return command.call<Request::cm_option>({id, control::cm_option_ack_timeout, value(std::uint8_t{})});
    default: return Errno{ENOSYS};
  }
}

// --- multicast groups -----------------------------------------------------------------------------------------

Status join_to(const Command& command, std::uint64_t response, std::uint32_t id, std::uint64_t uid, const void* address, std::uint32_t flags) {
  if (command.answer_bytes() < sizeof(rdma_ucm_create_id_resp)) return Errno{ENOSPC};
  const CmAddress group = address_of(static_cast<const sockaddr*>(address));
  const auto joined = command.attachment.call<Request::cm_join>({command.id(id), uid, group, flags, 0});
  if (!joined) return joined.error();
  Files& files = Files::instance();
  std::lock_guard lock(files.mutex);
  files.told[command.file->key(joined->id)] = {command.file->key(), uid, 0, command.file->key(id)};
  return command.answer(response, rdma_ucm_create_id_resp{joined->id});
}

Status join_ip_mcast(const Command& command) {
  const auto body = command.body<rdma_ucm_join_ip_mcast>(offsetof(rdma_ucm_join_ip_mcast, id) + sizeof(std::uint32_t));
  return body ? join_to(command, body->response, body->id, body->uid, &body->addr, RDMA_MC_JOIN_FLAG_FULLMEMBER) : Errno{EINVAL};
}

Status join_mcast(const Command& command) {
  const auto body = command.body<rdma_ucm_join_mcast>();
  return body ? join_to(command, body->response, body->id, body->uid, &body->addr, body->join_flags) : Errno{EINVAL};
}

Status leave_mcast(const Command& command) {
  const auto body = command.body<rdma_ucm_destroy_id>();
  if (!body) return Errno{EINVAL};
  if (command.answer_bytes() < sizeof(rdma_ucm_destroy_id_resp)) return Errno{ENOSPC};
  return forget(command, body->response, body->id, command.attachment.call<Request::cm_leave>(command.id(body->id)));
}

// --- events ---------------------------------------------------------------------------------------------------

rdma_ucm_event_resp event_of(const control::CmEvent& from) {
  rdma_ucm_event_resp to{};
  to.uid = from.uid;
  to.id = from.id;
  to.event = from.event;
  to.status = static_cast<std::uint32_t>(from.status);
  const control::CmParameters& parameters = from.parameters;
  if (from.is_datagram != 0) {
    rdma_ucm_ud_param& ud = to.param.ud;
    ud.qp_num = parameters.qpn;
    ud.qkey = parameters.qkey;
    put(ud.ah_attr, from.address);
    ud.private_data_len = parameters.private_bytes;
    std::copy_n(parameters.private_data.begin(), parameters.private_bytes, ud.private_data);
  } else {
    rdma_ucm_conn_param& connection = to.param.conn;
    connection.qp_num = parameters.qpn;
    connection.qkey = parameters.qkey;
    connection.private_data_len = parameters.private_bytes;
    std::copy_n(parameters.private_data.begin(), parameters.private_bytes, connection.private_data);
    connection.srq = parameters.srq;
    connection.responder_resources = parameters.responder_resources;
    connection.initiator_depth = parameters.initiator_depth;
    connection.flow_control = parameters.flow_control;
    connection.retry_count = parameters.retry_count;
    connection.rnr_retry_count = parameters.rnr_retry_count;
  }
  return to;
}

// The service is gone, and the devices with it. nullopt: every identifier of the channel has been told.
std::optional<control::CmEvent> next_removal(const File& file) {
  Files& files = Files::instance();
  std::lock_guard lock(files.mutex);
  for (auto& [key, told] : files.told) {
    if (told.channel != file.key() || told.member != 0 || told.removal || told.uid == 0) continue;
    told.removal = true;
    ++told.events;
    control::CmEvent event{};
    event.uid = told.uid;
    event.id = static_cast<std::uint32_t>(key);
    event.event = control::cm_device_removal;
    return event;
  }
  return std::nullopt;
}

// nullopt: none is there.
Result<std::optional<control::CmEvent>> take_event(const File& file) {
  const CancellationOff cancellation_off;
  Attachment& attachment = *file.attachment;
  if (attachment.liveness().inherited()) return Errno{EIO};
  const auto taken = attachment.call<Request::cm_take_event>({file.channel, 0});
  if (!taken) {
    if (!attachment.liveness().gone()) return taken.error();
    const auto removal = next_removal(file);
    if (!removal) return Errno{EIO};
    return removal;
  }
  if (taken->last != 0) file.take_record();
  if (taken->found == 0) return std::optional<control::CmEvent>{};
  Files& files = Files::instance();
  std::lock_guard lock(files.mutex);
  Told& told = files.told[file.key(taken->counted_at)];
  ++told.events;
  if (told.member != 0) ++files.told[told.member].events;
  if (taken->event.event == control::cm_connect_request) files.told[file.key(taken->event.id)] = {file.key(), 0};
  return std::optional(taken->event);
}

// Another thread has closed the channel. Who waits in the kernel keeps its file, where nothing will ever happen; rping, whose thread is
// still there when its channel goes, counts on that.
long wait_for_ever(bool blocks) {
  while (blocks) ::poll(nullptr, 0, -1);
  errno = EBADF;
  return -1;
}

// The only command that waits, and a cancellation point while it does.
long get_event(const std::shared_ptr<File>& file, const std::byte* body, std::size_t bytes, std::size_t answer_bytes, std::size_t whole) {
  const Command command(file, body, bytes, answer_bytes);
  const auto request = command.body<rdma_ucm_get_event>();
  constexpr std::size_t least = offsetof(rdma_ucm_event_resp, reserved);
  if (!request || answer_bytes < least) {
    errno = request ? ENOSPC : EINVAL;
    return -1;
  }
  for (;;) {
    const bool blocks = (::fcntl(file->fd, F_GETFL) & O_NONBLOCK) == 0;
    pollfd readable{file->fd, POLLIN, 0};
    const int ready = ::poll(&readable, 1, blocks ? -1 : 0);
    if (file->closed.load(std::memory_order_relaxed)) return wait_for_ever(blocks);
    if (ready < 0) return -1;
    if (ready == 0) {
      errno = EAGAIN;
      return -1;
    }
    std::optional<control::CmEvent> event;
    const int error = as_int([&]() -> Status {
      auto taken = take_event(*file);
      if (!taken) return taken.error();
      event = *taken;
      return event ? command.answer(request->response, event_of(*event), least) : ok();
    });
    if (file->closed.load(std::memory_order_relaxed)) return wait_for_ever(blocks);
    if (error != 0) return -1;
    if (event) return static_cast<long>(whole);
  }
}

Status carry_out(std::uint32_t which, const Command& command) {
  switch (which) {
    case RDMA_USER_CM_CMD_CREATE_ID: return create_id(command);
    case RDMA_USER_CM_CMD_DESTROY_ID: return destroy_id(command);
    case RDMA_USER_CM_CMD_BIND_IP: return bind_ip(command);
    case RDMA_USER_CM_CMD_RESOLVE_IP: return resolve_ip(command);
    case RDMA_USER_CM_CMD_RESOLVE_ROUTE: return resolve_route(command);
    case RDMA_USER_CM_CMD_QUERY_ROUTE: return query_route(command);
    case RDMA_USER_CM_CMD_CONNECT: return connect(command);
    case RDMA_USER_CM_CMD_LISTEN: return listen(command);
    case RDMA_USER_CM_CMD_ACCEPT: return accept(command);
    case RDMA_USER_CM_CMD_REJECT: return reject(command);
    case RDMA_USER_CM_CMD_DISCONNECT: return disconnect(command);
    case RDMA_USER_CM_CMD_INIT_QP_ATTR: return init_qp_attr(command);
    case RDMA_USER_CM_CMD_SET_OPTION: return set_option(command);
    case RDMA_USER_CM_CMD_NOTIFY: return notify(command);
    case RDMA_USER_CM_CMD_JOIN_IP_MCAST: return join_ip_mcast(command);
    case RDMA_USER_CM_CMD_LEAVE_MCAST: return leave_mcast(command);
    case RDMA_USER_CM_CMD_MIGRATE_ID: return migrate_id(command);
    case RDMA_USER_CM_CMD_QUERY: return query(command);
    case RDMA_USER_CM_CMD_BIND: return bind_any(command);
    case RDMA_USER_CM_CMD_RESOLVE_ADDR: return resolve_addr(command);
    case RDMA_USER_CM_CMD_JOIN_MCAST: return join_mcast(command);
    default: return Errno{ENOSYS};  // GET_OPTION too, as in the kernel
  }
}

}  // namespace

long write_command(const std::shared_ptr<File>& file, const void* command, std::size_t bytes) {
  rdma_ucm_cmd_hdr head;
  if (bytes < sizeof(head)) {
    errno = EINVAL;
    return -1;
  }
  std::memcpy(&head, command, sizeof(head));
  if (head.in + sizeof(head) > bytes) {
    errno = EINVAL;
    return -1;
  }
  const auto* const body = static_cast<const std::byte*>(command) + sizeof(head);
  if (head.cmd == RDMA_USER_CM_CMD_GET_EVENT) return get_event(file, body, head.in, head.out, bytes);
  const int error = as_int([&] { return carry_out(head.cmd, Command(file, body, head.in, head.out)); });
  return error == 0 ? static_cast<long>(bytes) : -1;
}

}  // namespace vrdma::guest::cm
