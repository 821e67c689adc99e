#include "vmkernel_svc/remote/far_desk.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/shard.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::svc {

using engine::FarFrame;
using engine::FarFramePtr;
using engine::FarKind;
using engine::FarRecord;
using engine::Operation;
using engine::Place;
using engine::QpState;
using engine::QpType;

namespace {
constexpr std::int64_t queued_bytes_max = 8 << 20;         // with the carrier, for one host
constexpr std::int64_t datagram_bytes_max = 4 << 20;       // of them, before datagrams are lost
constexpr std::size_t datagrams_waiting_max = 256;         // at a receiver's host, for a sixteenth of its receivers
constexpr std::uint64_t stand_in_bytes_max = 4 * engine::far_window_bytes;  // queued, by a peer that keeps to the window
constexpr std::uint64_t blocked_look_ns = 500'000;
constexpr std::uint64_t srq_look_min_ns = 100'000, srq_look_max_ns = 5'000'000;
constexpr std::uint32_t stand_ins_max = 65536;             // of one host
constexpr std::size_t arrived_max = 64 * engine::far_window_messages;
constexpr std::uint64_t arrived_bytes_max = 4 * engine::far_window_bytes;
constexpr int frames_per_turn = 64;
constexpr std::int64_t turn_bytes = 128 * 1024;

std::uint64_t bytes_of(const std::deque<FarFramePtr>& frames) {
  std::uint64_t bytes = 0;
  for (const auto& frame : frames) bytes += frame->record().payload_bytes;
  return bytes;
}
}  // namespace

FarDesk::FarDesk(Fabric& fabric, Shard& shard, MediatedPorts& ports, engine::Engine<MediatedPorts>& engine,
                 std::shared_ptr<remote::Directory> directory, std::unique_ptr<remote::Carrier> carrier)
    : fabric_(fabric), shard_(shard), ports_(ports), engine_(engine), directory_(std::move(directory)), carrier_(std::move(carrier)) {
  look_at_directory();
  if (fabric_.config.hca) hca_ = std::make_unique<HcaDesk>(fabric_, shard_, ports_, engine_, *this);
}

FarDesk::~FarDesk() {
  hca_.reset();
  for (auto& [key, stand_in] : stand_ins_) drop(*stand_in);
  for (auto& [id, host] : hosts_)
    for (auto& stand_in : host.datagrams)
      if (stand_in) drop(*stand_in);
}

void FarDesk::look_at_directory() {
  ranges_ = directory_->holders();
  for (const auto& range : ranges_) at(range.host);
  for (auto one = stand_ins_.begin(); one != stand_ins_.end();) {
    if (directory_->host(one->first.first)) {
      ++one;
      continue;
    }
    drop(*one->second);  // its host was removed
    --at(one->first.first).stand_ins;
    one = stand_ins_.erase(one);
  }
  ++fabric_.topology_generation;  // who found nobody looks again
}

std::size_t FarDesk::stand_in_count(remote::HostId host) const {
  std::size_t count = 0;
  for (auto one = stand_ins_.lower_bound({host, 0}); one != stand_ins_.end() && one->first.first == host; ++one) ++count;
  return count;
}

FarDesk::Host& FarDesk::at(std::uint32_t host) {
  Host& known = hosts_[host];
  if (!known.gauge) known.gauge = carrier_->gauge(host);
  return known;
}

// --- requesters of this host ----------------------------------------------------------------------------------

std::optional<std::uint32_t> FarDesk::host_of(const Qp& qp, std::uint16_t dlid, bool global, const std::uint8_t* dgid) const {
  const bool by_lid = qp.port.owner->guest->link_layer == control::link_layer_infiniband && dlid != 0;
  if (!by_lid && !global) return std::nullopt;
  return directory_->host_of(by_lid ? dlid : lid_of(dgid));
}

bool FarDesk::route(Qp& qp) {
  if (qp.far != nullptr) return true;
  if (qp.port.owner == nullptr || qp.type == QpType::ud) return false;
  const auto& path = qp.attributes.path;
  const auto host = host_of(qp, path.dlid, path.is_global != 0, path.dgid);
  if (!host) return false;
  at(*host);
  qp.far = std::make_unique<engine::FarHalf>();
  qp.far->host = *host;
  qp.far->epoch = new_epoch();
  return true;
}

void FarDesk::send(Qp& qp, FarFramePtr frame) {
  Host& host = at(qp.far->host);
  frame->host = qp.far->host;
  frame->session = host.session;
  frame->record().connection = qp.qpn.value;
  frame->record().epoch = qp.far->epoch;
  host.gauge->queued_bytes.fetch_add(static_cast<std::int64_t>(frame->whole_bytes()), std::memory_order_relaxed);
  carrier_->send(std::move(frame));
}

