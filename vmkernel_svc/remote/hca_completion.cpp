// Completions of the HCA become those of guests.
#include <algorithm>

#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/remote/hca_desk.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

using engine::Direction;
using engine::MemoryStatus;
using engine::Operation;
using engine::Place;
using engine::QpState;

namespace {
constexpr std::uint64_t number_of(std::uint64_t wr_id) { return wr_id >> 1; }
}  // namespace

void HcaDesk::wake(HcaConnection& c) {
  if (c.qp->far != nullptr) c.qp->far->blocked = false;
  shard_.make_runnable(*c.qp);
}

bool HcaDesk::poll() {
  bool worked = false;
  for (auto& cq : device_->cqs()) worked |= poll(*cq);
  for (std::size_t i = 0; i < shared_.size(); ++i) worked |= poll_shared(*shared_[i]);
  for (const std::uint64_t number : std::exchange(losing_, {}))
    if (const auto found = connections_.find(number); found != connections_.end() && found->second->stage == Stage::bound) lose(*found->second);
  if (worked) ports_.announce();
  return worked;
}

bool HcaDesk::poll(remote::HcaDevice::Cq& cq) {
  ibv_wc completions[completions_per_look];
  const int count = cq.poll(completions_per_look, completions);
  for (int i = 0; i < count; ++i) {
    const auto found = connections_.find(number_of(completions[i].wr_id));
    if (found == connections_.end()) {
      trunk_completed(completions[i]);
      continue;
    }
    HcaConnection& c = *found->second;
    (completions[i].wr_id & 1) != 0 ? receive_done(c, completions[i]) : send_done(c, completions[i]);
  }
  return count > 0;
}

void HcaDesk::look_at_events() {
  ibv_async_event event;
  while (device_->next_event(event)) {
    switch (event.event_type) {
      case IBV_EVENT_QP_FATAL:
      case IBV_EVENT_QP_REQ_ERR:  // its responder's half refused something
      case IBV_EVENT_QP_ACCESS_ERR:
        for (auto& [number, c] : connections_)
          if (c->physical == event.element.qp && c->stage == Stage::bound) lose_soon(*c);
        for (auto& [number, trunk] : trunks_)
          if (trunk->physical() == event.element.qp) trunk->fail("its HCA said: the queue pair has failed");
        break;
      case IBV_EVENT_DEVICE_FATAL:
      case IBV_EVENT_CQ_ERR: fatal_ = true; break;
      default: break;
    }
    device_->acknowledge(event);
  }
}

void HcaDesk::succeed(HcaConnection& c, const HcaSend& send) {
  Qp& qp = *c.qp;
  if (send.rule->atomic) {
    ++qp.counters.atomics;
  } else if (send.rule->reads) {
    ++qp.counters.read_messages;
    qp.counters.read_bytes += send.request.bytes;
  } else {
    ++qp.counters.sent_messages;
    qp.counters.sent_bytes += send.request.bytes;
  }
  if ((send.flags & wr_signaled) == 0) return;
  Cqe cqe{};
  cqe.wr_id = send.wr_id;
  cqe.byte_len = static_cast<std::uint32_t>(send.request.bytes);
  cqe.queue_position = send.next_position;
  engine_.publish(qp, Direction::send, cqe, {WcStatus::success, send.rule->send_opcode, 0});
}

void HcaDesk::fail(HcaConnection& c, const HcaSend& send, WcStatus status) {
  Qp& qp = *c.qp;
  ++(status == WcStatus::retry_exc_err ? qp.counters.retry_exceeded : status >= WcStatus::rem_inv_req_err ? qp.counters.remote_errors : qp.counters.local_errors);
  Cqe cqe{};
  cqe.wr_id = send.wr_id;
  cqe.imm_data = static_cast<std::uint32_t>(status);  // vendor error
  cqe.queue_position = send.next_position;
  engine_.publish(qp, Direction::send, cqe, {status, send.rule != nullptr ? send.rule->send_opcode : WcOpcode::send, 0});
  engine_.fail(qp, std::nullopt);
}

// Not at once: completions of it are being looked at.
void HcaDesk::lose_soon(HcaConnection& c) {
  if (!std::exchange(c.losing, true)) losing_.push_back(c.number);
}

void HcaDesk::send_done(HcaConnection& c, const ibv_wc& wc) {
  if (c.outstanding.empty()) return;
  if (wc.status == IBV_WC_SUCCESS) {
    HcaSend send = std::move(c.outstanding.front());
    c.outstanding.pop_front();
    free_bounces(c, send.bounces);
    if (c.qp->far != nullptr && c.qp->far->under_way != 0) --c.qp->far->under_way;
    ++counters_.sent;
    ++c.completed;
    succeed(c, send);
    return wake(c);
  }
  ++c.flushed;
  if (c.stage != Stage::bound || c.losing || c.qp->state == QpState::err) return;
  c.why = std::string("its HCA said: ") + device_->explain(wc.status);
  switch (wc.status) {
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_QP_OP_ERR:
    case IBV_WC_LOC_PROT_ERR: break;
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
      // Refused, so neither this one nor those behind it were executed. By records, they are once more, by the exact rules: a receive
      // WQE may have been posted there that its service has yet to give to its HCA, and HCAs differ in what they call an error.
      c.refused_there = true;
      [[fallthrough]];
    default:  // nobody answers, the device goes, or the responder's half refused something of the other end's
      if (!c.closed_there || wc.status == IBV_WC_WR_FLUSH_ERR) return lose_soon(c);
  }
  HcaSend send = std::move(c.outstanding.front());
  c.outstanding.pop_front();
  --c.flushed;
  free_bounces(c, send.bounces);
  fail(c, send, static_cast<WcStatus>(wc.status));
}

