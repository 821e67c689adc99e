// Work requests to the HCA, and what a queue pair does in its turn.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/remote/hca_desk.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

using engine::Direction;
using engine::MemoryStatus;
using engine::Operation;
using engine::Place;
using engine::Progress;
using engine::QpState;
using remote::HcaKind;
using remote::HcaMessage;

namespace {
constexpr std::uint64_t patience_min_ns = 5'000'000'000;  // a loaded host is no lost one
constexpr std::uint64_t look_again_ns = 500'000'000;
constexpr std::uint64_t sge_bytes_max = std::uint64_t{1} << 30;
constexpr const char* too_many_pieces = "a buffer has more pieces than the HCA takes in one request";
constexpr std::uint64_t id_of(const HcaConnection& c, bool receive) { return c.number << 1 | (receive ? 1 : 0); }

ibv_wr_opcode opcode_of(WrOpcode opcode) {
  switch (opcode) {
    case WrOpcode::rdma_write: return IBV_WR_RDMA_WRITE;
    case WrOpcode::rdma_write_with_imm: return IBV_WR_RDMA_WRITE_WITH_IMM;
    case WrOpcode::send_with_imm: return IBV_WR_SEND_WITH_IMM;
    case WrOpcode::rdma_read: return IBV_WR_RDMA_READ;
    case WrOpcode::atomic_cmp_and_swp: return IBV_WR_ATOMIC_CMP_AND_SWP;
    case WrOpcode::atomic_fetch_and_add: return IBV_WR_ATOMIC_FETCH_AND_ADD;
    default: return IBV_WR_SEND;
  }
}
}  // namespace

template <class Reached, class Other>
void HcaDesk::for_each_part(Place place, std::uint64_t bytes, Reached&& reached, Other&& other) {
  if (place.kind != Place::Kind::registered) return other(place, bytes);
  while (bytes != 0) {
    const Region* const region = fabric_.regions.at(place.region, place.generation);
    if (region == nullptr || region->pieces.empty()) return other(place, bytes);  // gone, or a window, which is no place of one's own
    const Reach here = reach(place.region, *region, place.address);
    const std::uint64_t part = std::min({bytes, here.bytes, sge_bytes_max});
    if (here.mr != nullptr) reached(ibv_sge{region->iova + place.address, static_cast<std::uint32_t>(part), here.mr->lkey});
    else other(place, part);
    place = place + part;
    bytes -= part;
  }
}

// Of what is being registered: rather than that so much else is registered, to copy it through.
bool HcaDesk::waits_for(std::uint64_t bytes) {
  if (!awaited_ || bytes <= remote::HcaDevice::bounce_kept_bytes) return false;
  device_->refusal = fmt::format("{} has not registered it yet", device_->name());
  return true;
}

// False: the HCA would not register some of it, or has not yet, and there is no room to copy through.
bool HcaDesk::lay_out(HcaReceive& receive, remote::HcaDomain& domain, std::vector<ibv_sge>& sges) {
  std::uint64_t offset = 0;
  refused_.clear();
  awaited_ = false;
  receive.domain = &domain;
  engine::ScatterGather buffers = receive.inbound.buffers;
  const auto bounce = [&](Place place, std::uint64_t bytes) {
    HcaReceive::Part part{{}, place, offset, bytes};
    if (refused_.empty() && (waits_for(bytes) || !device_->take_bounce(domain, bytes, part.bounce))) refused_ = device_->refusal;
    if (!refused_.empty()) return;
    sges.push_back({static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(part.bounce.memory.get())), static_cast<std::uint32_t>(bytes), part.bounce.mr->lkey});
    receive.parts.push_back(std::move(part));
    offset += bytes;
  };
  for (buffers.rewind(); buffers.contiguous_bytes() != 0; buffers.advance(buffers.contiguous_bytes()))
    for_each_part(buffers.here(), buffers.contiguous_bytes(), [&](const ibv_sge& sge) { sges.push_back(sge), offset += sge.length; }, bounce);
  // A buffer with a bad key fails the message that reaches it, and no other.
  if (receive.inbound.capacity_bytes > offset) sges.push_back({0, static_cast<std::uint32_t>(receive.inbound.capacity_bytes - offset), 0});
  if (sges.empty()) sges.push_back({0, 0, 0});  // what a message that brings bytes after all is checked against
  return refused_.empty();
}

