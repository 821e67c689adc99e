// What becomes of a connection whose HCA is lost, or that ends: the hardware is stopped, and what it had is done by records, completed
// or flushed.
#include <algorithm>

#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/remote/hca_desk.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

using engine::Direction;
using engine::Operation;
using engine::Progress;
using engine::QpState;
using remote::HcaKind;
using remote::HcaMessage;

void HcaDesk::free_physical(HcaConnection& c) {
  if (c.shared != nullptr && c.physical != nullptr) c.shared->users.erase(c.physical->qp_num);
  if (c.physical != nullptr) device_->destroy(std::exchange(c.physical, nullptr), *c.cq, c.wish);
  if (c.shared != nullptr) leave_shared(c);
  if (std::exchange(c.domain, nullptr) != nullptr) device_->release(c.pd);
}

void HcaDesk::free_bounces(HcaConnection& c, std::vector<remote::Bounce>& bounces) {
  for (auto& bounce : bounces) device_->give_bounce(*c.domain, std::move(bounce));
  bounces.clear();
}

// The hardware touches nothing of it any more, and what had come is taken.
void HcaDesk::stop(HcaConnection& c) {
  if (c.physical == nullptr) return;
  c.stage = Stage::stopped;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  const std::uint64_t until = drain_until_ns_ != 0 ? drain_until_ns_ : vmci::monotonic_ns() + drain_ns;
  if (device_->modify(c.physical, attributes, IBV_QP_STATE))
    while (c.flushed < c.outstanding.size() + c.posted.size() && vmci::monotonic_ns() < until) poll(*c.cq);
  while (poll(*c.cq) && vmci::monotonic_ns() < until) {  // others have completions there, too
  }
  while (c.shared != nullptr && poll_shared(*c.shared)) {
  }
  for (auto& send : c.outstanding) free_bounces(c, send.bounces);
  if (c.preparing) free_bounces(c, c.preparing->send.bounces);
  for (; !c.posted.empty(); c.posted.pop_back()) {  // next in line again
    for (auto& part : c.posted.back().parts) device_->give_bounce(*c.domain, std::move(part.bounce));
    c.qp->returned.push_back(c.posted.back().inbound);
  }
  for (auto& receive : c.arrived)  // what came stays to be copied, by memory that the HCA does not have any more
    for (auto& part : receive.parts)
      if (part.bounce.mr != nullptr) device_->detach(*receive.domain, part.bounce);
  free_physical(c);
}

void HcaDesk::end_remote_operations(Qp& qp) {
  if (qp.port.hca == nullptr || qp.port.hca->physical == nullptr) return;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  device_->modify(qp.port.hca->physical, attributes, IBV_QP_STATE);
}

void HcaDesk::lose(HcaConnection& c, const std::string& why) {
  c.why = why;
  lose(c);
}

void HcaDesk::lose(HcaConnection& c) {
  Qp& qp = *c.qp;
  hosts_[c.host].fallen_back = qp.port.no_hca = c.why;
  stop(c);
  c.stage = Stage::stopped;
  c.waiting_since_ns = 0;
  // What was not posted yet comes after what was. What is done here, when all before it are done, goes on where it is.
  const auto stage = qp.operation.stage;
  const bool local = engine_.busy(qp) && stage == Operation::Stage::routing && qp.operation.rule->local && c.outstanding.empty();
  if (stage == Operation::Stage::refused && !c.by_records) {
    HcaSend send{};
    send.wr_id = qp.operation.wr_id;
    send.next_position = qp.operation.next_position;
    send.rule = qp.operation.rule;
    send.fate = HcaSend::Fate::refused;
    send.status = std::exchange(qp.far->refused, WcStatus::success);
    c.outstanding.push_back(std::move(send));
    qp.operation.stage = Operation::Stage::none;
  } else if (c.preparing || (engine_.busy(qp) && !c.by_records && !local && stage == Operation::Stage::routing)) {
    if (!c.copy_of_receive) ports_.abandon(qp), qp.operation.copy_pending = false;
    c.outstanding.push_back(c.preparing ? std::move(c.preparing->send) : describe(qp));
    c.preparing.reset();
    qp.operation.stage = Operation::Stage::none;
  }
  if (c.after_records) c.outstanding.push_back(std::move(*std::exchange(c.after_records, nullptr)));
  qp.far->under_way = 0;
  qp.port.psn_from_records = true;
  if (c.closed_there) return resolve(c, 0);  // nobody is there who could say how far it came
  HcaMessage message{};
  message.count = c.received;
  message.bytes = qp.attributes.sq_psn & psn_mask;
  put_text(message, c.why);
  say(c, HcaKind::lost, message);
  wake(c);
}

