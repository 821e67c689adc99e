// Queue pairs and the multicast groups that they are in.
#include <algorithm>
#include <cstring>

#include "vmci_channel/stamp.hpp"
#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/control/find.hpp"
#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::svc {

using namespace control;
using engine::QpState;
using engine::QpType;

engine::PortLimits ControlDesk::limits_of(const Guest& guest) const {
  engine::PortLimits port{};
  port.pkey_count = limits::pkey_table;
  port.gid_count = limits::gid_table;
  port.max_mtu = 5;
  port.max_rd_atomic = limits::rd_atomic_max;
  port.ethernet = guest.link_layer == link_layer_ethernet;
  for (std::uint32_t i = 0; i < guest.gids.size(); ++i)
    if (guest.gids[i].gid != Gid{}) port.gids_present |= 1u << i;
  return port;
}

template <>
Result<CreateQpReply> ControlDesk::on<Request::create_qp>(Guest& guest, const CreateQpRequest& request) {
  if (request.type < 2 || request.type > 4) return Errno{EOPNOTSUPP};
  return create(guest, request, static_cast<QpType>(request.type), nullptr);
}

namespace {
// What a queue pair's rings are like. Inline data take the room of the SGEs, as with other providers: programs post some that have asked for none.
struct Rings {
  Rings(const CreateQpRequest& request, const SharedReceiveQueue* srq)
      : send_depth(std::max(request.max_send_wr, 1u)), receive_depth(srq != nullptr ? srq->core.max_wr : std::max(request.max_recv_wr, 1u)) {
    const auto sge_bytes = static_cast<std::uint32_t>(std::max(request.max_send_sge, 1u) * sizeof(Sge));
    max_inline_data = std::max(request.max_inline_data, std::min(sge_bytes, limits::inline_max));
    send_record_slots = std::max(send_wqe_slots(sge_bytes), send_wqe_slots(max_inline_data));
    receive_record_slots = receive_wqe_slots(srq != nullptr ? 1 : std::max(request.max_recv_sge, 1u));
    send = {power_of_two((send_depth + 1) * send_record_slots), power_of_two(send_depth), vmci::QueueKind::completions, 0};
    receive = {srq != nullptr ? 2 : power_of_two((receive_depth + 1) * receive_record_slots), power_of_two(receive_depth), vmci::QueueKind::completions, 0};
  }

  std::uint32_t send_depth, receive_depth;
  std::uint32_t max_inline_data, send_record_slots, receive_record_slots;
  vmci::QueuePairGeometry send, receive;
};
}  // namespace

