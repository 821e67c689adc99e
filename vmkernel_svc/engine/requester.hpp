// The requester half: reads send WQEs, checks what is local, asks the responder, moves the payload in slices, waits and
// retries as the specification says, and completes. IBA 9.7.2, 9.7.5 (reliable), 9.8 (unreliable), 10.7.2.
//
// Fences need no code here: on one host an operation is complete before the next one starts. A carrier that keeps several
// requests under way must look at wr_fence before it starts one.
#pragma once

#include <cstring>

#include "vmkernel_svc/engine/datagram_requester.hpp"
#include "vmkernel_svc/engine/responder.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::engine {

template <class P>
class Requester {
 public:
  using Step = engine::Step;
  enum class Fetch : std::uint8_t { empty, started, failed };

  Requester(P& ports, Responder<P>& responder) : ports_(ports), responder_(responder) {}

  // Takes the next send WQE into qp.operation and checks it. failed: it was completed in error.
  Fetch fetch(Qp<P>& qp) {
    Operation& op = qp.operation;
    std::uint32_t slots = 0;
    const auto peek = qp.send_ring.peek(op.wqe, send_wqe_slots_max, slots);
    if (peek == vmci::RecordReader::Peek::empty) return Fetch::empty;
    const auto& wqe = *reinterpret_cast<const SendWqe*>(op.wqe);
    const WqeControl control = unpack_wqe_control(wqe.head.control);
    const bool is_inline = (control.flags & wr_inline) != 0;
    const std::size_t payload_bytes = is_inline ? control.count : control.count * sizeof(Sge);
    if (peek == vmci::RecordReader::Peek::malformed || (!is_inline && control.count > send_sge_max) ||
        send_wqe_payload_offset + payload_bytes > std::size_t{slots} * slot_bytes) {
      ++qp.counters.malformed;
      responder_.fail(qp, AsyncEvent::qp_fatal);
      return Fetch::failed;
    }
    qp.send_ring.advance(slots);

    op.stage = qp.type == QpType::ud ? Operation::Stage::gathering : Operation::Stage::routing;
    op.wait = Operation::Wait::none;
    op.copy_pending = false;
    op.retries = op.rnr_retries = 0;
    op.moved_bytes = 0;
    op.receivers_from = 0;
    op.wr_id = wqe.head.tag;
    op.next_position = qp.send_ring.position();
    op.flags = control.flags;
    op.rule = opcode_rule(control.opcode, qp.type);
    if (op.rule == nullptr || (is_inline && op.rule->reads)) return local_error(qp, WcStatus::loc_qp_op_err), Fetch::failed;
    const OpcodeRule& rule = *op.rule;
    if (rule.local) [[unlikely]] {
      op.request = Request{};
      op.request.opcode = control.opcode;
      op.request.packets = 0;
      op.request.imm_data = wqe.head.word;
      return Fetch::started;
    }
    op.remote = wqe.remote;
    if (qp.type == QpType::ud) op.ud = wqe.ud;

    op.local.clear();
    if (is_inline) {
      if (control.count > length_limit(qp)) return local_error(qp, WcStatus::loc_len_err), Fetch::failed;
      op.local.add(Place::in_engine(op.wqe + send_wqe_payload_offset), control.count);
    } else {
      std::uint64_t total = 0;
      for (std::uint32_t i = 0; i < control.count; ++i) total += sge_at(op, i).bytes;
      if (total > length_limit(qp)) return local_error(qp, WcStatus::loc_len_err), Fetch::failed;
      for (std::uint32_t i = 0; i < control.count; ++i) {
        const Sge sge = sge_at(op, i);
        if (sge.bytes == 0) continue;
        const auto place = ports_.find(qp, Key{sge.lkey}, sge.address, sge.bytes,
                                       rule.reads ? access_local_write : access_local_read);
        if (!place) return local_error(qp, WcStatus::loc_prot_err), Fetch::failed;
        op.local.add(*place, sge.bytes);
      }
    }
    if (rule.word && op.local.total_bytes() != 8) return local_error(qp, WcStatus::loc_len_err), Fetch::failed;
    if (rule.reads && qp.attributes.max_rd_atomic == 0) return local_error(qp, WcStatus::loc_qp_op_err), Fetch::failed;

    Request& request = op.request;
    request.opcode = control.opcode;
    request.solicited = (control.flags & wr_solicited) != 0;
    request.psn = qp.send_psn;
    request.bytes = op.local.total_bytes();
    request.packets = rule.atomic ? 1 : packets(request.bytes, qp.attributes.path_mtu);
    request.imm_data = wqe.head.word;
    request.remote_address = wqe.remote.address;
    request.rkey = Key{wqe.remote.rkey};
    request.srqn = qp.type == QpType::xrc_send ? wqe.remote.srqn : 0;
    request.source_qpn = qp.qpn;
    return Fetch::started;
  }