// The other end has taken `count` messages that take a receive WQE.
void HcaDesk::resolve(HcaConnection& c, std::uint64_t count) {
  c.told_bytes.clear();
  std::size_t done = 0;
  for (std::size_t i = 0; i < c.outstanding.size(); ++i)
    if (c.outstanding[i].posted && c.outstanding[i].rule->takes_receive && c.outstanding[i].ordinal < count) done = i + 1;
  for (std::size_t i = 0; i < c.outstanding.size(); ++i) {
    HcaSend& send = c.outstanding[i];
    if (send.fate == HcaSend::Fate::refused) continue;
    const bool repeatable = (send.rule->takes_receive && send.rule->moves_to_receive) || (send.rule->reads && !send.rule->atomic);
    if (i < done && !send.rule->reads) send.fate = HcaSend::Fate::done;
    else if (!send.posted || repeatable || (c.refused_there && i >= done)) send.fate = HcaSend::Fate::again;
    else send.fate = HcaSend::Fate::unknown;
    if (c.closed_there && send.fate == HcaSend::Fate::again && !send.rule->local) send.fate = HcaSend::Fate::unknown;
  }
  c.stage = Stage::resuming;
  c.waiting_since_ns = 0;
  wake(c);
}

void HcaDesk::stop_quietly(HcaConnection& c) {
  const auto before = c.stage;
  stop(c);
  c.stage = before;
}

bool HcaDesk::immediate_follows(Qp& qp) {
  HcaConnection* const c = qp.port.hca;
  if (c == nullptr || c->stage != Stage::bound || c->shared != nullptr) return false;
  while (poll(*c->cq)) {  // what came before it
  }
  // A copy that is pending writes to memory of the service that stopping gives away; it is settled first, and the receive WQE is flushed.
  if (!c->told_bytes.contains(c->received) || !c->arrived.empty() || qp.operation.copy_pending) return false;
  stop_quietly(*c);
  return true;
}

void HcaDesk::drop(HcaConnection& c) {
  Qp& qp = *c.qp;
  const bool tell = c.heard && !c.closed_there && c.stage == Stage::bound;
  stop_quietly(c);
  if (tell) say(c, HcaKind::bye);
  if (qp.far != nullptr) {
    qp.far->given_one_by_one = false;
    qp.far->under_way = 0;
    qp.far->blocked = false;
  }
  qp.port.hca = nullptr;
  connections_.erase(c.number);
}

void HcaDesk::flush(HcaConnection& c) {
  Qp& qp = *c.qp;
  stop_quietly(c);
  if (c.stage == Stage::resuming || c.by_records) engine_.flush_begun(qp);  // older than what is still to be done
  for (const auto& send : c.outstanding) engine_.complete_flushed(qp, Direction::send, send.wr_id, send.next_position);
  if (c.after_records && !c.by_records) engine_.complete_flushed(qp, Direction::send, c.after_records->wr_id, c.after_records->next_position);
  for (const auto& receive : c.arrived) engine_.complete_flushed(qp, Direction::receive, receive.inbound.wr_id, 0);
  c.outstanding.clear();
  drop(c);
}

// The reverse: it becomes the operation under way; `send` stays where it is until that is over.
void HcaDesk::load(Qp& qp, HcaSend& send) {
  Operation& op = qp.operation;
  op.stage = Operation::Stage::routing;
  op.wait = Operation::Wait::none;
  op.copy_pending = false;
  op.retries = op.rnr_retries = 0;
  op.moved_bytes = 0;
  op.wr_id = send.wr_id;
  op.next_position = send.next_position;
  op.flags = send.flags;
  op.rule = send.rule;
  op.request = send.request;
  op.request.psn = qp.send_psn;
  op.remote = send.remote;
  op.local = send.local;
}

// By records: first what the HCA had and was not executed, then what comes.
Progress HcaDesk::resume(HcaConnection& c, engine::Budget& budget) {
  Qp& qp = *c.qp;
  bool worked = false;
  if (c.copy_of_receive) return Progress::waiting;  // the ports' copy is of that: what is sent has one of its own
  while (!c.outstanding.empty() && !budget.spent()) {
    if (engine_.busy(qp) || !qp.far->arrived.empty()) {
      worked |= engine_.run(qp, budget) == Progress::worked;
      if (qp.state == QpState::err) return Progress::worked;
      if (engine_.busy(qp)) return worked ? Progress::worked : Progress::waiting;
    }
    HcaSend& next = c.outstanding.front();
    if (next.fate != HcaSend::Fate::again && !qp.far->outstanding.empty()) {  // those before it complete first
      worked |= engine_.run(qp, budget) == Progress::worked;
      return worked ? Progress::worked : Progress::waiting;
    }
    --budget.wqes;
    worked = true;
    c.again = std::make_unique<HcaSend>(std::move(next));
    c.outstanding.pop_front();
    switch (c.again->fate) {
      case HcaSend::Fate::done: succeed(c, *c.again); break;
      case HcaSend::Fate::refused: fail(c, *c.again, c.again->status); return Progress::worked;
      case HcaSend::Fate::unknown: fail(c, *c.again, WcStatus::retry_exc_err); return Progress::worked;
      case HcaSend::Fate::again: load(qp, *c.again); break;
    }
  }
  if (!c.outstanding.empty() || !c.arrived.empty()) return Progress::worked;
  if (engine_.busy(qp)) {
    const auto progress = engine_.run(qp, budget);
    if (engine_.busy(qp)) return progress;  // what it sends may be ours
  }
  drop(c);
  return engine_.run(qp, budget);
}

}  // namespace vrdma::svc
