// The responder half: decides whether a queue pair accepts a request, gives it a receive WQE, completes it there, and goes to
// ERR where the specification says so. IBA 9.7.4 (responder checks), 9.9.3 (responder errors), 10.7.3 (completions).
//
// Called by the thread that runs the *requester*; touches the responder's queue pair only.
#pragma once

#include <cstring>
#include <optional>

#include "vmkernel_svc/engine/qp.hpp"

namespace vrdma::engine {

template <class P>
class Responder {
 public:
  explicit Responder(P& ports) : ports_(ports) {}

  // RC and UC: is this request for us, and can it be carried out? Sets `far` (RDMA) or qp.inbound (receive WQE taken).
  Response begin(Qp<P>& qp, Qp<P>& sender, const Request& request, const OpcodeRule& rule, ScatterGather& far) {
    if (qp.type != peer_type(sender.type) || !receives(qp)) return Response::silence();
    if (qp.attributes.dest_qp_num != sender.qpn.value || !ports_.leads_back(qp, sender)) return Response::silence();
    if (is_reliable(qp.type) && qp.expected_psn != request.psn) return Response::silence();  // IBA 9.7.4.1.2: out of sequence
    if (qp.state == QpState::rtr && !qp.communication_established) {
      qp.communication_established = true;
      ports_.event(qp, AsyncEvent::comm_est);
    }
    if (!knows_windows && rule.invalidates) return Response::silence();  // before anything is taken for it: a poster leaves it to the service
    if constexpr (requires { ports_.xrc_srq(qp, request.srqn); }) {
      if (qp.type == QpType::xrc_recv) {
        const std::optional<Srq<P>*> srq = ports_.xrc_srq(qp, request.srqn);
        if (!srq) return Response::silence();
        if (*srq == nullptr) return fail(qp, AsyncEvent::qp_req_err), Response::nak(WcStatus::rem_inv_req_err);
        receive_by(qp, **srq);
      }
    }
    if (rule.remote_access != 0) {
      if (const WcStatus status = check_remote(qp, request, rule, far); status != WcStatus::success) {
        if (is_reliable(qp.type)) status == WcStatus::rem_access_err ? deny(qp, rule) : fail(qp, AsyncEvent::qp_req_err);
        return Response::nak(status);
      }
    }
    if (rule.takes_receive) {
      if (!take(qp)) return Response::not_ready(rnr_timer_ns(qp.attributes.min_rnr_timer));
      if (rule.moves_to_receive) {
        if (request.bytes > qp.inbound.capacity_bytes) {
          if (qp.type == QpType::uc) return drop_for_want_of_room(qp);
          return receive_error(qp, WcStatus::loc_len_err, WcStatus::rem_inv_req_err);
        }
        // Only the buffers that the message reaches count.
        if (request.bytes > qp.inbound.buffers.total_bytes())
          return receive_error(qp, WcStatus::loc_prot_err, WcStatus::rem_op_err);
        qp.inbound.buffers.rewind();
      }
    }
    dismiss_requester(qp);
    engage(sender, qp);
    return Response::proceed();
  }

  // The payload is in place. False: the responder could not complete it (its CQ is overrun).
  bool finish(Qp<P>& qp, const Request& request, const OpcodeRule& rule) {
    dismiss_requester(qp);
    if (is_reliable(qp.type)) qp.expected_psn = advance(request.psn, request.packets);
    qp.counters.received_messages += 1;
    qp.counters.received_bytes += rule.reads ? 0 : request.bytes;
    if (!rule.takes_receive) return true;
    if constexpr (knows_windows) {
      if (rule.invalidates && !ports_.invalidate(qp, Key{request.imm_data})) [[unlikely]] {
        end_receive(qp, WcStatus::rem_inv_req_err);
        return fail(qp, std::nullopt), false;
      }
    }
    Cqe cqe{};
    cqe.wr_id = qp.inbound.wr_id;
    cqe.byte_len = static_cast<std::uint32_t>(request.bytes);
    cqe.imm_data = rule.has_imm || rule.invalidates ? request.imm_data : 0;
    cqe.src_qp = request.source_qpn.value;
    return complete(qp, cqe, {WcStatus::success, rule.receive_opcode, receive_flags(request.solicited, rule)});
  }