  // Carries the operation on.
  Step advance(Qp<P>& qp, Budget& budget) {
    if (qp.type == QpType::ud) return datagrams_.advance(qp, budget);
    Operation& op = qp.operation;
    if (op.rule->local) [[unlikely]] return conclude(qp);
    if (op.stage == Operation::Stage::returning_value) return return_value(qp);
    Qp<P>* peer = ports_.peer(qp);
    if (op.stage == Operation::Stage::moving && is_out_of_reach(qp, peer) && is_at_memory(op)) {
      // For now: its path is another one, it is in no partition of ours any more, its machine stands still. What is under way there comes to its
      // end, and may be the end of the message: asked again, it would be carried out twice, over what others have written since.
      Budget one_slice{1, 1};
      const Step step = op.rule->atomic ? execute_atomic(qp, *qp.accepted_by) : move(qp, *qp.accepted_by, one_slice);
      if (step != Step::budget_spent) return step;
    }
    if (op.stage == Operation::Stage::moving && (qp.accepted_by == nullptr || qp.accepted_by != peer || !receives(*peer))) {
      // The far end is not any more what it was when it accepted the message: ask again, once a copy that is under way has
      // left the buffers.
      if constexpr (calls_off) {
        if (last_step_under_way(qp)) return Step::waiting;
      } else if (!settled(qp)) {
        return wait_for_copy(qp);
      }
      drop_engagement(qp);
      // Whether it has been carried out nobody knows any more, and once more is too often.
      if (op.rule->atomic && op.wait == Operation::Wait::copy) return fail(qp, WcStatus::retry_exc_err, qp.counters.retry_exceeded);
      op.stage = Operation::Stage::routing;
    }
    if (op.stage == Operation::Stage::routing) {
      if (peer == nullptr && qp.far != nullptr) return Step::done;  // it is on another host: from here on FarRequester's
      const Response response =
          peer != nullptr ? responder_.begin(*peer, qp, op.request, *op.rule, op.far) : Response::silence();
      if (response.kind != Response::Kind::proceed) return not_accepted(qp, peer, response);
      op.stage = Operation::Stage::moving;
      op.wait = Operation::Wait::none;
      op.moved_bytes = 0;
      op.local.rewind();
    }
    return op.rule->atomic ? execute_atomic(qp, *peer) : move(qp, *peer, budget);
  }

  // The operation under way failed for a local reason, or because nobody answers.
  void refuse(Qp<P>& qp, WcStatus status) { local_error(qp, status); }
  void give_up(Qp<P>& qp) { fail(qp, WcStatus::retry_exc_err, qp.counters.retry_exceeded); }
  void drop(Qp<P>& qp) { succeed(qp); }  // UC: it is lost, and nobody tells the sender
  // Nobody answers: the operation under way ends so, or else the next one; what reaches nobody is executed. False: there is none, or it waits.
  bool give_up_next(Qp<P>& qp) {
    if (qp.operation.stage == Operation::Stage::none)
      if (const Fetch fetched = fetch(qp); fetched != Fetch::started) return fetched == Fetch::failed;
    if (qp.operation.stage == Operation::Stage::refused) return false;  // has its end already, once those before it have theirs
    if (qp.operation.rule->local) return conclude(qp) != Step::waiting;
    return give_up(qp), true;
  }
  // Of a local operation, when all before it have completed.
  Step conclude(Qp<P>& qp) {
    if constexpr (requires(P& ports) { ports.change_window(qp); }) {
      if (qp.operation.request.imm_data == window_in_turn) {
        const std::optional<WcStatus> changed = ports_.change_window(qp);
        if (!changed) return Step::waiting;
        return *changed == WcStatus::success ? succeed(qp) : local_error(qp, *changed);
      }
    }
    return qp.operation.request.imm_data == static_cast<std::uint32_t>(WcStatus::success) ? succeed(qp) : local_error(qp, WcStatus::mw_bind_err);
  }

