// ibv_poll_cq and the lanes behind it: from completion entries in shared memory to ibv_wc.
//
// Hot lanes are looked at directly; the others announce themselves in the CQ's bitmap. The service skips the bitmap for lanes
// that it sees in CqShared::hot, hence the promotion protocol in promote(). A call never sleeps: when there is nothing, it
// carries out what the service has left in a send queue (take_up), or makes one step of the adaptive wait, and looks once more.
#include "guest_lib/objects.hpp"

#include <sched.h>

#include <algorithm>
#include <new>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/backoff.hpp"
#include "vmci_channel/ready_bitmap.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

static_assert(IBV_WC_GENERAL_ERR == int(WcStatus::general_err) && IBV_WC_RETRY_EXC_ERR == int(WcStatus::retry_exc_err) &&
              IBV_WC_REM_ABORT_ERR == int(WcStatus::rem_abort_err) && IBV_WC_FETCH_ADD == int(WcOpcode::fetch_add) &&
              IBV_WC_RECV_RDMA_WITH_IMM == int(WcOpcode::recv_rdma_with_imm) && IBV_WC_GRH == int(wc_grh) &&
              IBV_WC_WITH_IMM == int(wc_with_imm));

namespace {

constexpr std::uint32_t polls_between_fair_turns = 16;
constexpr std::uint32_t visits_before_promotion = 16;

// The wait of each polling thread. Zero-initialised storage, so that the fast path needs no thread-local guard.
struct PollWait {
  bool made;
  alignas(vmci::Backoff) std::byte storage[sizeof(vmci::Backoff)];

