// Queue pairs: creation, modification, queries, destruction, multicast groups. The state table is the service's; what can be
// told without asking is refused here.
#include <sched.h>

#include <algorithm>
#include <mutex>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/namesakes.hpp"
#include "guest_lib/memory_window.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/provisional.hpp"
#include "guest_lib/verbs_result.hpp"
#include "vrdma/limits.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

namespace {

// The type as the service knows it.
Result<std::uint32_t> wire_type(ibv_qp_type type, bool for_srq) {
  switch (type) {
    case IBV_QPT_RC:
      return for_srq ? control::xrc_srq : std::uint32_t{type};
    case IBV_QPT_UC:
    case IBV_QPT_UD:
    case IBV_QPT_XRC_SEND:
    case IBV_QPT_XRC_RECV:
      return std::uint32_t{type};
    case IBV_QPT_RAW_PACKET:
    case IBV_QPT_DRIVER:
      return Errno{EOPNOTSUPP};
    default:
      return Errno{EINVAL};
  }
}

Status open_lane(Lane& lane, Attachment& attachment, Qp& qp, const control::QueueReply& queue, vmci::QueuePairView& view) {
  if (queue.geometry.consume_kind != vmci::QueueKind::completions || queue.geometry.consume_entries == 0 ||
      queue.lane >= vmci::ready_members_max)
    return Errno{EPROTO};
  auto at = attachment.queue_pair_at(queue.offset, queue.geometry);
  if (!at) return at.error();
  view = *at;
  lane.reader = vmci::LaneReader(view.consume_completions(), queue.geometry.consume_entries);
  lane.header = &view.header();
  lane.qp = &qp;
  lane.qpn = qp.base().qp_num;
  lane.number = queue.lane;
  return ok();
}

Status open_queues(Qp& qp, Attachment& attachment, const control::CreateQpReply& reply) {
  vmci::QueuePairView view;
  if (Status opened = open_lane(qp.send_lane, attachment, qp, reply.send, view); !opened) return opened;
  qp.send.open(view, reply.max_send_wr);
  qp.send_lane.send = &qp.send;
  if (Status opened = open_lane(qp.receive_lane, attachment, qp, reply.receive, view); !opened) return opened;
  if (qp.base().srq != nullptr) {
    qp.receive_lane.receive = &Srq::of(qp.base().srq).queue;
  } else {
    if (reply.receive.record_slots == 0 || reply.receive.record_slots > record_slots_max ||
        receive_wqe_slots(reply.max_recv_sge) > reply.receive.record_slots)
      return Errno{EPROTO};
    qp.receive.open(view, reply.max_recv_wr, reply.receive.record_slots, ReceiveQueue::WrIds::kept);
    qp.receive_lane.receive = &qp.receive;
  }
  return ok();
}

bool has_receive_queue(const ibv_qp_init_attr& init) {
  return init.srq == nullptr && init.qp_type != IBV_QPT_XRC_SEND && init.qp_type != IBV_QPT_XRC_RECV;
}

bool are_possible(const ibv_qp_cap& cap, bool receives) {
  if (cap.max_send_wr > limits::qp_wr_max || cap.max_send_sge > limits::sge_max || cap.max_inline_data > limits::inline_max) return false;
  return !receives || (cap.max_recv_wr <= limits::qp_wr_max && cap.max_recv_sge <= limits::sge_max);  // else ignored: ibv_create_qp(3)
}

control::CreateQpRequest creation_of(const ibv_qp_init_attr& init, std::uint32_t type, bool receives) {
  control::CreateQpRequest request{};
  request.send_cq = init.send_cq->handle;
  request.recv_cq = init.recv_cq->handle;
  request.srq = init.srq != nullptr ? init.srq->handle : 0;
  request.type = type;
  request.max_send_wr = init.cap.max_send_wr;
  request.max_recv_wr = receives ? init.cap.max_recv_wr : 0;
  request.max_send_sge = init.cap.max_send_sge;
  request.max_recv_sge = receives ? init.cap.max_recv_sge : 0;
  request.max_inline_data = init.cap.max_inline_data;
  request.sq_sig_all = init.sq_sig_all != 0;
  return request;
}

// What the service made of it; the queues are opened after that.
void take_created(Qp& qp, const control::CreateQpReply& reply, bool receives) {
  qp.doorbell_member = reply.doorbell;
  qp.max_send_sge = reply.max_send_sge;
  qp.max_recv_sge = reply.max_recv_sge;
  qp.max_inline_data = reply.max_inline_data;
  qp.caps = {reply.max_send_wr, reply.max_recv_wr, reply.max_send_sge, reply.max_recv_sge, reply.max_inline_data};
  if (!receives) qp.caps.max_recv_wr = qp.caps.max_recv_sge = 0;
  qp.base().handle = reply.qp;
  qp.base().qp_num = reply.qpn;
}

// What the program sees of it.
void show_verbs(ibv_qp& verbs, ibv_pd* pd, const ibv_qp_init_attr& init) {
  verbs.context = pd->context;
  verbs.qp_context = init.qp_context;
  verbs.pd = pd;
  verbs.send_cq = init.send_cq;
  verbs.recv_cq = init.recv_cq;
  verbs.srq = init.srq;
  verbs.state = IBV_QPS_RESET;
  verbs.qp_type = init.qp_type;
  if (init.qp_type == IBV_QPT_XRC_RECV) verbs.pd = nullptr, verbs.send_cq = verbs.recv_cq = nullptr;
  pthread_mutex_init(&verbs.mutex, nullptr);
  pthread_cond_init(&verbs.cond, nullptr);
}

}  // namespace

