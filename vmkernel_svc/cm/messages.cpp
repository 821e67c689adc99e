// What the managers' messages do to identifiers.
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "vmci_channel/arch.hpp"
#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/fabric.hpp"

namespace vrdma::svc {

using namespace control;
using engine::QpType;

namespace {

// Of one listener, that nobody has read: as many as the kernel allows, whatever its application has asked for, since here nobody who is
// turned away tries again by itself.
constexpr std::uint32_t requests_max = 1024;

// Has who listens the queue pair that who calls is to be connected with?
bool fits(const CmIdentifier& listener, const CmMessage& request) {
  if ((listener.type == QpType::ud) != (request.kind == CmKind::sidr_req)) return false;
  return request.qp_type == 0 || static_cast<QpType>(request.qp_type) == engine::peer_type(listener.type);
}

// Of this service's own network namespace.
bool is_address_of_host(const CmAddress& address) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return false;
  bool found = false;
  for (const ifaddrs* each = list; each != nullptr && !found; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != address.family) continue;
    if (address.family == AF_INET)
      found = std::memcmp(&reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr, address.ip.data(), 4) == 0;
    else
      found = std::memcmp(&reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr, address.ip.data(), 16) == 0;
  }
  ::freeifaddrs(list);
  return found;
}

}  // namespace

CmPort ConnectionManager::port_of(const Guest& guest) const {
  return {guest.guid, guest.link_layer, guest.lid, fabric_.config.mtu(), 0};
}

CmAddress ConnectionManager::mapped_address(const Guest& guest) {
  const Gid mapped = gids_of(guest.guid, guest.lid, link_layer_ethernet)[2].gid;
  CmAddress address{};
  address.family = AF_INET;
  std::copy(mapped.begin() + 12, mapped.end(), address.ip.begin());
  return address;
}

Guest* ConnectionManager::guest_at(const CmAddress& address) const {
  for (const auto& [context, guest] : fabric_.guests)
    if (is_address_of(*guest, address)) return guest.get();
  return nullptr;
}

bool ConnectionManager::is_known_here(const CmNetwork& except, const CmAddress& address) const {
  for (const auto& [guest, place] : places_)
    if (place.network != except && place.has(address)) return true;
  return is_address_of_host(address);
}

CmIdentifier* ConnectionManager::look_for(std::uint32_t host, const CmMessage& request, Lookup who) const {
  bool is_mapped = request.destination.family == AF_IB;  // which no network has
  for (const auto& [context, guest] : fabric_.guests) {  // several may have it: control::ShareAddressRequest
    if (!is_address_of(*guest, request.destination)) continue;
    is_mapped = true;
    const auto place = places_.find(guest->id.value);
    CmIdentifier* const found = place == places_.end() ? nullptr : (ports_.*who)(place->second.network, request.port_space, request.destination);
    if (found != nullptr && found->guest == guest.get()) return found;
  }
  if (is_mapped) return nullptr;
  const CmNetwork* const from = host == 0 ? &identifiers_.at(request.from)->network : nullptr;
  if (from != nullptr && request.is_local != 0) return (ports_.*who)(*from, request.port_space, request.destination);
  std::set<CmNetwork> networks;
  for (const auto& [guest, place] : places_)
    if ((from == nullptr || place.network != *from) && place.has(request.destination)) networks.insert(place.network);
  for (const CmNetwork& network : networks)
    if (CmIdentifier* const found = (ports_.*who)(network, request.port_space, request.destination)) return found;
  return nullptr;
}

// --- sending --------------------------------------------------------------------------------------------------

CmMessage ConnectionManager::message(CmKind kind, const CmIdentifier& from) const {
  CmMessage out{};
  out.kind = kind;
  out.from = from.id;
  out.to = from.peer.id;
  out.port_space = from.destination.family == AF_IB ? from.destination.port_space() : from.port_space;
  out.psn = from.psn;
  out.is_local = from.is_local;
  out.qp_type = static_cast<std::uint8_t>(from.type);
  out.port = port_of(*from.guest);
  out.source = from.source;
  out.destination = from.destination;
  out.pkeys[0] = from.pkey;
  return out;
}