  // The operation under way is given up (its queue pair flushes, is reset or destroyed).
  void abandon(Qp<P>& qp) {
    drop_engagement(qp);
    qp.operation.stage = Operation::Stage::none;
  }

  // Ports whose copies take time can call them off (WriteLeash).
  static constexpr bool calls_off = requires(P& ports, Qp<P>& qp) { ports.cut_off(qp); };
  // Calls off what `qp` has under way. True: something that was called off is still at its last step in the memory of the owner of `qp`, and
  // `qp` runs again to look.
  bool last_step_under_way(Qp<P>& qp) {
    if constexpr (calls_off) {
      ports_.cut_off(qp);
      const std::uint64_t wait_ns = ports_.last_step_ns(qp);
      if (wait_ns != 0) ports_.wake_at(qp, ports_.now_ns() + wait_ns);
      return wait_ns != 0;
    }
    return false;
  }

  // Whether no copy of `qp` is under way any more; what became of one that was is forgotten.
  bool settled(Qp<P>& qp) {
    Operation& op = qp.operation;
    if (!op.copy_pending) return true;
    if (ports_.copy(qp, op.pending.to, op.pending.from, op.pending.bytes) == MemoryStatus::pending) return false;
    op.copy_pending = false;
    return true;
  }
  // Whether a copy is under way into the receive WQE that `qp` gave to somebody's message.
  static bool is_written_to(const Qp<P>& qp) {
    return qp.serves != nullptr && qp.serves->operation.copy_pending && qp.serves->operation.rule->moves_to_receive;
  }

 private:
  static constexpr std::uint64_t copy_patience_ns = 1'000'000'000;
  static constexpr std::uint32_t copy_patience_slices = 10;

  static Sge sge_at(const Operation& op, std::uint32_t index) {
    Sge sge;
    std::memcpy(&sge, op.wqe + send_wqe_payload_offset + index * sizeof(Sge), sizeof(sge));
    return sge;
  }

  static std::uint64_t length_limit(const Qp<P>& qp) {
    return qp.type == QpType::ud ? datagram_bytes_max(qp.attributes) : limits::message_bytes_max;
  }

  // Whether the responder that accepted the message is as it was, only that `peer` is not it. Who has gone to another host does not come back to it.
  static bool is_out_of_reach(const Qp<P>& qp, const Qp<P>* peer) {
    return qp.accepted_by != nullptr && qp.accepted_by != peer && receives(*qp.accepted_by) && qp.far == nullptr;
  }
  // Whether a worker has something of the message that is moving: an atomic has no other reason to be at that.
  static bool is_at_memory(const Operation& op) { return op.copy_pending || op.rule->atomic; }

  // Undoes what ties the operation to its responder and to a copy under way.
  void drop_engagement(Qp<P>& qp) {
    ports_.abandon(qp);
    qp.operation.copy_pending = false;
    Qp<P>* const responder = qp.accepted_by;
    leave_responder(qp);
    if (responder != nullptr && responder->state == QpState::err) ports_.state_changed(*responder);  // may have held its flush
  }

