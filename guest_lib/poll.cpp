// ibv_poll_cq: from completion entries in the lanes of queue pairs (lanes.hpp) to ibv_wc.
//
// What the two lanes of a queue pair hold is taken in the order in which it was written, and so is what those of several hold
// (poll_in_order.cpp). A call never sleeps: when there is nothing, it carries out what the service has left in a send queue (take_up), lets
// go of peers (let_go_of_ended), or makes one step of the adaptive wait, one in a round of queues that a thread polls by turns, and looks once more.
#include "guest_lib/lanes.hpp"

#include <sched.h>

#include <algorithm>
#include <new>
#include <utility>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/backoff.hpp"
#include "vmci_channel/stamp.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

namespace {

// The wait of each polling thread. Zero-initialised storage, so that the fast path needs no thread-local guard.
struct PollWait {
  bool made;
  std::uint32_t passed;  // empty queues since the last step
  const Cq* round;       // the queue of that step
  const Cq* last;        // the empty queue before
  alignas(vmci::Backoff) std::byte storage[sizeof(vmci::Backoff)];

  // One step for all queues that the thread polls by turns: what it waits for may be in the next one. False: that was not this one's.
  bool idle(const Cq& cq) {
    constexpr std::uint32_t passed_max = 128;  // one that is not polled any more is waited for no longer
    // Who looks at one again and again waits for that one: `while (ibv_poll_cq(send_cq) == 0);` and then the same for the other.
    const bool by_turns = std::exchange(last, &cq) != &cq;
    if (by_turns && round != nullptr && round != &cq && ++passed < passed_max) return false;
    round = &cq;
    passed = 0;
    if (!made) {
      new (storage) vmci::Backoff;
      made = true;
    }
    reinterpret_cast<vmci::Backoff*>(storage)->idle();
    return true;
  }
  void reset() {
    last = nullptr;
    if (made) reinterpret_cast<vmci::Backoff*>(storage)->reset();
  }
};
[[gnu::tls_model("initial-exec")]] constinit thread_local PollWait poll_wait{};

int drain(Lane& lane, int room, ibv_wc* wc) {
  Taken taken;
  while (taken.entries < room) {
    const Cqe* const entry = lane.reader.next();
    if (entry == nullptr) break;
    take(lane, *entry, wc[taken.entries], taken);
  }
  give_back(lane, taken);
  return taken.entries;
}

bool flushed(const Cqe& entry) { return unpack_cqe_state(entry.state).status == WcStatus::wr_flush_err; }

// Of the heads of both lanes, by their stamps. What has none was written before the queue pair posted its first receive, or by somebody who knows
// none. Without, and where they may be older than stamps can tell, what was sent comes first, as it is before the answer to it; what is flushed last.
bool is_earlier(Cq& cq, const Lane& lane, const Cqe& entry, const Lane& other_lane, const Cqe& other) {
  const bool stamped = has_stamp(cq, entry), other_stamped = has_stamp(cq, other);
  if (stamped != other_stamped) return other_stamped;
  const std::uint64_t now = stamped ? stamp_for(cq) : 0, latest = now + stamps_ahead_max;
  const std::uint64_t emptied = cq.emptied.load(std::memory_order_relaxed);
  if (!stamped || static_cast<std::int64_t>(latest - emptied) >= std::int64_t{1} << cqe_stamp_bits) {
    if (stamped) cq.emptied.store(now, std::memory_order_relaxed);  // once: a receive is not to wait behind sends that go on completing
    return flushed(entry) != flushed(other) ? flushed(other) : lane.send != nullptr;
  }
  const std::uint64_t time = time_of_stamp(stamp_of(entry, lane.send != nullptr), latest);
  const std::uint64_t other_time = time_of_stamp(stamp_of(other, other_lane.send != nullptr), latest);
  const bool earlier = time < other_time;
  // All that is left is younger than the one that is taken now.
  cq.emptied.store(std::max(emptied, earlier ? time : other_time), std::memory_order_relaxed);
  return earlier;
}

// Both directions of the only queue pair.
int drain_both(Cq& cq, Lane& first, Lane& second, int room, ibv_wc* wc) {
  int got = 0;
  Taken of_first, of_second;
  for (; got < room; ++got) {
    const Cqe* entry = first.reader.next();
    const Cqe* const other = second.reader.next();
    if (other == nullptr) [[likely]] {
      if (entry == nullptr) break;
    } else {
      if (entry == nullptr) entry = first.reader.next();  // it may have got one before the other's was written
      if (entry == nullptr || is_earlier(cq, second, *other, first, *entry)) {
        take(second, *other, wc[got], of_second);
        continue;
      }
    }
    take(first, *entry, wc[got], of_first);
  }
  give_back(first, of_first);
  give_back(second, of_second);
  if (got == 0 && vmci::wants_stamps(*cq.shared)) cq.emptied.store(stamp_for(cq), std::memory_order_relaxed);
  return got;
}

// Its lanes are in the first two places.
int poll_one_queue_pair(Cq& cq, int room, ibv_wc* wc) {
  Lane* const first = cq.hot[0];
  Lane* const second = cq.hot[1];
  if (second == nullptr) return first != nullptr ? drain(*first, room, wc) : 0;
  return first != nullptr ? drain_both(cq, *first, *second, room, wc) : drain(*second, room, wc);
}

// What is in a lane that is not hot and not announced yet is going to be.
bool more_to_take(Cq& cq) {
  if (cq.in_order) return holds_more_in_order(cq);
  for (const Lane* const lane : cq.hot)
    if (lane != nullptr && lane->reader.next() != nullptr) return true;
  return false;
}

// Of the only queue pair. No more than there is room for: a queue with less than its receives could bring is overrun by who is not at the heels.
std::uint32_t receives_left(const Cq& cq) {
  for (const Lane* const lane : {cq.hot[0], cq.hot[1]})
    if (lane != nullptr && lane->receive != nullptr) return std::min(lane->receive->outstanding(), static_cast<std::uint32_t>(cq.verbs.cqe));
  return 0;
}

int look(Cq& cq, int room, ibv_wc* wc) {
  const int got = cq.in_order ? poll_in_order(cq, room, wc) : poll_one_queue_pair(cq, room, wc);
  if (cq.verbs.channel != nullptr) {
    cq.polled.store(true, std::memory_order_relaxed);
    cq.left_off.store(got == room && more_to_take(cq), std::memory_order_relaxed);
  }
  if (got != 0) {
    cq.consumed += static_cast<std::uint32_t>(got);
    std::atomic_ref(cq.shared->consumed).store(cq.consumed, std::memory_order_release);
    VRDMA_CRASH_POINT("guest.poll.consumed");
    cq.pace.found(static_cast<std::uint32_t>(got), got < room && !cq.in_order, [&cq] { return receives_left(cq); });
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
    // Whoever holds it posts, perhaps this thread between its ibv_wr_start and ibv_wr_complete: the next poll is early enough.
    const std::unique_lock guard(lane->send != nullptr ? lane->qp->send_lock : lane->qp->receive_lock, std::try_to_lock);
    if (!guard) continue;
    // Its lanes were empty; what a peer in direct mode was writing there as the service went is too late.
    if (lane->lined_up) step_out(cq, *lane);
    lane->reader = {};
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

bool has_ended_offer(const Qp& qp) {
  const std::uint32_t followed = qp.direct_offer.load(std::memory_order_relaxed);
  return followed != 0 && qp.send.direct_offer().load(std::memory_order_acquire) != followed;
}

// Under the lock of the completion queue that it was found in, so that who destroys the queue pair sees it once the lane is gone. False:
// somebody has its send queue.
bool enter(Qp& qp) {
  if (!qp.send_lock.try_lock()) return false;
  qp.visits.fetch_add(1, std::memory_order_relaxed);
  return true;
}
void leave(Qp& qp) {
  qp.send_lock.unlock();
  qp.visits.fetch_sub(1, std::memory_order_release);  // P2: pairs with take_lanes() in qp.cpp
}
void run_and_leave(Qp& qp) {
  struct Visit {
    Qp& qp;
    ~Visit() { leave(qp); }
  } visit{qp};
  run_send_queue(qp);
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
    if (lane != nullptr && lane->send != nullptr && enter(*lane->qp)) qp = lane->qp;
  }
  if (qp != nullptr) run_and_leave(*qp);
}

// Connections have ended, and their programs may post nothing there any more: what is mapped of a peer that has ended lives on until it is
// let go of.
void let_go_of_ended(Cq& cq) {
  const std::atomic_ref ended(cq.shared->offers_ended);
  if (ended.exchange(0, std::memory_order_acquire) == 0) return;  // W4: pairs with W3 in the service's DirectDesk::leave
  bool all = true;
  for (std::size_t i = 0;;) {
    Qp* qp = nullptr;
    {
      std::lock_guard guard(cq.lock);
      for (; i < cq.lanes.size() && qp == nullptr; ++i) {
        if (cq.lanes[i] == nullptr || !has_ended_offer(*cq.lanes[i]->qp)) continue;  // there may be thousands
        Qp& one = *cq.lanes[i]->qp;
        if (!enter(one)) all = false;
        else if (has_ended_offer(one)) qp = &one;
        else leave(one);
      }
    }
    if (qp == nullptr) break;
    run_and_leave(*qp);
  }
  if (!all) ended.store(1, std::memory_order_relaxed);
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
  cq.pace.wait();
  int got = look(cq, count, wc);
  if (got == 0) cq.pace.found_nothing();
  cq.lock.unlock();
  if (got != 0) {
    poll_wait.reset();
    return got;
  }
  bool look_again = true;
  if (std::atomic_ref(cq.shared->left_work).load(std::memory_order_relaxed) != 0) [[unlikely]] {
    take_up(cq);
  } else {
    if (std::atomic_ref(cq.shared->offers_ended).load(std::memory_order_relaxed) != 0) [[unlikely]]
      let_go_of_ended(cq);
    look_again = poll_wait.idle(cq);  // also for who holds the send queue of one of those
  }
  const bool gone = cq.liveness->gone();
  say_where(cq);
  if (!look_again && !gone) return 0;
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
    if (missed && !raise_missed(cq)) return ENOMEM;
  }
  if (cq.liveness->gone()) [[unlikely]]
    watch_after_death(cq);
  return 0;
}

}  // namespace vrdma::guest