void ConnectionManager::send(const CmPeer& to, const CmMessage& message) {
  if (to.host == 0) return deliver(0, message);
  if (post_ != nullptr) post_->tell(to.host, message);
}

void ConnectionManager::refuse(std::uint32_t host, const CmMessage& request, std::int32_t reason) {
  CmMessage no{};
  no.kind = request.kind == CmKind::sidr_req ? CmKind::sidr_rep : CmKind::rej;
  no.to = request.from;
  no.status = request.kind != CmKind::sidr_req ? reason : reason == rej_consumer ? sidr_reject : sidr_unsupported;
  send({host, request.from}, no);
}

void ConnectionManager::lost(std::uint32_t host) {
  kept_.forget_host(host);
  std::vector<CmIdentifier*> theirs;
  for (const auto& [id, one] : identifiers_)
    if (one->peer.host == host || one->asked.contains(host)) theirs.push_back(one.get());
  for (CmIdentifier* const one : theirs) switch (one->state) {
      case CmState::resolving:  // it was asked before it began anew, or was not there to be asked
        if (may_have(host, one->destination)) post_->tell(host, message(CmKind::who_has, *one));
        else stop_asking(*one, host);
        break;
      case CmState::connecting:
      case CmState::replied:
      case CmState::accepted: end(*one, cm_unreachable, -ETIMEDOUT); break;
      case CmState::requested:
        if (one->type != QpType::ud) end(*one, cm_unreachable, -ETIMEDOUT);
        break;
      case CmState::established:
        if (one->type == QpType::ud) break;
        [[fallthrough]];
      case CmState::disconnecting: end(*one, cm_disconnected, 0); break;
      default: break;
    }
}

// --- arriving -------------------------------------------------------------------------------------------------

CmIdentifier* ConnectionManager::addressee(std::uint32_t host, const CmMessage& message) {
  if (const auto found = identifiers_.find(message.to); found != identifiers_.end() && message.to != 0) {
    const CmPeer& peer = found->second->peer;
    const bool fits = peer.host == host && (peer.id == message.from || peer.id == 0 || message.from == 0);
    return fits ? found->second.get() : nullptr;
  }
  const auto made = by_peer_.find({host, message.from});
  return message.from == 0 || made == by_peer_.end() ? nullptr : identifiers_.at(made->second).get();
}

bool ConnectionManager::was_called(const CmIdentifier& one) const {
  const auto made = by_peer_.find(one.peer);
  return made != by_peer_.end() && made->second == one.id;
}

void ConnectionManager::learn_peer(CmIdentifier& one, std::uint32_t host, const CmMessage& message) {
  one.peer = {host, message.from};
  one.peer_port = message.port;
  one.peer_psn = message.psn;
  one.peer_qpn = message.parameters.qpn;
}

// A request is here sooner than any network would bring it, and servers listen anew between two connections: perftest -R, whose client
// connects a second time at once, would be rejected now and then.
bool ConnectionManager::keep_for_listener(std::uint32_t host, const CmMessage& request) {
  constexpr std::uint64_t patience_ns = 500'000'000;
  if (request.was_kept != 0) return false;
  const bool is_first = kept_.empty();
  const CmKept::Caller caller{host, host == 0 ? identifiers_.at(request.from)->guest->tenant->uid : request.port.guid};
  CmKept::Kept one{vmci::monotonic_ns() + patience_ns, host, caller, request};
  one.request.was_kept = 1;
  if (!kept_.keep(one)) return false;
  if (alarm_ && is_first) alarm_(one.until_ns);
  return true;
}

