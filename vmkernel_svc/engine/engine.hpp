// The engine: runs one queue pair for one turn. The only entry points that a runner (shard, posting thread, simulation) calls.
//
// run() is bounded by its budget and leaves everything it has not finished in the queue pair, to go on in the next turn.
#pragma once

#include "vmkernel_svc/engine/far_requester.hpp"
#include "vmkernel_svc/engine/requester.hpp"
#include "vmkernel_svc/engine/responder.hpp"

namespace vrdma::engine {

template <class P>
class Engine {
 public:
  explicit Engine(P& ports) : ports_(ports), responder_(ports), requester_(ports, responder_), far_(ports, responder_, requester_) {}
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Progress run(Qp<P>& qp, Budget& budget) {
    bool worked = false;
    while (!budget.spent()) {
      if (qp.state == QpState::err || qp.state == QpState::sqe) {
        // Who comes to an error in this turn flushes in the next: the receive queue goes with it then, and its runner has to have got that
        // first, from a peer that may be writing there (DirectDesk::may_run).
        return worked ? Progress::worked : flush(qp, budget);
      }
      const bool active = qp.operation.stage != Operation::Stage::none;
      if constexpr (FarPortsFor<P>) {
        if (qp.far != nullptr) [[unlikely]] {
          if (qp.state == QpState::sqd && !active && qp.far->outstanding.empty() && qp.far->under_way == 0) report_drained(qp);
          return far_.run(qp, budget, worked);
        }
      }
      if (!active) {
        if (qp.state == QpState::sqd) report_drained(qp);
        if (qp.state != QpState::rts) break;
        const auto fetched = requester_.fetch(qp);
        if (fetched == Requester<P>::Fetch::empty) break;
        worked = true;
        --budget.wqes;
        if (fetched == Requester<P>::Fetch::failed) continue;
      }
      const std::int64_t bytes_before = budget.bytes;
      const auto step = requester_.advance(qp, budget);
      worked |= budget.bytes != bytes_before;
      if (step == Requester<P>::Step::waiting) return worked ? Progress::worked : Progress::waiting;
      worked = true;
      if (active && step == Requester<P>::Step::done) --budget.wqes;
      if (step == Requester<P>::Step::budget_spent) break;
    }
    return worked ? Progress::worked : Progress::idle;
  }

  // Completes what another host has answered, and sends nothing.
  void take_answers(Qp<P>& qp) {
    if (qp.far == nullptr || (qp.state != QpState::rts && qp.state != QpState::sqd)) return;
    Budget budget{slice_bytes, 1};
    (void)far_.take_arrived(qp, budget);
  }

  // Carries on what a stand-in has in its `operation` (FarRecord): it stands for a requester on another host.
  bool carry_on(Qp<P>& stand_in, Budget& budget) {
    return requester_.advance(stand_in, budget) != Requester<P>::Step::waiting && stand_in.operation.stage != Operation::Stage::none;
  }

  // Whether a turn could find something to do without anybody ringing: an operation or a flush is under way, or answers came.
  static bool busy(const Qp<P>& qp) {
    return qp.operation.stage != Operation::Stage::none || (qp.far != nullptr && !qp.far->arrived.empty());
  }

  // Likewise, with what was posted; false is the common case: ready to send, nothing under way, nothing posted. A connection to another host
  // may have to be given up, although all that was posted has been sent.
  static bool may_have_work(const Qp<P>& qp) { return qp.state != QpState::rts || busy(qp) || !qp.send_ring.empty() || qp.far != nullptr; }

  // Whether a turn would take what lies at the head of the send queue.
  static bool may_take_sends(const Qp<P>& qp) {
    if (qp.far != nullptr && qp.far->blocked) return false;
    return !busy(qp) && !qp.send_queue_lost && (qp.state == QpState::rts || qp.state == QpState::err || qp.state == QpState::sqe) &&
           !qp.send_ring.empty();
  }