  void idle() {
    if (!made) {
      new (storage) vmci::Backoff;
      made = true;
    }
    reinterpret_cast<vmci::Backoff*>(storage)->idle();
  }
  void reset() {
    if (made) reinterpret_cast<vmci::Backoff*>(storage)->reset();
  }
};
[[gnu::tls_model("initial-exec")]] constinit thread_local PollWait poll_wait{};

void convert(const Cqe& from, std::uint32_t qpn, ibv_wc& to) {
  const CqeState state = unpack_cqe_state(from.state);
  const bool success = state.status == WcStatus::success;
  to.wr_id = from.wr_id;
  to.status = static_cast<ibv_wc_status>(state.status);
  to.opcode = static_cast<ibv_wc_opcode>(state.opcode);
  to.vendor_err = success ? 0 : from.imm_data;
  to.byte_len = from.byte_len;
  to.imm_data = from.imm_data;
  to.qp_num = qpn != 0 ? qpn : from.src_qp;
  to.src_qp = from.src_qp;
  to.wc_flags = state.flags & ~static_cast<unsigned>(wc_solicited);
  to.pkey_index = 0;
  to.slid = from.slid;
  to.sl = from.sl;
  to.dlid_path_bits = 0;
}

// `got` entries were taken from the lane, the last with this queue position.
void account(Lane& lane, int got, std::uint32_t queue_position) {
  if (got == 0) return;
  VRDMA_CRASH_POINT("guest.poll.before_consumed");
  if (lane.send != nullptr) {
    lane.send->completed_up_to(queue_position);
  } else {
    lane.receive->completed(static_cast<std::uint32_t>(got));
  }
  // L3: pairs with the writer's acquire when it asks whether the lane has room.
  std::atomic_ref(lane.header->creator.consumed).store(lane.reader.position(), std::memory_order_release);
  VRDMA_CRASH_POINT("guest.poll.lane_consumed");
}

bool flushed(const Cqe& entry) { return unpack_cqe_state(entry.state).status == WcStatus::wr_flush_err; }

// The other direction of the queue pair, on the same CQ, where it holds what was there first, as in the one queue of an adapter. A flush comes
// after the error that caused it. A message that was received may be the peer's answer to one that was sent: the completion of
// that one lies there since before the answer was written, and whoever has seen the answer sees it.
Lane* comes_first(const Lane& lane, const Cqe& entry) {
  if (lane.send != nullptr && !flushed(entry)) [[likely]] return nullptr;
  Qp& qp = *lane.qp;
  if (qp.verbs.qp_base.send_cq != qp.verbs.qp_base.recv_cq) return nullptr;
  Lane& other = lane.send != nullptr ? qp.receive_lane : qp.send_lane;
  if (&other == &lane || other.closed || other.header == nullptr) return nullptr;
  const Cqe* const earlier = other.reader.next();
  return earlier != nullptr && !flushed(*earlier) ? &other : nullptr;
}

struct Taken {
  int entries = 0;
  std::uint32_t queue_position = 0;  // of the last one
};

void take(Lane& lane, const Cqe& entry, ibv_wc& wc, Taken& taken) {
  convert(entry, lane.qpn, wc);
  if (lane.timed != nullptr && &wc == &lane.timed->current) [[unlikely]] lane.timed->current_time_ns = time_of(entry, lane.send != nullptr, lane.timed->clock_ns());
  taken.queue_position = entry.queue_position;
  ++taken.entries;
  lane.reader.pop();
}

int drain_before_flushes(Lane& lane, int room, ibv_wc* wc) {
  Taken taken;
  while (taken.entries < room) {
    const Cqe* const entry = lane.reader.next();
    if (entry == nullptr || flushed(*entry)) break;
    take(lane, *entry, wc[taken.entries], taken);
  }
  account(lane, taken.entries, taken.queue_position);
  return taken.entries;
}

int drain(Lane& lane, int room, ibv_wc* wc) {
  int got = 0;
  Taken taken;
  if (lane.closed) [[unlikely]] return 0;
  while (got < room) {
    const Cqe* const entry = lane.reader.next();
    if (entry == nullptr) break;
    if (Lane* const first = comes_first(lane, *entry)) {
      account(lane, taken.entries, taken.queue_position);
      taken = {};
      got += drain_before_flushes(*first, room - got, wc + got);
      continue;
    }
    take(lane, *entry, wc[got], taken);
    ++got;
  }
  account(lane, taken.entries, taken.queue_position);
  return got;
}

void append_pending(Cq& cq, Lane& lane) {
  if (lane.pending) return;
  lane.pending = true;
  lane.next_pending = nullptr;
  (cq.pending_last != nullptr ? cq.pending_last->next_pending : cq.pending_first) = &lane;
  cq.pending_last = &lane;
}

Lane* take_pending(Cq& cq) {
  Lane* lane = cq.pending_first;
  if (lane == nullptr) return nullptr;
  cq.pending_first = lane->next_pending;
  if (cq.pending_first == nullptr) cq.pending_last = nullptr;
  lane->pending = false;
  return lane;
}

void collect_ready(Cq& cq) {
  vmci::ReadyBitmap ready(&cq.shared->ready);
  if (!ready.any()) return;
  ready.take([&](std::uint32_t number) {
    if (number < cq.lanes.size() && cq.lanes[number] != nullptr) append_pending(cq, *cq.lanes[number]);
  });
}

// The lane comes to hot[index]; the one that was there goes back to the bitmap.
void promote(Cq& cq, Lane& lane, std::uint32_t index) {
  Lane* replaced = cq.hot[index];
  cq.hot[index] = &lane;
  lane.hot_index = index;
  lane.visits = 0;
  std::ranges::fill(cq.hot_hits, 0);
  std::atomic_ref(cq.shared->hot[index]).store(lane.number, std::memory_order_relaxed);
  // H1: pairs with the service's fence between a completion and its look at hot[]: what it wrote while it still saw the
  // replaced lane there has no bit, but is visible from here on.
  vmci::store_load_fence();
  if (replaced != nullptr) {
    replaced->hot_index = Lane::not_hot;
    append_pending(cq, *replaced);
  }
}

void consider_promotion(Cq& cq, Lane& lane) {
  std::uint32_t coldest = 0;
  for (std::uint32_t i = 0; i < control::hot_lanes; ++i) {
    if (cq.hot[i] == nullptr) return promote(cq, lane, i);
    if (cq.hot_hits[i] < cq.hot_hits[coldest]) coldest = i;
  }
  if (++lane.visits < visits_before_promotion) return;
  if (cq.hot_hits[coldest] < visits_before_promotion / 2) return promote(cq, lane, coldest);
  lane.visits = 0;
  for (auto& hits : cq.hot_hits) hits /= 2;
}

enum class Served { leaves, lines_up_again };
int poll_pending(Cq& cq, int room, ibv_wc* wc, Served served) {
  collect_ready(cq);
  int got = 0;
  // Lanes that promotion puts back are looked at once, hence not "until the list is empty" with a full array.
  while (got < room) {
    Lane* lane = take_pending(cq);
    if (lane == nullptr) break;
    const int entries = drain(*lane, room - got, wc + got);
    got += entries;
    if (served == Served::lines_up_again ? entries != 0 : got == room && lane->reader.next() != nullptr) append_pending(cq, *lane);
    if (entries == 0) continue;
    if (lane->hot_index != Lane::not_hot) ++cq.hot_hits[lane->hot_index];
    else consider_promotion(cq, *lane);
  }
  return got;
}

// More lanes hold something than the program takes at once: all wait in one row, and go to its end until they hold nothing. Programs count
// on it that what they post to many queue pairs completes evenly, as it does in an adapter's queue: `ib_write_bw -q 64 -t 16 -n 1000` waits
// for ever where one of them is two batches late.
int poll_in_row(Cq& cq, int room, ibv_wc* wc) {
  for (Lane* const lane : cq.hot)
    if (lane != nullptr && lane->reader.next() != nullptr) append_pending(cq, *lane);
  return poll_pending(cq, room, wc, Served::lines_up_again);
}

int poll_hot(Cq& cq, int room, ibv_wc* wc) {
  int got = 0;
  const std::uint32_t first = cq.polls;
  for (std::uint32_t i = 0; i < control::hot_lanes && got < room; ++i) {
    const std::uint32_t index = (first + i) % control::hot_lanes;
    Lane* lane = cq.hot[index];
    if (lane == nullptr) continue;
    const int entries = drain(*lane, room - got, wc + got);
    cq.hot_hits[index] += entries != 0;
    got += entries;
  }
  return got;
}

// Whether something that was announced, or lies in a hot lane, is still there. What is in another lane and not announced yet is
// going to be. Neither a ready bit nor a place in the list says that a lane holds anything.
bool more_to_take(Cq& cq) {
  if (std::ranges::any_of(cq.hot, [](const Lane* lane) { return lane != nullptr && lane->reader.next() != nullptr; })) return true;
  collect_ready(cq);
  for (const Lane* lane = cq.pending_first; lane != nullptr; lane = lane->next_pending)
    if (lane->reader.next() != nullptr) return true;
  return false;
}

int look(Cq& cq, int room, ibv_wc* wc) {
  int got;
  ++cq.polls;
  if (cq.pending_first != nullptr) {
    got = poll_in_row(cq, room, wc);
  } else if (cq.polls % polls_between_fair_turns == 0) {
    got = poll_pending(cq, room, wc, Served::leaves);
    if (got < room) got += poll_hot(cq, room - got, wc + got);
  } else {
    got = poll_hot(cq, room, wc);
    if (got < room) got += poll_pending(cq, room - got, wc + got, Served::leaves);
  }
  if (cq.verbs.channel != nullptr) {
    cq.polled.store(true, std::memory_order_relaxed);
    cq.left_off.store(got == room && more_to_take(cq), std::memory_order_relaxed);
  }
  if (got != 0) {
    cq.consumed += static_cast<std::uint32_t>(got);
    std::atomic_ref(cq.shared->consumed).store(cq.consumed, std::memory_order_release);
    VRDMA_CRASH_POINT("guest.poll.consumed");
  }
  return got;
}

// The service waits in another way for a program that shares its processor.
void say_where(Cq& cq) {
  const auto poller = static_cast<std::uint32_t>(::sched_getcpu()) + 1;
  const auto said = std::atomic_ref(cq.shared->poller);
  if (said.load(std::memory_order_relaxed) != poller) said.store(poller, std::memory_order_relaxed);
}

// The service is gone and its lanes are empty: what is outstanding is flushed here.
int flush(Cq& cq, int room, ibv_wc* wc) {
  int got = 0;
  for (Lane* lane : cq.lanes) {
    if (lane == nullptr || (lane->receive != nullptr && lane->qp->base().srq != nullptr)) continue;
    std::lock_guard guard(lane->send != nullptr ? lane->qp->send_lock : lane->qp->receive_lock);
    // Its lanes were empty; what a peer in direct mode was writing there as the service went is too late.
    lane->closed = true;
    for (std::uint64_t wr_id = 0; got < room; ++got) {
      if (!(lane->send != nullptr ? lane->send->take_oldest(wr_id) : lane->receive->take_oldest(wr_id))) break;
      wc[got] = {};
      wc[got].wr_id = wr_id;
      wc[got].status = IBV_WC_WR_FLUSH_ERR;
      wc[got].opcode = lane->send != nullptr ? IBV_WC_SEND : IBV_WC_RECV;
      wc[got].qp_num = lane->qpn;
    }
  }
  return got;
}

// The service has handed out a send queue that never was empty (DirectDesk::hand_out), whose program may post nothing until something
// of it is done.
void take_up(Cq& cq) {
  // W2: pairs with W1 there.
  const std::uint32_t lane_after = std::atomic_ref(cq.shared->left_work).exchange(0, std::memory_order_acquire);
  Qp* qp = nullptr;
  {
    std::lock_guard guard(cq.lock);
    const Lane* const lane = lane_after - 1 < cq.lanes.size() ? cq.lanes[lane_after - 1] : nullptr;
    // Whoever holds the lock mostly posts, and sees to it; else the service does, before long.
    if (lane != nullptr && lane->send != nullptr && lane->qp->send_lock.try_lock()) qp = lane->qp;
    // Under the lock, so that who destroys the queue pair sees it once the lane is gone.
    if (qp != nullptr) qp->taken_up.store(true, std::memory_order_relaxed);
  }
  if (qp == nullptr) return;
  struct Visit {
    Qp& qp;
    ~Visit() { qp.taken_up.store(false, std::memory_order_release); }  // P2: pairs with take_lanes() in qp.cpp
  } visit{*qp};
  std::lock_guard sends(qp->send_lock, std::adopt_lock);
  run_send_queue(*qp);
}

}  // namespace

