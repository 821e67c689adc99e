#include "vmkernel_svc/mediated_ports.hpp"

#include <sched.h>

#include <cstring>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/stamp.hpp"
#include "vmkernel_svc/engine/grh.hpp"
#include "vmkernel_svc/events.hpp"
#include "vmkernel_svc/fabric.hpp"
#include "vmkernel_svc/memory/bus_guard.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::svc {

using engine::Direction;
using engine::MemoryStatus;
using engine::Place;

// --- memory ---------------------------------------------------------------------------------------------------

std::optional<Place> MediatedPorts::find(Qp& qp, Key key, std::uint64_t address, std::uint64_t bytes, std::uint32_t access) {
  const bool from_afar = (access & engine::access_remote_any) != 0;
  return find_in(from_afar ? qp.port.remote_hint : qp.port.local_hint, qp.port.pd, from_afar ? qp.qpn.value : 0, key, address, bytes, access);
}

std::optional<Place> MediatedPorts::find_receive(Qp& qp, Key key, std::uint64_t address, std::uint64_t bytes) {
  const std::uint64_t pd = qp.srq != nullptr ? qp.srq->port.owner->pd->number : qp.port.pd;
  return find_in(qp.port.receive_hint, pd, 0, key, address, bytes, engine::access_local_write);
}

std::optional<Place> MediatedPorts::find_in(KeyHint& hint, std::uint64_t pd, std::uint32_t window_qpn, Key key, std::uint64_t address,
                                            std::uint64_t bytes, std::uint32_t access) {
  Region* region = hint.key == key.value ? fabric_.regions.at(hint.slot, hint.generation) : nullptr;
  if (region != nullptr && hint.generation != 0) {
    ++key_counters_.hits;
  } else {
    ++key_counters_.misses;
    const auto slot = fabric_.regions.find(key);
    if (!slot) return std::nullopt;
    region = &fabric_.regions.slot(*slot);
    hint = {key.value, *slot, region->generation};
  }
  if (region->pd != pd || (region->access & access) != access || region->leaving) return std::nullopt;
  const std::uint64_t offset = address - region->iova;
  if (address < region->iova || offset > region->bytes || bytes > region->bytes - offset) return std::nullopt;
  if ((region->access & Region::is_window) != 0) [[unlikely]] {
    if (window_qpn == 0 || (region->window_qpn != 0 && region->window_qpn != window_qpn)) return std::nullopt;
    return Place{Place::Kind::registered, hint.slot, region->generation, offset};
  }
  // Stores become visible in order: a completion waits for the line that the payload goes to, which its owner has in its cache.
  constexpr std::uint32_t writes = engine::access_local_write | engine::access_remote_write;
  if ((access & writes) != 0) {
    const Piece& piece = region->piece_at(offset);
    if (piece.host != nullptr) vmci::prefetch_for_write(piece.host + (offset - piece.offset));
  }
  return Place{Place::Kind::registered, hint.slot, region->generation, offset};
}

std::byte* MediatedPorts::mapped(const Place& place, std::uint64_t bytes) {
  if (place.kind == Place::Kind::engine) return reinterpret_cast<std::byte*>(place.address);
  const auto [region, slot, at] = fabric_.regions.reach(place.region, place.generation, place.address);
  if (region == nullptr || region->frozen) return nullptr;
  const Piece& piece = region->piece_at(at);
  const std::uint64_t offset = at - piece.offset;
  if (piece.host == nullptr || bytes > piece.bytes - offset) return nullptr;
  return piece.host + offset;
}

std::uint64_t MediatedPorts::piece_left(const Place& place) {
  constexpr std::uint64_t all = ~std::uint64_t{0};
  if (place.kind != Place::Kind::registered) return all;
  const auto [region, slot, at] = fabric_.regions.reach(place.region, place.generation, place.address);
  if (region == nullptr) return all;
  const Piece& piece = region->piece_at(at);
  return piece.bytes - (at - piece.offset);
}

