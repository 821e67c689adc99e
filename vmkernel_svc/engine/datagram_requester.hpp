// The requester half of datagrams: a message is first gathered into the engine's memory, then given to each receiver, so that a receiver
// depends on nobody's memory but its own. IBA 9.8.3, 10.5.2 (multicast).
#pragma once

#include <algorithm>

#include "vmkernel_svc/engine/grh.hpp"
#include "vmkernel_svc/engine/responder.hpp"

namespace vrdma::engine {

enum class Step : std::uint8_t { done, budget_spent, waiting };

// Requester: fetches the operations, and says how they end.
template <class P, class Requester>
class DatagramRequester {
 public:
  DatagramRequester(P& ports, Responder<P>& responder, Requester& requester) : ports_(ports), responder_(responder), requester_(requester) {}

  // Carries the operation on.
  Step advance(Qp<P>& qp, Budget& budget) {
    Operation& op = qp.operation;
    const std::uint64_t bytes = op.request.bytes;
    if (op.stage == Operation::Stage::gathering) {
      while (op.moved_bytes < bytes) {
        const std::uint64_t part = op.local.contiguous_bytes();
        const auto status = engine::copy(ports_, qp, Place::in_engine(qp.datagram.get() + grh_bytes + op.moved_bytes), op.local.here(), part);
        if (status == MemoryStatus::pending) return Step::waiting;
        if (status != MemoryStatus::done) return requester_.local_error(qp, WcStatus::loc_prot_err);
        op.local.advance(part);
        op.moved_bytes += part;
      }
      op.stage = Operation::Stage::routing;
    }
    // IBA 10.2.5: the top bit of the Q_Key in a work request asks for the queue pair's own.
    const std::uint32_t qkey = (op.ud.remote_qkey & 0x80000000u) ? qp.attributes.qkey : op.ud.remote_qkey;
    for (;; ++op.receivers_from) {
      if (op.stage == Operation::Stage::routing) {
        if (budget.bytes <= 0) return Step::budget_spent;
        Qp<P>* const receiver = receiver_of(qp);
        if (receiver == nullptr) {
          if constexpr (requires { ports_.far_datagram(qp, op.request, op.ud, qkey); }) ports_.far_datagram(qp, op.request, op.ud, qkey);
          return requester_.succeed(qp);
        }
        if constexpr (requires { ports_.is_elsewhere(qp, *receiver); }) {
          // Perhaps another thread's, which may be at it: its type and Q_Key stand still. Who would not take the datagram stays apart.
          if (ports_.is_elsewhere(qp, *receiver)) {
            const bool takes = receiver->type == QpType::ud && receiver->attributes.qkey == qkey;
            if (takes) ports_.bring_together(qp, *receiver);
            if (takes && wait_for_turn(qp)) return Step::waiting;
            continue;
          }
        }
        bool ready = receiver->serves == nullptr;  // one datagram at a time
        if constexpr (requires { ports_.may_deliver(*receiver); }) ready = ready && ports_.may_deliver(*receiver);
        if (!ready) {
          if (wait_for_turn(qp)) return Step::waiting;
          ++receiver->counters.dropped;
          continue;
        }
        op.wait = Operation::Wait::none;
        if (receiver->blocked_until_ns != 0 && ports_.now_ns() < receiver->blocked_until_ns) {
          ++receiver->counters.dropped;
          continue;
        }
        const Response response = responder_.begin_datagram(*receiver, qp, qkey, bytes);
        if (response.kind == Response::Kind::rnr && !is_multicast(op.ud) && requester_.keep_for_receive(qp, *receiver)) return Step::waiting;
        if (response.kind != Response::Kind::proceed) {
          receiver->counters.dropped += response.kind != Response::Kind::nak;  // that one its receiver was told of
          continue;
        }
        op.grh = ports_.write_grh(qp, *receiver, op.ud, ud_packet_bytes(static_cast<std::uint32_t>(bytes), op.rule->has_imm), qp.datagram.get());
        op.stage = Operation::Stage::delivering;
        op.moved_bytes = 0;
      }
      if (!deliver(qp, budget)) return Step::waiting;
      op.stage = Operation::Stage::routing;
    }
  }