  // The owner moved the queue pair from `before` to qp.state, attributes already stored.
  void entered(Qp<P>& qp, QpState before) {
    if (qp.state == QpState::err) {
      if (before != QpState::err) ports_.state_changed(qp);
      return;
    }
    if (qp.state == QpState::init && before == QpState::reset) qp.communication_established = qp.last_wqe_reported = false;
    if (qp.state == QpState::rtr && before == QpState::init) {
      qp.expected_psn = Psn{qp.attributes.rq_psn & psn_mask};
      const bool again = std::exchange(qp.was_connected, true);
      if constexpr (FarPortsFor<P>) {
        if (again && qp.type != QpType::ud) ports_.far_connected_again(qp);
      }
    }
    if (qp.state == QpState::rts && before == QpState::rtr) qp.send_psn = Psn{qp.attributes.sq_psn & psn_mask};
    if (qp.state == QpState::sqd && before != QpState::sqd) qp.drain_reported = false;
    // In SQD it may have been given another path.
    if (qp.state == QpState::rts && before == QpState::sqd && qp.far != nullptr && !qp.far->given_one_by_one && qp.far->outstanding.empty() && !busy(qp)) {
      close_far(qp, [](std::uint64_t, std::uint32_t) {});
      qp.far.reset();
    }
  }

  // To RESET: everything posted is forgotten; the rings go on where the guest's writers stand.
  void reset(Qp<P>& qp, std::uint32_t send_position, std::uint32_t receive_position) {
    abandon(qp);
    if (qp.send_ring.slot_count() != 0) qp.send_ring.skip_to(send_position);
    if (qp.receive_ring.slot_count() != 0) qp.receive_ring.skip_to(receive_position);
    qp.communication_established = qp.drain_reported = qp.last_wqe_reported = qp.send_queue_lost = false;
    qp.returned.clear();
    qp.patience = {};
    qp.flush_held_until_ns = qp.blocked_until_ns = 0;
  }

  // For a runner that has hardware carry a queue pair's messages (remote/hca_desk.hpp): WQEs are taken, checked and completed by
  // the engine's rules, whoever moves the bytes.
  typename Requester<P>::Fetch take_send(Qp<P>& qp) { return requester_.fetch(qp); }
  bool take_receive(Qp<P>& qp) { return responder_.fetch(qp); }
  void note_srq_take(Srq<P>& srq) { responder_.note_srq_take(srq); }
  // A receive WQE of its SRQ that a poster in direct mode had taken, and that has ended.
  void give_back(Qp<P>& qp, std::uint64_t wr_id, const Sge& buffer) { responder_.give_back(qp, wr_id, buffer); }
  void refuse(Qp<P>& qp, WcStatus status) { requester_.refuse(qp, status); }
  void give_up(Qp<P>& qp) { requester_.give_up(qp); }
  bool give_up_next(Qp<P>& qp) { return requester_.give_up_next(qp); }
  // False: it waits.
  bool conclude(Qp<P>& qp) { return requester_.conclude(qp) != Requester<P>::Step::waiting; }
  // In ERR: flushes what was sent as records, and the operation under way.
  void flush_begun(Qp<P>& qp) {
    close_far(qp, [&](std::uint64_t wr_id, std::uint32_t position) { complete_flushed(qp, Direction::send, wr_id, position); });
    if (qp.operation.stage == Operation::Stage::none) return;
    const std::uint64_t wr_id = qp.operation.wr_id;
    const std::uint32_t position = qp.operation.next_position;
    requester_.abandon(qp);
    complete_flushed(qp, Direction::send, wr_id, position);
  }
  bool settled(Qp<P>& qp) { return requester_.settled(qp); }
  void report_drained(Qp<P>& qp) {
    if (qp.drain_reported) return;
    qp.drain_reported = true;
    if (qp.attributes.en_sqd_async_notify != 0) ports_.event(qp, AsyncEvent::sq_drained);
  }
  void complete_flushed(Qp<P>& qp, Direction direction, std::uint64_t wr_id, std::uint32_t position) {
    ++qp.counters.flushed;
    Cqe cqe{};
    cqe.wr_id = wr_id;
    cqe.imm_data = static_cast<std::uint32_t>(WcStatus::wr_flush_err);
    cqe.queue_position = position;
    publish(qp, direction, cqe, {WcStatus::wr_flush_err, direction == Direction::send ? WcOpcode::send : WcOpcode::recv, 0});
  }
  // Where its CQ is overrun the queue pair is in ERR then.
  void publish(Qp<P>& qp, Direction direction, Cqe& cqe, const CqeState& state) { responder_.publish(qp, direction, cqe, state); }
  // Somebody else's memory cannot hold a flush for ever.
  bool hold_flush(Qp<P>& qp) {
    constexpr std::uint64_t patience_ns = 100'000'000;
    const std::uint64_t now = ports_.now_ns();
    if (qp.flush_held_until_ns == 0) qp.flush_held_until_ns = now + patience_ns;
    if (now >= qp.flush_held_until_ns) return false;
    ports_.wake_at(qp, qp.flush_held_until_ns);
    return true;
  }

