// Those who stand for requesters of other hosts: what they have been sent becomes operations, and these run as any of this host's.
#include <algorithm>
#include <cstring>
#include <utility>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/shard.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::svc {

using engine::FarFrame;
using engine::FarFramePtr;
using engine::FarKind;
using engine::FarRecord;
using engine::Operation;
using engine::Place;
using engine::QpType;

namespace {
constexpr std::uint64_t blocked_look_ns = 500'000;
constexpr std::uint64_t srq_look_min_ns = 100'000, srq_look_max_ns = 5'000'000;
constexpr std::int64_t turn_bytes = 128 * 1024;
}  // namespace

void FarDesk::make_runnable(StandIn& stand_in) {
  if (std::exchange(stand_in.runnable, true)) return;
  runnable_.push_back(&stand_in);
}

void FarDesk::set_timer(StandIn& stand_in, std::uint64_t at_ns) {
  if (stand_in.wake_ns == at_ns) return;
  if (stand_in.wake_ns != 0) timers_.erase({stand_in.wake_ns, &stand_in});
  stand_in.wake_ns = at_ns;
  timers_.insert({at_ns, &stand_in});
}

// Its owner erases it afterwards.
void FarDesk::drop(StandIn& stand_in) {
  engine_.abandon(stand_in.core);
  shard_.forget(stand_in.core);
  if (stand_in.wake_ns != 0) timers_.erase({stand_in.wake_ns, &stand_in});
  std::replace(runnable_.begin(), runnable_.end(), &stand_in, static_cast<StandIn*>(nullptr));
}

FarFramePtr FarDesk::addressed(StandIn& stand_in, FarFramePtr frame) {
  Host& host = at(stand_in.host);
  FarRecord& record = frame->record();
  record.connection = stand_in.core.qpn.value;
  record.epoch = stand_in.epoch;
  record.taken = stand_in.told = stand_in.taken;
  stand_in.sent += record.payload_bytes;
  frame->host = stand_in.host;
  frame->session = host.session;
  host.gauge->queued_bytes.fetch_add(static_cast<std::int64_t>(frame->whole_bytes()), std::memory_order_relaxed);
  return frame;
}

void FarDesk::answer(StandIn& stand_in, WcStatus status) {
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
  frame = addressed(stand_in, std::move(frame));
  if (status == WcStatus::success && rule != nullptr && rule->takes_receive) hold(std::move(frame));
  else give(std::move(frame));
}

void FarDesk::break_off(StandIn& stand_in, WcStatus status) {
  engine_.abandon(stand_in.core);
  if (stand_in.core.type == QpType::uc) status = WcStatus::success;  // the message is lost, the connection stays
  answer(stand_in, status);
}

void FarDesk::take_first(StandIn& stand_in) {
  const std::uint32_t bytes = stand_in.queue.front()->record().payload_bytes;
  stand_in.taken += bytes;
  stand_in.queued_bytes -= bytes;
  stand_in.queue.pop_front();
}

// A message that is half way to a machine that stands still goes on with it, if that is in time; a new one waits as it does here.
bool FarDesk::waits_for_frozen(StandIn& stand_in) {
  constexpr std::uint64_t look_again_ns = 10'000'000;
  const Qp& core = stand_in.core;
  const Qp* const target = core.accepted_by;
  if (engine::is_reliable(core.type) && core.operation.stage == Operation::Stage::moving && !core.operation.copy_pending && target != nullptr &&
      target->port.owner->guest->frozen) {
    const std::uint64_t now = vmci::monotonic_ns(), timeout = engine::ack_timeout_ns(core.attributes.timeout);
    if (stand_in.frozen_since_ns == 0) stand_in.frozen_since_ns = now;
    if (timeout == 0 || now - stand_in.frozen_since_ns < timeout * (core.attributes.retry_cnt + 1u)) {
      set_timer(stand_in, now + look_again_ns);
      return true;
    }
  }
  stand_in.frozen_since_ns = 0;
  return false;
}