int poll_cq(ibv_cq* verbs, int count, ibv_wc* wc) {
  Cq& cq = Cq::of(verbs);
  if (cq.liveness->inherited()) [[unlikely]] {
    errno = EIO;
    return -1;
  }
  if (count <= 0) return count == 0 ? 0 : -1;
  cq.lock.lock();
  int got = look(cq, count, wc);
  cq.lock.unlock();
  if (got != 0) {
    poll_wait.reset();
    return got;
  }
  if (std::atomic_ref(cq.shared->left_work).load(std::memory_order_relaxed) != 0) [[unlikely]]
    take_up(cq);
  else
    poll_wait.idle();
  say_where(cq);
  const bool gone = cq.liveness->gone();
  cq.lock.lock();
  got = look(cq, count, wc);
  if (got == 0 && gone) [[unlikely]]
    got = flush(cq, count, wc);
  cq.lock.unlock();
  if (got != 0) poll_wait.reset();
  return got;
}

int poll_cq_at_once(ibv_cq* verbs, int count, ibv_wc* wc) {
  Cq& cq = Cq::of(verbs);
  if (cq.liveness->inherited()) [[unlikely]] {
    errno = EIO;
    return -1;
  }
  std::lock_guard guard(cq.lock);
  const int got = look(cq, count, wc);
  if (got != 0) poll_wait.reset();
  return got;
}