  // To ERR for a reason outside the queue pair (its CQ is overrun); it flushes in its next turns.
  void fail(Qp<P>& qp, std::optional<AsyncEvent> event) { responder_.fail(qp, event); }

  // Whether a copy is under way that reads or writes buffers of this queue pair's work requests, or its own state. Before it is
  // reset or destroyed its ports let such a copy come to an end (and those that the queue pair gave up).
  static bool copies_under_way(const Qp<P>& qp) {
    const auto copies = [](const Qp<P>& one) {
      const Operation& op = one.operation;
      const bool atomic = op.stage == Operation::Stage::moving && op.rule->atomic && op.wait == Operation::Wait::copy;
      return op.copy_pending || atomic;
    };
    return copies(qp) || (qp.serves != nullptr && copies(*qp.serves));
  }

  // Whether what was posted before `position` of the send queue gets on by itself: it waits for nobody's answer, receive WQE or host, at
  // most for a copy. On an adapter such messages are as good as sent; who is moved out of RTS here lets them go first.
  static bool sends_get_on(const Qp<P>& qp, std::uint32_t position) {
    if (qp.state != QpState::rts && qp.state != QpState::sqd) return false;
    const auto slots_left = static_cast<std::int32_t>(position - qp.send_ring.position());
    const Operation& op = qp.operation;
    if (op.stage == Operation::Stage::none) return slots_left > 0 && qp.state == QpState::rts && may_take_sends(qp);
    if (slots_left < 0) return false;
    if (op.copy_pending) return true;
    if (qp.far != nullptr) return op.stage == Operation::Stage::moving && !qp.far->blocked;
    return op.wait == Operation::Wait::none || op.wait == Operation::Wait::copy || op.wait == Operation::Wait::busy;
  }

  // XRC: the SRQ is going. What a target queue pair has of it goes with it; the message that was coming asks again.
  void leave_srq(Qp<P>& qp, const Srq<P>& srq) {
    if (qp.srq != &srq) return;
    turn_away_requester(qp);
    qp.inbound.active = false;
    qp.returned.clear();
    qp.srq = nullptr;
  }

  // XRC: `heir` becomes to the initiator of `qp` what that was, its number included, also in the middle of a message: asked for again, an atomic
  // would be carried out twice.
  void hand_over(Qp<P>& qp, Qp<P>& heir) {
    std::swap(qp.qpn, heir.qpn);
    heir.attributes = qp.attributes;
    heir.state = qp.state;
    heir.expected_psn = qp.expected_psn;
    heir.send_psn = qp.send_psn;
    heir.communication_established = qp.communication_established;
    heir.was_connected = qp.was_connected;
    if (!receives(heir)) return;
    heir.srq = qp.srq;
    heir.inbound = qp.inbound;
    qp.inbound.active = false;
    Qp<P>* const requester = qp.serves;
    if (requester == nullptr) return;
    dismiss_requester(qp);
    engage(*requester, heir);
  }

  // Before the queue pair is destroyed.
  void abandon(Qp<P>& qp) {
    close_far(qp, [](std::uint64_t, std::uint32_t) {});
    qp.far.reset();
    requester_.abandon(qp);
    turn_away_requester(qp);
    responder_.give_back(qp);
  }

  // Of a queue pair that flushes: whether the copy that its operation has under way must end first. Somebody else's memory cannot hold that for
  // ever: then the copy is called off.
  bool copy_holds_flush(Qp<P>& qp) {
    if (!qp.operation.copy_pending) return false;
    if (hold_flush(qp)) return !requester_.settled(qp);
    return requester_.last_step_under_way(qp);
  }