bool FarDesk::run(StandIn& stand_in) {
  Operation& op = stand_in.core.operation;
  engine::Budget budget{turn_bytes, 32};
  bool worked = false;
  while (!budget.spent()) {
    if (op.stage == Operation::Stage::none) {
      if (!(stand_in.core.type == QpType::ud ? begin_datagram(stand_in) : begin(stand_in))) {
        if (stand_in.core.type == QpType::uc && !stand_in.queue.empty() && !stand_in.broken) continue;  // one that made no sense is gone
        break;
      }
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
  if (budget.spent()) make_runnable(stand_in);
  // Nobody rings for what is posted to an SRQ: it is looked at, less often the longer it has been empty.
  if (op.stage != Operation::Stage::none && op.wait == Operation::Wait::rnr && stand_in.core.port.waiting_at == nullptr) {
    const std::uint64_t now = vmci::monotonic_ns();
    if (stand_in.srq_empty_since_ns == 0) stand_in.srq_empty_since_ns = now;
    set_timer(stand_in, now + std::clamp((now - stand_in.srq_empty_since_ns) / 4, srq_look_min_ns, srq_look_max_ns));
  } else {
    stand_in.srq_empty_since_ns = 0;
  }
  if (stand_in.taken - stand_in.told >= engine::far_window_bytes / 4) {
    auto frame = FarFrame::make(0);
    frame->record().kind = FarKind::credit;
    frame->record().flags = 1;  // to the requester
    send(stand_in, std::move(frame));
  }
  return worked;
}

// Takes the next request into the operation. False: there is none.
bool FarDesk::begin(StandIn& stand_in) {
  Qp& core = stand_in.core;
  Operation& op = core.operation;
  while (!stand_in.queue.empty() && stand_in.queue.front()->record().kind != FarKind::request) take_first(stand_in);  // of a message that is over
  if (stand_in.queue.empty() || stand_in.broken) return false;
  const FarRecord& record = stand_in.queue.front()->record();
  op.rule = engine::opcode_rule(static_cast<WrOpcode>(record.opcode), core.type);
  stand_in.message = record.message;
  const bool good = op.rule != nullptr && !op.rule->local && record.bytes <= limits::message_bytes_max &&
                    (op.rule->reads ? record.payload_bytes == 0 : record.payload_bytes <= record.bytes) &&
                    (!op.rule->atomic || record.bytes == sizeof(std::uint64_t)) && (record.bytes == 0 || op.rule->reads || record.payload_bytes != 0);
  if (!good) {
    ++malformed_;
    break_off(stand_in, WcStatus::rem_inv_req_err);
    return false;
  }
  op.stage = Operation::Stage::routing;
  op.wait = Operation::Wait::none;
  op.copy_pending = false;
  op.retries = op.rnr_retries = 0;
  op.moved_bytes = 0;
  op.flags = wr_signaled;
  op.wr_id = 0;
  op.next_position = 0;
  op.remote = {record.remote_address, record.compare_add, record.swap, record.rkey, 0};
  op.request = {};
  op.request.opcode = static_cast<WrOpcode>(record.opcode);
  op.request.solicited = (record.flags & engine::far_solicited) != 0;
  op.request.psn = Psn{record.psn & psn_mask};
  op.request.bytes = record.bytes;
  op.request.packets = op.rule->atomic ? 1 : engine::packets(record.bytes, core.attributes.path_mtu);
  op.request.imm_data = record.imm_data;
  op.request.remote_address = record.remote_address;
  op.request.rkey = Key{record.rkey};
  op.request.srqn = core.type == QpType::xrc_send ? engine::srqn_of(record, op.rule->atomic) : 0;
  op.request.source_qpn = core.qpn;
  core.send_psn = op.request.psn;
  if (Qp* const target = ports_.peer(core); target != nullptr && target->port.psn_from_records) target->expected_psn = op.request.psn;
  op.local.clear();
  stand_in.fed_bytes = 0;
  if (op.rule->reads) {
    take_first(stand_in);
    const auto bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(op.request.bytes, engine::far_part_bytes));
    stand_in.part = FarFrame::make(bytes);
    stand_in.part->record().payload_bytes = bytes;
    op.local.add(Place::in_engine(stand_in.part->payload()), bytes);
    stand_in.fed_bytes = bytes;
  } else {
    op.local.add(Place::in_engine(stand_in.queue.front()->payload()), record.payload_bytes);
    stand_in.fed_bytes = record.payload_bytes;
  }
  return true;
}

// Sees to it that the operation has payload to move, or room to move it to. False: it has not, and waits.
bool FarDesk::feed(StandIn& stand_in) {
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
  if (next.kind != FarKind::more || next.message != stand_in.message || next.payload_bytes == 0 ||
      next.payload_bytes > op.request.bytes - stand_in.fed_bytes) {
    ++malformed_;
    break_off(stand_in, WcStatus::rem_inv_req_err);
    return false;
  }
  take_first(stand_in);
  op.local.clear();
  op.local.add(Place::in_engine(stand_in.queue.front()->payload()), next.payload_bytes);
  stand_in.fed_bytes += next.payload_bytes;
  return true;
}

bool FarDesk::feed_read(StandIn& stand_in) {
  Operation& op = stand_in.core.operation;
  if (stand_in.part) {
    stand_in.part->record().kind = FarKind::part;
    stand_in.part->record().message = stand_in.message;
    send(stand_in, std::move(stand_in.part));
  }
  if (stand_in.fed_bytes == op.request.bytes) return break_off(stand_in, WcStatus::retry_exc_err), false;
  if (stand_in.sent - stand_in.credited >= engine::far_window_bytes) return false;  // a credit makes it runnable
  if (!has_room(stand_in.host)) {
    set_timer(stand_in, vmci::monotonic_ns() + blocked_look_ns);
    return false;
  }
  const auto bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(op.request.bytes - stand_in.fed_bytes, engine::far_part_bytes));
  stand_in.part = FarFrame::make(bytes);
  stand_in.part->record().payload_bytes = bytes;
  op.local.clear();
  op.local.add(Place::in_engine(stand_in.part->payload()), bytes);
  stand_in.fed_bytes += bytes;
  return true;
}