  // RC: the request may not touch what it names. A receive WQE that was for its immediate ends with it (IBA 11.6.2, Local Access Error).
  void deny(Qp<P>& qp, const OpcodeRule& rule) {
    if ((rule.takes_receive || ports_.immediate_follows(qp)) && take(qp)) end_receive(qp, WcStatus::loc_access_err);
    fail(qp, AsyncEvent::qp_access_err);
  }

  // The payload could not be put into the receive buffers: a local error of the receiver, which goes to ERR whatever its type (IBA 9.9.3.1, class A).
  Response receive_error(Qp<P>& qp, WcStatus here, WcStatus there) {
    end_receive(qp, here);
    fail(qp, std::nullopt);
    return Response::nak(there);
  }

  // IBA 9.8.2.2, 9.8.3: an unreliable responder drops a message that its receive WQE has no room for, and the WQE stays for the next one (9.9.3,
  // class D). One of an SRQ ends in an error (class E): it would be kept from all others of the SRQ for as long as what comes is as large.
  Response drop_for_want_of_room(Qp<P>& qp) {
    if (qp.srq != nullptr) end_receive(qp, WcStatus::loc_len_err);
    return Response::silence();
  }

  // UD: a receive WQE whose buffers take grh_bytes + payload. Silence, and not being ready: the datagram is to be dropped.
  Response begin_datagram(Qp<P>& qp, Qp<P>& sender, std::uint32_t qkey, std::uint64_t payload_bytes) {
    if (qp.type != QpType::ud || !receives(qp) || qp.attributes.qkey != qkey) return Response::silence();
    if (!take(qp)) return Response::not_ready(0);
    if (grh_bytes + payload_bytes > qp.inbound.capacity_bytes) return drop_for_want_of_room(qp);
    if (grh_bytes + payload_bytes > qp.inbound.buffers.total_bytes())
      return receive_error(qp, WcStatus::loc_prot_err, WcStatus::success);
    qp.inbound.buffers.rewind();
    engage(sender, qp);
    return Response::proceed();
  }
  void finish_datagram(Qp<P>& qp, Qp<P>& sender, const Request& request, const OpcodeRule& rule, const UdOperand& ud, bool grh) {
    dismiss_requester(qp);
    Cqe cqe{};
    cqe.wr_id = qp.inbound.wr_id;
    cqe.byte_len = static_cast<std::uint32_t>(request.bytes + grh_bytes);
    cqe.imm_data = rule.has_imm ? request.imm_data : 0;
    cqe.src_qp = sender.qpn.value;
    cqe.slid = ports_.lid(sender);
    cqe.sl = ports_.sl(sender, ud);
    qp.counters.received_messages += 1;
    qp.counters.received_bytes += request.bytes;
    complete(qp, cqe,
             {WcStatus::success, rule.receive_opcode,
              static_cast<std::uint8_t>(receive_flags(request.solicited, rule) | (grh ? wc_grh : 0))});
  }

  // To ERR, where everything posted flushes. IBA 10.3.1.
  void fail(Qp<P>& qp, std::optional<AsyncEvent> event) {
    if (qp.state == QpState::err || qp.state == QpState::reset) return;
    qp.state = QpState::err;
    if (event) ports_.event(qp, *event);
    ports_.state_changed(qp);
  }

  // A receive completion, which ends qp.inbound.
  bool complete(Qp<P>& qp, Cqe& cqe, const CqeState& state) {
    qp.inbound.active = false;
    return publish(qp, Direction::receive, cqe, state);
  }

  // Any completion. False: its CQ is overrun, which ends the queue pair; the ports see to the others that complete there.
  [[gnu::always_inline]] bool publish(Qp<P>& qp, Direction direction, Cqe& cqe, const CqeState& state) {
    if (ports_.complete(qp, direction, cqe, state)) [[likely]] return true;
    fail(qp, AsyncEvent::qp_fatal);
    return false;
  }