  // `qp` is in ERR: an RDMA operation that is at its memory ends where it is, for no completion will tell its owner when that is over. What is
  // on its way into a receive WQE may come to its end, which its completion tells (flush).
  void end_remote_operation(Qp<P>& qp) {
    if (qp.serves != nullptr && !requester_.is_written_to(qp)) turn_away_requester(qp);
  }

  // Whoever is in the middle of a message to `qp` writes no more of it.
  void turn_away_requester(Qp<P>& qp) {
    if constexpr (Requester<P>::calls_off)
      if (qp.serves != nullptr) ports_.cut_off(*qp.serves);
    dismiss_requester(qp);
  }

 private:
  // IBA 10.3.1.7: everything on the queues completes in order with WR_FLUSH_ERR, the send queue's first. In SQE only sends.
  Progress flush(Qp<P>& qp, Budget& budget) {
    bool worked = false;
    if (qp.far != nullptr && (qp.far->opened || qp.operation.copy_pending)) {
      if (copy_holds_flush(qp)) return worked ? Progress::worked : Progress::waiting;
      close_far(qp, [&](std::uint64_t wr_id, std::uint32_t position) {
        complete_flushed(qp, Direction::send, wr_id, position);
        worked = true;
      });
    }
    if (qp.operation.stage != Operation::Stage::none) {
      // A flushed WQE's buffers are its owner's again, and the receive WQE at the far end free for the next message: not before
      // a copy that is under way has ended.
      if (copy_holds_flush(qp)) return worked ? Progress::worked : Progress::waiting;
      const std::uint64_t wr_id = qp.operation.wr_id;
      const std::uint32_t position = qp.operation.next_position;
      requester_.abandon(qp);
      complete_flushed(qp, Direction::send, wr_id, position);
      worked = true;
    }
    alignas(64) std::byte wqe[send_wqe_slots_max * slot_bytes];
    std::uint32_t slots = 0;
    RecordHead head;
    while (budget.wqes > 0) {
      const auto peek = qp.send_ring.peek(wqe, send_wqe_slots_max, slots);
      if (peek == vmci::RecordReader::Peek::malformed) qp.send_queue_lost = true;  // nobody knows where the next one begins
      if (peek != vmci::RecordReader::Peek::ready) break;
      std::memcpy(&head, wqe, sizeof(head));
      qp.send_ring.advance(slots);
      complete_flushed(qp, Direction::send, head.tag, qp.send_ring.position());
      --budget.wqes;
      worked = true;
    }
    if (qp.state != QpState::err) qp.flush_held_until_ns = 0;
    if (qp.state == QpState::err) {
      if (requester_.is_written_to(qp) && hold_flush(qp)) return worked ? Progress::worked : Progress::waiting;
      turn_away_requester(qp);
      if (requester_.last_step_under_way(qp)) return worked ? Progress::worked : Progress::waiting;
      qp.flush_held_until_ns = 0;
      if (qp.inbound.active) {
        qp.inbound.active = false;
        complete_flushed(qp, Direction::receive, qp.inbound.wr_id, 0);
        worked = true;
      }
      for (; !qp.returned.empty(); qp.returned.pop_back()) {
        complete_flushed(qp, Direction::receive, qp.returned.back().wr_id, 0);
        worked = true;
      }
      while (qp.srq == nullptr && qp.receive_ring.slot_count() != 0 && budget.wqes > 0 &&
             qp.receive_ring.peek(wqe, receive_wqe_slots_max, slots) == vmci::RecordReader::Peek::ready) {
        std::memcpy(&head, wqe, sizeof(head));
        qp.receive_ring.advance(slots);
        complete_flushed(qp, Direction::receive, head.tag, 0);
        --budget.wqes;
        worked = true;
      }
      if (qp.srq != nullptr && qp.type != QpType::xrc_recv && !qp.last_wqe_reported) {
        qp.last_wqe_reported = true;
        ports_.event(qp, AsyncEvent::qp_last_wqe_reached);
      }
    }
    return worked ? Progress::worked : Progress::idle;
  }

  template <class Flushed>
  void close_far(Qp<P>& qp, Flushed&& flushed) {
    if constexpr (FarPortsFor<P>) {
      if (qp.far != nullptr) far_.close(qp, flushed);
    }
  }

  P& ports_;
  Responder<P> responder_;
  Requester<P> requester_;
  FarRequester<P> far_;
};

}  // namespace vrdma::engine