Result<ibv_qp*> create_qp(ibv_pd* pd, ibv_qp_init_attr& wanted, Xrcd* xrcd, std::uint32_t target) {
  ibv_qp_init_attr init = wanted;  // of which the program is told the capabilities only
  const auto type = wire_type(init.qp_type, xrcd != nullptr);
  if (!type) return type.error();
  if (init.qp_type == IBV_QPT_XRC_RECV && xrcd == nullptr) return Errno{EINVAL};
  const bool receives = has_receive_queue(init);
  if (!are_possible(init.cap, receives)) return Errno{EINVAL};
  if (init.qp_type == IBV_QPT_XRC_SEND) init.recv_cq = init.send_cq, init.srq = nullptr;  // as it receives nothing
  if (init.send_cq == nullptr || init.recv_cq == nullptr) return Errno{EINVAL};
  if (init.srq != nullptr && Srq::of(init.srq).completions != nullptr) return Errno{EINVAL};  // an XRC SRQ is its domain's, and nobody else's
  auto attachment = Context::of(pd->context).usable();
  if (!attachment) return attachment.error();
  auto pd_handle = Pd::of(pd).handle_on(*attachment);
  if (!pd_handle) return pd_handle.error();
  Cq& send_cq = Cq::of(init.send_cq);
  Cq& recv_cq = Cq::of(init.recv_cq);
  // What came through a fork is nothing here, and its handle may be that of something else of this process's.
  if (send_cq.attachment != *attachment || recv_cq.attachment != *attachment) return Errno{EIO};
  if (init.srq != nullptr && Srq::of(init.srq).attachment != *attachment) return Errno{EIO};
  if (xrcd != nullptr && xrcd->attachment != *attachment) return Errno{EIO};

  auto qp = std::make_unique<Qp>();
  control::CreateQpRequest request = creation_of(init, *type, receives);
  request.context = Context::of(pd->context).handle;
  request.pd = *pd_handle;
  const bool xrc = *type > IBV_QPT_UD;
  if (xrc && (*attachment)->service_minor() < control::minor_of_xrc) return Errno{EOPNOTSUPP};
  auto reply = xrc ? (*attachment)->call<control::Request::create_xrc_qp>({request, xrcd != nullptr ? xrcd->handle : 0, target})
                   : (*attachment)->call<control::Request::create_qp>(request);
  if (!reply) return reply.error();
  Provisional<control::Request::destroy_qp> made(**attachment, reply->qp);

  VRDMA_CRASH_POINT("guest.create_qp.answered");
  qp->attachment = *attachment;
  qp->liveness = &(*attachment)->liveness();
  qp->doorbell = (*attachment)->doorbell();
  qp->implied_flags = init.sq_sig_all != 0 ? wr_signaled : 0;
  qp->sq_sig_all = init.sq_sig_all;
  qp->opcodes = opcodes_of(init.qp_type, offers_windows(**attachment));
  qp->xrcd = xrcd;
  take_created(*qp, *reply, receives);
  show_verbs(qp->base(), pd, init);
  if (Status opened = open_queues(*qp, **attachment, *reply); !opened) return opened.error();
  if (*type == control::xrc_srq) qp->receive_lane.qpn = 0;  // each completion says by which target it came

  // First all that may fail: a queue pair that does not come to be is in nobody's lists.
  send_cq.make_room_for(qp->send_lane);
  recv_cq.make_room_for(qp->receive_lane);
  {
    std::lock_guard lock((*attachment)->objects_mutex());
    (*attachment)->qps[reply->qp] = qp.get();
  }
  made.keep();
  send_cq.add_lane(qp->send_lane);
  recv_cq.add_lane(qp->receive_lane);
  if (init.srq != nullptr && &send_cq == &recv_cq) recv_cq.ask_for_stamps();  // whose receives are there already, perhaps
  if (xrcd != nullptr) xrcd->users.fetch_add(1, std::memory_order_relaxed);
  send_cq.users.fetch_add(1, std::memory_order_relaxed);
  recv_cq.users.fetch_add(1, std::memory_order_relaxed);
  Pd::of(pd).users.fetch_add(1, std::memory_order_relaxed);
  if (init.srq != nullptr) Srq::of(init.srq).users.fetch_add(1, std::memory_order_relaxed);
  wanted.cap = qp->caps;
  return &qp.release()->base();
}