  // Takes the next receive WQE into qp.inbound, unless one is already there. False: none is posted.
  bool take(Qp<P>& qp) {
    const bool got = take_next(qp);
    if (got && qp.patience.dry()) [[unlikely]] qp.patience.over(ports_.now_ns());
    return got;
  }
  bool take_next(Qp<P>& qp) {
    if (qp.inbound.active) return true;
    if (qp.srq == nullptr || !qp.returned.empty()) return fetch(qp);
    ports_.srq_wanted(*qp.srq);
    const bool got = fetch(qp);
    // Posters may have emptied it since a limit was set, before they knew of that.
    if (got || qp.srq->taken != qp.srq->taken_now()) note_srq_take(*qp.srq);
    return got;
  }

  // Likewise, for who hands it to hardware: a WQE of an SRQ does not count as taken before a message is in it.
  bool fetch(Qp<P>& qp) {
    if (qp.inbound.active) return true;
    if (auto& next = qp.srq != nullptr && qp.returned.empty() ? qp.srq->returned : qp.returned; !next.empty()) [[unlikely]] {
      qp.inbound = next.back();
      next.pop_back();
      return true;
    }
    alignas(64) std::byte wqe[receive_wqe_slots_max * slot_bytes];
    vmci::RecordReader& ring = qp.srq != nullptr ? qp.srq->ring : qp.receive_ring;
    const std::uint32_t record_slots = qp.srq != nullptr ? qp.srq->record_slots : qp.receive_record_slots;
    std::uint32_t slots = 0;
    bool good = false;
    if (ring.slot_count() == 0) return false;
    const vmci::RecordTurns turns = qp.srq != nullptr ? qp.srq->turns : vmci::RecordTurns();
    const auto& head = *reinterpret_cast<const RecordHead*>(wqe);
    WqeControl control{};
    for (int tries = 0;; ++tries) {
      const std::uint64_t last = turns ? turns.last() : 0;
      if (turns) ring.skip_to(vmci::RecordTurns::next(last) * record_slots);
      const auto peek = ring.peek(wqe, receive_wqe_slots_max, slots);
      if (peek == vmci::RecordReader::Peek::ready) control = unpack_wqe_control(head.control);  // a malformed one was not copied
      good = peek == vmci::RecordReader::Peek::ready && slots == record_slots && control.opcode == WrOpcode::receive &&
             control.count <= receive_sge_max && receive_wqe_payload_offset + control.count * sizeof(Sge) <= std::size_t{slots} * slot_bytes;
      // Where a poster took it meanwhile, what was read is nothing. Only a guest that writes nonsense there makes that go on for ever.
      const bool mine = !turns || (good ? turns.take(last, 0, vmci::ClaimedStores()) : turns.last() == last);
      if ((mine && peek == vmci::RecordReader::Peek::empty) || tries == takes_max) return false;
      if (mine) break;
    }
    if (!good) {  // the guest wrote nonsense into its own queue: its queue pair is lost, nothing else
      ++qp.counters.malformed;
      fail(qp, AsyncEvent::qp_fatal);
      return false;
    }
    ring.advance(slots);
    qp.inbound.active = true;
    qp.inbound.wr_id = head.tag;
    qp.inbound.capacity_bytes = 0;
    qp.inbound.buffers.clear();
    bool good_so_far = true;
    for (std::uint32_t i = 0; i < control.count; ++i) {
      Sge sge;
      std::memcpy(&sge, wqe + receive_wqe_payload_offset + i * sizeof(Sge), sizeof(sge));
      if (sge.bytes == 0) continue;
      qp.inbound.capacity_bytes += sge.bytes;
      if (!good_so_far) continue;
      good_so_far = add_buffer(qp, qp.inbound, sge);
    }
    return true;
  }

  void note_srq_take(Srq<P>& srq) {
    srq.taken = srq.turns ? srq.taken_now() : srq.taken + 1;
    if (srq.limit == 0) return;
    const std::uint32_t left = ports_.srq_posted(srq) - srq.taken;
    if (left < srq.limit) {
      srq.limit = 0;  // once, then disarmed (IBA 10.2.9.4)
      if (srq.turns) srq.turns.set_limit(0);
      ports_.srq_limit(srq);
    }
  }

