// The responder's half of a connection to another host: runs stand-ins, one for each requester of another host that is connected to a
// queue pair here, and one for each lane of its datagrams. A stand-in is a queue pair without an owner, whose operation comes out of
// records, and which runs by the same rules as a requester of this host.
#pragma once

#include <algorithm>
#include <deque>

#include "vmkernel_svc/engine/engine.hpp"

namespace vrdma::engine {

template <class P>
struct StandIn {
  Qp<P> core;
  std::uint32_t host = 0;  // the requester's
  std::uint32_t epoch = 0;

  std::deque<FarFramePtr> queue;          // the first one's payload may be in use by the operation
  FarFramePtr part;                       // READ, atomics: being filled
  std::uint64_t fed_bytes = 0;            // of the operation: its payload that was given to it, or room for it
  std::uint32_t message = 0;              // of the operation, or of the last one
  std::uint64_t queued_bytes = 0;         // in queue
  std::uint64_t sent = 0, credited = 0;   // payload, free-running: sent, and taken by the requester
  std::uint64_t taken = 0, told = 0;      // payload that came and was used, and how much of it the requester knows of
  std::uint64_t frozen_since_ns = 0;      // the target's machine; 0: it runs
  std::uint64_t srq_empty_since_ns = 0;   // the target's; 0: it is not known to be
  bool broken = false;                    // answered with an error: what follows is dropped
};

// What ports to other hosts have besides, where requesters of those are stood for.
template <class P>
concept StandInPortsFor = FarPortsFor<P> && requires(P p, StandIn<P>& stand_in, Qp<P>& qp, FarFramePtr frame, const FarDatagram& head) {
  // Hands a record for its requester to the carrier. may_wait: for what is said next.
  { p.far_say(stand_in, std::move(frame), true /*may_wait*/) } -> std::same_as<void>;
  { p.far_room(stand_in) } -> std::same_as<bool>;
  // What it brings may be from before its target was connected: it is run once that is known not to be so (far_marks.hpp).
  { p.far_waits_for_mark(stand_in) } -> std::same_as<bool>;
  // A request is taken in that `stand_in` has in its operation.
  { p.far_asked(stand_in) } -> std::same_as<void>;
  // What it runs next was sent by whom `head` says.
  { p.far_speaks_for(stand_in, head) } -> std::same_as<void>;
  // The machine of its owner stands still.
  { p.stands_still(qp) } -> std::same_as<bool>;
  // Who posts a receive WQE that it waits for will have it run.
  { p.is_awaited(qp) } -> std::same_as<bool>;
  // Whom what was completed concerns is told.
  { p.announce() } -> std::same_as<void>;
  { p.count_malformed() } -> std::same_as<void>;
};

template <class P>
class FarResponder {
 public:
  using Limits = FarLimits<P>;

  FarResponder(P& ports, Engine<P>& engine) : ports_(ports), engine_(engine) {}

  // A requester begins, or begins anew.
  static void open(StandIn<P>& stand_in, std::uint32_t host, const FarRecord& record, const FarOpen& said) {
    stand_in.host = host;
    stand_in.epoch = record.epoch;
    Qp<P>& core = stand_in.core;
    core.qpn = Qpn{record.connection};
    core.type = static_cast<QpType>(said.type);
    core.state = QpState::rts;
    core.attributes.path = said.path;
    core.attributes.dest_qp_num = said.dest_qp_num & psn_mask;
    core.attributes.timeout = said.timeout & 31;
    core.attributes.retry_cnt = said.retry_cnt & 7;
    core.attributes.rnr_retry = said.rnr_retry & 7;
    core.attributes.path_mtu = std::clamp<std::uint32_t>(said.path_mtu, 1, 5);
  }
  static void open_lane(StandIn<P>& lane, std::uint32_t host) {
    lane.host = host;
    lane.core.type = QpType::ud;
    lane.core.state = QpState::rts;
    lane.core.datagram = std::make_unique<std::byte[]>(grh_bytes + limits::mtu_max_bytes);
  }

  // The answer to a request for which there is no stand-in, as its `open` was refused: nobody answers it. Who has closed the connection since
  // does not listen to that.
  static FarFramePtr no_stand_in(const FarRecord& request) {
    auto frame = FarFrame::make(0);
    FarRecord& answer = frame->record();
    answer.kind = FarKind::answer;
    answer.status = static_cast<std::uint8_t>(WcStatus::retry_exc_err);
    answer.connection = request.connection;
    answer.epoch = request.epoch;
    answer.message = request.message;
    return frame;
  }