namespace {

QpAttributes to_wire(const ibv_qp_attr& from) {
  QpAttributes to{};
  to.state = from.qp_state;
  to.cur_state = from.cur_qp_state;
  to.access_flags = from.qp_access_flags;
  to.path = guest::to_wire(from.ah_attr);
  to.alt_path = guest::to_wire(from.alt_ah_attr);
  to.rate_limit = from.rate_limit;
  copy_namesakes(from, to);
  return to;
}

ibv_qp_attr from_wire(const QpAttributes& from, const ibv_qp_cap& caps) {
  ibv_qp_attr to{};
  to.qp_state = static_cast<ibv_qp_state>(from.state);
  to.cur_qp_state = static_cast<ibv_qp_state>(from.cur_state);
  to.qp_access_flags = from.access_flags;
  to.cap = caps;
  to.ah_attr = guest::from_wire(from.path);
  to.alt_ah_attr = guest::from_wire(from.alt_path);
  to.sq_draining = from.sq_draining;
  to.rate_limit = from.rate_limit;
  copy_namesakes(from, to);
  return to;
}

// The state is written under it: a data verb of another thread sees either the old one or the new one, and never posts behind a RESET.
struct StateLock {
  explicit StateLock(Qp& qp) : sends(qp.send_lock), receives(qp.receive_lock) {}
  std::lock_guard<SpinLock> sends, receives;
};

// What the queue pair is made of: of an XRC target its domain's, whatever the application sees in its fields.
struct Parts {
  Pd& pd;
  Cq &send_cq, &recv_cq;
};
Parts parts_of(Qp& qp) {
  const ibv_qp& verbs = qp.base();
  if (verbs.qp_type == IBV_QPT_XRC_RECV) return {Pd::of(qp.xrcd->pd), Cq::of(qp.xrcd->cq), Cq::of(qp.xrcd->cq)};
  return {Pd::of(verbs.pd), Cq::of(verbs.send_cq), Cq::of(verbs.recv_cq)};
}

void drop_completions(Qp& qp) {
  const Parts parts = parts_of(qp);
  parts.send_cq.drop_entries(qp.send_lane);
  parts.recv_cq.drop_entries(qp.receive_lane);
}

Status modify_qp(Qp& qp, const ibv_qp_attr& attributes, int mask) {
  if (qp.liveness->inherited()) return Errno{EIO};  // a thread of the parent's may have held its locks
  control::ModifyQpRequest request{};
  request.qp = qp.base().handle;
  request.mask = static_cast<std::uint32_t>(mask);
  request.attributes = to_wire(attributes);
  const bool of_state = (mask & IBV_QP_STATE) != 0;
  const bool to_reset = of_state && attributes.qp_state == IBV_QPS_RESET;
  ibv_qp_state& state = qp.base().state;
  ibv_qp_state before{};
  if (to_reset && qp.liveness->gone()) return Errno{EIO};
  if (of_state) {
    const StateLock lock(qp);
    ++qp.modifies_begun;
    before = state;
    request.send_position = qp.send.writer().position();
    if (to_reset) {
      state = IBV_QPS_RESET;  // from here on nothing is posted
      request.receive_position = qp.base().srq != nullptr ? 0 : qp.receive.writer().position();
    }
  }
  VRDMA_CRASH_POINT("guest.modify_qp.before_request");
  auto reply = qp.attachment->call<control::Request::modify_qp>(request);
  VRDMA_CRASH_POINT("guest.modify_qp.answered");
  if (reply && to_reset) drop_completions(qp);
  if (of_state) {
    const StateLock lock(qp);
    ++qp.modifies_ended;
    if (reply) state = static_cast<ibv_qp_state>(reply->state);
    else if (to_reset) state = before;
    if (reply && to_reset) {
      qp.send.forget_all();
      qp.receive.forget_all();
    }
  }
  if (!reply) return reply.error();
  return ok();
}

Status query_qp(Qp& qp, ibv_qp_attr& attributes, ibv_qp_init_attr* init) {
  if (qp.liveness->inherited()) return Errno{EIO};
  const std::uint32_t modifies = qp.modifies_ended.load(std::memory_order_acquire);
  auto reply = qp.attachment->call<control::Request::query_qp>({qp.base().handle, 0});
  if (!reply) return reply.error();
  attributes = from_wire(reply->attributes, qp.caps);
  // Beside a modify of another thread nobody knows which of the two answers is the later one, and the modify's counts. Who posts meanwhile, perhaps
  // this thread between its ibv_wr_start and ibv_wr_complete, does so in the state that it has found.
  const std::unique_lock sends(qp.send_lock, std::try_to_lock), receives(qp.receive_lock, std::try_to_lock);
  if (sends && receives && qp.modifies_begun.load(std::memory_order_relaxed) == modifies) qp.base().state = attributes.qp_state;
  if (init != nullptr) {
    const ibv_qp& verbs = qp.base();
    *init = {verbs.qp_context, verbs.send_cq, verbs.recv_cq, verbs.srq, qp.caps, verbs.qp_type, qp.sq_sig_all};
  }
  return ok();
}

void take_lanes(Qp& qp) {
  const Parts parts = parts_of(qp);
  parts.send_cq.remove_lane(qp.send_lane);
  parts.recv_cq.remove_lane(qp.receive_lane);
  while (qp.visits.load(std::memory_order_acquire) != 0) sched_yield();  // P2: who polls and had found the lane (poll.cpp)
}

// Nobody finds the QP by its handle any more; async events that were read and not acknowledged are waited for.
void withdraw(Qp& qp) {
  {
    std::lock_guard lock(qp.attachment->objects_mutex());
    auto found = qp.attachment->qps.find(qp.base().handle);
    if (found != qp.attachment->qps.end() && found->second == &qp) qp.attachment->qps.erase(found);
  }
  purge_async_events(qp.base().context, qp.base().handle);
  pthread_mutex_lock(&qp.base().mutex);
  while (qp.base().events_completed != qp.events_reported) pthread_cond_wait(&qp.base().cond, &qp.base().mutex);
  pthread_mutex_unlock(&qp.base().mutex);
}

Status destroy_qp(Qp& qp) {
  if (!qp.liveness->inherited()) {
    std::lock_guard lock(qp.mcast_mutex);
    if (!qp.mcast_groups.empty()) return Errno{EBUSY};
  }
  ibv_qp& verbs = qp.base();
  const Parts parts = parts_of(qp);
  if (!qp.liveness->gone()) {
    // First RESET, so that its completions can still be counted and dropped while their memory is there; then the end.
    if (verbs.state != IBV_QPS_RESET && verbs.qp_type != IBV_QPT_XRC_RECV) {  // which others may have open, and which completes nothing
      ibv_qp_attr reset{};
      reset.qp_state = IBV_QPS_RESET;
      (void)modify_qp(qp, reset, IBV_QP_STATE);
    }
    VRDMA_CRASH_POINT("guest.destroy_qp.reset");
    take_lanes(qp);
    auto gone = qp.attachment->call<control::Request::destroy_qp>({verbs.handle, 0});
    VRDMA_CRASH_POINT("guest.destroy_qp.answered");
    if (!gone && value(gone.error()) != EIO) {
      parts.send_cq.add_lane(qp.send_lane);
      parts.recv_cq.add_lane(qp.receive_lane);
      return gone.error();
    }
  } else if (!qp.liveness->inherited()) {
    take_lanes(qp);
  }
  if (!qp.liveness->inherited()) withdraw(qp);
  parts.send_cq.users.fetch_sub(1, std::memory_order_relaxed);
  parts.recv_cq.users.fetch_sub(1, std::memory_order_relaxed);
  parts.pd.users.fetch_sub(1, std::memory_order_relaxed);
  if (verbs.srq != nullptr) Srq::of(verbs.srq).users.fetch_sub(1, std::memory_order_relaxed);
  if (qp.xrcd != nullptr) qp.xrcd->users.fetch_sub(1, std::memory_order_relaxed);
  delete &qp;
  return ok();
}

constexpr std::uint16_t multicast_lid_first = 0xc000, permissive_lid = 0xffff;

Result<control::McastRequest> mcast_request(Qp& qp, const ibv_gid& gid, std::uint16_t lid) {
  const control::McastRequest request{qp.base().handle, lid, 0, std::to_array(gid.raw)};
  if (qp.base().qp_type != IBV_QPT_UD || !is_multicast(request.gid)) return Errno{EINVAL};
  // On InfiniBand a group has a LID, too; on Ethernet nobody looks at it (the kernel's is_valid_mcast_lid()).
  const auto device = qp.attachment->device();
  if (device && device->link_layer == control::link_layer_infiniband && (lid < multicast_lid_first || lid == permissive_lid)) return Errno{EINVAL};
  return request;
}

auto is_group(const control::McastRequest& wanted) {
  return [&wanted](const control::McastRequest& group) { return group.gid == wanted.gid && group.lid == wanted.lid; };
}

// A program attaches and detaches pairs of a GID and a LID, which are counted here as uverbs counts them; the service knows the GIDs.
Status attach(Qp& qp, const ibv_gid& gid, std::uint16_t lid) {
  if (qp.liveness->inherited()) return Errno{EIO};
  const auto request = mcast_request(qp, gid, lid);
  if (!request) return request.error();
  auto& groups = qp.mcast_groups;
  std::lock_guard lock(qp.mcast_mutex);
  const bool is_new = std::ranges::none_of(groups, is_group(*request));
  if (is_new) groups.reserve(groups.size() + 1);  // before the service has it: a group that is in no list could not be left
  if (const auto done = qp.attachment->call<control::Request::attach_mcast>(*request); !done) return done.error();
  if (is_new) groups.push_back(*request);
  return ok();
}

Status detach(Qp& qp, const ibv_gid& gid, std::uint16_t lid) {
  if (qp.liveness->inherited()) return ok();
  const auto request = mcast_request(qp, gid, lid);
  if (!request) return request.error();
  auto& groups = qp.mcast_groups;
  std::lock_guard lock(qp.mcast_mutex);
  const auto found = std::ranges::find_if(groups, is_group(*request));
  if (found == groups.end()) return Errno{EINVAL};
  if (std::ranges::count(groups, request->gid, &control::McastRequest::gid) == 1) {
    const auto done = qp.attachment->call<control::Request::detach_mcast>(*request);
    // With the service gone there is nothing left to leave.
    if (!done && value(done.error()) != EIO) return done.error();
  }
  groups.erase(found);
  return ok();
}

}  // namespace
}  // namespace vrdma::guest

using namespace vrdma;
using namespace vrdma::guest;

VRDMA_EXPORT ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
  return as_ptr([&] { return create_qp(pd, *init, nullptr); });
}

VRDMA_EXPORT int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
  return as_int([&] { return modify_qp(Qp::of(qp), *attributes, mask); });
}

// `mask` says what the application will look at; everything is filled in, as hardware does.
VRDMA_EXPORT int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attributes, int /*mask*/, ibv_qp_init_attr* init) {
  return as_int([&] { return query_qp(Qp::of(qp), *attributes, init); });
}

VRDMA_EXPORT int ibv_destroy_qp(ibv_qp* qp) {
  return as_int([&] { return destroy_qp(Qp::of(qp)); });
}

VRDMA_EXPORT int ibv_attach_mcast(ibv_qp* qp, const ibv_gid* gid, std::uint16_t lid) {
  return as_int([&] { return attach(Qp::of(qp), *gid, lid); });
}

VRDMA_EXPORT int ibv_detach_mcast(ibv_qp* qp, const ibv_gid* gid, std::uint16_t lid) {
  return as_int([&] { return detach(Qp::of(qp), *gid, lid); });
}