bool FarDesk::begin_datagram(StandIn& stand_in) {
  Qp& core = stand_in.core;
  Operation& op = core.operation;
  while (!stand_in.queue.empty()) {
    const FarFramePtr frame = std::move(stand_in.queue.front());
    stand_in.queue.pop_front();
    const FarRecord& record = frame->record();
    engine::FarDatagram head;
    std::memcpy(&head, frame->payload(), sizeof(head));
    op.rule = engine::opcode_rule(static_cast<WrOpcode>(record.opcode), QpType::ud);
    if (op.rule == nullptr) {
      ++malformed_;
      continue;
    }
    stand_in.guid = head.guid;
    stand_in.lid = head.lid;
    stand_in.link_layer = head.link_layer;
    stand_in.gids = gids_of(head.guid, head.lid, head.link_layer);
    core.port.pkey = judged(stand_in.host, head.pkey);
    core.qpn = Qpn{record.connection};
    core.attributes.qkey = head.qkey;
    op.stage = Operation::Stage::routing;
    op.wait = Operation::Wait::none;
    op.copy_pending = false;
    op.flags = 0;
    op.moved_bytes = 0;
    op.multicast_index = 0;
    op.ud = head.ud;
    op.ud.remote_qkey = head.qkey;
    op.request = {};
    op.request.opcode = static_cast<WrOpcode>(record.opcode);
    op.request.solicited = (record.flags & engine::far_solicited) != 0;
    op.request.packets = 1;
    op.request.bytes = record.bytes;
    op.request.imm_data = record.imm_data;
    op.request.source_qpn = core.qpn;
    op.local.clear();
    std::memcpy(core.datagram.get() + engine::grh_bytes, frame->payload() + sizeof(head), record.bytes);
    return true;
  }
  return false;
}

}  // namespace vrdma::svc