  Step not_accepted(Qp<P>& qp, Qp<P>* peer, const Response& response) {
    if (qp.type == QpType::uc) {  // IBA 9.8.2: nobody tells the sender
      if (response.kind == Response::Kind::rnr && keep_for_receive(qp, *peer)) return Step::waiting;
      if (peer != nullptr) ++peer->counters.dropped;
      if (response.kind == Response::Kind::nak && must_pay(qp)) return Step::waiting;
      return succeed(qp);
    }
    switch (response.kind) {
      case Response::Kind::silence:
        return wait_for_ack(qp);
      case Response::Kind::rnr:
        return wait_for_receive(qp, *peer, response.rnr_ns);
      default:
        return fail(qp, response.status, qp.counters.remote_errors);
    }
  }

  // A queue pair that names wrong keys again and again is guessing; RC loses its connection each time, UC pays in time.
  bool must_pay(Qp<P>& qp) {
    constexpr std::uint64_t free_errors = 64, penalty_ns = 1'000'000;
    Operation& op = qp.operation;
    const std::uint64_t now = ports_.now_ns();
    if (op.wait != Operation::Wait::penalty) {
      if (++qp.counters.remote_errors <= free_errors) return false;
      op.wait = Operation::Wait::penalty;
      op.deadline_ns = now + penalty_ns;
    }
    ports_.wake_at(qp, op.deadline_ns);
    return now < op.deadline_ns;
  }

  // Somebody's memory lets itself be waited for. To the requester that is a responder that does not answer: a reliable message
  // fails when all retries would have (IBA 9.9.2.1), an unreliable one is lost. Patience is counted in slices that begin when this is
  // called: a machine that stood still, and all its guests with it, has used up one of them, however long that was. While others have their turns
  // before this one there is somebody who answers.
  Step wait_for_copy(Qp<P>& qp) {
    Operation& op = qp.operation;
    const std::uint64_t timeout = ack_timeout_ns(qp.attributes.timeout);
    const bool for_ever = is_reliable(qp.type) && timeout == 0;
    const std::uint64_t now = ports_.now_ns();
    bool moved_up = false;
    if constexpr (requires(P& ports) { ports.moved_up(qp); }) moved_up = ports_.moved_up(qp);
    if (op.wait != Operation::Wait::copy || moved_up) {
      op.wait = Operation::Wait::copy;
      const std::uint64_t retries_ns = is_reliable(qp.type) ? timeout * (qp.attributes.retry_cnt + 1u) : 0;
      op.slice_ns = std::max(retries_ns, copy_patience_ns) / copy_patience_slices;
      op.slices_left = copy_patience_slices;
      op.deadline_ns = now + op.slice_ns;
    } else if (for_ever) {
      return Step::waiting;
    } else if (now >= op.deadline_ns && --op.slices_left > 0) {
      op.deadline_ns = now + op.slice_ns;
    } else if (now >= op.deadline_ns) {
      if (is_reliable(qp.type)) return fail(qp, WcStatus::retry_exc_err, qp.counters.retry_exceeded);
      if (qp.accepted_by != nullptr) ++qp.accepted_by->counters.dropped;
      drop_engagement(qp);
      return succeed(qp);
    }
    if (!for_ever) ports_.wake_at(qp, op.deadline_ns);
    return Step::waiting;
  }

