#include "vmkernel_svc/remote/far_desk.hpp"

#include <algorithm>
#include <cstring>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/remote/link_head.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

using engine::FarFrame;
using engine::FarFramePtr;
using engine::FarKind;
using engine::FarRecord;
using engine::QpType;

namespace {
constexpr std::int64_t queued_bytes_max = 8 << 20;         // with the carrier, for one host
constexpr std::int64_t datagram_bytes_max = 4 << 20;       // of datagrams, before more are lost
constexpr std::int64_t answers_bytes_max = 16 << 20;       // … and before requests of that host wait
constexpr std::int64_t told_bytes_max = 32 << 20;          // … and before it is told nothing any more: it does not listen
constexpr std::size_t arrived_max = 64 * engine::far_window_messages;
constexpr std::uint64_t arrived_bytes_max = 4 * engine::far_window_bytes;
constexpr int frames_per_turn = 64;
constexpr int tasks_max = 256;
constexpr std::uint64_t lost_ns = 5'000'000'000;  // a host that has not been heard for so long gets no multicast; FarRequester gives up then, at the soonest
// Since when a host is known. As long as one that stands still is waited for: whoever joins a group waits, also where a host is down for good.
constexpr std::uint64_t meeting_ns = 3'000'000'000;

std::uint64_t bytes_of(const std::deque<FarFramePtr>& frames) {
  std::uint64_t bytes = 0;
  for (const auto& frame : frames) bytes += frame->record().payload_bytes;
  return bytes;
}
}  // namespace