bool HcaDesk::pump_receives(HcaConnection& c) {
  if (c.shared != nullptr) return pump_shared(*c.shared);
  if (c.awaits_memory) return false;
  Qp& qp = *c.qp;
  bool worked = false;
  if (c.physical == nullptr || c.physical->state == IBV_QPS_INIT || !engine::receives(qp)) return false;
  for (bool watched = false; c.posted.size() < c.wish.receive_wr;) {
    if (!engine_.take_receive(qp)) {
      if (std::exchange(watched, true) || qp.state == QpState::err) break;
      qp.port.owner->watch_receives(true);  // and once more, for what was posted before it could be seen
      continue;
    }
    HcaReceive receive;
    receive.inbound = qp.inbound;
    qp.inbound.active = false;
    std::vector<ibv_sge> sges;
    const bool good = lay_out(receive, *c.domain, sges);
    ibv_recv_wr request{id_of(c, true), nullptr, sges.data(), static_cast<int>(sges.size())};
    ibv_recv_wr* bad = nullptr;
    if (!good || sges.size() > c.wish.sge || ibv_post_recv(c.physical, &request, &bad) != 0) {
      for (auto& part : receive.parts) device_->give_bounce(*c.domain, std::move(part.bounce));
      qp.returned.push_back(receive.inbound);
      if (!good && awaited_) return c.awaits_memory = true, worked;
      lose(c, refused_.empty() ? too_many_pieces : std::string(refused_));
      return true;
    }
    c.posted.push_back(std::move(receive));
    worked = true;
  }
  return worked;
}

HcaSend HcaDesk::describe(Qp& qp) {
  const Operation& op = qp.operation;
  HcaSend send{op.wr_id, op.next_position, op.flags, op.rule, op.request, op.remote, op.local, nullptr, {}};
  send.local.rewind();
  if ((op.flags & wr_inline) == 0 || op.request.bytes == 0) return send;
  send.inline_bytes = std::make_unique<std::byte[]>(op.request.bytes);
  std::memcpy(send.inline_bytes.get(), reinterpret_cast<const std::byte*>(send.local.here().address), op.request.bytes);
  send.local.clear();
  send.local.add(Place::in_engine(send.inline_bytes.get()), op.request.bytes);
  return send;
}

// Lays out what the HCA gathers. False: it cannot.
bool HcaDesk::prepare(HcaConnection& c) {
  auto made = std::make_unique<HcaConnection::Preparing>();
  made->send = describe(*c.qp);
  HcaSend& send = made->send;
  const bool in_request = send.inline_bytes && send.request.bytes <= c.wish.inline_bytes;
  bool good = true;
  refused_.clear();
  awaited_ = false;
  const auto other = [&](Place place, std::uint64_t bytes) {
    if (send.rule->reads || !refused_.empty()) return void(good = false);
    if (in_request) return made->sges.push_back({place.address, static_cast<std::uint32_t>(bytes), 0});
    remote::Bounce bounce;
    if (good && (waits_for(bytes) || !device_->take_bounce(*c.domain, bytes, bounce))) good = false, refused_ = device_->refusal;
    if (!good) return;
    made->sges.push_back({static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(bounce.memory.get())), static_cast<std::uint32_t>(bytes), bounce.mr->lkey});
    made->parts.push_back({place, bounce.memory.get(), bytes});
    send.bounces.push_back(std::move(bounce));
  };
  engine::ScatterGather local = send.local;
  for (local.rewind(); local.contiguous_bytes() != 0; local.advance(local.contiguous_bytes()))
    for_each_part(local.here(), local.contiguous_bytes(), [&](const ibv_sge& sge) { made->sges.push_back(sge); }, other);
  if (!good || made->sges.size() > c.wish.sge) return free_bounces(c, send.bounces), false;
  c.preparing = std::move(made);
  return true;
}

// The operation under way goes by records, when all before it are done.
HcaDesk::Step HcaDesk::by_records(HcaConnection& c) {
  Qp& qp = *c.qp;
  if (!c.outstanding.empty()) return Step::waiting;
  Operation& op = qp.operation;
  if (op.rule->moves_to_receive) return lose(c, too_many_pieces), Step::ended;
  ++counters_.by_records;
  c.answered = Key{};
  if (op.rule->takes_receive) {  // the bytes first; then the HCA brings the immediate, without any
    HcaMessage message{};
    message.count = c.sent;
    message.bytes = op.request.bytes;
    say(c, HcaKind::ordinal, message);
    c.after_records = std::make_unique<HcaSend>(describe(qp));
    op.request.opcode = WrOpcode::rdma_write;
    op.rule = engine::opcode_rule(WrOpcode::rdma_write, qp.type);
    op.flags &= static_cast<std::uint8_t>(~wr_signaled);
  }
  c.by_records = true;
  return Step::posted;
}