  // A record of its requester's: request, more or credit. The stand-in is to be run.
  void take(StandIn<P>& stand_in, FarFramePtr frame) {
    const FarRecord& record = frame->record();
    note_credit(stand_in, record);
    if (record.kind == FarKind::credit || stand_in.broken) return;
    stand_in.queued_bytes += record.payload_bytes;
    if (stand_in.queued_bytes > queued_bytes_max || stand_in.queue.size() > 64 * Limits::window_messages) {
      ports_.count_malformed();
      return break_off(stand_in, WcStatus::fatal_err);
    }
    stand_in.queue.push_back(std::move(frame));
  }
  static void note_credit(StandIn<P>& stand_in, const FarRecord& record) {
    if (record.taken > stand_in.credited && record.taken <= stand_in.sent) stand_in.credited = record.taken;
  }

  struct Turn {
    bool worked = false;
    bool again = false;  // its budget is spent
  };
  Turn run(StandIn<P>& stand_in) {
    if (ports_.far_waits_for_mark(stand_in)) return {};
    Operation& op = stand_in.core.operation;
    Budget budget{turn_bytes, 32};
    bool worked = false;
    while (!budget.spent()) {
      if (op.stage == Operation::Stage::none) {
        if (!(stand_in.core.type == QpType::ud ? begin_datagram(stand_in) : begin(stand_in))) break;
        --budget.wqes;
        worked = true;
      }
      if (waits_for_frozen(stand_in)) break;
      if (stand_in.core.type != QpType::ud && !feed(stand_in)) {
        if (op.stage == Operation::Stage::none) continue;  // broken off
        break;
      }
      const std::int64_t before = budget.bytes;
      const bool more = engine_.carry_on(stand_in.core, budget);
      ports_.announce();
      worked |= budget.bytes != before || op.stage == Operation::Stage::none;
      if (op.stage == Operation::Stage::none || more) continue;
      // It waits: for its next part, which may be there, or for somebody else.
      if (op.stage != Operation::Stage::moving || op.copy_pending || op.local.contiguous_bytes() != 0 || op.rule->atomic) break;
    }
    look_at_srq(stand_in);
    if (stand_in.taken - stand_in.told >= Limits::window_bytes / 4) {
      auto frame = FarFrame::make(0);
      frame->record().kind = FarKind::credit;
      frame->record().flags = 1;  // to the requester
      say(stand_in, std::move(frame));
    }
    return {worked, budget.spent()};
  }

  // For the ports: what the stand-in has in its operation is complete.
  void answer(StandIn<P>& stand_in, WcStatus status) {
    if (stand_in.core.type == QpType::ud) return;
    FarFramePtr frame = status == WcStatus::success ? std::move(stand_in.part) : nullptr;
    stand_in.part.reset();
    if (!frame) frame = FarFrame::make(0);
    frame->record().kind = FarKind::answer;
    frame->record().status = static_cast<std::uint8_t>(status);
    frame->record().message = stand_in.message;
    // What the message brought is taken in with it.
    if (!stand_in.queue.empty() && stand_in.queue.front()->record().message == stand_in.message) take_first(stand_in);
    if (status != WcStatus::success) {
      stand_in.broken = true;
      stand_in.queue.clear();
      stand_in.queued_bytes = 0;
    }
    // Who hears of the answer may tell the receiver, who may arm: the completion's event is decided before that.
    ports_.announce();
    const auto* const rule = stand_in.core.operation.rule;
    say(stand_in, std::move(frame), status == WcStatus::success && rule != nullptr && rule->takes_receive);
  }

 private:
  static constexpr std::uint64_t queued_bytes_max = 4 * Limits::window_bytes;  // by a peer that keeps to the window
  static constexpr std::uint64_t blocked_look_ns = 500'000;
  static constexpr std::uint64_t srq_look_min_ns = 100'000, srq_look_max_ns = 5'000'000;
  static constexpr std::int64_t turn_bytes = 128 * 1024;

  void say(StandIn<P>& stand_in, FarFramePtr frame, bool may_wait = false) {
    FarRecord& record = frame->record();
    record.connection = stand_in.core.qpn.value;
    record.epoch = stand_in.epoch;
    record.taken = stand_in.told = stand_in.taken;
    stand_in.sent += record.payload_bytes;
    ports_.far_say(stand_in, std::move(frame), may_wait);
  }

  void break_off(StandIn<P>& stand_in, WcStatus status) {
    engine_.abandon(stand_in.core);
    if (stand_in.core.type == QpType::uc) status = WcStatus::success;  // the message is lost, the connection stays
    answer(stand_in, status);
  }