// In order, so that the last bytes of all come last: what is mapped on both sides at once, each part that is not by a guest's worker.
// Repeated with the same arguments until done.
MemoryStatus MediatedPorts::copy_parts(Qp& qp, const Place& to, const Place& from, std::uint64_t bytes) {
  while (qp.port.copied < bytes) {
    const std::uint64_t left = bytes - qp.port.copied;
    Place target = to, origin = from;
    target.address += qp.port.copied, origin.address += qp.port.copied;
    const std::uint64_t part = std::min({left, piece_left(target), piece_left(origin)});
    if (part == 0) return qp.port.copied = 0, MemoryStatus::source_fault;  // no such pieces are made
    const auto status = qp.port.job_sequence == 0 ? copy_mapped(target, origin, part) : std::nullopt;
    const MemoryStatus ended = status ? *status : copy_by_worker(qp, target, origin, part);
    if (ended == MemoryStatus::pending) return ended;
    qp.port.copied += part;
    if (ended != MemoryStatus::done) return qp.port.copied = 0, ended;
  }
  qp.port.copied = 0;
  return MemoryStatus::done;
}

// std::nullopt: one of them is not mapped.
std::optional<MemoryStatus> MediatedPorts::copy_mapped(const Place& to, const Place& from, std::uint64_t bytes) {
  std::byte* const destination = mapped(to, bytes);
  const std::byte* const source = mapped(from, bytes);
  if (destination == nullptr || source == nullptr) return std::nullopt;
  const BusGuard::Access access;
  vmci::placement_copy(destination, source, bytes);
  if (!access.failed()) [[likely]] return MemoryStatus::done;
  const std::uintptr_t into = access.where() - reinterpret_cast<std::uintptr_t>(destination);
  return into < bytes ? MemoryStatus::destination_fault : MemoryStatus::source_fault;
}

MemoryStatus MediatedPorts::copy(Qp& qp, const Place& to, const Place& from, std::uint64_t bytes) {
  VRDMA_CRASH_POINT("service.copy.wqe_taken");
  if (qp.port.job_sequence == 0 && qp.port.copied == 0) {
    if (const auto copied = copy_mapped(to, from, bytes)) {
      VRDMA_CRASH_POINT("service.copy.copied");
      return *copied;
    }
  }
  return copy_parts(qp, to, from, bytes);
}

MemoryStatus MediatedPorts::fetch_and_add(Qp& qp, const Place& place, std::uint64_t add, std::uint64_t& old_value) {
  if (std::byte* host = mapped(place, 8); host != nullptr && reinterpret_cast<std::uintptr_t>(host) % 8 == 0) {
    const BusGuard::Access access;
    old_value = std::atomic_ref(*reinterpret_cast<std::uint64_t*>(host)).fetch_add(add, std::memory_order_acq_rel);
    return access.failed() ? MemoryStatus::destination_fault : MemoryStatus::done;
  }
  return atomic_by_worker(qp, place, ProcessJob::Kind::fetch_and_add, add, 0, old_value);
}

MemoryStatus MediatedPorts::compare_and_swap(Qp& qp, const Place& place, std::uint64_t compare, std::uint64_t swap,
                                             std::uint64_t& old_value) {
  if (std::byte* host = mapped(place, 8); host != nullptr && reinterpret_cast<std::uintptr_t>(host) % 8 == 0) {
    const BusGuard::Access access;
    old_value = compare;
    std::atomic_ref(*reinterpret_cast<std::uint64_t*>(host))
        .compare_exchange_strong(old_value, swap, std::memory_order_acq_rel);
    return access.failed() ? MemoryStatus::destination_fault : MemoryStatus::done;
  }
  return atomic_by_worker(qp, place, ProcessJob::Kind::compare_and_swap, swap, compare, old_value);
}

// --- completions and events -----------------------------------------------------------------------------------

