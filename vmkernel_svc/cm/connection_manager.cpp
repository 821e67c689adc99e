// What guests ask for.
#include "vmkernel_svc/cm/connection_manager.hpp"

#include <fmt/format.h>
#include <rdma/rdma_user_cm.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <random>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/fabric.hpp"

namespace vrdma::svc {

using namespace control;
using engine::QpType;

namespace {

constexpr std::uint64_t second_ns = 1'000'000'000;
// What the kernel's leaves the other program to answer. It sends 16 requests in 4.1 s each; of a connection, the second REQ or REP is answered
// by an MRA, and each of those from then on waits for 66 s. Datagrams know no MRA. The MRA is the far kernel's own: a host that is dead sends
// none, and is given up as soon as the requests are all sent (unheard_patience_ns).
constexpr std::uint64_t answer_patience_ns = 16 * 60 * second_ns, datagram_patience_ns = 60 * second_ns;
constexpr std::uint64_t dreq_patience_ns = 5 * second_ns;
// Of an identifier that is resolved again and again: more that nobody reads are not kept.
constexpr std::uint32_t unread_max = 16;

bool is_ip(const CmAddress& address) { return address.family == AF_INET || address.family == AF_INET6; }
bool is_valid(const CmAddress& address) { return is_ip(address) || address.family == AF_IB; }

// As the fields of a REQ and a REP have room for them (IBA 12.6.5, 12.6.8).
CmParameters as_sent(CmParameters parameters) {
  parameters.retry_count = std::min<std::uint8_t>(parameters.retry_count, 7);
  parameters.rnr_retry_count = std::min<std::uint8_t>(parameters.rnr_retry_count, 7);
  parameters.flow_control &= 1;
  parameters.srq = parameters.srq != 0;
  return parameters;
}

std::uint32_t random_psn() {
  static std::random_device random;
  return random() & 0xffffff;
}

}  // namespace

ConnectionManager::ConnectionManager(Fabric& fabric, std::uint32_t last_number) : fabric_(fabric), last_number_(last_number) {}
ConnectionManager::~ConnectionManager() = default;

// They come round again, after hours of somebody's making and destroying.
std::uint32_t ConnectionManager::new_number() {
  do ++last_number_;
  while (last_number_ == 0 || channels_.contains(last_number_) || identifiers_.contains(last_number_) || memberships_.contains(last_number_));
  return last_number_;
}

Result<CmIdentifier*> ConnectionManager::find(Guest& guest, const CmId& id) {
  const auto found = identifiers_.find(id.id);
  if (found == identifiers_.end() || found->second->guest != &guest) return Errno{ENOENT};
  if (found->second->channel->handle != id.channel) return Errno{EINVAL};
  return found->second.get();
}

Status ConnectionManager::place(Guest& guest, const CmPlaceRequest& request) {
  Place& place = places_[guest.id.value];
  if (request.count > cm_addresses_at_once || (request.more != 0 && request.count > cm_addresses_max - place.addresses.size())) return Errno{EINVAL};
  if (request.more == 0) place.addresses.clear();
  place.network.machine = guest.machine ? guest.machine->name : "";
  place.network.number = request.network;
  // What the kernel says of a process of this host counts more than what that says itself, where this service may ask.
  struct stat known;
  if (!guest.machine && ::stat(fmt::format("/proc/{}/ns/net", guest.credentials.pid).c_str(), &known) == 0) place.network.number = known.st_ino;
  place.addresses.insert(place.addresses.end(), request.addresses, request.addresses + request.count);
  std::erase_if(place.addresses, [](const CmAddress& one) { return !is_ip(one); });
  std::sort(place.addresses.begin(), place.addresses.end(), Place::before);
  return ok();
}

// --- identifiers ----------------------------------------------------------------------------------------------

Result<CmIdentifier*> ConnectionManager::add(Guest& guest, CmChannel& channel, std::uint32_t port_space, engine::QpType type) {
  if (!guest.tenant->take_object()) return Errno{EDQUOT};
  auto made = std::make_unique<CmIdentifier>();
  made->id = new_number();
  made->guest = &guest;
  made->channel = &channel;
  made->port_space = port_space;
  made->type = type;
  made->psn = random_psn();
  made->network = places_[guest.id.value].network;
  CmIdentifier* const one = made.get();
  identifiers_.emplace(one->id, std::move(made));
  channel.identifiers.insert(one->id);
  return one;
}

Result<CmId> ConnectionManager::create(Guest& guest, const CmCreateRequest& request) {
  CmChannel* const channel = channel_of(guest, request.channel);
  if (channel == nullptr) return Errno{EINVAL};
  QpType type;
  switch (request.port_space) {
    case RDMA_PS_TCP: type = QpType::rc; break;
    case RDMA_PS_UDP:
    case RDMA_PS_IPOIB: type = QpType::ud; break;
    case RDMA_PS_IB:
      type = static_cast<QpType>(request.qp_type);
      if (!engine::is_reliable(type) && type != QpType::uc && type != QpType::ud) return Errno{EINVAL};
      break;
    default: return Errno{EINVAL};
  }
  const auto made = add(guest, *channel, request.port_space, type);
  if (!made) return made.error();
  (*made)->uid = request.uid;
  return CmId{(*made)->id, 0};
}

Result<CmGone> ConnectionManager::destroy(Guest& guest, const CmId& id) {
  const auto found = find(guest, id);
  if (!found) return found.error();
  CmIdentifier& one = **found;
  const auto going = with_its_own(one);
  const CmGone gone{drop_events(*one.channel, going), 0};
  for (const std::uint32_t number : going)
    if (const auto each = identifiers_.find(number); each != identifiers_.end()) remove(*each->second);
  return gone;
}

void ConnectionManager::remove(CmIdentifier& one) {
  const CmState state = std::exchange(one.state, CmState::ended);
  switch (state) {
    case CmState::connecting:
    case CmState::replied:
    case CmState::requested:
    case CmState::accepted: {
      const bool datagrams = state == CmState::requested && one.type == QpType::ud;
      CmMessage no = message(datagrams ? CmKind::sidr_rep : CmKind::rej, one);
      no.status = datagrams ? sidr_reject : rej_consumer;
      send(one.peer, no);
      break;
    }
    case CmState::established:
      if (one.type != QpType::ud) send(one.peer, message(CmKind::dreq, one));
      break;
    default:
      break;
  }
  clear_deadline(one);
  ports_.give_back(one);
  for (const std::uint32_t handle : one.memberships) memberships_.erase(handle), --one.guest->tenant->objects;
  if (was_called(one)) by_peer_.erase(one.peer);
  --one.guest->tenant->objects;
  one.channel->identifiers.erase(one.id);
  identifiers_.erase(one.id);
}

void ConnectionManager::leave(Guest& guest) {
  for (auto at = channels_.begin(); at != channels_.end();) {
    const auto next = std::next(at);
    if (at->second->guest == &guest) (void)close(guest, at->first);
    at = next;
  }
  places_.erase(guest.id.value);
}

// --- addresses ------------------------------------------------------------------------------------------------

bool ConnectionManager::is_own(const Guest& guest, const CmAddress& address) const {
  if (is_address_of(guest, address) || address.is_loopback()) return true;
  const auto place = places_.find(guest.id.value);
  return place != places_.end() && place->second.has(address);
}

Status ConnectionManager::take_address(Guest& guest, CmIdentifier& one, CmAddress address) {
  if (!is_valid(address)) return Errno{EAFNOSUPPORT};
  if (address.family == AF_IB) {
    if (const auto may = take_gid(guest, one, address); !may) return may.error();
  } else if (!address.is_any() && !is_own(guest, address)) {
    return Errno{EADDRNOTAVAIL};
  }
  one.network = places_[guest.id.value].network;
  one.source = address;
  one.has_device = !address.is_any();
  one.pkey = address.family == AF_IB && one.has_device ? pkey_of(guest, address.pkey()) : 0;
  if (const auto taken = ports_.take(one); !taken) return one.source = {}, one.has_device = false, taken.error();
  one.state = CmState::bound;
  return ok();
}

Status ConnectionManager::bind(Guest& guest, const CmBindRequest& request) {
  const auto found = find(guest, request.id);
  if (!found) return found.error();
  if ((*found)->state != CmState::idle) return Errno{EINVAL};
  return take_address(guest, **found, request.address);
}

Status ConnectionManager::resolve_address(Guest& guest, const CmResolveAddressRequest& request) {
  const auto found = find(guest, request.id);
  if (!found) return found.error();
  CmIdentifier& one = **found;
  if (one.state != CmState::idle && one.state != CmState::bound) return Errno{EINVAL};
  if (!is_valid(request.destination)) return Errno{EAFNOSUPPORT};
  if (one.unread >= unread_max) return Errno{ENOBUFS};
  if (one.state == CmState::idle) {
    CmAddress source = request.source;
    if (source.family == 0) source.family = request.destination.family;
    if (const auto taken = take_address(guest, one, source); !taken) return taken.error();
  }
  if (one.source.family != request.destination.family) return Errno{EINVAL};
  if (one.source.family == AF_IB) {
    if (const auto may = call_from_gid(guest, one, request.destination); !may) return may.error();
  } else if (one.source.is_any() && one.source.family == request.source.family && !request.source.is_any()) {
    if (!is_own(guest, request.source)) return Errno{EADDRNOTAVAIL};
    one.source.ip = request.source.ip, one.source.scope = request.source.scope;
  }
  one.destination = request.destination;
  one.is_local = request.is_local != 0 || one.destination.is_any() || is_own(guest, one.destination);
  if (one.destination.is_any()) one.destination.ip = one.source.ip;
  const bool own_kind = guest_at(one.destination) != nullptr;
  // Who calls an address of ours has one, too.
  if (own_kind && !guest_at(one.source)) {
    one.source.family = AF_INET, one.source.ip = mapped_address(guest).ip;
  }
  ports_.update(one);
  // A group's is nobody's: its members are whose ports have it (join()).
  if (own_kind || one.is_local || one.destination.is_multicast() || is_known_here(one.network, one.destination)) return address_resolved(one), ok();

  const auto hosts = post_ != nullptr ? post_->who_may_have(one.destination) : std::vector<std::uint32_t>{};
  if (hosts.empty()) return address_unknown(one, EHOSTUNREACH), ok();
  one.asked = {hosts.begin(), hosts.end()};
  one.state = CmState::resolving;
  set_deadline(one, std::uint64_t{std::max(request.timeout_ms, 1u)} * 1'000'000);
  for (const std::uint32_t host : hosts) post_->tell(host, message(CmKind::who_has, one));
  return ok();
}

void ConnectionManager::address_resolved(CmIdentifier& one) {
  clear_deadline(one);
  one.asked.clear();
  one.state = CmState::resolved;
  one.has_device = true;
  if (one.destination.family == AF_IB && !one.destination.is_multicast()) one.peer_port = port_at(one.destination, *one.guest);
  // Whose port it is, if somebody has that address and port already: what a route tells. It is asked again at connect. rsockets' datagrams
  // know their destination by nothing else, and nobody listens for them.
  if (const CmIdentifier* const holder = one.host == 0 ? look_for(0, message(CmKind::req, one), &CmPorts::holder) : nullptr) one.peer_port = port_of(*holder->guest);
  raise(one, cm_address_resolved);
}

void ConnectionManager::address_unknown(CmIdentifier& one, int error) {
  clear_deadline(one);
  one.asked.clear();
  one.state = CmState::bound;
  raise(one, cm_address_error, -error);
}

Status ConnectionManager::resolve_route(Guest& guest, const CmId& id) {
  const auto found = find(guest, id);
  if (!found) return found.error();
  if ((*found)->state != CmState::resolved) return Errno{EINVAL};
  (*found)->state = CmState::routed;
  // On InfiniBand it would be the subnet administrator who makes a path of it (cma_resolve_iboe_route() and cma_query_ib_route()).
  if (guest.link_layer == link_layer_ethernet) (*found)->traffic_class = (*found)->tos;
  raise(**found, cm_route_resolved);
  return ok();
}

Status ConnectionManager::listen(Guest& guest, const CmListenRequest& request) {
  const auto found = find(guest, request.id);
  if (!found) return found.error();
  CmIdentifier& one = **found;
  if (one.state == CmState::idle) {
    CmAddress any{};
    any.family = AF_INET;
    if (const auto taken = take_address(guest, one, any); !taken) return taken.error();
  }
  if (one.state != CmState::bound) return Errno{EINVAL};
  if (const auto may = ports_.may_listen(one); !may) return may.error();
  one.state = CmState::listening;
  ports_.update(one);
  deliver_kept(one);
  return ok();
}

// --- connections ----------------------------------------------------------------------------------------------

Status ConnectionManager::connect(Guest& guest, const CmConnectRequest& request) {
  const auto found = find(guest, request.id);
  if (!found) return found.error();
  CmIdentifier& one = **found;
  if (one.state != CmState::routed) return Errno{EINVAL};
  const bool datagrams = one.type == QpType::ud;
  if (request.parameters.private_bytes > request_private_bytes(datagrams, one.destination)) return Errno{EINVAL};
  one.responder_resources = request.parameters.responder_resources;
  one.initiator_depth = request.parameters.initiator_depth;
  one.retry_count = request.parameters.retry_count;
  one.state = CmState::connecting;
  one.peer = {one.host, 0};
  if (datagrams) set_deadline(one, datagram_patience_ns);
  else await_answer(one, answer_patience_ns);
  CmMessage out = message(datagrams ? CmKind::sidr_req : CmKind::req, one);
  out.parameters = as_sent(request.parameters);
  out.ack_timeout = one.ack_timeout.value_or(0);
  out.status = one.traffic_class;
  if (one.destination.family == AF_IB) out.pkeys[0] = pkey_of(guest, one.pkey);  // by its address it has chosen
  else std::copy(guest.tenant->pkeys.begin(), guest.tenant->pkeys.end(), out.pkeys);
  send(one.peer, out);
  return ok();
}

Status ConnectionManager::accept(Guest& guest, const CmAcceptRequest& request) {
  const auto found = find(guest, request.id);
  if (!found) return found.error();
  CmIdentifier& one = **found;
  const bool datagrams = one.type == QpType::ud;
  // Whoever cannot be accepted is rejected, as in the kernel (rdma_accept()), whose caller does not wait for another try.
  const auto refused = [&]() -> Status { return (void)reject(guest, {request.id, 0, 0, {}}), Errno{EINVAL}; };
  if (request.has_parameters == 0 && !datagrams) {
    if (one.state != CmState::replied) return refused();
    one.state = CmState::established;
    send(one.peer, message(CmKind::rtu, one));
    return ok();
  }
  if (one.state != CmState::requested) return refused();
  if (request.parameters.private_bytes > (datagrams ? sidr_rep_private_bytes : rep_private_bytes)) return refused();
  if (request.has_parameters != 0) one.uid = request.uid;
  CmMessage out = message(datagrams ? CmKind::sidr_rep : CmKind::rep, one);
  out.parameters = as_sent(request.parameters);
  out.parameters.retry_count = 0;  // which a REP does not say
  if (datagrams) {
    one.state = CmState::established;
    if (out.parameters.qkey == 0) out.parameters.qkey = cm_udp_qkey;
  } else {
    one.state = CmState::accepted;
    one.responder_resources = request.parameters.responder_resources;
    one.initiator_depth = request.parameters.initiator_depth;
    await_answer(one, answer_patience_ns);
  }
  send(one.peer, out);
  return ok();
}

Status ConnectionManager::reject(Guest& guest, const CmRejectRequest& request) {
  const auto found = find(guest, request.id);
  if (!found) return found.error();
  CmIdentifier& one = **found;
  const bool datagrams = one.type == QpType::ud;
  const bool may = one.state == CmState::requested || (!datagrams && (one.state == CmState::connecting || one.state == CmState::replied || one.state == CmState::accepted));
  if (!may) return Errno{EINVAL};
  if (request.private_bytes > (datagrams ? sidr_rep_private_bytes : rej_private_bytes)) return Errno{EINVAL};
  const CmState before = std::exchange(one.state, CmState::ended);
  clear_deadline(one);
  if (before == CmState::accepted) set_deadline(one, timewait_ns);  // what it has sent may still arrive
  CmMessage no = message(datagrams ? CmKind::sidr_rep : CmKind::rej, one);
  no.status = datagrams ? sidr_reject : request.reason != 0 ? static_cast<std::int32_t>(request.reason) : rej_consumer;
  no.parameters.private_bytes = static_cast<std::uint8_t>(request.private_bytes);
  no.parameters.private_data = request.private_data;
  send(one.peer, no);
  return ok();
}

Status ConnectionManager::disconnect(Guest& guest, const CmId& id) {
  const auto found = find(guest, id);
  if (!found) return found.error();
  CmIdentifier& one = **found;
  // The kernel's asks only whether it has begun to talk to others, also as a listener at an address of a device; whether there is a connection
  // to be ended is nobody's error.
  if (one.state < CmState::listening || (one.state == CmState::listening && !one.has_device)) return Errno{EINVAL};
  // Its peer's word was answered already. Timewait is for who has spoken himself, as in the kernel's.
  if (one.state == CmState::ended && std::exchange(one.was_left, false)) set_deadline(one, timewait_ns);
  const bool is_connected = one.state == CmState::established || one.state == CmState::accepted || one.state == CmState::replied;
  if (!is_connected || one.type == QpType::ud) return ok();
  one.state = CmState::disconnecting;
  set_deadline(one, dreq_patience_ns);
  send(one.peer, message(CmKind::dreq, one));
  return ok();
}

Status ConnectionManager::established(Guest& guest, const CmId& id) {
  const auto found = find(guest, id);
  if (!found) return found.error();
  CmIdentifier& one = **found;
  if (one.state == CmState::established && one.type != QpType::ud) return Errno{EISCONN};
  if (one.state != CmState::accepted) return Errno{EINVAL};
  clear_deadline(one);
  one.state = CmState::established;
  raise(one, cm_established);
  return ok();
}

Status ConnectionManager::set_option(Guest& guest, const CmOptionRequest& request) {
  const auto found = find(guest, request.id);
  if (!found) return found.error();
  CmIdentifier& one = **found;
  switch (request.option) {
    case cm_option_reuse_address:
      if (one.state != CmState::idle && (request.value == 0 || one.state == CmState::listening)) return Errno{EINVAL};
      one.reuse_address = request.value != 0;
      ports_.update(one);
      return ok();
    case cm_option_only_ipv6:
      if (one.state != CmState::idle && one.state != CmState::bound) return Errno{EINVAL};
      one.only_ipv6 = request.value != 0;
      ports_.update(one);
      return ok();
    case cm_option_ack_timeout:
      if ((one.type != QpType::rc && one.type != QpType::xrc_send) || request.value > 31) return Errno{EINVAL};
      one.ack_timeout = static_cast<std::uint8_t>(request.value);
      return ok();
    case cm_option_tos:
      one.tos = static_cast<std::uint8_t>(request.value);
      return ok();
    default:
      return Errno{ENOSYS};
  }
}

}  // namespace vrdma::svc