Result<CreateQpReply> ControlDesk::create(Guest& guest, const CreateQpRequest& request, QpType type, Xrcd* xrcd) {
  ProtectionDomain* const pd = find_in(guest.pds, request.pd, request.context);
  CompletionQueue* const send_cq = find_in(guest.cqs, request.send_cq, request.context);
  CompletionQueue* const receive_cq = find_in(guest.cqs, request.recv_cq, request.context);
  SharedReceiveQueue* const srq = request.srq != 0 ? find_in(guest.srqs, request.srq, request.context) : nullptr;
  if (find(guest.contexts, request.context) == nullptr || pd == nullptr || send_cq == nullptr || receive_cq == nullptr ||
      (request.srq != 0 && srq == nullptr))
    return Errno{EINVAL};
  if (request.max_send_wr > limits::qp_wr_max || request.max_send_sge > limits::sge_max ||
      request.max_inline_data > limits::inline_max)
    return Errno{EINVAL};
  if (srq == nullptr && (request.max_recv_wr > limits::qp_wr_max || request.max_recv_sge > limits::sge_max)) return Errno{EINVAL};
  if (guest.qps.size() >= limits::qp_max || fabric_.by_qpn.size() >= 0x800000) return Errno{ENOMEM};
  const Rings rings(request, srq);
  // Who completes by itself there counts on room for all, and goes on where there is; not from a queue without stamps to one with them.
  const bool more_receives = srq == nullptr || !receive_cq->srqs.contains(srq);
  const auto leaves_others_alone = [&](const CompletionQueue& cq) {
    const std::uint64_t more = (&cq == send_cq ? rings.send_depth : 0u) + (&cq == receive_cq && more_receives ? rings.receive_depth : 0u);
    return cq.depth + more <= cq.cqe && vmci::wants_stamps(*cq.shared);
  };
  for (CompletionQueue* cq : {send_cq, receive_cq})
    if (cq->direct_lanes != 0 && !leaves_others_alone(*cq) && !shard_.direct().take_back(*cq)) return Errno{EINPROGRESS};
  if (!guest.tenant->take_object()) return Errno{EDQUOT};

  const auto send_offset = carve(guest, rings.send.total_bytes());
  if (!send_offset) return --guest.tenant->objects, send_offset.error();
  const auto receive_offset = carve(guest, rings.receive.total_bytes());
  if (!receive_offset) return uncarve(guest, *send_offset), --guest.tenant->objects, receive_offset.error();

  auto qp = std::make_unique<QueuePair>();
  std::byte* const base = guest.arena.segment().data();
  qp->send_view = vmci::QueuePairView(base + *send_offset, rings.send);
  qp->receive_view = vmci::QueuePairView(base + *receive_offset, rings.receive);
  qp->handle = Handle{guest.new_handle()};
  qp->context = request.context;
  qp->guest = &guest;
  qp->pd = pd;
  qp->send_cq = send_cq;
  qp->receive_cq = receive_cq;
  qp->srq = srq;
  qp->xrcd = xrcd;
  qp->send_offset = *send_offset;
  qp->receive_offset = *receive_offset;
  qp->send_depth = rings.send_depth;
  qp->receive_depth = rings.receive_depth;

  auto& core = qp->core;
  core.qpn = Qpn{fabric_.new_qpn()};
  core.type = type;
  core.send_ring = vmci::RecordReader(qp->send_view.produce(), rings.send.produce_slots);
  core.send_lane = vmci::LaneWriter(qp->send_view.consume_completions(), rings.send.consume_entries);
  core.receive_lane = vmci::LaneWriter(qp->receive_view.consume_completions(), rings.receive.consume_entries);
  core.receive_record_slots = rings.receive_record_slots;
  if (srq != nullptr) core.srq = &srq->core;
  else core.receive_ring = vmci::RecordReader(qp->receive_view.produce(), rings.receive.produce_slots);
  if (core.type == QpType::ud) core.datagram = std::make_unique<std::byte[]>(engine::grh_bytes + limits::mtu_max_bytes);
  core.attributes.max_send_wr = request.max_send_wr;
  core.attributes.max_recv_wr = srq != nullptr ? 0 : request.max_recv_wr;
  core.attributes.max_send_sge = request.max_send_sge;
  core.attributes.max_recv_sge = srq != nullptr ? 0 : request.max_recv_sge;
  core.attributes.max_inline_data = rings.max_inline_data;
  core.port.owner = qp.get();
  core.port.pd = pd->number;
  core.port.pkey = guest.tenant->pkeys[0];
  join(*qp);

  CreateQpReply reply{};
  reply.qp = qp->handle.value;
  reply.qpn = core.qpn.value;
  reply.doorbell = qp->doorbell;
  reply.max_send_wr = core.attributes.max_send_wr;
  reply.max_recv_wr = core.attributes.max_recv_wr;
  reply.max_send_sge = core.attributes.max_send_sge;
  reply.max_recv_sge = core.attributes.max_recv_sge;
  reply.max_inline_data = core.attributes.max_inline_data;
  reply.send = {*send_offset, rings.send, qp->send_lane, rings.send_record_slots};
  reply.receive = {*receive_offset, rings.receive, qp->receive_lane, rings.receive_record_slots};
  guest.qps.emplace(qp->handle.value, std::move(qp));
  return reply;
}