  // A receive WQE that was taken and will not be completed by this queue pair (it is reset or destroyed): one of an SRQ goes
  // back to it, its own is forgotten with everything else posted.
  void give_back(Qp<P>& qp) {
    if (std::exchange(qp.inbound.active, false)) qp.returned.push_back(qp.inbound);
    if (qp.srq != nullptr) {
      for (Inbound& inbound : qp.returned) inbound.active = true;
      qp.srq->returned.insert(qp.srq->returned.end(), qp.returned.begin(), qp.returned.end());
      qp.srq->taken -= static_cast<std::uint32_t>(qp.returned.size());
    }
    qp.returned.clear();
  }
  // XRC: what a target queue pair takes from now on is of this SRQ.
  void receive_by(Qp<P>& qp, Srq<P>& srq) {
    if (qp.srq == &srq) return;
    if (qp.srq != nullptr) give_back(qp);
    qp.srq = &srq;
  }
  // One of the queue pair's SRQ, by somebody else who is gone: it goes back, too.
  void give_back(Qp<P>& qp, std::uint64_t wr_id, const Sge& buffer) {
    Srq<P>& srq = *qp.srq;
    if (srq.returned.size() >= srq.max_wr) return;  // more than an honest guest can have posted
    Inbound inbound;
    inbound.active = true;
    inbound.wr_id = wr_id;
    inbound.capacity_bytes = buffer.bytes;
    if (buffer.bytes != 0) add_buffer(qp, inbound, buffer);
    srq.returned.push_back(inbound);
    --srq.taken;
  }

 private:
  static constexpr int takes_max = 200;
  static constexpr bool knows_windows = requires(P& ports, Qp<P>& qp, Key key) { ports.invalidate(qp, key); };

  // The receive WQE that was taken ends in error.
  void end_receive(Qp<P>& qp, WcStatus status) {
    Cqe cqe{};
    cqe.wr_id = qp.inbound.wr_id;
    cqe.imm_data = static_cast<std::uint32_t>(status);  // vendor error
    ++qp.counters.local_errors;
    dismiss_requester(qp);
    complete(qp, cqe, {status, WcOpcode::recv, 0});
  }

  // Adds what can be written of a receive buffer. One may end beyond its region, and does no harm as long as no message gets there:
  // an adapter translates what it writes, and programs rely on that (perftest --use-srq rounds buffers up to the MTU).
  // False: nothing behind it can be written.
  bool add_buffer(Qp<P>& qp, Inbound& inbound, const Sge& sge) {
    const Key key{sge.lkey};
    if (const auto place = ports_.find_receive(qp, key, sge.address, sge.bytes)) [[likely]] return inbound.buffers.add(*place, sge.bytes), true;
    if (const auto place = ports_.find_receive(qp, key, sge.address, 1)) {
      std::uint64_t within = 1;
      for (std::uint64_t beyond = sge.bytes; beyond - within > 1;) {
        const std::uint64_t middle = within + (beyond - within) / 2;
        (ports_.find_receive(qp, key, sge.address, middle) ? within : beyond) = middle;
      }
      inbound.buffers.add(*place, within);
    }
    return false;
  }

  WcStatus check_remote(Qp<P>& qp, const Request& request, const OpcodeRule& rule, ScatterGather& far) {
    far.clear();
    if (rule.reads && qp.attributes.max_dest_rd_atomic == 0) return WcStatus::rem_inv_req_err;
    if (rule.word && request.remote_address % 8 != 0) return WcStatus::rem_inv_req_err;
    // IBA 9.9.3: a function that this queue pair is not set up for is an invalid request, whatever its key, and without bytes too.
    if ((qp.attributes.access_flags & rule.remote_access) == 0) return WcStatus::rem_inv_req_err;
    if (request.bytes == 0) return WcStatus::success;
    const auto place = ports_.find(qp, request.rkey, request.remote_address, request.bytes, rule.remote_access);
    if (!place) return WcStatus::rem_access_err;
    far.add(*place, request.bytes);
    return WcStatus::success;
  }

  P& ports_;
};

}  // namespace vrdma::engine
