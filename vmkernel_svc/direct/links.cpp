// Which connections are direct.

#include <algorithm>

#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/direct/key_book.hpp"
#include "vmkernel_svc/direct/link.hpp"
#include "vmkernel_svc/direct/trust.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/shard.hpp"
#include "vmkernel_svc/show.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::svc {

using engine::QpState;
using engine::QpType;

namespace {

void offer(QueuePair& qp, std::uint32_t epoch) {
  std::atomic_ref(qp.send_view.header().attacher.direct_offer).store(epoch, std::memory_order_release);
}

// Of the SRQ of the end that receives: numbers of those who take from it.
bool takes_another(const QueuePair& qp) {
  return qp.srq == nullptr || qp.srq->free_takers.size() + (direct::takers_max - qp.srq->takers_used) >= 2;  // both ends may have the same
}
std::uint32_t new_taker(const QueuePair& qp) {
  if (qp.srq == nullptr) return 0;
  SharedReceiveQueue& srq = *qp.srq;
  if (srq.free_takers.empty()) return srq.takers_used++;
  const std::uint32_t taker = srq.free_takers.back();
  srq.free_takers.pop_back();
  return taker;
}

}  // namespace

namespace {

// What keeps an end of a connection, or a UD queue pair, from being direct, whoever else it has to do with.
std::string_view why_not(const QueuePair& end) {
  if (!heard_directly(*end.send_cq) || !heard_directly(*end.receive_cq)) return "a completion channel without descriptors for its peers, or of an older library";
  if (!roomy(end)) return "a completion queue with less room than its work queues";
  if (end.guest->machine) return "a virtual machine";
  if (end.send_cq->timed || end.receive_cq->timed) return "a completion queue with times, which the service tells";
  if (end.srq != nullptr && !end.srq->core.turns) return "a shared receive queue, which is for the HCA to take from";
  if (end.srq != nullptr && end.srq->pd != end.pd) return "a shared receive queue of another protection domain";
  if (end.core.port.link == nullptr && !takes_another(end)) return "too many direct connections of one shared receive queue";
  return {};
}

// nullptr: it has none left, or there is none.
std::shared_ptr<DirectRoom> room_for_link(const Result<std::shared_ptr<DirectRoom>>& room, std::string& why) {
  if (!room) return nullptr;
  if (!(*room)->free.empty() || (*room)->used < direct::room_links) return *room;
  why = "too many direct connections of these processes";
  return nullptr;
}

}  // namespace

std::string DirectDesk::why_mediated_datagrams(const QueuePair& qp) const {
  if (fabric_.config.direct != "auto") return "the service's \"direct\" is \"mediated\"";
  if (is_mediated(*qp.guest)) return "\"vrdma direct mediated\" was said";
  if (qp.core.state != QpState::rtr && qp.core.state != QpState::rts) return "not in RTS";
  if (qp.guest->minor < control::minor_of_direct) return "an older library";
  return std::string(why_not(qp));
}

void DirectDesk::consider_datagrams(QueuePair& qp) {
  // Those who send there look it up anew, as it is now.
  if (DirectLink* const link = qp.core.port.link) {
    if (link->whole()) dissolve(*link);
    else part_from(qp);
  }
  std::string why = why_mediated_datagrams(qp);
  if (why.empty())
    if (const auto room = room_for_link(room_of(*qp.guest, *qp.guest, why), why)) return make_link(qp, nullptr, room);
  qp.mediated_because = std::move(why);
}

std::string DirectDesk::why_mediated(QueuePair& qp, QueuePair*& peer) {
  if (fabric_.config.direct != "auto") return "the service's \"direct\" is \"mediated\"";
  if (qp.core.type == QpType::xrc_send || qp.core.type == QpType::xrc_recv) return "XRC";
  if (qp.core.type != QpType::rc && qp.core.type != QpType::uc) return "not a connection";
  if (is_mediated(*qp.guest)) return "\"vrdma direct mediated\" was said";
  const auto connected = [](const QueuePair& end) { return end.core.state == QpState::rtr || end.core.state == QpState::rts; };
  if (!connected(qp)) return "not in RTS";
  MediatedPorts::Qp* const far_end = shard_.peer(qp.core);
  if (far_end == nullptr) return "the peer is on another host, or not there";
  peer = far_end->port.owner;
  if (is_mediated(*peer->guest)) return "\"vrdma direct mediated\" was said of the peer";
  if (peer == &qp) return "connected to itself";
  if (peer->core.type != qp.core.type || !connected(*peer)) return "the peer is not in RTS";
  if (qp.core.state != QpState::rts && peer->core.state != QpState::rts) return "not in RTS, nor is its peer";
  if (shard_.peer(peer->core) != &qp.core) return "the peer is connected elsewhere";
  for (const QueuePair* end : {&qp, peer})
    if (const std::string_view why = why_not(*end); !why.empty()) return std::string(why);
  if (std::min(qp.guest->minor, peer->guest->minor) < control::minor_of_direct) return "an older library";
  return {};
}