  static void take_first(StandIn<P>& stand_in) {
    const std::uint32_t bytes = stand_in.queue.front()->record().payload_bytes;
    stand_in.taken += bytes;
    stand_in.queued_bytes -= bytes;
    stand_in.queue.pop_front();
  }

  // A message that is half way to a machine that stands still goes on with it, if that is in time; a new one waits as it does here.
  bool waits_for_frozen(StandIn<P>& stand_in) {
    constexpr std::uint64_t look_again_ns = 10'000'000;
    Qp<P>& core = stand_in.core;
    Qp<P>* const target = core.accepted_by;
    if (is_reliable(core.type) && core.operation.stage == Operation::Stage::moving && !core.operation.copy_pending && target != nullptr &&
        ports_.stands_still(*target)) {
      const std::uint64_t now = ports_.now_ns(), timeout = ack_timeout_ns(core.attributes.timeout);
      if (stand_in.frozen_since_ns == 0) stand_in.frozen_since_ns = now;
      if (timeout == 0 || now - stand_in.frozen_since_ns < timeout * (core.attributes.retry_cnt + 1u)) {
        ports_.wake_at(core, now + look_again_ns);
        return true;
      }
    }
    stand_in.frozen_since_ns = 0;
    return false;
  }

  // Nobody rings for what is posted to an SRQ: it is looked at, less often the longer it has been empty.
  void look_at_srq(StandIn<P>& stand_in) {
    Qp<P>& core = stand_in.core;
    const bool empty = core.operation.stage != Operation::Stage::none && core.operation.wait == Operation::Wait::rnr;
    if (!empty || ports_.is_awaited(core)) {
      stand_in.srq_empty_since_ns = 0;
      return;
    }
    const std::uint64_t now = ports_.now_ns();
    if (stand_in.srq_empty_since_ns == 0) stand_in.srq_empty_since_ns = now;
    ports_.wake_at(core, now + std::clamp((now - stand_in.srq_empty_since_ns) / 4, srq_look_min_ns, srq_look_max_ns));
  }

  bool has_room(StandIn<P>& stand_in) {
    if (ports_.far_room(stand_in)) return true;
    ports_.wake_at(stand_in.core, ports_.now_ns() + blocked_look_ns);
    return false;
  }

  static bool makes_sense(const FarRecord& record, const OpcodeRule* rule) {
    if (rule == nullptr || rule->local || record.bytes > limits::message_bytes_max) return false;
    if (rule->atomic && record.bytes != sizeof(std::uint64_t)) return false;
    if (rule->reads) return record.payload_bytes == 0;
    return record.payload_bytes <= record.bytes && (record.payload_bytes != 0 || record.bytes == 0);
  }

  static void start(Operation& op, const FarRecord& record, Qpn source) {
    op.stage = Operation::Stage::routing;
    op.wait = Operation::Wait::none;
    op.copy_pending = false;
    op.retries = op.rnr_retries = 0;
    op.moved_bytes = 0;
    op.receivers_from = 0;
    op.wr_id = 0;
    op.next_position = 0;
    op.request = {};
    op.request.opcode = static_cast<WrOpcode>(record.opcode);
    op.request.solicited = (record.flags & far_solicited) != 0;
    op.request.bytes = record.bytes;
    op.request.packets = 1;
    op.request.imm_data = record.imm_data;
    op.request.source_qpn = source;
    op.local.clear();
  }

  // Takes the next request into the operation. False: there is none, or no room for the answer.
  bool begin(StandIn<P>& stand_in) {
    Qp<P>& core = stand_in.core;
    Operation& op = core.operation;
    for (;;) {
      while (!stand_in.queue.empty() && stand_in.queue.front()->record().kind != FarKind::request) take_first(stand_in);  // of a message that is over
      if (stand_in.queue.empty() || stand_in.broken) return false;
      if (!has_room(stand_in)) return false;
      const FarRecord& record = stand_in.queue.front()->record();
      op.rule = opcode_rule(static_cast<WrOpcode>(record.opcode), core.type);
      stand_in.message = record.message;
      if (makes_sense(record, op.rule)) break;
      ports_.count_malformed();
      break_off(stand_in, WcStatus::rem_inv_req_err);
    }
    const FarRecord& record = stand_in.queue.front()->record();
    start(op, record, core.qpn);
    op.flags = wr_signaled;
    op.remote = {record.remote_address, record.compare_add, record.swap, record.rkey, 0};
    op.request.psn = Psn{record.psn & psn_mask};
    if (!op.rule->atomic) op.request.packets = packets(record.bytes, core.attributes.path_mtu);
    op.request.remote_address = record.remote_address;
    op.request.rkey = Key{record.rkey};
    op.request.srqn = core.type == QpType::xrc_send ? srqn_of(record, op.rule->atomic) : 0;
    core.send_psn = op.request.psn;
    ports_.far_asked(stand_in);
    stand_in.fed_bytes = 0;
    if (op.rule->reads) {
      take_first(stand_in);
      if (op.rule->atomic) add_part(stand_in);  // other reads get theirs when they move
    } else {
      op.local.add(Place::in_engine(stand_in.queue.front()->payload()), record.payload_bytes);
      stand_in.fed_bytes = record.payload_bytes;
    }
    return true;
  }