// Of nobody's queue pair.
void FarDesk::send_to(remote::HostId id, FarFramePtr frame) {
  Host& host = at(id);
  if (host.session == 0) return;
  frame->host = id;
  frame->session = host.session;
  host.gauge->queued_bytes.fetch_add(static_cast<std::int64_t>(frame->whole_bytes()), std::memory_order_relaxed);
  carrier_->send(std::move(frame));
}

bool FarDesk::has_stand_in(remote::HostId host, std::uint32_t requester, std::uint32_t target) const {
  const auto found = stand_ins_.find({host, requester});
  return found != stand_ins_.end() && found->second->core.attributes.dest_qp_num == target;
}

bool FarDesk::has_room(std::uint32_t id) {
  Host& host = at(id);
  if (hca_ && hca_->holds(id)) return false;
  return host.session != 0 && host.gauge->queued_bytes.load(std::memory_order_relaxed) < queued_bytes_max;
}

std::uint64_t FarDesk::silent_ns(std::uint32_t host) { return at(host).gauge->silent_ns.load(std::memory_order_relaxed); }

void FarDesk::send_datagram(Qp& qp, const engine::Request& request, const UdOperand& ud, std::uint32_t qkey) {
  if (qp.port.owner == nullptr) return;  // it came from another host: it goes no further
  const auto send_to = [&](std::uint32_t id) {
    Host& host = at(id);
    const auto queued = host.gauge->queued_bytes.load(std::memory_order_relaxed);
    if (host.session == 0 || queued > datagram_bytes_max) {
      ++dropped_datagrams_;
      return;
    }
    const auto payload = static_cast<std::uint32_t>(request.bytes);
    auto frame = FarFrame::make(static_cast<std::uint32_t>(sizeof(engine::FarDatagram)) + payload);
    FarRecord& record = frame->record();
    record.kind = FarKind::datagram;
    record.opcode = static_cast<std::uint8_t>(request.opcode);
    record.flags = request.solicited ? engine::far_solicited : 0;
    record.connection = qp.qpn.value;
    record.imm_data = request.imm_data;
    record.bytes = request.bytes;
    record.payload_bytes = frame->capacity();
    const Guest& guest = *qp.port.owner->guest;
    engine::FarDatagram head{ud, guest.guid, guest.link_layer, qkey, guest.lid, qp.port.pkey, {}};
    std::memcpy(frame->payload(), &head, sizeof(head));
    std::memcpy(frame->payload() + sizeof(head), qp.datagram.get() + engine::grh_bytes, payload);
    frame->host = id;
    frame->session = host.session;
    host.gauge->queued_bytes.fetch_add(static_cast<std::int64_t>(frame->whole_bytes()), std::memory_order_relaxed);
    carrier_->send(std::move(frame));
  };
  if (ud.remote_qpn == multicast_qpn.value && ud.dgid[0] == 0xff) {
    for (auto& [id, host] : hosts_) send_to(id);
    return;
  }
  if (const auto id = host_of(qp, ud.dlid, (ud.route_flags & route_global) != 0, ud.dgid)) send_to(*id);
}

// --- what comes -----------------------------------------------------------------------------------------------

bool FarDesk::turn() {
  bool worked = carrier_->turn();
  worked |= hca_ && hca_->turn();
  for (int left = frames_per_turn; left > 0; --left) {
    FarFramePtr frame = carrier_->receive();
    if (!frame) break;
    arrived(std::move(frame));
    worked = true;
  }
  const std::uint64_t now = timers_.empty() ? 0 : vmci::monotonic_ns();
  while (!timers_.empty() && timers_.begin()->first <= now) {
    StandIn& due = *timers_.begin()->second;
    timers_.erase(timers_.begin());
    due.wake_ns = 0;
    make_runnable(due);
  }
  if (runnable_.empty()) return worked;
  for (StandIn* const stand_in : std::exchange(runnable_, {})) {
    if (stand_in == nullptr) continue;  // dropped meanwhile
    stand_in->runnable = false;
    worked |= run(*stand_in);
  }
  carrier_->flush();
  return worked;
}

void FarDesk::arrived(FarFramePtr frame) {
  switch (frame->record().kind) {
    case FarKind::news: return new_session(frame->host, frame->session);
    case FarKind::open: return open(std::move(frame));
    case FarKind::request:
    case FarKind::more:
    case FarKind::pkey:
    case FarKind::close: return to_stand_in(std::move(frame));
    case FarKind::answer:
    case FarKind::part: return to_requester(std::move(frame));
    case FarKind::credit:
      if (frame->record().flags != 0) return to_requester(std::move(frame));
      return to_stand_in(std::move(frame));
    case FarKind::datagram: return to_datagrams(std::move(frame));
    case FarKind::hca:
      if (hca_) hca_->arrived(std::move(frame));
      return;
  }
  ++malformed_;
}