void HcaDesk::receive_done(HcaConnection& c, const ibv_wc& wc) {
  if (c.posted.empty()) return;
  if (wc.status != IBV_WC_SUCCESS) {
    // Its WQE stays with the others, and is the first that records use: what is wrong with it, or with the message, is found out there.
    ++c.flushed;
    if (c.stage == Stage::bound && !c.losing && c.qp->state != QpState::err) lose_soon(c);
    return;
  }
  HcaReceive receive = std::move(c.posted.front());
  c.posted.pop_front();
  received(c, std::move(receive), wc);
}

void HcaDesk::received(HcaConnection& c, HcaReceive receive, const ibv_wc& wc) {
  ++counters_.received;
  receive.bytes = wc.byte_len;
  if (const auto told = c.told_bytes.find(c.received); told != c.told_bytes.end()) {
    if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) receive.bytes = static_cast<std::uint32_t>(told->second);
    c.told_bytes.erase(told);
  }
  ++c.received;
  receive.opcode = wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM ? WcOpcode::recv_rdma_with_imm : WcOpcode::recv;
  // The hardware does not say which messages were solicited: an event too many is better than one too few.
  receive.flags = wc_solicited;
  if ((wc.wc_flags & IBV_WC_WITH_IMM) != 0) receive.flags |= wc_with_imm, receive.imm_data = wc.imm_data;
  c.arrived.push_back(std::move(receive));
  take_arrived(c);
  shard_.make_runnable(*c.qp);
}

MemoryStatus HcaDesk::copy(HcaConnection& c, const Place& to, const Place& from, std::uint64_t bytes, bool of_receive) {
  const MemoryStatus status = engine::copy(ports_, *c.qp, to, from, bytes);
  c.copy_of_receive = of_receive && status == MemoryStatus::pending;
  if (status != MemoryStatus::pending) ++counters_.copies, counters_.copied_bytes += bytes;
  return status;
}

// Messages that have come go to their receivers, in order.
bool HcaDesk::take_arrived(HcaConnection& c) {
  Qp& qp = *c.qp;
  bool worked = false;
  while (!c.arrived.empty() && qp.state != QpState::err) {
    if (qp.operation.copy_pending && !c.copy_of_receive) return worked;  // of the operation under way
    HcaReceive& receive = c.arrived.front();
    for (; receive.status == WcStatus::success && receive.opcode == WcOpcode::recv && receive.part < receive.parts.size(); ++receive.part, receive.part_done = 0) {
      const HcaReceive::Part& part = receive.parts[receive.part];
      const std::uint64_t filled = receive.bytes <= part.offset ? 0 : std::min<std::uint64_t>(part.bytes, receive.bytes - part.offset);
      while (receive.part_done < filled) {
        const std::uint64_t bytes = std::min(engine::slice_bytes, filled - receive.part_done);
        const auto status = copy(c, part.place + receive.part_done, Place::in_engine(part.bounce.memory.get() + receive.part_done), bytes, true);
        if (status == MemoryStatus::pending) return worked;
        if (status != MemoryStatus::done) {
          receive.status = WcStatus::loc_prot_err;
          break;
        }
        receive.part_done += bytes;
      }
    }
    for (auto& part : receive.parts)
      if (part.bounce.mr != nullptr) device_->give_bounce(*receive.domain, std::move(part.bounce));
    Cqe cqe{};
    cqe.wr_id = receive.inbound.wr_id;
    const WcStatus status = receive.status;
    if (status == WcStatus::success) {
      cqe.byte_len = receive.bytes;
      cqe.imm_data = receive.imm_data;
      cqe.src_qp = qp.attributes.dest_qp_num;
      ++qp.counters.received_messages;
      qp.counters.received_bytes += receive.bytes;
    } else {
      cqe.imm_data = static_cast<std::uint32_t>(status);
      ++qp.counters.local_errors;
    }
    if (qp.state == QpState::rtr && !std::exchange(qp.communication_established, true)) ports_.event(qp, engine::AsyncEvent::comm_est);
    const CqeState state{status, status == WcStatus::success ? receive.opcode : WcOpcode::recv, receive.flags};
    c.arrived.pop_front();
    worked = true;
    engine_.publish(qp, Direction::receive, cqe, state);
    if (status != WcStatus::success) engine_.fail(qp, std::nullopt);
  }
  return worked;
}

}  // namespace vrdma::svc
