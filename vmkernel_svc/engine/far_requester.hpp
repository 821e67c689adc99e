// The requester's half of a connection to another host: takes send WQEs as the requester does, sends them as records within a window,
// and completes them in order as answers come. RC and UC; a datagram needs no half of its own (Requester, send_far_datagram).
//
// The far end's rules (RNR, retries while nobody answers there, access) run at the far end, by a stand-in that was told this queue
// pair's attributes; what is decided here is what a requester decides alone: local errors, order, fences, and that a host which
// has been silent for longer than all retries would take does not answer any more (IBA 9.9.2.1).
#pragma once

#include <algorithm>

#include "vmkernel_svc/engine/far_half.hpp"
#include "vmkernel_svc/engine/requester.hpp"

namespace vrdma::engine {

// What ports to other hosts have besides.
template <class P>
concept FarPortsFor = requires(P p, Qp<P>& qp, FarFramePtr frame, FarOpen& open) {
  // Hands a record to the carrier; connection and epoch are filled in here. Only while there is room.
  { p.far_send(qp, std::move(frame)) } -> std::same_as<void>;
  { p.far_room(qp) } -> std::same_as<bool>;
  // Which run of the far host's service this is; 0: none has been reached yet. While it is not connected, the next may be another one.
  { p.far_session(qp) } -> std::same_as<std::uint64_t>;
  { p.far_connected(qp) } -> std::same_as<bool>;
  // For how long the far host has not been heard.
  { p.far_silent_ns(qp) } -> std::same_as<std::uint64_t>;
  { p.far_describe(qp, open) } -> std::same_as<void>;
  { p.far_epoch() } -> std::same_as<std::uint32_t>;
  // `qp` has been connected before, and is so again: stand-ins that are for it wait until a mark is back (far_marks.hpp).
  { p.far_connected_again(qp) } -> std::same_as<void>;
};

template <class P>
class FarRequester {
 public:
  using Half = FarHalf;
  using Limits = FarLimits<P>;

  FarRequester(P& ports, Responder<P>& responder, Requester<P>& requester)
      : ports_(ports), responder_(responder), requester_(requester) {}

  Progress run(Qp<P>& qp, Budget& budget, bool worked) {
    Half& far = *qp.far;
    far.blocked = false;
    if (far.session != 0 && ports_.far_session(qp) != far.session) {
      if (far.outstanding.empty() && !busy(qp) && (qp.state != QpState::rts || qp.send_ring.empty())) return Progress::idle;
      return lose(qp) ? Progress::worked : Progress::waiting;
    }
    const std::uint64_t sent = far.sent;
    const std::uint32_t messages = far.messages;
    worked |= take_arrived(qp, budget);
    while (qp.far->refused == WcStatus::success && !budget.spent() && (qp.state == QpState::rts || busy(qp)) && qp.state != QpState::err) {
      if (!step(qp, budget)) break;
      worked = true;
    }
    if (far.refused != WcStatus::success && far.outstanding.empty() && far.under_way == 0) {
      requester_.refuse(qp, std::exchange(far.refused, WcStatus::success));
      worked = true;
    }
    worked |= far.sent != sent || far.messages != messages;
    worked |= watch_silence(qp);
    return worked ? Progress::worked : busy(qp) || !far.outstanding.empty() ? Progress::waiting : Progress::idle;
  }

  // Answers and parts of answers, in order.
  bool take_arrived(Qp<P>& qp, Budget& budget) {
    bool worked = false;
    while (!qp.far->arrived.empty() && budget.bytes > 0 && qp.state != QpState::err) {
      if (qp.operation.copy_pending && qp.far->arrived_copy == false) break;  // the operation under way has the ports' copy
      if (!take(qp, budget)) break;
      worked = true;
    }
    Half& far = *qp.far;
    if (far.taken - far.told >= Limits::window_bytes / 4 && far.opened) send_bare(qp, FarKind::credit);
    return worked;
  }

  // Everything that was sent is given up; `flushed` is told of each message in order. The stand-in goes, too.
  template <class Flushed>
  void close(Qp<P>& qp, Flushed&& flushed) {
    Half& far = *qp.far;
    if (qp.operation.stage == Operation::Stage::moving) requester_.abandon(qp);  // stands among the outstanding
    if (std::exchange(qp.operation.copy_pending, false)) ports_.abandon(qp);
    const auto outstanding = std::move(far.outstanding);
    for (const auto& message : outstanding) flushed(message.wr_id, message.next_position);
    if (far.opened && far.session == ports_.far_session(qp)) send_bare(qp, FarKind::close);
    const std::uint32_t host = far.host;
    far = Half{};
    far.host = host;
    far.epoch = ports_.far_epoch();
  }

