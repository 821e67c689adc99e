#include "vmkernel_svc/direct/direct_desk.hpp"

#include <algorithm>

#include "vmkernel_svc/control/find.hpp"
#include "vmkernel_svc/direct/key_book.hpp"
#include "vmkernel_svc/direct/link.hpp"
#include "vmkernel_svc/direct/stopped.hpp"
#include "vmkernel_svc/shard.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::svc {

using engine::QpState;

namespace {

constexpr std::uint32_t useful_messages = 64;       // so many since it was handed out, and it was worth it
constexpr std::uint64_t grace_ns = 10'000'000;   // for a poster to leave, before it is asked whether it is stopped …
constexpr std::uint64_t stopped_ns = 1'000'000;  // … and so long it has to have been
constexpr std::uint64_t useful_datagrams = 8;       // likewise: of many receivers each is new at first

}  // namespace

DirectDesk::DirectDesk(Shard& shard) : shard_(shard), fabric_(shard.fabric()) {}
DirectDesk::~DirectDesk() = default;

// --- who runs them ----------------------------------------------------------------------------------------------

bool DirectDesk::own(DirectLink& link, int i) {
  if (link.owned[i]) return true;
  if (!link.claims[i].take()) return false;
  // It was revoked, went on, and has given up, or it came to memory that it could not write to: a record that it had taken and could not
  // complete goes back.
  const bool unfinished = !link.cut[i] && (link.revoked[i] || link.claims[i].direction().taking.unfinished != 0);
  if (const QueuePair* const to = link.ends[1 - i]; unfinished && to != nullptr && to->srq != nullptr)
    settle_turn(link, i, recorded(link.claims[i]));
  import(link, i);
  return true;
}

// What `qp` needs of a direction: its sending end belongs to who is inside, its receiving end can be taken from one who stands still.
bool DirectDesk::own_end(DirectLink& link, int i, const QueuePair& qp) {
  return own(link, i) || (link.ends[i] != &qp && cut_off(link, i));
}

// The poster does not leave. Where its process is stopped nobody can say when it will: its claim is revoked. Its threads then look at
// the claim before they write anything more, and what they have written until now is there (vmci_channel/claimed_stores.hpp).
bool DirectDesk::cut_off(DirectLink& link, int i) {
  if (link.cut[i]) return true;
  const std::uint64_t now = vmci::monotonic_ns();
  if (link.refused_since_ns[i] == 0) link.refused_since_ns[i] = now;
  if (now - link.refused_since_ns[i] < grace_ns || now - link.asked_ns[i] < stopped_ns) return false;
  link.asked_ns[i] = now;
  if (link.is_inbox(i) && take_from_ended(link, i)) return true;
  const Poster of_connection{link.room->pids[link.place_of_poster(i)], link.room->pidfds[link.place_of_poster(i)]};
  const Poster* const inside = link.is_inbox(i) ? poster_of(link.claims[i].word()) : &of_connection;
  if (inside == nullptr || !is_stopped(inside->pid) || has_ended(*inside->pidfd) || !link.claims[i].revoke()) return link.stopped_since_ns[i] = 0, false;
  link.revoked[i] = true;
  // Seen again: a process that is about to stop may yet be woken before it leaves its processor.
  if (link.stopped_since_ns[i] == 0) link.stopped_since_ns[i] = now;
  if (now - link.stopped_since_ns[i] < stopped_ns) return false;
  const direct::Positions at = receiver_at(link, i);
  import_receiver(link, i, at);
  link.cut[i] = true;
  watch(link, i, false);
  return true;
}

// Of an inbox. nullptr: of none.
const DirectDesk::Poster* DirectDesk::poster_of(std::uint64_t claim) const {
  const auto found = posters_.find(direct::poster_of(claim));
  return found != posters_.end() ? &found->second : nullptr;
}

// A direction whose poster has ended inside its claim. An inbox's also from one that never was: who writes nonsense there holds nobody up.
bool DirectDesk::take_from_ended(DirectLink& link, int i) {
  if (!link.is_inbox(i)) {
    if (!has_ended(*link.room->pidfds[link.place_of_poster(i)])) return false;
    link.claims[i].seize();
  } else {
    const std::uint64_t claim = link.claims[i].word();
    const Poster* const inside = poster_of(claim);
    if (link.claims[i].is_free(claim) || (inside != nullptr && !has_ended(*inside->pidfd)) || !link.claims[i].seize(claim)) return false;
  }
  recover(link, i);
  return true;
}

