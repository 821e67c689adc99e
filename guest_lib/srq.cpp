// Shared receive queues. Posting to them is in post.cpp.
#include "guest_lib/abi/export.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/provisional.hpp"
#include "guest_lib/verbs_result.hpp"
#include "vrdma/limits.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

Result<ibv_srq*> create_srq(ibv_pd* pd, ibv_srq_init_attr& init) {
  if (init.attr.max_wr == 0 || init.attr.max_wr > limits::srq_wr_max || init.attr.max_sge > limits::sge_max)
    return Errno{EINVAL};
  auto attachment = Context::of(pd->context).usable();
  if (!attachment) return attachment.error();
  auto pd_handle = Pd::of(pd).handle_on(*attachment);
  if (!pd_handle) return pd_handle.error();
  auto srq = std::make_unique<Srq>();
  // The limit is armed by ibv_modify_srq only.
  auto reply = (*attachment)->call<control::Request::create_srq>(
      {Context::of(pd->context).handle, *pd_handle, init.attr.max_wr, init.attr.max_sge, 0, 0});
  if (!reply) return reply.error();
  Provisional<control::Request::destroy_srq> made(**attachment, reply->srq);
  VRDMA_CRASH_POINT("guest.create_srq.answered");
  auto view = (*attachment)->queue_pair_at(reply->queue.offset, reply->queue.geometry);
  if (!view || reply->queue.record_slots == 0 || reply->queue.record_slots > record_slots_max ||
      receive_wqe_slots(reply->max_sge) > reply->queue.record_slots)
    return Errno{EPROTO};
  srq->attachment = *attachment;
  srq->liveness = &(*attachment)->liveness();
  srq->srq_num = reply->srq_num;
  srq->max_sge = reply->max_sge;
  srq->queue.open(*view, reply->max_wr, reply->queue.record_slots, ReceiveQueue::WrIds::not_kept);
  srq->verbs.context = pd->context;
  srq->verbs.srq_context = init.srq_context;
  srq->verbs.pd = pd;
  srq->verbs.handle = reply->srq;
  pthread_mutex_init(&srq->verbs.mutex, nullptr);
  pthread_cond_init(&srq->verbs.cond, nullptr);
  {
    std::lock_guard lock((*attachment)->objects_mutex());
    (*attachment)->srqs[reply->srq] = srq.get();
  }
  made.keep();
  init.attr.max_wr = reply->max_wr;
  init.attr.max_sge = reply->max_sge;
  Pd::of(pd).users.fetch_add(1, std::memory_order_relaxed);
  return &srq.release()->verbs;
}

namespace {

Status modify_srq(Srq& srq, const ibv_srq_attr& attributes, int mask) {
  if ((mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT)) != 0) return Errno{EINVAL};
  if (mask & IBV_SRQ_MAX_WR) return Errno{EOPNOTSUPP};  // IBV_DEVICE_SRQ_RESIZE is not reported
  if ((mask & IBV_SRQ_LIMIT) && attributes.srq_limit > srq.queue.max_wr()) return Errno{EINVAL};
  auto done = srq.attachment->call<control::Request::modify_srq>(
      {srq.verbs.handle, static_cast<std::uint32_t>(mask), attributes.max_wr, attributes.srq_limit});
  return done ? ok() : Status(done.error());
}

Status query_srq(Srq& srq, ibv_srq_attr& attributes) {
  auto reply = srq.attachment->call<control::Request::query_srq>({srq.verbs.handle, 0});
  if (!reply) return reply.error();
  attributes = {reply->max_wr, reply->max_sge, reply->srq_limit};
  return ok();
}

void withdraw(Srq& srq) {
  {
    std::lock_guard lock(srq.attachment->objects_mutex());
    auto found = srq.attachment->srqs.find(srq.verbs.handle);
    if (found != srq.attachment->srqs.end() && found->second == &srq) srq.attachment->srqs.erase(found);
  }
  purge_async_events(srq.verbs.context, srq.verbs.handle);
  pthread_mutex_lock(&srq.verbs.mutex);
  while (srq.verbs.events_completed != srq.events_reported) pthread_cond_wait(&srq.verbs.cond, &srq.verbs.mutex);
  pthread_mutex_unlock(&srq.verbs.mutex);
}

Status destroy_srq(Srq& srq) {
  if (srq.users.load(std::memory_order_relaxed) != (srq.completions != nullptr ? 1u : 0u)) return Errno{EBUSY};
  if (srq.completions != nullptr) {
    if (const int error = ibv_destroy_qp(srq.completions); error != 0) return Errno{error};
    srq.completions = nullptr;
  }
  if (!srq.liveness->gone()) {
    auto gone = srq.attachment->call<control::Request::destroy_srq>({srq.verbs.handle, 0});
    if (!gone && value(gone.error()) != EIO) return gone.error();
  }
  if (!srq.liveness->inherited()) withdraw(srq);
  Pd::of(srq.verbs.pd).users.fetch_sub(1, std::memory_order_relaxed);
  delete &srq;
  return ok();
}

}  // namespace
}  // namespace vrdma::guest

using namespace vrdma;
using namespace vrdma::guest;

VRDMA_EXPORT ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* init) {
  return as_ptr([&] { return create_srq(pd, *init); });
}

VRDMA_EXPORT int ibv_modify_srq(ibv_srq* srq, ibv_srq_attr* attributes, int mask) {
  return as_int([&] { return modify_srq(Srq::of(srq), *attributes, mask); });
}

VRDMA_EXPORT int ibv_query_srq(ibv_srq* srq, ibv_srq_attr* attributes) {
  return as_int([&] { return query_srq(Srq::of(srq), *attributes); });
}

VRDMA_EXPORT int ibv_destroy_srq(ibv_srq* srq) {
  return as_int([&] { return destroy_srq(Srq::of(srq)); });
}