// What it uses, and whoever is to find it, knows it from now on; leave() is the other way round.
void ControlDesk::join(QueuePair& qp) {
  Guest& guest = *qp.guest;
  qp.send_lane = qp.send_cq->take_lane();
  qp.receive_lane = qp.receive_cq->take_lane();
  qp.send_cq->depth += qp.send_depth;
  if (qp.srq == nullptr || qp.receive_cq->srqs[qp.srq]++ == 0) qp.receive_cq->depth += qp.receive_depth;
  qp.send_cq->users.push_back(&qp);
  qp.receive_cq->users.push_back(&qp);
  if (qp.srq != nullptr) ++qp.srq->users;
  ++qp.pd->users;
  qp.doorbell = guest.take_doorbell();
  guest.by_doorbell[qp.doorbell] = &qp;
  qp.watch_sends(true);
  fabric_.by_qpn.emplace(qp.core.qpn.value, &qp);
  connected_elsewhere();
}

void ControlDesk::leave(QueuePair& qp) {
  Guest& guest = *qp.guest;
  fabric_.by_qpn.erase(qp.core.qpn.value);
  connected_elsewhere();
  const auto leave_cq = [&qp](CompletionQueue& cq, std::uint32_t lane) {
    cq.users.erase(std::find(cq.users.begin(), cq.users.end(), &qp));
    cq.free_lanes.push_back(lane);
  };
  qp.send_cq->depth -= qp.send_depth;
  auto& shared = qp.receive_cq->srqs;
  if (qp.srq == nullptr || --shared[qp.srq] == 0) qp.receive_cq->depth -= qp.receive_depth, shared.erase(qp.srq);
  leave_cq(*qp.send_cq, qp.send_lane);
  leave_cq(*qp.receive_cq, qp.receive_lane);
  if (qp.srq != nullptr) --qp.srq->users;
  --qp.pd->users;
  guest.by_doorbell[qp.doorbell] = nullptr;
  guest.free_doorbells.push_back(qp.doorbell);
}

// With who it is connected to: one shard runs both.
void ControlDesk::bring_together(const QueuePair& qp) {
  if (fabric_.shards.count() == 1 || !engine::receives(qp.core)) return;
  const bool datagrams = qp.core.type == QpType::ud;  // theirs are brought together by the first one that is sent
  QueuePair* const to = datagrams ? nullptr : shard_.ports().addressee(qp.core);
  if (to == nullptr) {
    if (fabric_.far != nullptr) fabric_.shards.pin(*qp.guest);
  } else if (engine::receives(to->core) && shard_.ports().addressee(to->core) == &qp) {
    fabric_.shards.bring_together(*qp.guest, *to->guest);
  }
}

template <>
Result<ModifyQpReply> ControlDesk::on<Request::modify_qp>(Guest& guest, const ModifyQpRequest& request) {
  QueuePair* qp = find(guest.qps, request.qp);
  if (qp == nullptr) return Errno{EINVAL};
  if (qp->stands_for != nullptr) qp = qp->stands_for;
  if (!shard_.direct().take_back(*qp)) return Errno{EINPROGRESS};
  auto& core = qp->core;
  core.attributes.state = static_cast<std::uint32_t>(core.state);
  if (qp->completes_for_srq()) return Errno{EINVAL};
  const QpState before = core.state;
  const auto moves_to = [&request](QpState state) {
    return (request.mask & qp_attr_state) != 0 && request.attributes.state == static_cast<std::uint32_t>(state);
  };
  const bool to_reset = moves_to(QpState::reset);
  if (to_reset && shard_.engine().copies_under_way(core) && may_wait(guest)) return Errno{EINPROGRESS};
  // What an HCA sends needs nobody's turn.
  if ((to_reset || moves_to(QpState::err)) && core.port.hca == nullptr && shard_.engine().sends_get_on(core, request.send_position) && may_wait(guest))
    return Errno{EINPROGRESS};
  const auto modified = engine::modify(core.type, core.attributes, request.attributes, request.mask, limits_of(guest));
  if (!modified) return modified.error();
  core.state = static_cast<QpState>(core.attributes.state);
  if (core.type == QpType::ud && core.state == QpState::rtr) core.attributes.path_mtu = fabric_.config.mtu();
  HcaDesk* const hca = fabric_.far != nullptr ? fabric_.far->hca() : nullptr;
  const std::uint16_t pkey = guest.tenant->pkeys[core.attributes.pkey_index];
  if (std::exchange(core.port.pkey, pkey) != pkey && hca != nullptr) hca->pkey_changed(core);
  if (core.state == QpState::reset) {
    if (hca != nullptr) hca->leave(core);
    shard_.engine().reset(core, request.send_position, request.receive_position);
    unbind_windows(*qp);
    qp->watch_sends(true);
    qp->watch_receives(false);
  } else {
    shard_.engine().entered(core, before);
    if (core.state == QpState::err) {
      shard_.engine().end_remote_operation(core);
      if (hca != nullptr) hca->end_remote_operations(core);
    }
  }
  connected_elsewhere();
  bring_together(*qp);
  if (hca != nullptr) hca->consider(core);
  if (core.state != QpState::reset) shard_.make_runnable(core);
  shard_.direct().consider(*qp);
  // As it is now, nothing changes when it is asked again.
  if ((to_reset || moves_to(QpState::err)) && shard_.ports().last_step_ns(core) != 0 && may_wait(guest, MediatedPorts::last_step_max_ns)) return Errno{EINPROGRESS};
  return ModifyQpReply{static_cast<std::uint32_t>(core.state), 0};
}