 private:
  static constexpr std::uint64_t patience_min_ns = 5'000'000'000;    // a loaded host is no lost one
  static constexpr std::uint64_t uc_patience_ns = patience_min_ns;    // then a message is lost
  static constexpr std::uint64_t look_again_ns = 500'000;            // for room

  static bool busy(const Qp<P>& qp) { return qp.operation.stage != Operation::Stage::none; }

  void send_bare(Qp<P>& qp, FarKind kind) {
    auto frame = FarFrame::make(0);
    frame->record().kind = kind;
    send(qp, std::move(frame));
  }
  void send(Qp<P>& qp, FarFramePtr frame) {
    Half& far = *qp.far;
    frame->record().taken = far.told = far.taken;
    far.sent += frame->record().payload_bytes;
    ports_.far_send(qp, std::move(frame));
  }

  // --- what comes back ----------------------------------------------------------------------------------------
  // Carries on with the first that arrived. False: a copy is pending.
  bool take(Qp<P>& qp, Budget& budget) {
    Half& far = *qp.far;
    FarFrame& frame = *far.arrived.front();
    const FarRecord record = frame.record();
    if (far.outstanding.empty() || far.outstanding.front().message != record.message) {
      ++qp.counters.malformed;
      far.arrived.pop_front();
      return true;
    }
    auto& message = far.outstanding.front();
    const auto status = static_cast<WcStatus>(record.status);
    // It has no stand-in, who would have said what it took of the window: the next message asks for one again.
    if (qp.type == QpType::uc && record.kind == FarKind::answer && status == WcStatus::retry_exc_err) return lose(qp), true;
    while (status == WcStatus::success && far.arrived_offset < record.payload_bytes) {
      const std::uint64_t bytes = message.into == nullptr ? 0
                                                          : std::min({message.into->contiguous_bytes(), slice_bytes,
                                                                      std::uint64_t{record.payload_bytes} - far.arrived_offset});
      if (bytes == 0) return end(qp, WcStatus::bad_resp_err), true;
      const auto copied = engine::copy(ports_, qp, message.into->here(), Place::in_engine(frame.payload() + far.arrived_offset), bytes);
      far.arrived_copy = copied == MemoryStatus::pending;
      if (copied == MemoryStatus::pending) return false;
      if (copied != MemoryStatus::done) return end(qp, WcStatus::loc_prot_err), true;
      message.into->advance(bytes);
      far.arrived_offset += static_cast<std::uint32_t>(bytes);
      budget.bytes -= static_cast<std::int64_t>(bytes);
    }
    far.taken += record.payload_bytes;
    far.arrived_offset = 0;
    if (record.kind == FarKind::answer) {
      if (status == WcStatus::success && message.into != nullptr && message.into->contiguous_bytes() != 0)
        return end(qp, WcStatus::bad_resp_err), true;
      return end(qp, status), true;
    }
    far.arrived.pop_front();
    return true;
  }

  // The oldest message is over.
  void end(Qp<P>& qp, WcStatus status) {
    Half& far = *qp.far;
    if (!far.arrived.empty()) far.arrived.pop_front();
    far.arrived_offset = 0;
    auto message = std::move(far.outstanding.front());
    far.outstanding.pop_front();
    if (message.rule->reads) --far.reads;
    if (qp.operation.stage == Operation::Stage::moving && message.message + 1 == far.messages) requester_.abandon(qp), far.filling.reset();
    if (qp.type == QpType::uc) status = WcStatus::success;  // IBA 9.8.2: nobody tells the sender
    Cqe cqe{};
    cqe.wr_id = message.wr_id;
    cqe.queue_position = message.next_position;
    if (status == WcStatus::success) {
      if (message.rule->atomic)
        ++qp.counters.atomics;
      else if (message.rule->reads)
        ++qp.counters.read_messages, qp.counters.read_bytes += message.bytes;
      else
        ++qp.counters.sent_messages, qp.counters.sent_bytes += message.bytes;
      if (!message.signaled) return;
      cqe.byte_len = static_cast<std::uint32_t>(message.bytes);
      responder_.publish(qp, Direction::send, cqe, {status, message.rule->send_opcode, 0});
      return;
    }
    ++(status == WcStatus::loc_prot_err        ? qp.counters.local_errors
       : status == WcStatus::retry_exc_err     ? qp.counters.retry_exceeded
       : status == WcStatus::rnr_retry_exc_err ? qp.counters.rnr_retry_exceeded
                                               : qp.counters.remote_errors);
    cqe.imm_data = static_cast<std::uint32_t>(status);  // vendor error
    responder_.publish(qp, Direction::send, cqe, {status, message.rule->send_opcode, 0});
    responder_.fail(qp, std::nullopt);
  }