// Asked of the machine once.
bool DirectDesk::trusts(const Guest& a, const Guest& b, std::string& why_not) {
  const auto key = key_of(a, b);
  if (together_.contains(key)) return true;
  if (const auto known = apart_.find(key); known != apart_.end()) return why_not = known->second, false;
  const auto facts = [](const Guest& guest) { return TrustFacts::of(guest.credentials, *guest.pidfd); };
  const TrustFacts of_a = facts(a), of_b = facts(b);
  why_not = why_apart(of_a, of_b);
  if (!why_not.empty()) {
    static constinit log::Sparing sparing{log::Sparing::lines_of_ordinary_life};
    sparing.info("{} and {} stay mediated: {}", a.name, b.name, why_not);
    apart_.emplace(key, why_not);
    return false;
  }
  const bool in_order = a.id.value <= b.id.value;
  together_.emplace(key, std::array{(in_order ? of_a : of_b).own_pid, (in_order ? of_b : of_a).own_pid});
  return true;
}

Result<std::shared_ptr<DirectRoom>> DirectDesk::room_of(Guest& a, Guest& b, std::string& why_not) {
  const auto key = key_of(a, b);
  if (const auto known = rooms_.find(key); known != rooms_.end()) return known->second;
  if (!trusts(a, b, why_not)) return Errno{EPERM};
  why_not = "no memory or descriptors left for its words";
  for (Guest* const guest : {&a, &b}) {
    if (guest->key_book) continue;
    if (!guest->tenant->take_descriptors(1)) return Errno{EDQUOT};
    auto book = KeyBook::create(*guest, fabric_.regions);
    if (!book) return --guest->tenant->descriptors, book.error();
    guest->key_book = std::move(*book);
  }
  if (!a.tenant->take_descriptors(1)) return Errno{EDQUOT};
  auto segment = vmci::Segment::create("vrdma-direct", sizeof(direct::Room));
  if (!segment) return --a.tenant->descriptors, segment.error();
  auto room = std::make_shared<DirectRoom>();
  room->number = next_room_++;
  room->segment = std::move(*segment);
  const bool in_order = a.id.value <= b.id.value;
  room->pidfds[0] = in_order ? a.pidfd : b.pidfd;
  room->pidfds[1] = in_order ? b.pidfd : a.pidfd;
  room->guests[0] = key.first, room->guests[1] = key.second;
  room->pids[0] = in_order ? a.credentials.pid : b.credentials.pid;
  room->pids[1] = in_order ? b.credentials.pid : a.credentials.pid;
  return rooms_.emplace(key, std::move(room)).first->second;
}

void DirectDesk::consider(QueuePair& qp) {
  if (qp.core.type == QpType::ud) return consider_datagrams(qp);
  QueuePair* peer = nullptr;
  std::string why = why_mediated(qp, peer);
  if (DirectLink* const link = qp.core.port.link) {
    if (why.empty() && link->ends[1 - link->side(qp)] == peer) return (void)hand_out(qp);
    if (link->whole()) dissolve(*link);
    else part_from(qp);
  }
  if (why.empty() && peer->core.port.link != nullptr) why = "the peer's connection before this one has not ended";
  if (why.empty()) {
    if (const auto room = room_for_link(room_of(*qp.guest, *peer->guest, why), why)) return make_link(qp, peer, room);
  }
  qp.mediated_because = why;
  if (peer != nullptr && peer->core.port.link == nullptr) peer->mediated_because = std::move(why);
}