bool MediatedPorts::complete(Qp& qp, Direction direction, Cqe& cqe, CqeState state) {
  if (qp.port.owner == nullptr) [[unlikely]] return fabric_.far->answer(*qp.port.stand_in, state.status), true;
  const bool by_xrc_srq = qp.type == engine::QpType::xrc_recv && direction == Direction::receive && qp.srq != nullptr;
  QueuePair& owner = by_xrc_srq ? *qp.srq->port.owner->completions : *qp.port.owner;
  CompletionQueue& cq = direction == Direction::send ? *owner.send_cq : *owner.receive_cq;
  const std::uint32_t lane = direction == Direction::send ? owner.send_lane : owner.receive_lane;
  // Where somebody else completes, too, there is room for all that can be posted (DirectDesk).
  if (cq.produced - cq.consumed_seen >= cq.cqe && cq.direct_lanes == 0) {
    cq.consumed_seen = std::atomic_ref(cq.shared->consumed).load(std::memory_order_acquire);
    if (cq.produced - cq.consumed_seen >= cq.cqe) {
      runner_.overran(cq);
      return false;
    }
  }
  VRDMA_CRASH_POINT("service.complete.before_cqe");
  auto& core = owner.core;
  auto& to = direction == Direction::send ? core.send_lane : core.receive_lane;
  if (by_xrc_srq) [[unlikely]] cqe.src_qp = qp.qpn.value;  // its receiver learns by which of the targets it came
  const bool stamped = vmci::wants_stamps(*cq.shared);
  if (stamped) vmci::put_stamp(cqe, state, direction == Direction::send, cq.timed ? vmci::monotonic_ns() : vmci::stamp_now());
  else if (cq.timed) [[unlikely]] set_stamp(cqe, direction == Direction::send, vmci::monotonic_ns());
  // So that it is found before what is done because of it. The event can wait.
  const bool told_at_once = stamped && !vmci::is_named(cq.shared->hot, lane);
  to.push(cqe, pack(state));
  ++cq.produced;
  VRDMA_CRASH_POINT("service.complete.cqe_written");
  if (told_at_once) cq.ready.set(lane);
  const bool urgent = state.status != WcStatus::success || (state.flags & wc_solicited) != 0;
  for (std::size_t i = announcement_count_; i > 0; --i) {
    Announcement& known = announcements_[i - 1];
    if (known.cq != &cq || known.lane != lane) continue;
    known.solicited_or_error |= urgent;
    known.received |= direction == Direction::receive;
    known.ready_is_set &= told_at_once;
    return true;
  }
  if (announcement_count_ == announcements_.size()) announce();
  announcements_[announcement_count_++] = {&cq, lane, urgent, direction == Direction::receive, told_at_once};
  return true;
}

void MediatedPorts::announce() {
  if (announcement_count_ == 0) return;
  // Pairs with H1 of guest_lib/lanes.cpp and A1 of poll.cpp: the guest's fences between announcing a hot lane, or arming, and looking at the
  // lanes once more.
  vmci::store_load_fence();
  for (std::size_t i = 0; i < announcement_count_; ++i) {
    const Announcement& due = announcements_[i];
    if (!due.ready_is_set && !vmci::is_named(due.cq->shared->hot, due.lane)) due.cq->ready.set(due.lane);
    VRDMA_CRASH_POINT("service.complete.ready_set");
    if (due.cq->channel != nullptr) raise_if_armed(*due.cq, due.solicited_or_error);
    if (!due.received) continue;
    const std::uint32_t poller = std::atomic_ref(due.cq->shared->poller).load(std::memory_order_relaxed);
    if (poller != 0) (poller == static_cast<std::uint32_t>(::sched_getcpu()) + 1 ? told_here_ : told_elsewhere_) = true;
  }
  announcement_count_ = 0;
}

bool MediatedPorts::take_answer_expected() {
  const bool expected = told_elsewhere_ && !told_here_;
  told_here_ = told_elsewhere_ = false;
  return expected;
}

void MediatedPorts::event(Qp& qp, engine::AsyncEvent event) {
  if (qp.port.owner == nullptr) return;
  QueuePair& owner = *qp.port.owner;
  raise_async(*owner.guest, owner.context, static_cast<std::uint32_t>(event), owner.handle);
  for (const QueuePair* const other : owner.stand_bys)
    raise_async(*other->guest, other->context, static_cast<std::uint32_t>(event), other->handle);
}

void MediatedPorts::srq_limit(Srq& srq) {
  SharedReceiveQueue& owner = *srq.port.owner;
  raise_async(*owner.guest, owner.context, static_cast<std::uint32_t>(engine::AsyncEvent::srq_limit_reached), owner.handle);
}