template <>
Result<QueryQpReply> ControlDesk::on<Request::query_qp>(Guest& guest, const HandleRequest& request) {
  QueuePair* qp = find(guest.qps, request.handle);
  if (qp == nullptr) return Errno{EINVAL};
  if (qp->stands_for != nullptr) qp = qp->stands_for;
  if (!shard_.direct().take_back(*qp)) return Errno{EINPROGRESS};
  QueryQpReply reply{qp->core.attributes};
  reply.attributes.state = reply.attributes.cur_state = static_cast<std::uint32_t>(qp->core.state);
  if (qp->core.state >= QpState::rtr && qp->core.type != QpType::ud) reply.attributes.rq_psn = qp->core.expected_psn.value;
  if (qp->core.state >= QpState::rts) reply.attributes.sq_psn = qp->core.send_psn.value;
  reply.attributes.sq_draining = qp->core.state == QpState::sqd && !qp->core.drain_reported ? 1 : 0;
  shard_.direct().hand_out(*qp);
  return reply;
}

void ControlDesk::destroy(Guest& guest, QueuePair& qp) {
  if (fabric_.far != nullptr && fabric_.far->hca() != nullptr) fabric_.far->hca()->leave(qp.core);
  shard_.direct().forget(qp);
  unbind_windows(qp);
  leave_domain(qp);
  shard_.engine().abandon(qp.core);
  shard_.forget(qp.core);
  guest.totals += qp.core.counters;
  leave_groups(qp);
  leave(qp);
  uncarve(guest, qp.send_offset);
  uncarve(guest, qp.receive_offset);
  --guest.tenant->objects;
  guest.qps.erase(qp.handle.value);
}

void ControlDesk::leave_groups(QueuePair& qp) {
  for (auto group = fabric_.multicast.begin(); qp.mcast_groups != 0 && group != fabric_.multicast.end();) {
    auto& members = group->second;
    const auto left = static_cast<std::uint32_t>(members.erase(qp.core.qpn.value));
    qp.mcast_groups -= left;
    qp.guest->tenant->memberships -= left;
    if (members.empty() && fabric_.far != nullptr) fabric_.far->groups().left(group->first);
    group = members.empty() ? fabric_.multicast.erase(group) : std::next(group);
  }
}