// A connection's, or (no peer) of a UD queue pair.
void DirectDesk::make_link(QueuePair& qp, QueuePair* peer, const std::shared_ptr<DirectRoom>& room) {
  // Links are the first shard's. Their ends are together already.
  fabric_.shards.pin(*qp.guest);
  auto link = std::make_unique<DirectLink>();
  link->room = room;
  if (room->free.empty()) room->free.push_back(room->used++);
  link->index = room->free.back();
  room->free.pop_back();
  link->epoch = next_epoch_++;
  link->datagrams = peer == nullptr;
  ++counters_.links;
  link->ends[0] = &qp, link->ends[1] = peer;
  for (int i = 0; i < 2; ++i) {
    direct::Direction& direction = room->direction(link->index * 2 + static_cast<std::uint32_t>(i));
    direction.positions[0] = direction.positions[1] = {};
    direction.claimed_arm = direction.taking.unfinished = 0;
    link->claims[i] = vmci::ServiceClaim(&direction, link->epoch);
    link->takers[i] = link->ends[1 - i] != nullptr ? new_taker(*link->ends[1 - i]) : 0;
    if (link->ends[i] == nullptr) continue;
    link->guests[i] = link->ends[i]->guest->id.value;
    link->ends[i]->core.port.link = link.get();
    link->note_rest(i, *link->ends[i]);
    link->ends[i]->mediated_because.clear();
    offer(*link->ends[i], link->epoch);
  }
  VRDMA_CRASH_POINT("direct.service.offered");
  links_.emplace(link.get(), std::move(link));
  hand_out(qp);
}

// The end is as if it had not had that link. Nobody takes from its SRQ for it any more: who posts to it has left, or lost its claim, or
// the queue goes with its guest.
void DirectDesk::leave(DirectLink& link, QueuePair& qp) {
  if (const std::uint32_t taker = std::exchange(link.takers[1 - link.side(qp)], 0); taker != 0) qp.srq->free_takers.push_back(taker);
  qp.core.port.link = nullptr;
  qp.mediated_because = "its connection has ended";
  offer(qp, 0);
  // W3: pairs with W4 in guest_lib/poll.cpp: who finds it finds the offer ended. Its program may never post there any more.
  for (const CompletionQueue* const cq : {qp.send_cq, qp.receive_cq}) std::atomic_ref(cq->shared->offers_ended).store(1, std::memory_order_release);
}

void DirectDesk::dissolve(DirectLink& link) {
  for (QueuePair* end : link.ends) {
    if (end == nullptr) continue;
    leave(link, *end);
  }
  if (link.datagrams) link.claims[1].end();
  link.room->free.push_back(link.index);
  std::erase(orphans_, &link);
  std::erase(taken_inboxes_, &link);
  haunted_.erase(&link);
  links_.erase(&link);
}

Result<control::SetDirectReply> DirectDesk::set(const control::SetDirectRequest& request, const Viewer& viewer) {
  if (fabric_.config.direct != "auto") return Errno{EOPNOTSUPP};
  const bool mediated = request.mediated != 0, one = request.guest != 0;
  if (!one && !viewer.is_known()) return Errno{EPERM};  // it would be said of others
  if (!one && viewer.all) {
    mediated_ = mediated;
    if (!mediated) mediated_tenants_.clear();
  } else if (!one && mediated) {
    mediated_tenants_.insert(viewer.uid);
  } else if (!one) {
    mediated_tenants_.erase(viewer.uid);
  }
  control::SetDirectReply reply{};
  for (auto& [id, guest] : fabric_.guests) {
    if (!viewer.sees(*guest) || (one && id != request.guest)) continue;
    guest->mediated = mediated && one;
    ++reply.guests;
    reply.still_mediated += !mediated && is_mediated(*guest);
  }
  if (one && reply.guests == 0) return Errno{ENOENT};
  look_again();
  return reply;
}

// Its peer's poster is still inside. The link stays until that has left.
void DirectDesk::part_from(QueuePair& qp) {
  DirectLink* const link = qp.core.port.link;
  leave(*link, qp);
  link->ends[link->side(qp)] = nullptr;
  if (std::find(orphans_.begin(), orphans_.end(), link) == orphans_.end()) orphans_.push_back(link);
}

// Who may be direct, or who is in which partition, has changed.
void DirectDesk::look_again() {
  if (fabric_.config.direct != "auto") return;
  for (auto& [qpn, qp] : fabric_.by_qpn)
    if (qp->core.state == QpState::rts || qp->core.port.link != nullptr || (qp->core.type == QpType::ud && qp->core.state == QpState::rtr)) doubtful_.insert(qpn);
}

}  // namespace vrdma::svc