std::optional<WcStatus> MediatedPorts::change_window(Qp& qp) {
  if (qp.port.window_changed) return std::exchange(qp.port.window_changed, std::nullopt);
  const bool looked_at_soon = qp.port.window_since_ns != 0 && qp.port.wake_ns != 0;
  if (!looked_at_soon) runner_.change_window(qp);
  return std::nullopt;
}

bool MediatedPorts::invalidate(Qp& qp, Key key) { return fabric_.regions.invalidate_window(key, qp.port.pd, qp.qpn.value); }

std::optional<MediatedPorts::Srq*> MediatedPorts::xrc_srq(Qp& qp, std::uint32_t srqn) {
  const auto found = fabric_.by_qpn.find(srqn);
  const Xrcd* const xrcd = qp.port.owner->xrcd;
  if (found == fabric_.by_qpn.end() || !found->second->completes_for_srq() || found->second->xrcd->domain != xrcd->domain) return nullptr;
  const QueuePair& completions = *found->second;
  if (completions.guest->frozen) return std::nullopt;
  qp.port.pd = completions.srq->pd->number;  // A14.5: R_Keys are of the SRQ's protection domain
  return &completions.srq->core;
}

std::uint32_t MediatedPorts::srq_posted(Srq& srq) {
  return std::atomic_ref(srq.port.owner->view.header().creator.produced_count).load(std::memory_order_acquire);
}

void MediatedPorts::take_back(Srq& srq) { fabric_.far->hca()->take_back(srq); }

bool MediatedPorts::immediate_follows(Qp& qp) { return qp.port.hca != nullptr && fabric_.far->hca()->immediate_follows(qp); }

void MediatedPorts::state_changed(Qp& qp) {
  if (qp.port.owner == nullptr) return;
  qp.port.owner->watch_receives(qp.state == engine::QpState::err);
  runner_.make_runnable(qp);
}

void MediatedPorts::await_receive(Qp& sender, Qp& receiver) {
  if (receiver.srq != nullptr) return;  // found again by the timer, or while the sender is looked at anyway
  if (sender.port.waiting_at != nullptr) sender.port.waiting_at->port.waiting_sender = nullptr;  // it was connected elsewhere since
  if (receiver.port.waiting_sender != nullptr) receiver.port.waiting_sender->port.waiting_at = nullptr;
  receiver.port.waiting_sender = &sender;
  sender.port.waiting_at = &receiver;
  receiver.port.owner->watch_receives(true);
}

// --- time -----------------------------------------------------------------------------------------------------

std::uint64_t MediatedPorts::now_ns() { return vmci::monotonic_ns(); }
void MediatedPorts::wake_at(Qp& qp, std::uint64_t ns) { runner_.set_timer(qp, ns); }

// --- addresses ------------------------------------------------------------------------------------------------

namespace {
std::uint32_t link_layer_of(const MediatedPorts::Qp& qp) {
  return qp.port.owner != nullptr ? qp.port.owner->guest->link_layer : qp.port.stand_in->link_layer;
}
}  // namespace

MediatedPorts::Qp* MediatedPorts::peer(Qp& qp) {
  QpPort& port = qp.port;
  if (port.peer_generation == fabric_.topology_generation) return port.peer;
  port.peer_generation = fabric_.topology_generation;
  port.peer = nullptr;
  if (port.stand_in != nullptr && !port.stand_in->is_of_its_host) return nullptr;
  if (QueuePair* const to = addressee(qp)) {
    // One that is another shard's is connected elsewhere: who is connected to it was brought together with it.
    if (!to->guest->frozen && fabric_.shards.of(qp) == to->guest->group->shard && admits(qp, to->core)) port.peer = &to->core;
  } else if (fabric_.far != nullptr && (fabric_.shards.count() == 1 || port.owner == nullptr || port.owner->guest->group->pinned)) {
    fabric_.far->route(qp);
  }
  return port.peer;
}

QueuePair* MediatedPorts::addressee(const Qp& qp) const {
  const auto found = fabric_.by_qpn.find(qp.attributes.dest_qp_num);
  if (found == fabric_.by_qpn.end()) return nullptr;
  const auto& path = qp.attributes.path;
  const QueuePair& to = *found->second;
  const std::uint16_t lid = to.inherited ? to.inherited->lid : to.guest->lid;
  const auto& gids = to.inherited ? to.inherited->gids : to.guest->gids;
  return fabric_.leads_to(lid, gids, link_layer_of(qp), path.dlid, path.is_global != 0, path.dgid) ? found->second : nullptr;
}

