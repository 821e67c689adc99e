// The requester half: reads send WQEs, checks what is local, asks the responder, moves the payload in slices, waits and
// retries as the specification says, and completes. IBA 9.7.2, 9.7.5 (reliable), 9.8 (unreliable), 10.7.2.
//
// Fences need no code here: on one host an operation is complete before the next one starts. A carrier that keeps several
// requests under way must look at wr_fence before it starts one.
#pragma once

#include <cstring>

#include "vmkernel_svc/engine/responder.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::engine {

template <class P>
class Requester {
 public:
  enum class Step : std::uint8_t { done, budget_spent, waiting };
  enum class Fetch : std::uint8_t { empty, started, failed };

  Requester(P& ports, Responder<P>& responder) : ports_(ports), responder_(responder) {}

  // Takes the next send WQE into qp.operation and checks it. failed: it was completed in error.
  Fetch fetch(Qp<P>& qp) {
    Operation& op = qp.operation;
    std::uint32_t slots = 0;
    const auto peek = qp.send_ring.peek(op.wqe, send_wqe_slots_max, slots);
    if (peek == vmci::RecordReader::Peek::empty) return Fetch::empty;
    SendWqe wqe;
    std::memcpy(&wqe, op.wqe, sizeof(wqe));
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

    op.stage = Operation::Stage::routing;
    op.wait = Operation::Wait::none;
    op.retries = op.rnr_retries = 0;
    op.moved_bytes = 0;
    op.multicast_index = 0;
    op.wr_id = wqe.head.tag;
    op.next_position = qp.send_ring.position();
    op.flags = control.flags;
    op.rule = opcode_rule(control.opcode, qp.type);
    if (op.rule == nullptr || (is_inline && op.rule->reads)) return local_error(qp, WcStatus::loc_qp_op_err), Fetch::failed;
    const OpcodeRule& rule = *op.rule;
    op.remote = wqe.remote;
    if (qp.type == QpType::ud) op.ud = wqe.ud;

    op.local.clear();
    if (is_inline) {
      op.local.add(Place::in_engine(op.wqe + send_wqe_payload_offset), control.count);
    } else {
      std::uint64_t total = 0;
      for (std::uint32_t i = 0; i < control.count; ++i) total += sge_at(op, i).bytes;
      if (total > length_limit(qp, rule)) return local_error(qp, WcStatus::loc_len_err), Fetch::failed;
      for (std::uint32_t i = 0; i < control.count; ++i) {
        const Sge sge = sge_at(op, i);
        if (sge.bytes == 0) continue;
        const auto place = ports_.find(qp, Key{sge.lkey}, sge.address, sge.bytes,
                                       rule.reads ? access_local_write : access_local_read);
        if (!place) return local_error(qp, WcStatus::loc_prot_err), Fetch::failed;
        op.local.add(*place, sge.bytes);
      }
    }
    if (rule.atomic && op.local.total_bytes() != 8) return local_error(qp, WcStatus::loc_len_err), Fetch::failed;
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
    request.source_qpn = qp.qpn;
    return Fetch::started;
  }