// Somebody listens who did not: what is not for it waits on.
void ConnectionManager::deliver_kept(const CmIdentifier& listener) {
  const auto is_for_it = [&](const CmKept::Kept& each) { return look_for(each.host, each.request, &CmPorts::listener) == &listener; };
  for (const CmKept::Kept& each : kept_.take(listener.space_of_port(), *listener.holding, is_for_it)) deliver_request(each.host, each.request);
}

void ConnectionManager::deliver_request(std::uint32_t host, const CmMessage& message) {
  CmIdentifier* const listener = look_for(host, message, &CmPorts::listener);
  if (listener == nullptr && keep_for_listener(host, message)) return;
  if (listener == nullptr) return refuse(host, message, rej_invalid_service_id);
  Guest& guest = *listener->guest;
  std::uint16_t mine = 0;
  for (const std::uint16_t a : guest.tenant->pkeys)
    for (const std::uint16_t b : message.pkeys)
      if (mine == 0 && hosts::pkeys_match(a, b)) mine = a;
  // In no partition of its own: it hears what it would hear if there was nobody, and as late.
  if (mine == 0 && keep_for_listener(host, message)) return;
  if (mine == 0) return guest.count_bad_pkey(), refuse(host, message, rej_invalid_service_id);
  // Somebody listens there, who is nothing for it: in the kernel, as if its program had rejected it.
  if (!fits(*listener, message)) return refuse(host, message, rej_consumer);
  if (listener->unread >= requests_max) return refuse(host, message, rej_no_resources);
  const auto made = add(guest, *listener->channel, listener->port_space, listener->type);
  if (!made) return refuse(host, message, rej_no_resources);
  CmIdentifier& one = **made;
  one.state = CmState::requested;
  one.network = listener->network;
  one.source = message.destination;
  one.destination = message.source;
  one.has_device = true;
  one.is_local = message.is_local != 0;
  one.host = host;
  one.pkey = mine;
  one.traffic_class = static_cast<std::uint8_t>(message.status);
  learn_peer(one, host, message);
  one.peer_ack_timeout = static_cast<std::uint8_t>(std::min(message.ack_timeout, 31u));
  one.retry_count = message.parameters.retry_count;
  one.rnr_retry_count = message.parameters.rnr_retry_count;
  one.responder_resources = message.parameters.initiator_depth;
  one.initiator_depth = message.parameters.responder_resources;
  by_peer_[one.peer] = one.id;

  CmEvent event{};
  event.uid = listener->uid;
  event.id = one.id;
  event.event = cm_connect_request;
  event.parameters = as_received(message.parameters, request_private_bytes(one.type == QpType::ud, message.destination));
  if (one.type == QpType::ud) {
    event.is_datagram = 1;
    event.parameters.qpn = event.parameters.qkey = 0;  // a sidr_req does not say them
  }
  raise_on(*listener->channel, listener->id, event);
}

void ConnectionManager::deliver_who_has(std::uint32_t host, const CmMessage& message) {
  if (host == 0 || post_ == nullptr) return;
  CmMessage answer{};
  answer.kind = CmKind::has;
  answer.to = message.from;
  answer.status = guest_at(message.destination) != nullptr || is_known_here({}, message.destination) ? 0 : ENOENT;
  post_->tell(host, answer);
}

bool ConnectionManager::may_have(std::uint32_t host, const CmAddress& address) const {
  if (post_ == nullptr) return false;
  const auto hosts = post_->who_may_have(address);
  return std::find(hosts.begin(), hosts.end(), host) != hosts.end();
}

void ConnectionManager::stop_asking(CmIdentifier& one, std::uint32_t host) {
  one.asked.erase(host);
  if (one.asked.empty()) address_unknown(one, EHOSTUNREACH);
}

void ConnectionManager::deliver_has(std::uint32_t host, const CmMessage& message) {
  const auto found = identifiers_.find(message.to);
  if (found == identifiers_.end() || !found->second->asked.contains(host)) return;
  CmIdentifier& one = *found->second;
  if (message.status != 0) return stop_asking(one, host);
  one.host = host;
  address_resolved(one);
}