int req_notify_cq(ibv_cq* verbs, int solicited_only) {
  Cq& cq = Cq::of(verbs);
  if (cq.liveness->inherited()) return EIO;
  const auto wanted = solicited_only != 0 ? control::arm_solicited : control::arm_next;
  const auto arm = std::atomic_ref(cq.shared->arm);
  std::uint32_t now = arm.load(std::memory_order_relaxed);
  do {
    // Armed for any completion already: a wish for less changes nothing.
    if ((now & 3) == control::arm_next) break;
  } while (!arm.compare_exchange_weak(now, (((now >> 2) + 1) << 2) | wanted, std::memory_order_relaxed));
  VRDMA_CRASH_POINT("guest.arm.armed");
  // A1: pairs with the fence between a completion and the look at `arm` of who completes, the service or a poster in direct mode
  // (DirectConnection::tell): one that it put before seeing the arm is found by the application's next poll.
  vmci::store_load_fence();
  if (cq.verbs.channel != nullptr && wanted == control::arm_next && cq.polled.load(std::memory_order_relaxed)) {
    cq.lock.lock();
    const bool missed = more_to_take(cq);
    cq.lock.unlock();
    if (missed) raise_missed(cq);
  }
  if (cq.liveness->gone()) [[unlikely]]
    watch_after_death(cq);
  return 0;
}

void Cq::add_lane(Lane& lane) {
  std::lock_guard guard(lock);
  if (lanes.size() <= lane.number) lanes.resize(lane.number + 1);
  lanes[lane.number] = &lane;
  lane.timed = timed ? this : nullptr;
  ++lane_count;
  for (std::uint32_t i = 0; i < control::hot_lanes; ++i) {
    if (hot[i] != nullptr) continue;
    promote(*this, lane, i);
    break;
  }
  append_pending(*this, lane);  // in case it completed something before it got here
}

void Cq::drop_entries(Lane& lane) {
  std::lock_guard guard(lock);
  std::uint32_t dropped = 0;
  for (; lane.reader.next() != nullptr && dropped < lane.reader.entry_count(); ++dropped) lane.reader.pop();
  if (dropped != 0) {
    if (lane.receive != nullptr && lane.qp->base().srq != nullptr) lane.receive->completed(dropped);
    std::atomic_ref(lane.header->creator.consumed).store(lane.reader.position(), std::memory_order_release);
    consumed += dropped;
    std::atomic_ref(shared->consumed).store(consumed, std::memory_order_release);
  }
}

void Cq::remove_lane(Lane& lane) {
  drop_entries(lane);
  std::lock_guard guard(lock);
  lanes[lane.number] = nullptr;
  --lane_count;
  if (lane.hot_index != Lane::not_hot) {
    hot[lane.hot_index] = nullptr;
    std::atomic_ref(shared->hot[lane.hot_index]).store(control::no_lane, std::memory_order_relaxed);
    lane.hot_index = Lane::not_hot;
  }
  if (lane.pending) {
    Lane* before = nullptr;
    for (Lane* other = pending_first; other != &lane; other = other->next_pending) before = other;
    (before != nullptr ? before->next_pending : pending_first) = lane.next_pending;
    if (pending_last == &lane) pending_last = before;
    lane.pending = false;
  }
}

}  // namespace vrdma::guest
