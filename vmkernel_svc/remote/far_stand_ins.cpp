// Requesters of other hosts, by their stand-ins here: which there are, what their hosts may say of them, and what comes for them.
#include <algorithm>
#include <cstring>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/shard.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::svc {

using engine::FarFramePtr;
using engine::FarKind;
using engine::FarRecord;
using engine::QpType;

namespace {
constexpr std::size_t datagrams_waiting_max = 256;         // at a receiver's host, for a sixteenth of its receivers
constexpr std::uint32_t stand_ins_max = 65536;             // of one host
constexpr std::int64_t marks_queued_max = 64 << 20;         // bytes: a host that does not listen is told none until it does

bool can_be_a_port(std::uint64_t guid, std::uint16_t lid, std::uint32_t link_layer) {
  return (link_layer == control::link_layer_infiniband || link_layer == control::link_layer_ethernet) && static_cast<std::uint16_t>(guid) == lid;
}
}  // namespace

std::size_t FarDesk::stand_in_count(remote::HostId host) const {
  std::size_t count = 0;
  for (auto one = stand_ins_.lower_bound({host, 0}); one != stand_ins_.end() && one->first.first == host; ++one) ++count;
  return count;
}

bool FarDesk::has_stand_in(remote::HostId host, std::uint32_t requester, std::uint32_t target) const {
  const auto found = stand_ins_.find({host, requester});
  return found != stand_ins_.end() && found->second->core.attributes.dest_qp_num == target;
}

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
  if (stand_in.waits_for_mark) std::erase(waiting_, &stand_in);
}

bool FarDesk::run(StandIn& stand_in) {
  const auto turn = responder_.run(stand_in);
  if (turn.again) make_runnable(stand_in);
  return turn.worked;
}

void FarDesk::say(StandIn& stand_in, FarFramePtr frame, bool may_wait) {
  frame = address(stand_in.host, std::move(frame));
  may_wait ? hold(std::move(frame)) : give(std::move(frame));
}

void FarDesk::speaks_for(StandIn& lane, const engine::FarDatagram& head) {
  lane.guid = head.guid;
  lane.lid = head.lid;
  lane.link_layer = head.link_layer;
  lane.gids = gids_of(head.guid, head.lid, head.link_layer);
  lane.core.port.pkey = judged(lane.host, head.pkey);
}

// --- what its host says of a guest -----------------------------------------------------------------------------