void FarDesk::new_session(remote::HostId id, std::uint64_t session) {
  Host& host = at(id);
  host.session = session;
  const auto first = stand_ins_.lower_bound({id, 0});
  auto last = first;
  for (; last != stand_ins_.end() && last->first.first == id; ++last) drop(*last->second);
  stand_ins_.erase(first, last);
  host.stand_ins = 0;
  for (auto& datagrams : host.datagrams) {
    if (datagrams) drop(*datagrams);
    datagrams.reset();
  }
  for (auto& [qpn, qp] : fabric_.by_qpn)
    if (qp->core.far != nullptr && qp->core.far->host == id) shard_.make_runnable(qp->core);
  if (hca_) hca_->new_session(id);
}

// What a host says of a guest of its own; it cannot speak for another's.
bool FarDesk::is_of(remote::HostId host, std::uint64_t guid, std::uint16_t lid, std::uint32_t link_layer) const {
  return (link_layer == control::link_layer_infiniband || link_layer == control::link_layer_ethernet) &&
         static_cast<std::uint16_t>(guid) == lid && directory_->host_of(lid) == host;
}

// A P_Key that a host claims for a guest of its own, if some guest of that host may have it; else 0, which matches none.
std::uint16_t FarDesk::judged(remote::HostId id, std::uint16_t pkey) {
  const auto [claim, is_new] = at(id).claims.try_emplace(pkey, false);
  if (is_new) {
    const auto host = directory_->host(id);
    claim->second = host != nullptr && fabric_.partitions.may_be_of(host->name, pkey);
  }
  if (!claim->second) ++refused_pkeys_;
  return claim->second ? pkey : 0;
}

void FarDesk::look_at_partitions() {
  for (auto& [id, host] : hosts_) host.claims.clear();
  for (auto& [key, stand_in] : stand_ins_) {
    stand_in->core.port.pkey = judged(stand_in->host, stand_in->claimed_pkey);
    make_runnable(*stand_in);
  }
  if (hca_) hca_->look_at_partitions();
}

void FarDesk::tell_pkey(Qp& qp) {
  if (hca_) hca_->pkey_changed(qp);
  if (qp.far == nullptr || !qp.far->opened || qp.far->session != session(qp.far->host)) return;
  auto frame = FarFrame::make(0);
  frame->record().kind = FarKind::pkey;
  frame->record().bytes = qp.port.pkey;
  frame->record().taken = qp.far->told = qp.far->taken;
  send(qp, std::move(frame));
}

void FarDesk::to_requester(FarFramePtr frame) {
  const FarRecord& record = frame->record();
  const auto found = fabric_.by_qpn.find(record.connection);
  if (found == fabric_.by_qpn.end()) return;
  Qp& qp = found->second->core;
  if (qp.far == nullptr || qp.far->host != frame->host || qp.far->epoch != record.epoch || !qp.far->opened) return;
  engine::FarHalf& far = *qp.far;
  if (record.taken > far.credited && record.taken <= far.sent) far.credited = record.taken;
  if (record.kind != FarKind::credit) {
    // Who keeps to the window never has so much here.
    if (far.arrived.size() >= arrived_max || (far.arrived.size() > engine::far_window_messages && bytes_of(far.arrived) > arrived_bytes_max))
      return void(++malformed_);
    far.arrived.push_back(std::move(frame));
  }
  shard_.make_runnable(qp);
}

