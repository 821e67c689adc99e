#include "guest_lib/cm/commands.hpp"

#include <infiniband/verbs.h>
#include <rdma/rdma_user_cm.h>

#include "guest_lib/cm/command.hpp"
#include "guest_lib/cm/place.hpp"

namespace vrdma::guest::cm {

using control::CmAddress;
using control::CmId;
using control::Request;

namespace {

control::CmParameters parameters_of(const rdma_ucm_conn_param& from) {
  control::CmParameters to{};
  to.qpn = from.qp_num;
  to.private_bytes = from.private_data_len;
  copy_parameters(from, to);
  std::copy_n(from.private_data, from.private_data_len, to.private_data.begin());
  return to;
}

// --- identifiers ----------------------------------------------------------------------------------------------

Status create_id(const Command& command) {
  const auto body = command.body<rdma_ucm_create_id>();
  if (!body) return Errno{EINVAL};
  if (command.answer_bytes() < sizeof(rdma_ucm_create_id_resp)) return Errno{ENOSPC};
  const auto made = command.attachment.call<Request::cm_create_id>({command.file->channel, body->ps, body->qp_type, body->uid});
  if (!made) return made.error();
  Account& account = Account::instance();
  std::lock_guard lock(account.mutex);
  account.told[command.file->key(made->id)] = {command.file->key(), body->uid};
  return command.answer(body->response, rdma_ucm_create_id_resp{made->id});
}

// An identifier or a membership that goes: how many of its events were read.
template <Request R>
Status forget(const Command& command) {
  const auto body = command.body<rdma_ucm_destroy_id>();  // of a membership, too
  if (!body) return Errno{EINVAL};
  if (command.answer_bytes() < sizeof(rdma_ucm_destroy_id_resp)) return Errno{ENOSPC};
  std::uint32_t events = 0;
  bool last = false;
  {
    Account& account = Account::instance();
    std::lock_guard lock(account.mutex);
    const auto gone = command.attachment.call<R>(command.id(body->id));
    // What a service that is gone does not know any more has ended all the same.
    if (!gone && !command.attachment.liveness().gone()) return gone.error();
    last = gone && gone->last != 0;
    const auto found = account.told.find(command.file->key(body->id));
    if (found == account.told.end() && !gone) return Errno{ENOENT};
    if (found != account.told.end()) events = found->second.events, account.told.erase(found);
  }
  if (last) command.file->take_record();
  return command.answer(body->response, rdma_ucm_destroy_id_resp{events});
}

Status migrate_id(const Command& command) {
  const auto body = command.body<rdma_ucm_migrate_id>();
  if (!body) return Errno{EINVAL};
  const auto from = find_file(static_cast<int>(body->fd));
  if (!from || from->attachment != command.file->attachment) return Errno{EINVAL};
  std::uint32_t events = 0;
  bool last = false;
  {
    Account& account = Account::instance();
    std::lock_guard lock(account.mutex);
    const auto moved = command.attachment.call<Request::cm_migrate>({{body->id, from->channel}, command.file->channel, 0});
    if (!moved) return moved.error();
    last = moved->last != 0;
    Told& told = account.told[command.file->key(body->id)];
    told.channel = command.file->key();
    events = told.events;
  }
  if (last) from->take_record();
  return command.answer(body->response, rdma_ucm_migrate_resp{events});
}

// --- addresses ------------------------------------------------------------------------------------------------

const sockaddr* socket_address(const void* address) { return static_cast<const sockaddr*>(address); }

// linux/drivers/infiniband/core/ucma.c: an address of no family that there is is an invalid argument.
Status check_family(const Command& command, const CmAddress& address) {
  if (address.family == 0) return Errno{EINVAL};
  if (address.family == AF_IB && command.attachment.service_minor() < control::minor_of_cm_by_gid) return Errno{EAFNOSUPPORT};
  return ok();
}

template <class Address>
Status bind_to(const Command& command, std::uint32_t id, const Address& address) {
  const CmAddress wanted = own_address_of(socket_address(&address), sizeof(address));
  if (const Status known = check_family(command, wanted); !known) return known;
  if (const auto told = tell_place(command.attachment, Interfaces()); !told) return told.error();
  return command.call<Request::cm_bind>({command.id(id), wanted});
}

Status bind_ip(const Command& command) {
  const auto body = command.body<rdma_ucm_bind_ip>(offsetof(rdma_ucm_bind_ip, id) + sizeof(std::uint32_t));
  return body ? bind_to(command, body->id, body->addr) : Errno{EINVAL};
}

Status bind_any(const Command& command) {
  const auto body = command.body<rdma_ucm_bind>();
  return body ? bind_to(command, body->id, body->addr) : Errno{EINVAL};
}

template <class Address>
Status resolve(const Command& command, std::uint32_t id, const Address& source, const Address& destination, std::uint32_t timeout_ms) {
  control::CmResolveAddressRequest request{};
  request.id = command.id(id);
  request.destination = address_of(socket_address(&destination), sizeof(destination));
  if (const Status known = check_family(command, request.destination); !known) return known;
  request.source = own_address_of(socket_address(&source), sizeof(source));
  if (socket_address(&source)->sa_family != 0)
    if (const Status known = check_family(command, request.source); !known) return known;
  if (request.source.family == 0 || request.source.is_any()) {
    const CmAddress chosen = source_for(request.destination);
    if (chosen.family != 0) request.source = {chosen.family, request.source.port, chosen.scope, chosen.ip};
  }
  const Interfaces interfaces;
  request.is_local = interfaces.lead_to(request.destination);
  request.timeout_ms = timeout_ms;
  if (const auto told = tell_place(command.attachment, interfaces); !told) return told.error();
  return command.call<Request::cm_resolve_address>(request);
}

Status resolve_ip(const Command& command) {
  const auto body = command.body<rdma_ucm_resolve_ip>();
  return body ? resolve(command, body->id, body->src_addr, body->dst_addr, body->timeout_ms) : Errno{EINVAL};
}

Status resolve_addr(const Command& command) {
  const auto body = command.body<rdma_ucm_resolve_addr>();
  return body ? resolve(command, body->id, body->src_addr, body->dst_addr, body->timeout_ms) : Errno{EINVAL};
}

Status resolve_route(const Command& command) {
  const auto body = command.body<rdma_ucm_resolve_route>();
  if (!body || body->timeout_ms == 0) return Errno{EINVAL};  // the kernel's: in no time nothing is found
  return command.call<Request::cm_resolve_route>(command.id(body->id));
}

Status listen(const Command& command) {
  const auto body = command.body<rdma_ucm_listen>();
  if (!body) return Errno{EINVAL};
  if (const auto told = tell_place(command.attachment, Interfaces()); !told) return told.error();
  return command.call<Request::cm_listen>({command.id(body->id), static_cast<int>(body->backlog) > 0 ? body->backlog : 0, 0});
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
    Account& account = Account::instance();
    std::lock_guard lock(account.mutex);
    account.told[command.file->key(body->id)].uid = body->uid;
  }
  return ok();
}

Status reject(const Command& command) {
  const auto body = command.body<rdma_ucm_reject>();
  if (!body) return Errno{EINVAL};
  control::CmRejectRequest request{command.id(body->id), body->reason, body->private_data_len, {}};
  std::copy_n(body->private_data, body->private_data_len, request.private_data.begin());
  if (const Status rejected = command.call<Request::cm_reject>(request); !rejected) return rejected;
  Account& account = Account::instance();
  std::lock_guard lock(account.mutex);
  if (const auto found = account.told.find(command.file->key(body->id)); found != account.told.end()) found->second.connected = false;
  return ok();
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

// Which path it names makes no difference: there is one.
Status set_path(const Command& command, const rdma_ucm_set_option& option) {
  constexpr std::uint32_t meant = IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL;
  if (option.optlen % sizeof(ib_path_rec_data) != 0) return Errno{EINVAL};
  for (std::uint64_t at = option.optval; at < option.optval + option.optlen; at += sizeof(ib_path_rec_data)) {
    ib_path_rec_data path;
    std::memcpy(&path, reinterpret_cast<const void*>(at), sizeof(path));
    if (path.flags == meant) return command.call<Request::cm_resolve_route>(command.id(option.id));
  }
  return Errno{EINVAL};
}

Status set_option(const Command& command) {
  const auto body = command.body<rdma_ucm_set_option>();
  if (!body) return Errno{EINVAL};
  if (body->optval == 0 && body->optlen != 0) return Errno{EFAULT};
  if (body->level == RDMA_OPTION_IB && body->optname == RDMA_OPTION_IB_PATH) return set_path(command, *body);
  if (body->level != RDMA_OPTION_ID) return Errno{ENOSYS};
  const auto set = [&](auto value, control::CmOption option) -> Status {
    if (body->optlen != sizeof(value)) return Errno{EINVAL};
    std::memcpy(&value, reinterpret_cast<const void*>(body->optval), sizeof(value));
    if (option == control::cm_option_tos && command.attachment.service_minor() < control::minor_of_tos) return ok();
    return command.call<Request::cm_option>({command.id(body->id), option, static_cast<std::uint32_t>(value)});
  };
  switch (body->optname) {
    case RDMA_OPTION_ID_TOS: return set(std::uint8_t{}, control::cm_option_tos);
    case RDMA_OPTION_ID_REUSEADDR: return set(std::int32_t{}, control::cm_option_reuse_address);
    case RDMA_OPTION_ID_AFONLY: return set(std::int32_t{}, control::cm_option_only_ipv6);
    case RDMA_OPTION_ID_ACK_TIMEOUT: return set(std::uint8_t{}, control::cm_option_ack_timeout);
    default: return Errno{ENOSYS};
  }
}

// --- multicast groups -----------------------------------------------------------------------------------------

template <class Address>
Status join_to(const Command& command, std::uint64_t response, std::uint32_t id, std::uint64_t uid, const Address& address, std::uint32_t flags) {
  if (command.answer_bytes() < sizeof(rdma_ucm_create_id_resp)) return Errno{ENOSPC};
  const CmAddress group = address_of(socket_address(&address), sizeof(address));
  if (const Status known = check_family(command, group); !known) return known;
  Account& account = Account::instance();
  std::lock_guard lock(account.mutex);
  const auto joined = command.attachment.call<Request::cm_join>({command.id(id), uid, group, flags, 0});
  if (!joined) return joined.error();
  account.told[command.file->key(joined->id)] = {command.file->key(), uid, 0, command.file->key(id)};
  return command.answer(response, rdma_ucm_create_id_resp{joined->id});
}

Status join_ip_mcast(const Command& command) {
  const auto body = command.body<rdma_ucm_join_ip_mcast>(offsetof(rdma_ucm_join_ip_mcast, id) + sizeof(std::uint32_t));
  return body ? join_to(command, body->response, body->id, body->uid, body->addr, RDMA_MC_JOIN_FLAG_FULLMEMBER) : Errno{EINVAL};
}

Status join_mcast(const Command& command) {
  const auto body = command.body<rdma_ucm_join_mcast>();
  return body ? join_to(command, body->response, body->id, body->uid, body->addr, body->join_flags) : Errno{EINVAL};
}

// --- events of its own ----------------------------------------------------------------------------------------

// Of <rdma/rdma_user_cm.h> since Linux 6.17; the headers that this is built with may be older.
constexpr std::uint32_t resolve_ib_service = 23, write_cm_event = 24;  // RDMA_USER_CM_CMD_*
struct WriteCmEvent {                                                  // struct rdma_ucm_write_cm_event
  std::uint32_t id, reserved, event, status;
  std::array<std::uint8_t, 8> argument;  // the first member of a union
};

Status write_event(const Command& command) {
  const auto body = command.body<WriteCmEvent>();
  if (!body) return Errno{EINVAL};
  if (command.attachment.service_minor() < control::minor_of_written_events) return Errno{ENOSYS};
  return command.call<Request::cm_write_event>({command.id(body->id), body->event, static_cast<std::int32_t>(body->status), body->argument});
}

Status carry_out(std::uint32_t which, const Command& command) {
  switch (which) {
    case RDMA_USER_CM_CMD_CREATE_ID: return create_id(command);
    case RDMA_USER_CM_CMD_DESTROY_ID: return forget<Request::cm_destroy_id>(command);
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
    case RDMA_USER_CM_CMD_LEAVE_MCAST: return forget<Request::cm_leave>(command);
    case RDMA_USER_CM_CMD_MIGRATE_ID: return migrate_id(command);
    case RDMA_USER_CM_CMD_QUERY: return query(command);
    case RDMA_USER_CM_CMD_BIND: return bind_any(command);
    case RDMA_USER_CM_CMD_RESOLVE_ADDR: return resolve_addr(command);
    case RDMA_USER_CM_CMD_JOIN_MCAST: return join_mcast(command);
    case write_cm_event: return write_event(command);
    case resolve_ib_service: return Errno{EOPNOTSUPP};  // nobody can register a service record
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