  Step wait_for_ack(Qp<P>& qp) {
    Operation& op = qp.operation;
    const std::uint64_t now = ports_.now_ns();
    const std::uint64_t timeout = ack_timeout_ns(qp.attributes.timeout);
    if (op.wait != Operation::Wait::ack) {
      op.wait = Operation::Wait::ack;
      op.wait_since_ns = now;
      op.deadline_ns = now + timeout;
    } else if (timeout != 0 && now >= op.deadline_ns) {
      ++qp.counters.ack_timeouts;
      if (op.retries >= qp.attributes.retry_cnt) return fail(qp, WcStatus::retry_exc_err, qp.counters.retry_exceeded);
      ++op.retries;
      op.deadline_ns = now + timeout;
    }
    // Nobody tells us that somebody appears at the far end: look now and then, less often as time goes by. A timeout of 0 waits
    // for ever.
    const std::uint64_t look_ns = now + std::clamp<std::uint64_t>((now - op.wait_since_ns) / 8, 100'000, 50'000'000);
    ports_.wake_at(qp, timeout == 0 ? look_ns : std::min(look_ns, op.deadline_ns));
    return Step::waiting;
  }

  // IBA 9.7.5.2.8. A receive that is posted before the timer is over is used at once, as end-to-end credits would have it.
  Step wait_for_receive(Qp<P>& qp, Qp<P>& peer, std::uint64_t rnr_ns) {
    constexpr std::uint8_t retry_for_ever = 7;
    Operation& op = qp.operation;
    const std::uint64_t now = ports_.now_ns();
    if (op.wait != Operation::Wait::rnr || now >= op.deadline_ns) {
      ++peer.counters.rnr_naks;
      if (qp.attributes.rnr_retry != retry_for_ever) {
        if (op.rnr_retries >= qp.attributes.rnr_retry)
          return fail(qp, WcStatus::rnr_retry_exc_err, qp.counters.rnr_retry_exceeded);
        ++op.rnr_retries;
      }
      op.wait = Operation::Wait::rnr;
      op.deadline_ns = now + rnr_ns;
    }
    ports_.wake_at(qp, op.deadline_ns);
    ports_.await_receive(qp, peer);
    return Step::waiting;
  }

  // Of an unreliable service: whether a message that found no receive WQE waits for one yet.
  bool keep_for_receive(Qp<P>& qp, Qp<P>& receiver) {
    constexpr std::uint64_t look_again_ns = 200'000;  // nobody rings for an SRQ, nor for who waits second
    const std::uint64_t now = ports_.now_ns(), until = receiver.patience.until(now, receiver.counters.received_messages, receiver.type);
    if (now >= until) return false;
    qp.operation.wait = Operation::Wait::rnr;
    ports_.wake_at(qp, std::min(until, now + look_again_ns));
    ports_.await_receive(qp, receiver);
    return true;
  }

  Step move(Qp<P>& qp, Qp<P>& peer, Budget& budget) {
    Operation& op = qp.operation;
    const OpcodeRule& rule = *op.rule;
    ScatterGather& to = rule.reads ? op.local : rule.moves_to_receive ? peer.inbound.buffers : op.far;
    ScatterGather& from = rule.reads ? op.far : op.local;
    while (op.moved_bytes < op.request.bytes) {
      if (budget.bytes <= 0) return Step::budget_spent;
      const std::uint64_t bytes = std::min({from.contiguous_bytes(), to.contiguous_bytes(), slice_bytes});
      if (bytes == 0) [[unlikely]] return Step::waiting;  // a stand-in's next part has yet to come, or to go
      switch (engine::copy(ports_, qp, to.here(), from.here(), bytes)) {
        case MemoryStatus::done:
          break;
        case MemoryStatus::pending:
          return wait_for_copy(qp);
        case MemoryStatus::source_fault:
          return rule.reads ? remote_fault(qp, peer) : local_error(qp, WcStatus::loc_prot_err);
        case MemoryStatus::destination_fault:
          if (rule.reads) return local_error(qp, WcStatus::loc_prot_err);
          if (!rule.moves_to_receive) return remote_fault(qp, peer);
          return refused(qp, responder_.receive_error(peer, WcStatus::loc_prot_err, WcStatus::rem_op_err).status);
      }
      op.wait = Operation::Wait::none;
      from.advance(bytes);
      to.advance(bytes);
      op.moved_bytes += bytes;
      budget.bytes -= static_cast<std::int64_t>(bytes);
    }
    if (!responder_.finish(peer, op.request, rule)) return refused(qp, WcStatus::rem_op_err);
    return succeed(qp);
  }

  Step execute_atomic(Qp<P>& qp, Qp<P>& peer) {
    Operation& op = qp.operation;
    const MemoryStatus status =
        op.request.opcode == WrOpcode::atomic_fetch_and_add
            ? ports_.fetch_and_add(qp, op.far.here(), op.remote.compare_add, op.value)
            : ports_.compare_and_swap(qp, op.far.here(), op.remote.compare_add, op.remote.swap, op.value);
    if (status == MemoryStatus::pending) return wait_for_copy(qp);
    if (status != MemoryStatus::done) return remote_fault(qp, peer);
    responder_.finish(peer, op.request, *op.rule);
    op.stage = Operation::Stage::returning_value;
    return return_value(qp);
  }

  Step return_value(Qp<P>& qp) {
    Operation& op = qp.operation;
    while (op.moved_bytes < sizeof(op.value)) {
      const std::uint64_t bytes = op.local.contiguous_bytes();
      const auto status = engine::copy(ports_, qp, op.local.here(), Place::in_engine(&op.value) + op.moved_bytes, bytes);
      if (status == MemoryStatus::pending) return Step::waiting;
      if (status != MemoryStatus::done) return local_error(qp, WcStatus::loc_prot_err);
      op.local.advance(bytes);
      op.moved_bytes += bytes;
    }
    return succeed(qp);
  }

  // A region at the responder that was good when the message began is gone.
  Step remote_fault(Qp<P>& qp, Qp<P>& peer) {
    leave_responder(qp);
    if (is_reliable(qp.type)) responder_.deny(peer, *qp.operation.rule);
    return refused(qp, WcStatus::rem_access_err);
  }
  Step refused(Qp<P>& qp, WcStatus status) {
    return qp.type == QpType::uc ? succeed(qp) : fail(qp, status, qp.counters.remote_errors);
  }

  // --- completion ---
  Step succeed(Qp<P>& qp) {
    Operation& op = qp.operation;
    const OpcodeRule& rule = *op.rule;
    op.stage = Operation::Stage::none;
    qp.send_psn = vrdma::advance(qp.send_psn, op.request.packets);
    if (rule.local) {
      // no message
    } else if (rule.atomic) {
      ++qp.counters.atomics;
    } else if (rule.reads) {
      ++qp.counters.read_messages;
      qp.counters.read_bytes += op.request.bytes;
    } else {
      ++qp.counters.sent_messages;
      qp.counters.sent_bytes += op.request.bytes;
    }
    if ((op.flags & wr_signaled) == 0) return Step::done;
    Cqe cqe{};
    cqe.wr_id = op.wr_id;
    cqe.byte_len = static_cast<std::uint32_t>(op.request.bytes);
    cqe.queue_position = op.next_position;
    responder_.publish(qp, Direction::send, cqe, {WcStatus::success, rule.send_opcode, 0});
    return Step::done;
  }

  Step fail(Qp<P>& qp, WcStatus status, std::uint64_t& counter) {
    Operation& op = qp.operation;
    if (qp.far != nullptr && (!qp.far->outstanding.empty() || qp.far->under_way != 0)) [[unlikely]] {  // those before it complete first
      drop_engagement(qp);
      qp.far->refused = status;
      op.stage = Operation::Stage::refused;
      return Step::waiting;
    }
    abandon(qp);
    ++counter;
    Cqe cqe{};
    cqe.wr_id = op.wr_id;
    cqe.imm_data = static_cast<std::uint32_t>(status);  // vendor error
    cqe.queue_position = op.next_position;
    responder_.publish(qp, Direction::send, cqe, {status, op.rule != nullptr ? op.rule->send_opcode : WcOpcode::send, 0});
    if (is_reliable(qp.type)) {
      responder_.fail(qp, std::nullopt);
    } else {  // IBA 10.3.1.6: an unreliable send queue in error leaves the receive queue alone
      if (qp.state != QpState::err) qp.state = QpState::sqe;
      ports_.state_changed(qp);
    }
    return Step::done;
  }
  Step local_error(Qp<P>& qp, WcStatus status) { return fail(qp, status, qp.counters.local_errors); }

  friend DatagramRequester<P, Requester>;  // ends its operations as this does

  P& ports_;
  Responder<P>& responder_;
  DatagramRequester<P, Requester> datagrams_{ports_, responder_, *this};
};

}  // namespace vrdma::engine