  // The far host does not know this connection any more, or is not there any more. False: something is waited for.
  bool lose(Qp<P>& qp) {
    Half& far = *qp.far;
    if (std::exchange(far.arrived_copy, false)) {
      ports_.abandon(qp);
      qp.operation.copy_pending = false;
    }
    far.arrived.clear();
    if (qp.type == QpType::uc) {
      while (!far.outstanding.empty()) end(qp, WcStatus::success);
      if (far.refused != WcStatus::success) requester_.refuse(qp, std::exchange(far.refused, WcStatus::success));
      else if (busy(qp) && qp.operation.rule->local) requester_.conclude(qp);
      else if (busy(qp)) requester_.drop(qp);
      close(qp, [](std::uint64_t, std::uint32_t) {});
      return true;
    }
    if (!far.outstanding.empty()) return end(qp, WcStatus::retry_exc_err), true;
    if (far.refused != WcStatus::success && far.under_way == 0) return requester_.refuse(qp, std::exchange(far.refused, WcStatus::success)), true;
    if (busy(qp)) return requester_.give_up_next(qp);
    // Nothing was under way: the next message finds that nobody answers.
    return !far.given_one_by_one && qp.state == QpState::rts && requester_.give_up_next(qp);
  }

  // --- what goes out ------------------------------------------------------------------------------------------
  // False: nothing to do, or to be waited for.
  bool step(Qp<P>& qp, Budget& budget) {
    Operation& op = qp.operation;
    Half& far = *qp.far;
    if (far.arrived_copy) return false;  // the ports' copy is of what arrived: the next operation has one of its own
    if (!busy(qp)) {
      if (far.given_one_by_one) return false;
      if (far.outstanding.size() >= Limits::window_messages || far.sent - far.credited >= Limits::window_bytes) {
        far.blocked = true;
        return false;
      }
      const auto fetched = requester_.fetch(qp);
      if (fetched == Requester<P>::Fetch::empty) return false;
      --budget.wqes;
      if (fetched == Requester<P>::Fetch::failed) return true;
    }
    if (op.rule->local) [[unlikely]] {
      if (!far.outstanding.empty() || far.under_way != 0) return false;
      return requester_.conclude(qp) != Requester<P>::Step::waiting;
    }
    if (op.stage == Operation::Stage::routing && !begin(qp)) return false;
    return carry_on(qp, budget);
  }

  bool begin(Qp<P>& qp) {
    Operation& op = qp.operation;
    Half& far = *qp.far;
    const OpcodeRule& rule = *op.rule;
    if (far.reads != 0 && ((op.flags & wr_fence) != 0 || (rule.reads && far.reads >= qp.attributes.max_rd_atomic))) return false;
    // Whoever connects while the far host is away means the service that will be there.
    if (!ports_.far_room(qp) || (!far.opened && !ports_.far_connected(qp))) {
      far.blocked = true;
      return false;
    }
    if (!far.opened) {
      far.session = ports_.far_session(qp);
      auto frame = FarFrame::make(sizeof(FarOpen));
      frame->record().kind = FarKind::open;
      frame->record().payload_bytes = sizeof(FarOpen);
      FarOpen open{};
      ports_.far_describe(qp, open);
      std::memcpy(frame->payload(), &open, sizeof(open));
      far.opened = true;
      frame->record().taken = far.told = far.taken;
      ports_.far_send(qp, std::move(frame));  // not counted against the window
    }
    op.stage = Operation::Stage::moving;
    op.moved_bytes = 0;
    op.local.rewind();
    FarHalf::Outstanding message{far.messages++, op.next_position, op.wr_id, op.request.bytes, &rule, (op.flags & wr_signaled) != 0, nullptr};
    if (rule.reads) {
      ++far.reads;
      message.into = std::make_unique<ScatterGather>(op.local);
    }
    far.outstanding.push_back(std::move(message));
    qp.send_psn = vrdma::advance(qp.send_psn, op.request.packets);
    return true;
  }