  // Sees to it that the operation has payload to move, or room to move it to. False: it has not, and waits.
  bool feed(StandIn<P>& stand_in) {
    Operation& op = stand_in.core.operation;
    const bool left = op.stage == Operation::Stage::moving && !op.rule->atomic && stand_in.core.accepted_by == nullptr;
    if ((left || op.stage == Operation::Stage::routing) && op.local.total_bytes() != stand_in.fed_bytes) {
      // The far end is not any more what accepted the message, and its beginning is not here any more.
      break_off(stand_in, WcStatus::retry_exc_err);
      return false;
    }
    if (op.stage != Operation::Stage::moving || op.rule->atomic || op.copy_pending || op.local.contiguous_bytes() != 0 ||
        op.moved_bytes == op.request.bytes)
      return true;
    if (op.rule->reads) return feed_read(stand_in);
    if (stand_in.queue.size() < 2) return false;
    const FarRecord& next = stand_in.queue[1]->record();
    if (stand_in.core.type == QpType::uc && next.kind == FarKind::request) {  // its sender's memory went away in the middle
      engine_.abandon(stand_in.core);
      take_first(stand_in);
      return false;
    }
    if (next.kind != FarKind::more || next.message != stand_in.message || next.payload_bytes == 0 ||
        next.payload_bytes > op.request.bytes - stand_in.fed_bytes) {
      ports_.count_malformed();
      break_off(stand_in, WcStatus::rem_inv_req_err);
      return false;
    }
    take_first(stand_in);
    op.local.clear();
    op.local.add(Place::in_engine(stand_in.queue.front()->payload()), next.payload_bytes);
    stand_in.fed_bytes += next.payload_bytes;
    return true;
  }

  bool feed_read(StandIn<P>& stand_in) {
    Operation& op = stand_in.core.operation;
    if (stand_in.part) {
      stand_in.part->record().kind = FarKind::part;
      stand_in.part->record().message = stand_in.message;
      say(stand_in, std::move(stand_in.part));
    }
    if (stand_in.fed_bytes == op.request.bytes) return break_off(stand_in, WcStatus::retry_exc_err), false;
    if (stand_in.sent - stand_in.credited >= Limits::window_bytes) return false;  // a credit makes it runnable
    if (!has_room(stand_in)) return false;
    op.local.clear();
    add_part(stand_in);
    return true;
  }
  // Room for the next part of what is read.
  static void add_part(StandIn<P>& stand_in) {
    Operation& op = stand_in.core.operation;
    const auto bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(op.request.bytes - stand_in.fed_bytes, Limits::part_bytes));
    stand_in.part = FarFrame::make(bytes);
    stand_in.part->record().payload_bytes = bytes;
    op.local.add(Place::in_engine(stand_in.part->payload()), bytes);
    stand_in.fed_bytes += bytes;
  }

  // Records that are malformed never get into the queue, but by their opcode.
  bool begin_datagram(StandIn<P>& stand_in) {
    Qp<P>& core = stand_in.core;
    Operation& op = core.operation;
    while (!stand_in.queue.empty()) {
      const FarFramePtr frame = std::move(stand_in.queue.front());
      stand_in.queue.pop_front();
      const FarRecord& record = frame->record();
      FarDatagram head;
      std::memcpy(&head, frame->payload(), sizeof(head));
      op.rule = opcode_rule(static_cast<WrOpcode>(record.opcode), QpType::ud);
      if (op.rule == nullptr) {
        ports_.count_malformed();
        continue;
      }
      core.qpn = Qpn{record.connection};
      core.attributes.qkey = head.qkey;
      start(op, record, core.qpn);
      op.flags = 0;
      op.ud = head.ud;
      op.ud.remote_qkey = head.qkey;
      ports_.far_speaks_for(stand_in, head);
      std::memcpy(core.datagram.get() + grh_bytes, frame->payload() + sizeof(head), record.bytes);
      return true;
    }
    return false;
  }

  P& ports_;
  Engine<P>& engine_;
};

}  // namespace vrdma::engine