  // Carries the operation on.
  Step advance(Qp<P>& qp, Budget& budget) {
    if (qp.type == QpType::ud) return advance_datagram(qp, budget);
    Operation& op = qp.operation;
    if (op.stage == Operation::Stage::returning_value) return return_value(qp);
    Qp<P>* peer = ports_.peer(qp);
    if (op.stage == Operation::Stage::moving && !engaged(peer, op)) {
      ports_.abandon(qp);  // the far end is not the one this message was begun with: ask again
      op.stage = Operation::Stage::routing;
    }
    if (op.stage == Operation::Stage::routing) {
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

  // The operation under way is given up (its queue pair flushes, is reset or destroyed).
  void abandon(Qp<P>& qp) {
    Operation& op = qp.operation;
    if (op.stage == Operation::Stage::none) return;
    ports_.abandon(qp);
    if (qp.type == QpType::ud && op.stage == Operation::Stage::moving)
      if (Qp<P>* peer = datagram_peer(qp); peer != nullptr && peer->inbound.active && peer->inbound.owner == qp.qpn)
        peer->inbound.owner = {};
    op.stage = Operation::Stage::none;
  }

 private:
  static Sge sge_at(const Operation& op, std::uint32_t index) {
    Sge sge;
    std::memcpy(&sge, op.wqe + send_wqe_payload_offset + index * sizeof(Sge), sizeof(sge));
    return sge;
  }

  static std::uint64_t length_limit(const Qp<P>& qp, const OpcodeRule&) {
    return qp.type == QpType::ud ? limits::mtu_max_bytes : limits::message_bytes_max;
  }

  static bool engaged(const Qp<P>* peer, const Operation& op) {
    if (peer == nullptr || peer->state == QpState::err || peer->state == QpState::reset || peer->state == QpState::init)
      return false;
    if (peer->type == QpType::rc && peer->expected_psn != op.request.psn) return false;
    return !op.rule->takes_receive || peer->inbound.active;
  }

  Step not_accepted(Qp<P>& qp, Qp<P>* peer, const Response& response) {
    if (qp.type == QpType::uc) {  // IBA 9.8.2: nobody tells the sender
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

  // Somebody's memory lets itself be waited for. To the requester that is a responder that does not answer: the message fails
  // when all retries would have. IBA 9.9.2.1.
  Step wait_for_copy(Qp<P>& qp) {
    Operation& op = qp.operation;
    const std::uint64_t timeout = ack_timeout_ns(qp.attributes.timeout);
    if (qp.type != QpType::rc || timeout == 0) return Step::waiting;
    const std::uint64_t now = ports_.now_ns();
    if (op.wait != Operation::Wait::copy) {
      op.wait = Operation::Wait::copy;
      op.deadline_ns = now + std::max<std::uint64_t>(timeout * (qp.attributes.retry_cnt + 1u), 1'000'000'000);
    } else if (now >= op.deadline_ns) {
      return fail(qp, WcStatus::retry_exc_err, qp.counters.retry_exceeded);
    }
    ports_.wake_at(qp, op.deadline_ns);
    return Step::waiting;
  }

  Step wait_for_ack(Qp<P>& qp) {
    Operation& op = qp.operation;
    const std::uint64_t now = ports_.now_ns();
    const std::uint64_t timeout = ack_timeout_ns(qp.attributes.timeout);
    if (timeout == 0) {  // for ever: look again by and by
      op.wait = Operation::Wait::ack;
      ports_.wake_at(qp, now + 1'000'000);
      return Step::waiting;
    }
    if (op.wait != Operation::Wait::ack) {
      op.wait = Operation::Wait::ack;
      op.deadline_ns = now + timeout;
    } else if (now >= op.deadline_ns) {
      ++qp.counters.ack_timeouts;
      if (op.retries >= qp.attributes.retry_cnt) return fail(qp, WcStatus::retry_exc_err, qp.counters.retry_exceeded);
      ++op.retries;
      op.deadline_ns = now + timeout;
    }
    ports_.wake_at(qp, op.deadline_ns);
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
      ports_.wake_at(qp, op.deadline_ns);
    }
    ports_.await_receive(qp, peer);
    return Step::waiting;
  }

  Step move(Qp<P>& qp, Qp<P>& peer, Budget& budget) {
    Operation& op = qp.operation;
    const OpcodeRule& rule = *op.rule;
    ScatterGather& to = rule.reads ? op.local : rule.moves_to_receive ? peer.inbound.buffers : op.far;
    ScatterGather& from = rule.reads ? op.far : op.local;
    while (op.moved_bytes < op.request.bytes) {
      if (budget.bytes <= 0) return Step::budget_spent;
      const std::uint64_t bytes = std::min({from.contiguous_bytes(), to.contiguous_bytes(), slice_bytes});
      switch (ports_.copy(qp, to.here(), from.here(), bytes)) {
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
      const auto status = ports_.copy(qp, op.local.here(), Place::in_engine(&op.value) + op.moved_bytes, bytes);
      if (status == MemoryStatus::pending) return Step::waiting;
      if (status != MemoryStatus::done) return local_error(qp, WcStatus::loc_prot_err);
      op.local.advance(bytes);
      op.moved_bytes += bytes;
    }
    return succeed(qp);
  }

  // A region at the responder that was good when the message began is gone.
  Step remote_fault(Qp<P>& qp, Qp<P>& peer) {
    if (qp.type == QpType::rc) responder_.fail(peer, AsyncEvent::qp_access_err);
    return refused(qp, WcStatus::rem_access_err);
  }
  Step refused(Qp<P>& qp, WcStatus status) {
    return qp.type == QpType::uc ? succeed(qp) : fail(qp, status, qp.counters.remote_errors);
  }

  // --- datagrams: first gathered into the engine's memory, then given to each receiver, so that a receiver depends on nobody's
  // memory but its own.
  Qp<P>* datagram_peer(Qp<P>& qp) {
    const UdOperand& ud = qp.operation.ud;
    const bool multicast = ud.remote_qpn == multicast_qpn.value && ud.dgid[0] == 0xff;
    if (multicast) return ports_.multicast_peer(qp, ud, qp.operation.multicast_index);
    return qp.operation.multicast_index == 0 ? ports_.datagram_peer(qp, ud) : nullptr;
  }

  Step advance_datagram(Qp<P>& qp, Budget& budget) {
    Operation& op = qp.operation;
    const std::uint64_t bytes = op.request.bytes;
    if (op.stage == Operation::Stage::routing) {
      while (op.moved_bytes < bytes) {
        const std::uint64_t part = op.local.contiguous_bytes();
        const auto status =
            ports_.copy(qp, Place::in_engine(qp.datagram.get() + grh_bytes + op.moved_bytes), op.local.here(), part);
        if (status == MemoryStatus::pending) return Step::waiting;
        if (status != MemoryStatus::done) return local_error(qp, WcStatus::loc_prot_err);
        op.local.advance(part);
        op.moved_bytes += part;
      }
      budget.bytes -= static_cast<std::int64_t>(bytes);
      op.stage = Operation::Stage::moving;
      op.moved_bytes = 0;
    }
    const std::uint32_t qkey = (op.ud.remote_qkey & 0x80000000u) ? qp.attributes.qkey : op.ud.remote_qkey;
    for (Qp<P>* peer; (peer = datagram_peer(qp)) != nullptr; ++op.multicast_index, op.moved_bytes = 0) {
      const bool ours = peer->inbound.active && peer->inbound.owner == qp.qpn;
      if (peer->inbound.active && !ours && peer->inbound.owner != Qpn{}) {  // one datagram at a time
        constexpr std::uint64_t look_again_ns = 20'000;
        ports_.wake_at(qp, ports_.now_ns() + look_again_ns);
        return Step::waiting;
      }
      if (!ours && !responder_.begin_datagram(*peer, qp.qpn, qkey, bytes)) continue;
      const bool grh = ports_.write_grh(qp, *peer, op.ud, static_cast<std::uint32_t>(bytes), qp.datagram.get());
      ScatterGather& to = peer->inbound.buffers;
      bool faulted = false;
      while (op.moved_bytes < grh_bytes + bytes && !faulted) {
        const std::uint64_t part = std::min(to.contiguous_bytes(), grh_bytes + bytes - op.moved_bytes);
        const auto status = ports_.copy(qp, to.here(), Place::in_engine(qp.datagram.get() + op.moved_bytes), part);
        if (status == MemoryStatus::pending) return Step::waiting;
        faulted = status != MemoryStatus::done;
        if (faulted) {
          responder_.receive_error(*peer, WcStatus::loc_prot_err, WcStatus::success);
        } else {
          to.advance(part);
          op.moved_bytes += part;
        }
      }
      if (!faulted) responder_.finish_datagram(*peer, qp, op.request, *op.rule, op.ud, grh);
    }
    return succeed(qp);
  }

  // --- completion ---------------------------------------------------------------------------------------------
  Step succeed(Qp<P>& qp) {
    Operation& op = qp.operation;
    const OpcodeRule& rule = *op.rule;
    op.stage = Operation::Stage::none;
    qp.send_psn = vrdma::advance(qp.send_psn, op.request.packets);
    if (rule.atomic) {
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
    if (!ports_.complete(qp, Direction::send, cqe, {WcStatus::success, rule.send_opcode, 0})) responder_.fail(qp, std::nullopt);
    return Step::done;
  }

  Step fail(Qp<P>& qp, WcStatus status, std::uint64_t& counter) {
    Operation& op = qp.operation;
    ports_.abandon(qp);
    op.stage = Operation::Stage::none;
    ++counter;
    Cqe cqe{};
    cqe.wr_id = op.wr_id;
    cqe.imm_data = static_cast<std::uint32_t>(status);  // vendor error
    cqe.queue_position = op.next_position;
    ports_.complete(qp, Direction::send, cqe, {status, op.rule != nullptr ? op.rule->send_opcode : WcOpcode::send, 0});
    if (qp.type == QpType::rc) {
      responder_.fail(qp, std::nullopt);
    } else {  // IBA 10.3.1.6: an unreliable send queue in error leaves the receive queue alone
      qp.state = QpState::sqe;
      ports_.state_changed(qp);
    }
    return Step::done;
  }
  Step local_error(Qp<P>& qp, WcStatus status) { return fail(qp, status, qp.counters.local_errors); }

  P& ports_;
  Responder<P>& responder_;
};

}  // namespace vrdma::engine