  // Gathers and sends. True: the message is out, or has failed.
  bool carry_on(Qp<P>& qp, Budget& budget) {
    Operation& op = qp.operation;
    Half& far = *qp.far;
    const std::uint64_t payload = op.rule->reads ? 0 : op.request.bytes;
    for (;;) {
      if (!far.filling) {
        if (far.sent - far.credited >= Limits::window_bytes || !ports_.far_room(qp)) {
          far.blocked = true;
          return false;
        }
        far.filling = FarFrame::make(static_cast<std::uint32_t>(std::min<std::uint64_t>(payload - op.moved_bytes, Limits::part_bytes)));
        describe(qp, far.filling->record());
      }
      FarRecord& record = far.filling->record();
      while (record.payload_bytes < far.filling->capacity()) {
        if (budget.bytes <= 0) return false;
        const std::uint64_t bytes = std::min(op.local.contiguous_bytes(), std::uint64_t{far.filling->capacity() - record.payload_bytes});
        switch (engine::copy(ports_, qp, Place::in_engine(far.filling->payload() + record.payload_bytes), op.local.here(), bytes)) {
          case MemoryStatus::done: break;
          case MemoryStatus::pending: return false;
          default:
            far.filling.reset();
            far.outstanding.pop_back();  // it never was: it fails here, after those before it
            requester_.refuse(qp, WcStatus::loc_prot_err);
            return true;
        }
        op.local.advance(bytes);
        op.moved_bytes += bytes;
        record.payload_bytes += static_cast<std::uint32_t>(bytes);
        budget.bytes -= static_cast<std::int64_t>(bytes);
      }
      send(qp, std::move(far.filling));
      if (op.moved_bytes >= payload) break;
    }
    op.stage = Operation::Stage::none;
    return true;
  }

  static void describe(const Qp<P>& qp, FarRecord& record) {
    const Operation& op = qp.operation;
    record.kind = op.moved_bytes == 0 ? FarKind::request : FarKind::more;
    record.message = qp.far->messages - 1;
    record.opcode = static_cast<std::uint8_t>(op.request.opcode);
    record.flags = op.request.solicited ? far_solicited : 0;
    record.psn = op.request.psn.value;
    record.imm_data = op.request.imm_data;
    record.bytes = op.request.bytes;
    record.remote_address = op.request.remote_address;
    record.rkey = op.request.rkey.value;
    if (op.rule->atomic) record.compare_add = op.remote.compare_add, record.swap = op.remote.swap;
    if (qp.type == QpType::xrc_send) set_srqn(record, op.rule->atomic, op.request.srqn);
  }

  // --- time ---------------------------------------------------------------------------------------------------
  // True: the far host was silent for too long.
  bool watch_silence(Qp<P>& qp) {
    Half& far = *qp.far;
    const bool local = qp.operation.stage == Operation::Stage::routing && qp.operation.rule->local;  // it waits for nobody there, by timers of its own
    // Nothing is under way, and the window full: of what was sent of messages that are over, for which the far end has yet to make room.
    const bool full = far.blocked && !busy(qp) && far.outstanding.empty();
    if (qp.state == QpState::err || (far.outstanding.empty() && (busy(qp) ? local : !full))) {
      // Who has lost messages to a host that is not there loses the next ones without waiting for each, until it is heard.
      if (qp.type != QpType::uc || far.waiting_since_ns == 0 || ports_.far_silent_ns(qp) < uc_patience_ns) far.waiting_since_ns = 0;
      return false;
    }
    const std::uint64_t now = ports_.now_ns();
    if (far.waiting_since_ns == 0) far.waiting_since_ns = now;
    const std::uint64_t timeout = ack_timeout_ns(qp.attributes.timeout);
    std::uint64_t look_ns = now + (far.blocked ? look_again_ns : 1'000'000'000);
    if (qp.type == QpType::uc || timeout != 0) {  // a timeout of 0 waits for ever
      const std::uint64_t patience =
          qp.type == QpType::uc ? uc_patience_ns : std::max(timeout * (qp.attributes.retry_cnt + 1u), patience_min_ns);
      const std::uint64_t silent = std::min(ports_.far_silent_ns(qp), now - far.waiting_since_ns);
      if (silent >= patience) {
        ++qp.counters.ack_timeouts;
        const std::uint64_t since = std::exchange(far.waiting_since_ns, 0);
        lose(qp);
        if (qp.type == QpType::uc) far.waiting_since_ns = since;
        return true;
      }
      look_ns = std::min(look_ns, now + std::max(patience - silent, look_again_ns));
    }
    ports_.wake_at(qp, look_ns);
    return false;
  }

  P& ports_;
  Responder<P>& responder_;
  Requester<P>& requester_;
};

}  // namespace vrdma::engine