void DirectDesk::import(DirectLink& link, int i) {
  // Read once. Positions are only ever used modulo the size of their ring; wrong ones spoil queues of these two guests.
  const direct::Positions at = recorded(link.claims[i]);
  direct::Positions& seen = link.seen[i];
  if (at.sent_messages + at.read_messages + at.atomics - seen.sent_messages - seen.read_messages - seen.atomics >= (link.datagrams ? useful_datagrams : useful_messages))
    link.returns = 0;
  if (QueuePair* const from = link.ends[i]) {
    auto& core = from->core;
    core.send_ring.skip_to(at.send_head);
    core.send_lane.skip_to(at.send_lane);
    core.send_psn = Psn{at.psn & psn_mask};
    from->send_cq->produced += at.send_lane - seen.send_lane;
    --from->send_cq->direct_lanes;
    core.counters.sent_messages += at.sent_messages - seen.sent_messages;
    core.counters.sent_bytes += at.sent_bytes - seen.sent_bytes;
    core.counters.read_messages += at.read_messages - seen.read_messages;
    core.counters.read_bytes += at.read_bytes - seen.read_bytes;
    core.counters.atomics += at.atomics - seen.atomics;
  }
  if (!link.cut[i]) {
    import_receiver(link, i, at);
  } else if (QueuePair* const to = link.ends[1 - i]) {
    // Of a message that had arrived before, the rest.
    if (to->core.type == engine::QpType::rc) to->core.expected_psn = Psn{at.psn & psn_mask};
    to->core.counters.received_messages += at.received_messages - seen.received_messages;
    to->core.counters.received_bytes += at.received_bytes - seen.received_bytes;
  }
  seen = at;
  if (link.ends[i] != nullptr) link.note_rest(i, *link.ends[i]);
  forget_left_work(link, i);
  link.owned[i] = true;
  if (i == 0) link.turns = 0;
  link.claims[i].direction().claimed_arm = 0;
  link.claims[i].direction().taking.unfinished = 0;  // also by one who was cut off, and says so only now
  watch(link, i, false);
  link.cut[i] = link.revoked[i] = false;
  link.refused_since_ns[i] = link.stopped_since_ns[i] = 0;
}

void DirectDesk::import_receiver(DirectLink& link, int i, const direct::Positions& at) {
  QueuePair* const to = link.ends[1 - i];
  if (to == nullptr) return;
  direct::Positions& seen = link.seen[i];
  auto& core = to->core;
  if (to->srq == nullptr) core.receive_ring.skip_to(at.receive_head);
  core.receive_lane.skip_to(at.receive_lane);
  if (core.type == engine::QpType::rc) core.expected_psn = Psn{at.psn & psn_mask};
  to->receive_cq->produced += at.receive_lane - seen.receive_lane;
  --to->receive_cq->direct_lanes;
  if (link.revoked[i]) to->receive_cq->ready.set(to->receive_lane);  // it may not have been told
  core.counters.received_messages += at.received_messages - seen.received_messages;
  core.counters.received_bytes += at.received_bytes - seen.received_bytes;
  seen.receive_lane = at.receive_lane;
  seen.received_messages = at.received_messages;
  seen.received_bytes = at.received_bytes;
  report(link, i, *to);
}

// Where the receiving end stands: at the poster's last record. At the receiver the completion is the commit point: where one more was
// written the message has arrived and its receive WQE is used, else it has not been taken.
direct::Positions DirectDesk::receiver_at(DirectLink& link, int i) {
  direct::Positions at = recorded(link.claims[i]);
  const QueuePair* const to = link.ends[1 - i];
  if (to == nullptr) return at;
  const vmci::LaneReader lane(to->receive_view.consume_completions(), to->core.receive_lane.entry_count(), at.receive_lane);
  const bool arrived = lane.next() != nullptr;
  if (to->srq != nullptr && !arrived) settle_turn(link, i, at);
  if (!arrived) return at;
  at.receive_lane += 1;
  at.receive_head += to->core.receive_record_slots;
  return at;
}

// A record of the shared receive queue that the poster has named: where it is its own, and it has not completed it, it goes back.
void DirectDesk::settle_turn(DirectLink& link, int i, const direct::Positions& at) {
  QueuePair& to = *link.ends[1 - i];
  direct::Taking& taking = link.claims[i].direction().taking;
  // G4: pairs with G3 in DirectPorts::take_turn.
  const std::uint32_t index = std::atomic_ref(taking.index).load(std::memory_order_acquire);
  if (index + 1 == at.receive_head || !to.srq->core.turns.took(link.takers[i], index)) return;
  shard_.engine().give_back(to.core, taking.wr_id, taking.buffer);
}