 private:
  static constexpr std::uint64_t copy_patience_ns = 200'000'000;
  static constexpr std::uint32_t copy_patience_slices = 10;  // as in Requester::wait_for_copy
  // With a receiver whose memory has used that up, until a datagram reaches it: how long, and how long none is tried in between.
  static constexpr std::uint64_t blocked_patience_ns = 10'000'000, blocked_pause_ns = 200'000'000;

  Qp<P>* receiver_of(Qp<P>& qp) {
    const UdOperand& ud = qp.operation.ud;
    if (is_multicast(ud)) return ports_.multicast_peer(qp, ud, qp.operation.receivers_from);
    return qp.operation.receivers_from == 0 ? ports_.datagram_peer(qp, ud) : nullptr;
  }

  // Carries the delivery to the receiver that accepted the datagram on. False: a copy is pending.
  bool deliver(Qp<P>& qp, Budget& budget) {
    Operation& op = qp.operation;
    const std::uint64_t bytes = grh_bytes + op.request.bytes;
    Qp<P>* const receiver = qp.accepted_by;
    if (receiver == nullptr || !receives(*receiver)) {  // it went away in the middle
      if (receiver != nullptr && !requester_.settled(qp) && keep_waiting(qp, copy_patience_ns)) return false;
      requester_.drop_engagement(qp);
      return true;
    }
    ScatterGather& to = receiver->inbound.buffers;
    while (op.moved_bytes < bytes) {
      const std::uint64_t part = std::min(to.contiguous_bytes(), bytes - op.moved_bytes);
      const auto status = engine::copy(ports_, qp, to.here(), Place::in_engine(qp.datagram.get() + op.moved_bytes), part);
      if (status == MemoryStatus::pending) {
        if (keep_waiting(qp, receiver->blocked_until_ns == 0 ? copy_patience_ns : blocked_patience_ns)) return false;
        // Its memory blocks: the datagram is lost, the receive WQE stays for the next one. The sender has other receivers, who do not wait as long again.
        ++receiver->counters.dropped;
        receiver->blocked_until_ns = ports_.now_ns() + blocked_pause_ns;
        requester_.drop_engagement(qp);
        return true;
      }
      if (status != MemoryStatus::done) {
        responder_.receive_error(*receiver, WcStatus::loc_prot_err, WcStatus::success);
        return true;
      }
      op.wait = Operation::Wait::none;
      to.advance(part);
      op.moved_bytes += part;
    }
    budget.bytes -= static_cast<std::int64_t>(bytes);
    receiver->blocked_until_ns = 0;
    responder_.finish_datagram(*receiver, qp, op.request, *op.rule, op.ud, op.grh);
    return true;
  }

  // Whether a wait for somebody else's memory has not lasted too long yet.
  bool keep_waiting(Qp<P>& qp, std::uint64_t patience_ns) {
    Operation& op = qp.operation;
    const std::uint64_t now = ports_.now_ns();
    if (op.wait != Operation::Wait::copy) {
      op.wait = Operation::Wait::copy;
      op.deadline_ns = now + patience_ns;
    }
    if (now >= op.deadline_ns) return op.wait = Operation::Wait::none, false;
    ports_.wake_at(qp, op.deadline_ns);
    return true;
  }
  bool wait_for_turn(Qp<P>& qp) {
    constexpr std::uint64_t look_again_ns = 20'000, slice_ns = copy_patience_ns / copy_patience_slices;
    Operation& op = qp.operation;
    const std::uint64_t now = ports_.now_ns();
    if (op.wait != Operation::Wait::busy) {
      op.wait = Operation::Wait::busy;
      op.slices_left = copy_patience_slices;
      op.deadline_ns = now + slice_ns;
    } else if (now >= op.deadline_ns) {
      if (--op.slices_left == 0) return op.wait = Operation::Wait::none, false;
      op.deadline_ns = now + slice_ns;
    }
    ports_.wake_at(qp, now + look_again_ns);
    return true;
  }

  P& ports_;
  Responder<P>& responder_;
  Requester& requester_;
};

}  // namespace vrdma::engine