HcaDesk::Step HcaDesk::post(HcaConnection& c) {
  Qp& qp = *c.qp;
  Operation& op = qp.operation;
  if (!c.preparing) {
    if (c.awaits_memory) return Step::waiting;
    if (op.rule->local) return c.outstanding.empty() && engine_.conclude(qp) ? Step::ended : Step::waiting;
    if (op.rule->invalidates) return c.outstanding.empty() ? (lose(c, "a SEND that invalidates a memory window, which no HCA knows"), Step::ended) : Step::waiting;
    // Programs of the target's host have atomic operations on that memory, too, which are its processors'.
    if (op.rule->word && (!op.rule->atomic || c.theirs.atomics_with_cpu == 0)) return by_records(c);
    if (op.rule->remote_access != 0 && op.request.bytes != 0) {
      const auto key = key_of(c, op.request.rkey);
      if (!key) return Step::waiting;
      if (*key == 0) return by_records(c);
    }
    if (!prepare(c)) {
      if (refused_.empty()) return by_records(c);
      if (awaited_) return c.awaits_memory = true, Step::waiting;
      return lose(c, std::string(refused_)), Step::ended;
    }
  }
  HcaConnection::Preparing& now = *c.preparing;
  if (c.copy_of_receive) return Step::waiting;
  for (; now.part < now.parts.size(); ++now.part, now.part_done = 0) {
    const auto& part = now.parts[now.part];
    while (now.part_done < part.bytes) {
      const std::uint64_t bytes = std::min(engine::slice_bytes, part.bytes - now.part_done);
      const auto status = copy(c, Place::in_engine(part.to + now.part_done), part.from + now.part_done, bytes, false);
      if (status == MemoryStatus::pending) return Step::waiting;
      if (status != MemoryStatus::done) {
        free_bounces(c, now.send.bounces);
        c.preparing.reset();
        engine_.refuse(qp, WcStatus::loc_prot_err);
        return Step::ended;
      }
      now.part_done += bytes;
    }
  }
  return post_prepared(c);
}

HcaDesk::Step HcaDesk::post_prepared(HcaConnection& c) {
  Qp& qp = *c.qp;
  HcaConnection::Preparing& now = *c.preparing;
  HcaSend& send = now.send;
  ibv_send_wr request{};
  request.wr_id = id_of(c, false);
  request.opcode = opcode_of(send.request.opcode);
  request.imm_data = send.request.imm_data;
  request.send_flags = static_cast<unsigned>(IBV_SEND_SIGNALED | ((send.flags & wr_fence) != 0 ? IBV_SEND_FENCE : 0) |
                                             ((send.flags & wr_solicited) != 0 ? IBV_SEND_SOLICITED : 0) |
                                             (now.parts.empty() && send.inline_bytes && !now.sges.empty() ? IBV_SEND_INLINE : 0));
  std::uint32_t rkey = 0;
  if (send.rule->remote_access != 0 && send.request.bytes != 0 && !now.sges.empty()) {
    const auto key = key_of(c, send.request.rkey);  // it may have been revoked since
    if (!key) return Step::waiting;
    if (*key == 0) {
      free_bounces(c, send.bounces);
      c.preparing.reset();
      return by_records(c);
    }
    rkey = *key;
  }
  if (send.rule->atomic)
    request.wr.atomic = {send.request.remote_address, send.remote.compare_add, send.remote.swap, rkey};
  else
    request.wr.rdma = {send.request.remote_address, rkey};
  request.sg_list = now.sges.data();
  request.num_sge = static_cast<int>(now.sges.size());
  ibv_send_wr* bad = nullptr;
  if (ibv_post_send(c.physical, &request, &bad) != 0) {
    lose(c);
    return Step::ended;
  }
  if (send.rule->takes_receive) send.ordinal = c.sent++;
  send.posted = true;
  qp.send_psn = vrdma::advance(qp.send_psn, send.request.packets);
  c.outstanding.push_back(std::move(send));
  c.preparing.reset();
  if (qp.far != nullptr) ++qp.far->under_way;
  qp.operation.stage = Operation::Stage::none;
  return Step::posted;
}

// --- turns ----------------------------------------------------------------------------------------------------