template <>
Result<Empty> ControlDesk::on<Request::destroy_qp>(Guest& guest, const HandleRequest& request) {
  QueuePair* const qp = find(guest.qps, request.handle);
  if (qp == nullptr) return Errno{EINVAL};
  if (qp->mcast_groups != 0) return Errno{EBUSY};
  if (!shard_.direct().take_back(*qp)) return Errno{EINPROGRESS};
  // Its buffers, and those that it serves, are their owner's again afterwards.
  if ((shard_.engine().copies_under_way(qp->core) || written_by_targets(*qp)) && may_wait(guest)) return Errno{EINPROGRESS};
  // Whoever sends to it meanwhile asks again, and finds nobody. A target's heir is found in the middle of the message (hand_over).
  bool last_step = false;
  const auto turn_away = [&](MediatedPorts::Qp& core) {
    shard_.engine().turn_away_requester(core);
    last_step |= shard_.ports().last_step_ns(core) != 0;
  };
  if (qp->stand_bys.empty()) turn_away(qp->core);
  if (qp->completes_for_srq())
    for (QueuePair* const target : qp->xrcd->domain->targets)
      if (target->core.srq == &qp->srq->core) turn_away(target->core);
  if (last_step && may_wait(guest, MediatedPorts::last_step_max_ns)) return Errno{EINPROGRESS};
  destroy(guest, *qp);
  return Empty{};
}

template <>
Result<Empty> ControlDesk::on<Request::attach_mcast>(Guest& guest, const McastRequest& request) {
  QueuePair* const qp = find(guest.qps, request.qp);
  if (qp == nullptr || qp->core.type != QpType::ud || !is_multicast(request.gid)) return Errno{EINVAL};
  const auto existing = fabric_.multicast.find(request.gid);
  const bool is_new = existing == fabric_.multicast.end();
  // Who is told that it has joined misses nothing that is sent after that, on whatever host. A host that stands still is not waited for
  // any longer once the carrier gives its connection up; one that lives and does not answer, for that long.
  constexpr std::uint64_t hosts_patience_ns = 5'000'000'000;
  const auto joined = [&]() -> Result<Empty> {
    if (fabric_.far != nullptr && !fabric_.far->groups().is_heard(request.gid) && may_wait(guest, hosts_patience_ns)) return Errno{EINPROGRESS};
    return Empty{};
  };
  if (!is_new && existing->second.contains(qp->core.qpn.value)) return joined();
  if (is_new ? fabric_.multicast.size() >= limits::mcast_groups_max : existing->second.size() >= limits::mcast_qp_attach_max) return Errno{ENOMEM};
  if (guest.tenant->memberships >= guest.tenant->quota.memberships) return Errno{EDQUOT};
  ++guest.tenant->memberships;
  fabric_.multicast[request.gid].emplace(qp->core.qpn.value, qp);
  ++qp->mcast_groups;
  if (is_new && fabric_.far != nullptr) fabric_.far->groups().joined(request.gid);
  return joined();
}

template <>
Result<Empty> ControlDesk::on<Request::detach_mcast>(Guest& guest, const McastRequest& request) {
  QueuePair* const qp = find(guest.qps, request.qp);
  const auto group = fabric_.multicast.find(request.gid);
  if (qp == nullptr || group == fabric_.multicast.end()) return Errno{EINVAL};
  auto& members = group->second;
  if (members.erase(qp->core.qpn.value) == 0) return Errno{EINVAL};
  --qp->mcast_groups;
  --guest.tenant->memberships;
  if (members.empty()) {
    fabric_.multicast.erase(group);
    if (fabric_.far != nullptr) fabric_.far->groups().left(request.gid);
  }
  return Empty{};
}

// In the port's terms: what a RDMA READ of this guest's brought has been received. What others read here leaves no trace.
CountersReply ControlDesk::traffic_of(const Guest& guest) const {
  engine::QpCounters sum = guest.totals;
  for (auto& [handle, qp] : guest.qps) sum += shard_.direct().counters(*qp);
  return CountersReply{sum.sent_bytes, sum.sent_messages, sum.received_bytes + sum.read_bytes, sum.received_messages + sum.read_messages};
}

template <>
Result<CountersReply> ControlDesk::on<Request::read_counters>(Guest& guest, const Empty&) {
  return traffic_of(guest);
}

}  // namespace vrdma::svc