// The poster's process has ended inside the claim, which was seized. Of its own queues nothing matters any more.
void DirectDesk::recover(DirectLink& link, int i) {
  if (!link.cut[i]) recorded(link.claims[i]) = receiver_at(link, i);
  link.revoked[i] = true;
  import(link, i);
}

bool DirectDesk::take_back(QueuePair& qp) {
  DirectLink* const link = qp.core.port.link;
  if (link == nullptr) return true;
  const bool first = own_end(*link, 0, qp);
  VRDMA_CRASH_POINT("direct.service.half_taken_back");
  return own_end(*link, 1, qp) && first;
}

bool DirectDesk::take_back(CompletionQueue& cq) {
  bool all = true;
  for (QueuePair* user : cq.users) all &= take_back(*user);
  return all;
}

bool DirectDesk::take_back(Guest& guest) {
  if (!guest.key_book) return true;
  bool all = true;
  for (auto& [handle, qp] : guest.qps) all &= take_back(*qp);
  return all;
}

bool DirectDesk::may_run(QueuePair& qp) {
  DirectLink& link = *qp.core.port.link;
  const int i = link.side(qp);
  // Whoever sends datagrams needs no inbox of its own for it.
  const bool sends_alone = link.datagrams && qp.core.state != QpState::err;
  if (link.datagrams && qp.core.state == QpState::rtr) return qp.watch_sends(true), shard_.withdraw(qp.core), false;
  if (link.owned[i] && (sends_alone || link.owned[1 - i])) return true;
  const bool left_work = link.left_work[i];
  if (left_work && qp.core.state == QpState::rts) {
    if (qp.core.port.wake_ns != 0) {  // whoever rings before its time is looked at then
      qp.watch_sends(true);
      return shard_.withdraw(qp.core), false;
    }
    forget_left_work(link, i);
    if (was_taken_up(link, i)) return shard_.withdraw(qp.core), false;
  }
  const bool had = link.owned[i];
  const bool mine = own(link, i);
  const bool other = sends_alone || (link.datagrams ? take_inbox(qp) : qp.core.state == QpState::rts ? own(link, 1 - i) : own_end(link, 1 - i, qp));
  if (!had && mine && (!link.datagrams || !qp.core.send_ring.empty())) {
    ++link.returns;
    ++counters_.returned;
    if (!link.opened[i] && !left_work) ++link.unopened_posts;  // who only did not come in time may yet open it
  }
  // A poster at the other end that is inside will leave before its next message; what this queue pair gets of it came before. But to
  // flush, the receive queue is needed, too.
  if (mine && (other || qp.core.state == QpState::rts)) return true;
  shard_.withdraw(qp.core);
  qp.watch_sends(true);
  held_back_.insert(qp.core.qpn.value);
  return false;
}

bool DirectDesk::settle() {
  bool worked = false;
  for (const std::uint32_t qpn : std::exchange(doubtful_, {})) {
    const auto found = fabric_.by_qpn.find(qpn);
    if (found == fabric_.by_qpn.end()) continue;
    if (take_back(*found->second)) worked = true, consider(*found->second);
    else doubtful_.insert(qpn);
  }
  for (DirectLink* const link : std::vector(orphans_)) {
    for (int side = 0; side < 2; ++side)
      if (!own(*link, side)) take_from_ended(*link, side);
    if (!link->whole()) continue;
    for (QueuePair* end : link->ends)
      if (end != nullptr) shard_.make_runnable(end->core);
    dissolve(*link);
    worked = true;
  }
  for (DirectLink* const link : std::vector(haunted_.begin(), haunted_.end())) worked |= settle_inbox(*link);
  for (const std::uint32_t qpn : std::exchange(held_back_, {})) {
    const auto found = fabric_.by_qpn.find(qpn);
    if (found == fabric_.by_qpn.end()) continue;
    if (found->second->core.port.link != nullptr && !may_run(*found->second)) continue;
    shard_.make_runnable(found->second->core);
    worked = true;
  }
  return worked;
}

// --- ends -------------------------------------------------------------------------------------------------------

void DirectDesk::forget(QueuePair& qp) {
  DirectLink* const link = qp.core.port.link;
  if (link == nullptr) return;
  take_back(qp);
  if (link->whole()) return dissolve(*link);
  part_from(qp);
}

