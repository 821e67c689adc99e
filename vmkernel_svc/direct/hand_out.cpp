// When a connection is given to its posters, and how.
#include <algorithm>

#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/direct/link.hpp"
#include "vmkernel_svc/shard.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::svc {

using engine::QpState;

namespace {

constexpr std::uint32_t rest_turns = 8;             // looks in vain before a link is handed out again, and twice as many …
constexpr std::uint32_t rest_doublings = 6;         // … each time that it came back
constexpr std::uint32_t datagrams_turns = 2;        // likewise of a UD queue pair, idle or not: nobody else has to come to rest with it
constexpr std::uint32_t mapping_returns = 3;        // the first ones, which are to be expected
constexpr std::uint64_t lap_bytes = 4 << 20;        // of large messages
constexpr std::uint64_t take_up_ns = 50'000;        // for a poster to take up what was handed out with work in it
constexpr std::uint64_t boundary_ns = 1'000'000;    // for the other end to come to a message boundary
constexpr std::uint32_t unopened_posts_max = 16;

}  // namespace

// A queue pair that only receives may stay in RTR for ever (perftest's do); that it has received the first message, the service says.
bool DirectDesk::at_rest(const QueuePair& from, const QueuePair& to) const {
  const auto& core = from.core;
  return (to.core.state == QpState::rts || (to.core.state == QpState::rtr && to.core.communication_established)) && !shard_.engine().busy(core) && core.accepted_by == nullptr && core.far == nullptr && !core.send_queue_lost &&
         core.port.job_sequence == 0 && to.core.serves == nullptr && !to.core.inbound.active &&
         (core.type != engine::QpType::rc || to.core.expected_psn == core.send_psn);
}

// A program that keeps its send queue full never lets it rest: a whole lap of the ring without an empty moment says so, or so many bytes.
// Each time that the connection comes back, but for the first times, when memory is mapped, or that it was waited for in vain, makes it
// twice as many.
bool DirectDesk::never_rests(const QueuePair& qp) const {
  DirectLink& link = *qp.core.port.link;
  const int i = link.side(qp);
  const auto& ring = qp.core.send_ring;
  if (ring.empty()) return link.note_rest(i, qp), false;
  const std::uint32_t doublings = std::min(link.returns - std::min(link.returns, mapping_returns) + link.waits_in_vain, rest_doublings);
  return ring.position() - link.rested_at[i] >= ring.slot_count() << doublings || qp.core.counters.moved_bytes() - link.rested_bytes[i] >= lap_bytes << doublings;
}

namespace {

// Whether another queue pair of the CQ is still to be taken up: one at a time is named there.
bool names_another(const QueuePair& qp) {
  const std::uint32_t left = std::atomic_ref(qp.send_cq->shared->left_work).load(std::memory_order_relaxed);
  return left != 0 && left != qp.send_lane + 1;
}

// Whether a request of its guest waits, which may need all of its queue pairs at once: then nothing is given away beside it.
bool is_asked_for(const DirectLink& link, const QueuePair& qp) { return link.datagrams && qp.guest->held_since_ns != 0; }

// Whether the message that the queue pair is at comes to its end by itself, and is one that its poster could carry out.
bool ends_soon(const QueuePair& qp) {
  const engine::Operation& op = qp.core.operation;
  return op.stage == engine::Operation::Stage::moving && op.wait == engine::Operation::Wait::none && !op.copy_pending &&
         op.request.bytes <= direct::message_bytes_max;
}

}  // namespace

DirectDesk::Flood DirectDesk::flood(QueuePair& qp) {
  DirectLink& link = *qp.core.port.link;
  const int i = link.side(qp);
  const bool other_waits = link.waits_since_ns[1 - i] != 0;
  if (qp.core.state != QpState::rts || is_asked_for(link, qp) || !never_rests(qp)) {
    link.waits_since_ns[i] = 0;
    return qp.core.state == QpState::rts && other_waits ? Flood::to_boundary : Flood::none;
  }
  const QueuePair* const other = link.ends[1 - i];
  const bool other_sends = other != nullptr && other->core.state == QpState::rts && !other->core.send_ring.empty();
  if (shard_.engine().busy(qp.core) || names_another(qp) || (other_sends && names_another(*other))) return Flood::to_boundary;
  if (hand_out(qp, true)) return Flood::handed_out;
  // Both ends have to be between two messages at once: this one waits there for the other.
  if (other != nullptr && !other_waits && ends_soon(*other)) {
    const std::uint64_t now = vmci::monotonic_ns();
    if (link.waits_since_ns[i] == 0) link.waits_since_ns[i] = now;
    if (now - link.waits_since_ns[i] < boundary_ns) return Flood::waits;
    ++link.waits_in_vain;
  }
  link.waits_since_ns[i] = 0;
  link.note_rest(i, qp);  // not now: after another lap
  return Flood::none;
}

// Whoever never takes an offer up keeps going through the service.
bool DirectDesk::sends_may_be_given(const DirectLink& link) { return link.unopened_posts <= unopened_posts_max; }