// What a host says of a guest of its own; it cannot speak for another's.
bool FarDesk::is_of(remote::HostId host, std::uint64_t guid, std::uint16_t lid, std::uint32_t link_layer) const {
  return can_be_a_port(guid, lid, link_layer) && directory_->host_of(lid) == host;
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

// --- what is of former connections (engine/far_marks.hpp) --------------------------------------------------------

void FarDesk::connected_again(Qp& qp) {
  qp.port.mark = {};
  const auto host = host_of(qp, qp.attributes.path.dlid, qp.attributes.path.is_global != 0, qp.attributes.path.dgid);
  if (!host) return;
  qp.port.mark = {*host, at(*host).marks.want()};
  send_mark(*host);
}

void FarDesk::send_mark(remote::HostId host) {
  const std::uint64_t number = at(host).marks.next();
  if (number == 0) return;
  auto frame = engine::FarFrame::make(0);
  frame->record().kind = FarKind::mark;
  frame->record().bytes = number;
  give(address(host, std::move(frame)));
}

bool FarDesk::waits_for_mark(StandIn& stand_in) {
  const auto& marks = at(stand_in.host).marks;
  if (marks.all_back() || stand_in.core.type == QpType::ud) return false;
  const auto target = fabric_.by_qpn.find(stand_in.core.attributes.dest_qp_num);
  if (target == fabric_.by_qpn.end()) return false;
  const engine::FarMark& mark = target->second->core.port.mark;
  if (mark.host != stand_in.host || marks.is_back(mark.number)) return false;
  if (!std::exchange(stand_in.waits_for_mark, true)) waiting_.push_back(&stand_in);
  return true;
}

void FarDesk::end_waits() {
  for (StandIn* const stand_in : std::exchange(waiting_, {})) {
    stand_in->waits_for_mark = false;
    make_runnable(*stand_in);
  }
}

void FarDesk::mark(remote::HostId id, const FarRecord& record) {
  Host& host = at(id);
  if (record.flags == engine::far_back) {
    if (!host.marks.came_back(record.bytes)) return void(++malformed_);
    send_mark(id);  // for those who wanted one since
    return end_waits();
  }
  // Not answered, it would be waited for until the next session: rather owed. One is under way at a time, so that the last one is all there is.
  host.owed_mark = record.bytes;
  pay_mark(id);
}

void FarDesk::pay_mark(remote::HostId id) {
  Host& host = at(id);
  if (host.owed_mark == 0) return;
  if (host.gauge->queued_bytes.load(std::memory_order_relaxed) > marks_queued_max) return void(marks_owed_ = true);  // to be tried in the next turn
  auto frame = engine::FarFrame::make(0);
  frame->record().kind = FarKind::mark;
  frame->record().flags = engine::far_back;
  frame->record().bytes = std::exchange(host.owed_mark, 0);
  give(address(id, std::move(frame)));
}

// --- what comes -----------------------------------------------------------------------------------------------

void FarDesk::open(FarFramePtr frame) {
  const FarRecord& record = frame->record();
  if (record.payload_bytes != sizeof(engine::FarOpen)) return void(++malformed_);
  engine::FarOpen said;
  std::memcpy(&said, frame->payload(), sizeof(said));
  if (const auto type = static_cast<QpType>(said.type); type != QpType::rc && type != QpType::uc && type != QpType::xrc_send) return void(++malformed_);
  if (!can_be_a_port(said.guid, said.lid, said.link_layer) || record.connection > psn_mask) return void(++malformed_);
  const StandInKey key{frame->host, record.connection};
  if (const auto known = stand_ins_.find(key); known != stand_ins_.end()) drop(*known->second);
  else if (++at(frame->host).stand_ins > stand_ins_max) return --at(frame->host).stand_ins, void(++malformed_);
  auto& slot = stand_ins_[key];
  slot = std::make_unique<StandIn>();
  StandIn& stand_in = *slot;
  responder_.open(stand_in, frame->host, record, said);
  stand_in.guid = said.guid;
  stand_in.link_layer = said.link_layer;
  stand_in.lid = said.lid;
  // Another list of hosts may give it that LID, or this one will soon: till then nobody answers, and its requests end as they would then.
  stand_in.is_of_its_host = is_of(frame->host, said.guid, said.lid, said.link_layer);
  if (!stand_in.is_of_its_host) ++malformed_;
  stand_in.gids = gids_of(said.guid, said.lid, said.link_layer);
  stand_in.claimed_pkey = said.pkey;
  stand_in.core.port.stand_in = &stand_in;
  stand_in.core.port.pkey = judged(frame->host, said.pkey);
  if (hca_ && stand_in.is_of_its_host) hca_->peer_goes_by_records(stand_in.host, stand_in.core.attributes.dest_qp_num);
}

void FarDesk::to_stand_in(FarFramePtr frame) {
  const FarRecord& record = frame->record();
  const auto found = stand_ins_.find({frame->host, record.connection});
  if (found == stand_ins_.end() || found->second->epoch != record.epoch) {
    if (record.kind == FarKind::request) send_to(frame->host, responder_.no_stand_in(record));
    return;
  }
  StandIn& stand_in = *found->second;
  if (record.kind == FarKind::close) {
    run(stand_in);  // what came along with it was sent before
    drop(stand_in);
    stand_ins_.erase(found);
    --at(frame->host).stand_ins;
    return;
  }
  if (record.kind == FarKind::pkey) {
    responder_.note_credit(stand_in, record);
    stand_in.claimed_pkey = static_cast<std::uint16_t>(record.bytes);
    stand_in.core.port.pkey = judged(stand_in.host, stand_in.claimed_pkey);
    stand_in.core.port.peer_generation = 0;
  } else {
    responder_.take(stand_in, std::move(frame));
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
  const std::size_t lanes = host.datagrams.size() - 1;
  auto& lane = host.datagrams[head.ud.remote_qpn == multicast_qpn.value ? lanes : head.ud.remote_qpn % lanes];
  if (!lane) {
    lane = std::make_unique<StandIn>();
    responder_.open_lane(*lane, frame->host);
    lane->core.port.stand_in = lane.get();
  }
  if (lane->queue.size() >= datagrams_waiting_max) return void(++dropped_datagrams_);
  lane->queue.push_back(std::move(frame));
  make_runnable(*lane);
}

}  // namespace vrdma::svc