// False: nobody there has answered for as long as all retries take; where it is not known that nobody will, not before patience_min_ns.
bool HcaDesk::patient(HcaConnection& c) {
  Qp& qp = *c.qp;
  // In SQD, too, what was begun ends; what was posted since waits for nobody's answer.
  const bool begun = engine_.busy(qp) || !c.outstanding.empty();
  const bool waits = qp.state == QpState::rts ? begun || !qp.send_ring.empty() : qp.state == QpState::sqd && begun;
  if (!waits) return c.waiting_since_ns = 0, true;
  const std::uint64_t now = vmci::monotonic_ns(), timeout = engine::ack_timeout_ns(qp.attributes.timeout);
  if (c.waiting_since_ns == 0) c.waiting_since_ns = now;
  const std::uint64_t retries_ns = timeout * (qp.attributes.retry_cnt + 1u), patience_ns = c.closed_there ? retries_ns : std::max(retries_ns, patience_min_ns);
  shard_.set_timer(qp, now + (timeout == 0 ? look_again_ns : std::min(look_again_ns, patience_ns)));
  return timeout == 0 || now - c.waiting_since_ns < patience_ns;
}

Progress HcaDesk::run(Qp& qp, engine::Budget& budget) {
  HcaConnection& c = *qp.port.hca;
  Operation& op = qp.operation;
  if (qp.state == QpState::err || qp.state == QpState::sqe) {
    if (engine_.copy_holds_flush(qp)) return Progress::waiting;
    flush(c);
    return engine_.run(qp, budget);
  }
  bool worked = take_arrived(c);
  // Also while the two ends have not agreed yet.
  if (qp.state == QpState::sqd && !engine_.busy(qp) && c.outstanding.empty() && !c.by_records) engine_.report_drained(qp);
  if (c.stage == Stage::bound) {
    worked |= pump_receives(c);
    if (c.stage == Stage::bound && !c.sending && qp.state == QpState::rts && c.physical->state == IBV_QPS_RTR && !to_rts(c)) lose(c);
  }
  if (c.stage == Stage::resuming) return resume(c, budget);
  if (c.stage != Stage::bound || !c.sending || !c.allowed) {
    qp.far->blocked = true;
    if (!patient(c)) {
      if (c.stage == Stage::stopped) c.closed_there = true, resolve(c, 0), worked = true;
      else if (engine_.busy(qp) || qp.state == QpState::rts) worked |= engine_.give_up_next(qp);
    }
    return worked ? Progress::worked : Progress::waiting;
  }
  if (c.asked.value == 0) c.waiting_since_ns = 0;
  qp.far->blocked = false;
  while (!budget.spent() && qp.state != QpState::err && c.stage == Stage::bound) {
    if (c.by_records) {
      if (engine_.run(qp, budget) == Progress::worked) worked = true;
      if (qp.state == QpState::err || engine_.busy(qp) || !qp.far->outstanding.empty()) break;
      c.by_records = false;
      if (!c.after_records) continue;
      c.preparing = std::make_unique<HcaConnection::Preparing>();  // the immediate, without bytes
      c.preparing->send = std::move(*std::exchange(c.after_records, nullptr));
    }
    if (op.stage == Operation::Stage::refused || qp.far->refused != WcStatus::success) {
      if (!c.outstanding.empty()) break;
      engine_.refuse(qp, std::exchange(qp.far->refused, WcStatus::success));
      worked = true;
      break;
    }
    if (!engine_.busy(qp) && !c.preparing) {
      if (qp.state != QpState::rts || c.copy_of_receive) break;
      if (c.outstanding.size() >= c.wish.send_wr) {
        qp.far->blocked = true;
        break;
      }
      const auto fetched = engine_.take_send(qp);
      if (fetched == engine::Requester<MediatedPorts>::Fetch::empty) break;
      worked = true;
      --budget.wqes;
      if (fetched == engine::Requester<MediatedPorts>::Fetch::failed) continue;
    }
    if (post(c) == Step::waiting) {
      if (c.asked.value == 0 || patient(c)) break;
      c.asked = Key{};
      if (c.preparing) free_bounces(c, c.preparing->send.bounces);
      c.preparing.reset();
      engine_.give_up(qp);
    }
    worked = true;
  }
  return worked ? Progress::worked : engine_.busy(qp) || !c.outstanding.empty() ? Progress::waiting : Progress::idle;
}

}  // namespace vrdma::svc