void FarDesk::open(FarFramePtr frame) {
  const FarRecord& record = frame->record();
  if (record.payload_bytes != sizeof(engine::FarOpen)) return void(++malformed_);
  engine::FarOpen said;
  std::memcpy(&said, frame->payload(), sizeof(said));
  if (said.type != static_cast<std::uint8_t>(QpType::rc) && said.type != static_cast<std::uint8_t>(QpType::uc)) return void(++malformed_);
  if (!is_of(frame->host, said.guid, said.lid, said.link_layer) || record.connection > psn_mask) return void(++malformed_);
  const StandInKey key{frame->host, record.connection};
  if (const auto known = stand_ins_.find(key); known != stand_ins_.end()) drop(*known->second);
  else if (++at(frame->host).stand_ins > stand_ins_max) return --at(frame->host).stand_ins, void(++malformed_);
  auto& slot = stand_ins_[key];
  slot = std::make_unique<StandIn>();
  StandIn& stand_in = *slot;
  stand_in.host = frame->host;
  stand_in.epoch = record.epoch;
  stand_in.guid = said.guid;
  stand_in.link_layer = said.link_layer;
  stand_in.lid = said.lid;
  stand_in.gids = gids_of(said.guid, said.lid, said.link_layer);
  Qp& core = stand_in.core;
  core.port.stand_in = &stand_in;
  stand_in.claimed_pkey = said.pkey;
  core.port.pkey = judged(frame->host, said.pkey);
  core.qpn = Qpn{record.connection};
  core.type = static_cast<QpType>(said.type);
  core.state = QpState::rts;
  core.attributes.path = said.path;
  core.attributes.dest_qp_num = said.dest_qp_num & psn_mask;
  core.attributes.timeout = said.timeout & 31;
  core.attributes.retry_cnt = said.retry_cnt & 7;
  core.attributes.rnr_retry = said.rnr_retry & 7;
  core.attributes.path_mtu = std::clamp<std::uint32_t>(said.path_mtu, 1, 5);
  if (hca_) hca_->peer_goes_by_records(stand_in.host, core.attributes.dest_qp_num);
}

void FarDesk::to_stand_in(FarFramePtr frame) {
  const FarRecord& record = frame->record();
  const auto found = stand_ins_.find({frame->host, record.connection});
  if (found == stand_ins_.end() || found->second->epoch != record.epoch) return;  // of a connection that is over
  StandIn& stand_in = *found->second;
  if (record.kind == FarKind::close) {
    drop(stand_in);
    stand_ins_.erase(found);
    --at(frame->host).stand_ins;
    return;
  }
  if (record.taken > stand_in.credited && record.taken <= stand_in.sent) stand_in.credited = record.taken;
  if (record.kind == FarKind::pkey) {
    stand_in.claimed_pkey = static_cast<std::uint16_t>(record.bytes);
    stand_in.core.port.pkey = judged(stand_in.host, stand_in.claimed_pkey);
    stand_in.core.port.peer_generation = 0;
  } else if (record.kind != FarKind::credit && !stand_in.broken) {
    stand_in.queued_bytes += record.payload_bytes;
    if (stand_in.queued_bytes > stand_in_bytes_max || stand_in.queue.size() > 64 * engine::far_window_messages) {
      ++malformed_;
      return break_off(stand_in, WcStatus::fatal_err);
    }
    stand_in.queue.push_back(std::move(frame));
  }
  make_runnable(stand_in);
}

void FarDesk::to_datagrams(FarFramePtr frame) {
  Host& host = at(frame->host);
  if (frame->record().payload_bytes < sizeof(engine::FarDatagram) ||
      frame->record().payload_bytes - sizeof(engine::FarDatagram) != frame->record().bytes || frame->record().bytes > limits::mtu_max_bytes)
    return void(++malformed_);
  engine::FarDatagram head;
  std::memcpy(&head, frame->payload(), sizeof(head));
  if (!is_of(frame->host, head.guid, head.lid, head.link_layer)) return void(++malformed_);
  auto& lane = host.datagrams[head.ud.remote_qpn % host.datagrams.size()];
  if (!lane) {
    lane = std::make_unique<StandIn>();
    lane->host = frame->host;
    Qp& core = lane->core;
    core.port.stand_in = lane.get();
    core.type = QpType::ud;
    core.state = QpState::rts;
    core.datagram = std::make_unique<std::byte[]>(engine::grh_bytes + limits::mtu_max_bytes);
  }
  if (lane->queue.size() >= datagrams_waiting_max) return void(++dropped_datagrams_);
  lane->queue.push_back(std::move(frame));
  make_runnable(*lane);
}

// --- stand-ins ------------------------------------------------------------------------------------------------

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

void FarDesk::send(StandIn& stand_in, FarFramePtr frame) {
  Host& host = at(stand_in.host);
  FarRecord& record = frame->record();
  record.connection = stand_in.core.qpn.value;
  record.epoch = stand_in.epoch;
  record.taken = stand_in.told = stand_in.taken;
  stand_in.sent += record.payload_bytes;
  frame->host = stand_in.host;
  frame->session = host.session;
  host.gauge->queued_bytes.fetch_add(static_cast<std::int64_t>(frame->whole_bytes()), std::memory_order_relaxed);
  carrier_->send(std::move(frame));
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
  send(stand_in, std::move(frame));
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
  if (core.type == QpType::rc && core.operation.stage == Operation::Stage::moving && !core.operation.copy_pending && target != nullptr &&
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
  const bool good = op.rule != nullptr && record.bytes <= limits::message_bytes_max &&
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