FarDesk::FarDesk(Fabric& fabric, Shard& shard, MediatedPorts& ports, engine::Engine<MediatedPorts>& engine,
                 std::shared_ptr<remote::Directory> directory, std::unique_ptr<remote::Carrier> carrier)
    : fabric_(fabric), shard_(shard), ports_(ports), engine_(engine), responder_(ports, engine), directory_(std::move(directory)), carrier_(std::move(carrier)) {
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
  for (auto& [key, stand_in] : stand_ins_) {
    if (stand_in->is_of_its_host || !is_of(stand_in->host, stand_in->guid, stand_in->lid, stand_in->link_layer)) continue;
    stand_in->is_of_its_host = true;
    if (hca_) hca_->peer_goes_by_records(stand_in->host, stand_in->core.attributes.dest_qp_num);
  }
  for (const auto& [id, host] : hosts_)
    if (!directory_->host(id)) {
      groups_.forget(id);
      if (hca_) hca_->forget_host(id);
    }
  ++fabric_.topology_generation;  // who found nobody looks again
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

FarFramePtr FarDesk::address(remote::HostId id, FarFramePtr frame) {
  Host& host = at(id);
  frame->host = id;
  frame->session = host.session;
  remote::count_queued(*host.gauge, *frame, 1);
  return frame;
}

void FarDesk::send(Qp& qp, FarFramePtr frame) {
  if (hca_) hca_->want_trunk(qp.far->host);
  frame->record().connection = qp.qpn.value;
  frame->record().epoch = qp.far->epoch;
  give(address(qp.far->host, std::move(frame)));
}

// Of nobody's queue pair.
void FarDesk::send_to(remote::HostId id, FarFramePtr frame) {
  const Host& host = at(id);
  if (host.session == 0 || host.gauge->queued_bytes.load(std::memory_order_relaxed) > told_bytes_max) return;
  give(address(id, std::move(frame)));
}

bool FarDesk::has_room(std::uint32_t id) {
  Host& host = at(id);
  if (hca_ && hca_->holds(id)) return false;
  return host.session != 0 && host.gauge->queued_bytes.load(std::memory_order_relaxed) < queued_bytes_max;
}

bool FarDesk::has_room_for_answers(std::uint32_t id) { return at(id).gauge->queued_bytes.load(std::memory_order_relaxed) < answers_bytes_max; }

std::uint64_t FarDesk::silent_ns(std::uint32_t host) { return at(host).gauge->silent_ns.load(std::memory_order_relaxed); }

void FarDesk::send_datagram(Qp& qp, const engine::Request& request, const UdOperand& ud, std::uint32_t qkey) {
  if (qp.port.owner == nullptr) return;  // it came from another host: it goes no further
  const auto send_to = [&](std::uint32_t id) {
    Host& host = at(id);
    const auto queued = host.gauge->queued_datagrams.load(std::memory_order_relaxed);
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
    if (!host.knows_flow_labels) set_flow_label(head.ud, 0);
    std::memcpy(frame->payload(), &head, sizeof(head));
    std::memcpy(frame->payload() + sizeof(head), qp.datagram.get() + engine::grh_bytes, payload);
    if (hca_) hca_->want_trunk(id);
    give(address(id, std::move(frame)));
  };
  if (is_multicast(ud)) {
    Gid group;
    std::memcpy(group.data(), ud.dgid, sizeof(group));
    for (const remote::HostId id : groups_.receivers(group)) {
      if (silent_ns(id) >= lost_ns) continue;
      ++at(id).multicast_datagrams;
      send_to(id);
    }
    return;
  }
  if (const auto id = host_of(qp, ud.dlid, (ud.route_flags & route_global) != 0, ud.dgid)) send_to(*id);
}

bool FarDesk::may_tell(remote::HostId host) {
  return at(host).session != 0 && silent_ns(host) < lost_ns && at(host).gauge->queued_bytes.load(std::memory_order_relaxed) < queued_bytes_max;
}

void FarDesk::later(std::function<void(Shard&)> task) {
  ++tasks_;
  shard_.submit([task = std::move(task)](Shard& shard) {
    if (FarDesk* const desk = shard.fabric().far) --desk->tasks_;
    task(shard);
  });
}

bool FarDesk::meets_others() {
  return std::any_of(ranges_.begin(), ranges_.end(), [this](const remote::LidHolder& range) {
    const auto known = directory_->host(range.host);
    return known && !known->expired && session(range.host) == 0 && silent_ns(range.host) < meeting_ns;
  });
}

bool FarDesk::is_connected(remote::HostId host) { return at(host).gauge->connected.load(std::memory_order_relaxed); }

// --- what comes -----------------------------------------------------------------------------------------------

bool FarDesk::turn() {
  bool worked = carrier_->turn();
  worked |= hca_ && hca_->turn();
  for (int left = frames_per_turn; left > 0 && tasks_ < tasks_max; --left) {
    FarFramePtr frame = carrier_->receive();
    if (!frame) break;
    arrived(std::move(frame));
    worked = true;
  }
  groups_.turn();
  if (std::exchange(marks_owed_, false)) [[unlikely]] {
    for (const auto& [id, host] : hosts_)
      if (host.owed_mark != 0) pay_mark(id);
  }
  const std::uint64_t now = timers_.empty() ? 0 : vmci::monotonic_ns();
  while (!timers_.empty() && timers_.begin()->first <= now) {
    StandIn& due = *timers_.begin()->second;
    timers_.erase(timers_.begin());
    due.wake_ns = 0;
    make_runnable(due);
  }
  // As between adapters: who answered a message and then sent one of its own is heard in this order.
  for (Qp* const qp : std::exchange(answered_, {}))
    if (!qp->port.owner->guest->frozen) engine_.take_answers(*qp);  // else once its machine goes on
  ports_.announce();
  if (runnable_.empty()) return worked;
  for (StandIn* const stand_in : std::exchange(runnable_, {})) {
    if (stand_in == nullptr) continue;  // dropped meanwhile
    stand_in->runnable = false;
    worked |= run(*stand_in);
  }
  return worked;
}

void FarDesk::give(FarFramePtr frame) {
  release();
  carrier_->send(std::move(frame));
  said_something_ = true;
}

// Who has received a message often says something to it: then both leave together, and half of the packets are saved. Two hosts that
// share processors took 50 instead of 30 us for half a round trip.
void FarDesk::hold(FarFramePtr answer) {
  if (said_something_ || held_) return give(std::move(answer));
  held_ = std::move(answer);
  held_for_a_turn_ = false;
}

void FarDesk::release() {
  if (held_) carrier_->send(std::move(held_));
}

void FarDesk::flush() {
  said_something_ = false;
  if (held_ && std::exchange(held_for_a_turn_, true)) release();
  carrier_->flush();
}

void FarDesk::arrived(FarFramePtr frame) {
  switch (frame->record().kind) {
    case FarKind::news:
      new_session(frame->host, frame->session);
      at(frame->host).knows_flow_labels = (frame->record().bytes & remote::link_knows_flow_labels) != 0;
      at(frame->host).marks.begin((frame->record().bytes & remote::link_knows_marks) != 0);
      cm_.new_session(frame->host, frame->record().bytes);
      management_.new_session(frame->host, frame->record().bytes);
      return groups_.new_session(frame->host, frame->record().bytes);
    case FarKind::open:
      if (hca_) hca_->want_trunk(frame->host);
      return open(std::move(frame));
    case FarKind::request:
    case FarKind::more:
    case FarKind::pkey:
    case FarKind::close: return to_stand_in(std::move(frame));
    case FarKind::answer:
    case FarKind::part: return to_requester(std::move(frame));
    case FarKind::credit:
      if (frame->record().flags != 0) return to_requester(std::move(frame));
      return to_stand_in(std::move(frame));
    case FarKind::datagram:
      if (hca_) hca_->want_trunk(frame->host);
      return to_datagrams(std::move(frame));
    case FarKind::hca:
      if (hca_) hca_->arrived(std::move(frame));
      return;
    case FarKind::mark: return mark(frame->host, frame->record());
    case FarKind::cm: malformed_ += !cm_.arrived(frame->host, *frame); return;
    case FarKind::mad: malformed_ += !management_.arrived(frame->host, *frame); return;
    case FarKind::groups: malformed_ += !groups_.arrived(frame->host, *frame); return;
  }
  ++malformed_;
}

void FarDesk::new_session(remote::HostId id, std::uint64_t session) {
  Host& host = at(id);
  host.session = session;
  host.owed_mark = 0;
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
    if (record.kind == FarKind::answer) answered_.push_back(&qp);
    far.arrived.push_back(std::move(frame));
  }
  shard_.make_runnable(qp);
}

}  // namespace vrdma::svc