bool MediatedPorts::is_elsewhere(const Qp& sender, const Qp& receiver) const {
  if (fabric_.shards.count() == 1) [[likely]] return false;
  const GuestGroup* const group = receiver.port.owner->guest->group;
  return sender.port.owner != nullptr ? sender.port.owner->guest->group != group : !group->pinned;
}

void MediatedPorts::bring_together(Qp& sender, Qp& receiver) { runner_.bring_together(sender, *receiver.port.owner); }

MediatedPorts::Qp* MediatedPorts::datagram_peer(Qp& qp, const UdOperand& ud) {
  const std::uint32_t link_layer = link_layer_of(qp);
  RouteKey key{ud.remote_qpn, ud.dlid, static_cast<std::uint8_t>(link_layer), qp.port.pkey, {}};
  if (ud.route_flags & route_global) std::memcpy(key.dgid.data(), ud.dgid, 16);
  const auto take = [](const Route& route) -> Qp* {
    if (route.refuses) route.peer->port.owner->guest->count_bad_pkey();
    return route.refuses ? nullptr : route.peer;
  };
  if (const Route* const known = routes_.find(key, fabric_.topology_generation)) return take(*known);
  Route route;
  if (Qp* const to = addressed(link_layer, ud)) route = {to, !hosts::pkeys_match(qp.port.pkey, to->port.pkey)};
  routes_.insert(key, fabric_.topology_generation, route);
  return take(route);
}

const MediatedPorts::Qp* MediatedPorts::reachable(const Qp& qp, const UdOperand& ud) {
  const Qp* const to = addressed(link_layer_of(qp), ud);
  return to != nullptr && hosts::pkeys_match(qp.port.pkey, to->port.pkey) ? to : nullptr;
}

MediatedPorts::Qp* MediatedPorts::addressed(std::uint32_t link_layer, const UdOperand& ud) {
  const auto found = fabric_.by_qpn.find(ud.remote_qpn);
  if (found == fabric_.by_qpn.end()) return nullptr;
  QueuePair& to = *found->second;
  const bool leads = !to.guest->frozen && fabric_.leads_to(*to.guest, link_layer, ud.dlid, (ud.route_flags & route_global) != 0, ud.dgid);
  return leads ? &to.core : nullptr;
}

bool MediatedPorts::may_deliver(Qp& receiver) { return receiver.port.link == nullptr || runner_.owns_inbox(*receiver.port.owner); }

MediatedPorts::Qp* MediatedPorts::multicast_peer(Qp& qp, const UdOperand& ud, std::uint32_t& from) {
  Gid group;
  std::memcpy(group.data(), ud.dgid, 16);
  const auto found = fabric_.multicast.find(group);
  if (found == fabric_.multicast.end()) return nullptr;
  const auto& members = found->second;
  for (auto at = members.lower_bound(from); at != members.end(); ++at) {
    auto& [number, member] = *at;
    if (member->guest->frozen || !hosts::pkeys_match(qp.port.pkey, member->core.port.pkey)) continue;
    from = number;
    return &member->core;
  }
  return nullptr;
}

bool MediatedPorts::admits(const Qp& sender, Qp& receiver) {
  if (hosts::pkeys_match(sender.port.pkey, receiver.port.pkey)) return true;
  receiver.port.owner->guest->count_bad_pkey();
  return false;
}

bool MediatedPorts::leads_back(Qp& receiver, Qp& sender) {
  const auto& path = receiver.attributes.path;
  if (const StandIn* const far = sender.port.stand_in)
    return fabric_.leads_to(far->lid, far->gids, receiver.port.owner->guest->link_layer, path.dlid, path.is_global != 0, path.dgid);
  return fabric_.leads_to(*sender.port.owner->guest, receiver.port.owner->guest->link_layer, path.dlid, path.is_global != 0,
                          path.dgid);
}