void ConnectionManager::deliver_rep(CmIdentifier& one, std::uint32_t host, const CmMessage& message) {
  if (one.state != CmState::connecting || one.type == QpType::ud) return;
  clear_deadline(one);
  learn_peer(one, host, message);
  one.state = CmState::replied;
  // It says which partition; one may be a limited member of it, and the other one a full one.
  for (const std::uint16_t mine : one.guest->tenant->pkeys)
    if (hosts::pkeys_match(mine, message.pkeys[0])) one.pkey = mine;
  one.responder_resources = message.parameters.initiator_depth;
  one.initiator_depth = message.parameters.responder_resources;
  one.rnr_retry_count = message.parameters.rnr_retry_count;
  raise(one, cm_connect_response, 0, &message, rep_private_bytes);
}

void ConnectionManager::deliver_sidr_rep(CmIdentifier& one, std::uint32_t host, const CmMessage& message) {
  if (one.state != CmState::connecting || one.type != QpType::ud) return;
  clear_deadline(one);
  if (message.status != 0) return end(one, cm_unreachable, message.status, &message, sidr_rep_private_bytes);
  learn_peer(one, host, message);
  one.state = CmState::established;
  raise(one, cm_established, 0, &message, sidr_rep_private_bytes);
}

void ConnectionManager::deliver_rtu(CmIdentifier& one) {
  if (one.state != CmState::accepted) return;
  clear_deadline(one);
  one.state = CmState::established;
  raise(one, cm_established);
}

void ConnectionManager::deliver_rej(CmIdentifier& one, const CmMessage& message) {
  switch (one.state) {
    case CmState::connecting:
    case CmState::replied:
    case CmState::accepted:
      return end(one, cm_rejected, message.status, &message, rej_private_bytes);
    // Its rep or rtu has not met the other one any more, or it has not waited for the rtu (established()), as in the kernel's cm_rej_handler().
    case CmState::established:
    case CmState::disconnecting:
      if (one.type != QpType::ud) end(one, cm_rejected, message.status, &message, rej_private_bytes);
      return;
    case CmState::requested:
      if (one.type != QpType::ud) one.state = CmState::ended;  // accepting it fails; a sidr_req cannot be withdrawn
      return;
    default:
      return;
  }
}

void ConnectionManager::deliver_dreq(CmIdentifier& one) {
  switch (one.state) {
    case CmState::replied:
    case CmState::accepted:
    case CmState::established: {
      const CmPeer peer = one.peer;
      const CmMessage drep = message(CmKind::drep, one);
      end(one, cm_disconnected, 0);
      return send(peer, drep);
    }
    case CmState::disconnecting:  // both at once
      return end(one, cm_disconnected, 0);
    default:
      return;
  }
}

void ConnectionManager::deliver(std::uint32_t host, const CmMessage& message) {
  switch (message.kind) {  // those of nobody's connection
    case CmKind::req:
    case CmKind::sidr_req: return deliver_request(host, message);
    case CmKind::who_has: return deliver_who_has(host, message);
    case CmKind::has: return deliver_has(host, message);
    case CmKind::rej:
      if (message.to == 0) kept_.forget({host, message.from});
      break;
    default: break;
  }
  CmIdentifier* const found = addressee(host, message);
  if (found == nullptr) {
    // Who asked for the connection is gone, and could not say so to whom it did not know.
    if (message.kind == CmKind::rep) refuse(host, message, rej_consumer);
    return;
  }
  CmIdentifier& one = *found;
  switch (message.kind) {
    case CmKind::rep: return deliver_rep(one, host, message);
    case CmKind::sidr_rep: return deliver_sidr_rep(one, host, message);
    case CmKind::rtu: return deliver_rtu(one);
    case CmKind::rej: return deliver_rej(one, message);
    case CmKind::dreq: return deliver_dreq(one);
    case CmKind::drep:
      if (one.state == CmState::disconnecting) end(one, cm_disconnected, 0);
      return;
    default: return;
  }
}

}  // namespace vrdma::svc