void DirectDesk::forget(Guest& guest) {
  forget_poster(guest);
  if (guest.key_book) --guest.tenant->descriptors;
  for (auto room = rooms_.begin(); room != rooms_.end();) {
    const bool its = room->first.first == guest.id.value || room->first.second == guest.id.value;
    if (its) --guest.tenant->descriptors;
    room = its ? rooms_.erase(room) : std::next(room);
  }
  const auto its = [&](const auto& pair) { return pair.first.first == guest.id.value || pair.first.second == guest.id.value; };
  std::erase_if(apart_, its);
  std::erase_if(together_, its);
  lent_.erase(guest.id.value);
}

// --- memory ---------------------------------------------------------------------------------------------------------

bool DirectDesk::is_lent(const Guest& guest, std::uint32_t backing) const {
  const auto lent = lent_.find(guest.id.value);
  return lent != lent_.end() && (lent->second.all || lent->second.backings.contains(backing));
}
bool DirectDesk::has_lent_all(const Guest& guest) const {
  const auto lent = lent_.find(guest.id.value);
  return lent != lent_.end() && lent->second.all;
}
void DirectDesk::registered(Guest& guest, const Region& region) {
  if (guest.key_book) guest.key_book->add(guest, region);
}
void DirectDesk::deregistering(Guest& guest, const Region& region) {
  if (guest.key_book) guest.key_book->remove(region.key);
}

// Not the window: its owner gives back the pages themselves, and what is registered next lies in it again.
void DirectDesk::released(Guest& guest, const std::vector<Piece>& pieces) {
  if (!guest.key_book) return;
  std::uint32_t last = control::backing_process;
  for (const Piece& piece : pieces) {
    if (piece.host == nullptr || piece.backing == guest.window_backing || piece.backing == std::exchange(last, piece.backing)) continue;
    const auto backing = guest.backings.find(piece.backing);
    if (backing != guest.backings.end() && !backing->second.in_use() && is_lent(guest, piece.backing)) guest.key_book->let_go(piece.backing);
  }
}

// --- to be seen -------------------------------------------------------------------------------------------------

std::string DirectDesk::mode(const QueuePair& qp) const {
  const DirectLink* const link = qp.core.port.link;
  return link != nullptr && !link->whole() ? "direct" : "mediated";
}

engine::QpCounters DirectDesk::counters(const QueuePair& qp) const {
  engine::QpCounters sum = qp.core.counters;
  const DirectLink* const link = qp.core.port.link;
  if (link == nullptr) return sum;
  const int i = link->side(qp);
  const auto since = [&](int side, auto member) {
    if (link->owned[side]) return std::uint64_t{0};
    return std::atomic_ref(recorded(link->claims[side]).*member).load(std::memory_order_relaxed) - link->seen[side].*member;
  };
  sum.sent_messages += since(i, &direct::Positions::sent_messages);
  sum.sent_bytes += since(i, &direct::Positions::sent_bytes);
  sum.read_messages += since(i, &direct::Positions::read_messages);
  sum.read_bytes += since(i, &direct::Positions::read_bytes);
  sum.atomics += since(i, &direct::Positions::atomics);
  sum.received_messages += since(1 - i, &direct::Positions::received_messages);
  sum.received_bytes += since(1 - i, &direct::Positions::received_bytes);
  return sum;
}

// Completions written there, by the posters of what is handed out, too.
std::uint32_t DirectDesk::produced(const CompletionQueue& cq) const {
  std::uint32_t sum = cq.produced;
  if (cq.direct_lanes == 0) return sum;
  const auto since = [](const DirectLink& link, int side, auto member) {
    if (link.owned[side]) return std::uint32_t{0};
    return std::atomic_ref(recorded(link.claims[side]).*member).load(std::memory_order_relaxed) - link.seen[side].*member;
  };
  std::vector<QueuePair*> users = cq.users;  // with those that complete here in both directions once
  std::sort(users.begin(), users.end());
  users.erase(std::unique(users.begin(), users.end()), users.end());
  for (const QueuePair* const qp : users) {
    const DirectLink* const link = qp->core.port.link;
    if (link == nullptr) continue;
    const int i = link->side(*qp);
    if (qp->send_cq == &cq) sum += since(*link, i, &direct::Positions::send_lane);
    if (qp->receive_cq == &cq) sum += since(*link, 1 - i, &direct::Positions::receive_lane);
  }
  return sum;
}

}  // namespace vrdma::svc