bool DirectDesk::hand_out(QueuePair& qp, bool with_work) {
  DirectLink* const link = qp.core.port.link;
  if (link != nullptr && link->datagrams) return give_datagrams(*link, with_work);
  if (link == nullptr || !link->whole() || !sends_may_be_given(*link)) return false;
  QueuePair *const a = link->ends[0], *const b = link->ends[1];
  if (a == nullptr || b == nullptr || !roomy(*a) || !roomy(*b)) return false;
  const bool a_sends = a->core.state == QpState::rts, b_sends = b->core.state == QpState::rts;
  const auto ready = [&](const QueuePair& from, const QueuePair& to) {
    return from.core.state != QpState::rts || (at_rest(from, to) && (with_work || from.core.send_ring.empty()));
  };
  if ((!a_sends && !b_sends) || !ready(*a, *b) || !ready(*b, *a)) return false;
  for (QueuePair* end : {a, b}) {
    shard_.withdraw(end->core);
    end->watch_sends(true);  // with a fence: who finds the claim taken finds this
  }
  for (int i = 0; i < 2; ++i) {
    if (link->ends[i]->core.state != QpState::rts) continue;
    give(*link, i);
    if (i == 0) VRDMA_CRASH_POINT("direct.service.half_handed_out");
  }
  link->waits_since_ns[0] = link->waits_since_ns[1] = 0;
  link->waits_in_vain = 0;
  // D3: pairs with the fence in the guest's post: a record that its poster found no claim for is seen here, or needs_doorbell there.
  vmci::store_load_fence();
  for (QueuePair* end : {a, b}) give_work(*end, with_work);
  VRDMA_CRASH_POINT("direct.service.handed_out");
  return true;
}

// The direction, at a message boundary, to its poster.
void DirectDesk::give(DirectLink& link, int i) {
  QueuePair *const from = link.ends[i], *const to = link.ends[1 - i];
  direct::Direction& direction = link.claims[i].direction();
  direct::Positions& at = link.seen[i];
  direction.terms = {};
  if (from != nullptr) {
    const auto& core = from->core;
    direction.terms.path_mtu = core.attributes.path_mtu;
    direction.terms.max_rd_atomic = core.attributes.max_rd_atomic;
    direction.terms.qkey = core.attributes.qkey;
    at.send_head = core.send_ring.position();
    at.send_lane = core.send_lane.position();
    at.psn = core.send_psn.value;
    ++from->send_cq->direct_lanes;
  }
  if (to != nullptr) {
    const auto& core = to->core;
    direction.terms.remote_access = core.attributes.access_flags;
    direction.terms.max_dest_rd_atomic = core.attributes.max_dest_rd_atomic;
    if (link.is_inbox(i)) direction.terms.qkey = core.attributes.qkey;
    at.receive_head = core.receive_ring.position();
    if (to->srq != nullptr) {  // it has taken nothing that is not done
      at.receive_head = vmci::RecordTurns::next(to->srq->core.turns.last());
      direction.taking.index = at.receive_head - 1;
    }
    at.receive_lane = core.receive_lane.position();
    ++to->receive_cq->direct_lanes;
  }
  direction.current = 0;
  direction.positions[0] = at;
  link.owned[i] = false;
  watch(link, i, to != nullptr && to->receive_cq->channel != nullptr);
  counters_.handed_out += !link.is_inbox(i);
  link.claims[i].hand_out();
}

// What was in a send queue when its direction was given. After the fence D3.
void DirectDesk::give_work(QueuePair& qp, bool with_work) {
  qp.core.port.wake_ns = 0;  // a timer from before would fetch it back
  if (qp.core.state != QpState::rts || qp.core.send_ring.empty()) return;
  if (!with_work) return shard_.make_runnable(qp.core);
  // Its poster takes it with its next post or poll, or there is none.
  qp.core.port.link->left_work[qp.core.port.link->side(qp)] = true;
  // W1: pairs with W2 in guest_lib/poll.cpp: who finds it finds the claim to be had.
  std::atomic_ref(qp.send_cq->shared->left_work).store(qp.send_lane + 1, std::memory_order_release);
  shard_.set_timer(qp.core, vmci::monotonic_ns() + take_up_ns);
}

void DirectDesk::hand_out(Guest& guest) {
  if (!guest.key_book) return;
  for (auto& [handle, qp] : guest.qps) hand_out(*qp);
}

// Of what was handed out with work in it. Where the poster is inside, or has left nothing, it rings when it leaves something.
bool DirectDesk::was_taken_up(DirectLink& link, int i) {
  QueuePair& qp = *link.ends[i];
  qp.watch_sends(true);  // with a fence: who leaves after we look at the claim finds this
  const direct::Direction& direction = link.claims[i].direction();
  // An event that it could not raise it has rung for.
  const bool owes = std::atomic_ref(const_cast<std::uint32_t&>(direction.claimed_arm)).load(std::memory_order_relaxed) != 0;
  if (!owes && link.claims[i].poster_inside()) return true;
  auto ring = qp.core.send_ring;
  ring.skip_to(recorded(link.claims[i]).send_head);
  if (!owes && ring.empty()) return true;
  qp.watch_sends(false);
  return false;
}

void DirectDesk::forget_left_work(DirectLink& link, int i) {
  if (!std::exchange(link.left_work[i], false) || link.ends[i] == nullptr) return;
  std::uint32_t its = link.ends[i]->send_lane + 1;  // still named, where nobody has polled in vain since
  std::atomic_ref(link.ends[i]->send_cq->shared->left_work).compare_exchange_strong(its, 0, std::memory_order_relaxed);
}

bool DirectDesk::rest(QueuePair& qp, std::uint32_t idle_turns) {
  DirectLink& link = *qp.core.port.link;
  if (!link.datagrams) return idle_turns == rest_turns << std::min(link.returns, rest_doublings) && hand_out(qp);
  if (is_asked_for(link, qp)) return false;
  // Who sends one after the other, and shares the service's processor, has posted the next one at every other look.
  return ++link.turns >= datagrams_turns << std::min(link.returns / 4, rest_doublings) && hand_out(qp);
}

}  // namespace vrdma::svc