bool MediatedPorts::has_grh(const Qp& receiver, const UdOperand& ud) {
  return (ud.route_flags & route_global) != 0 || receiver.port.owner->guest->link_layer == control::link_layer_ethernet;
}

const control::GidEntry& MediatedPorts::source(const Qp& sender, const UdOperand& ud) {
  const auto& gids = sender.port.owner != nullptr ? sender.port.owner->guest->gids : sender.port.stand_in->gids;
  return gids[sgid_index_of(ud) % gids.size()];
}

bool MediatedPorts::write_grh(Qp& sender, Qp& receiver, const UdOperand& ud, std::uint32_t packet_bytes, std::byte* bytes) {
  const bool has = has_grh(receiver, ud);
  if (has) engine::write_grh_bytes(source(sender, ud), ud, packet_bytes, bytes);
  else std::memset(bytes, 0, engine::grh_bytes);
  return has;
}

std::uint16_t MediatedPorts::lid(Qp& qp) {
  return qp.port.owner != nullptr ? qp.port.owner->guest->lid : qp.port.stand_in->lid;
}

std::uint8_t MediatedPorts::sl(Qp& sender, const UdOperand& ud) { return engine::sl_to_tell(source(sender, ud), ud); }

// --- other hosts ----------------------------------------------------------------------------------------------

void MediatedPorts::far_send(Qp& qp, engine::FarFramePtr frame) { fabric_.far->send(qp, std::move(frame)); }
bool MediatedPorts::far_room(Qp& qp) { return fabric_.far->has_room(qp.far->host); }
std::uint64_t MediatedPorts::far_session(Qp& qp) { return fabric_.far->session(qp.far->host); }
bool MediatedPorts::far_connected(Qp& qp) { return fabric_.far->is_connected(qp.far->host); }
std::uint64_t MediatedPorts::far_silent_ns(Qp& qp) { return fabric_.far->silent_ns(qp.far->host); }
std::uint32_t MediatedPorts::far_epoch() { return fabric_.far->new_epoch(); }
void MediatedPorts::far_connected_again(Qp& qp) {
  if (fabric_.far != nullptr) fabric_.far->connected_again(qp);
}

void MediatedPorts::far_describe(Qp& qp, engine::FarOpen& open) {
  const Guest& guest = *qp.port.owner->guest;
  const QpAttributes& a = qp.attributes;
  open = {a.path, guest.guid, guest.link_layer, guest.lid, static_cast<std::uint8_t>(qp.type), a.timeout, a.retry_cnt, a.rnr_retry,
          static_cast<std::uint8_t>(a.path_mtu), 0, a.dest_qp_num, qp.port.pkey, {}};
}

void MediatedPorts::far_datagram(Qp& qp, const engine::Request& request, const UdOperand& ud, std::uint32_t qkey) {
  if (fabric_.far != nullptr) fabric_.far->send_datagram(qp, request, ud, qkey);
}

void MediatedPorts::far_say(engine::StandIn<MediatedPorts>& stand_in, engine::FarFramePtr frame, bool may_wait) {
  fabric_.far->say(*stand_in.core.port.stand_in, std::move(frame), may_wait);
}
bool MediatedPorts::far_room(engine::StandIn<MediatedPorts>& stand_in) { return fabric_.far->has_room_for_answers(stand_in.host); }
bool MediatedPorts::far_waits_for_mark(engine::StandIn<MediatedPorts>& stand_in) { return fabric_.far->waits_for_mark(*stand_in.core.port.stand_in); }
void MediatedPorts::far_asked(engine::StandIn<MediatedPorts>& stand_in) {
  Qp& core = stand_in.core;
  if (Qp* const target = peer(core); target != nullptr && target->port.psn_from_records) target->expected_psn = core.operation.request.psn;
}
void MediatedPorts::far_speaks_for(engine::StandIn<MediatedPorts>& stand_in, const engine::FarDatagram& head) {
  fabric_.far->speaks_for(*stand_in.core.port.stand_in, head);
}
bool MediatedPorts::stands_still(Qp& qp) { return qp.port.owner->guest->frozen; }
void MediatedPorts::count_malformed() { fabric_.far->count_malformed(); }

}  // namespace vrdma::svc
