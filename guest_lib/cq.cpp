// Completion channels and completion queues: creation, resize, destruction. Polling is in poll.cpp, events in events.cpp.
#include <algorithm>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/descriptors.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/provisional.hpp"
#include "guest_lib/verbs_result.hpp"
#include "vrdma/limits.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

namespace {

Result<ibv_comp_channel*> create_channel(ibv_context* context) {
  auto attachment = Context::of(context).usable();
  if (!attachment) return attachment.error();
  auto channel = std::make_unique<Channel>();
  auto reply = (*attachment)->call_on_socket<control::Request::create_channel>({Context::of(context).handle, control::interrupt_wanted});
  if (!reply) return reply.error();
  Provisional<control::Request::destroy_channel> made(**attachment, reply->body.handle);
  if (reply->descriptors.empty() || reply->descriptors.size() > 2) return vmci::not_brought(reply->descriptors);
  const bool second = reply->descriptors.size() == 2, interrupted = second && reply->body.ring != 0;
  channel->pipe = std::make_unique<PrivateFd>(std::move(reply->descriptors[0]));
  auto event_fd = make_event_fd(channel->pipe->get());
  if (!event_fd) return event_fd.error();
  if (Status prepared = channel->events.prepare_to_keep(event_fd->get()); !prepared) return prepared.error();
  if (interrupted) {
    auto ring = (*attachment)->at<control::EventRing>(std::uint64_t{reply->body.ring} * control::ring_unit_bytes);
    if (!ring) return ring.error();
    channel->interrupt = std::make_unique<PrivateFd>(std::move(reply->descriptors[1]));
    if (Status watched = watch_pipe(event_fd->get(), channel->interrupt->get()); !watched) return watched.error();
    if (Status used = channel->events.use_ring(*ring, channel->interrupt->get()); !used) return used.error();
  } else if (second) {
    channel->peers = std::make_unique<PrivateFd>(std::move(reply->descriptors[1]));
    if (Status watched = watch_pipe(event_fd->get(), channel->peers->get()); !watched) return watched.error();
    if (Status used = channel->events.use_peers(channel->peers->get()); !used) return used.error();
  }
  channel->attachment = *attachment;
  channel->handle = reply->body.handle;
  channel->verbs = {context, event_fd->release(), 0};
  made.keep();
  return &channel.release()->verbs;
}

Result<ibv_cq*> create_cq(ibv_context* context, int cqe, void* cq_context, ibv_comp_channel* channel, int comp_vector) {
  if (cqe < 1 || static_cast<std::uint32_t>(cqe) > limits::cqe_max) return Errno{EINVAL};
  if (comp_vector < 0 || comp_vector >= context->num_comp_vectors) return Errno{EINVAL};
  auto attachment = Context::of(context).usable();
  if (!attachment) return attachment.error();
  if (channel != nullptr && Channel::of(channel).attachment != *attachment) return Errno{EIO};

  auto cq = std::make_unique<Cq>();
  cq->attachment = *attachment;
  cq->liveness = &(*attachment)->liveness();
  auto reply = (*attachment)->call<control::Request::create_cq>(
      {Context::of(context).handle, static_cast<std::uint32_t>(cqe), channel != nullptr ? Channel::of(channel).handle : 0,
       static_cast<std::uint32_t>(comp_vector)});
  if (!reply) return reply.error();
  Provisional<control::Request::destroy_cq> made(**attachment, reply->cq);
  VRDMA_CRASH_POINT("guest.create_cq.answered");
  auto shared = (*attachment)->at<control::CqShared>(reply->offset);
  if (!shared) return shared.error();
  cq->shared = *shared;
  for (auto& lane : cq->shared->hot) std::atomic_ref(lane).store(control::no_lane, std::memory_order_relaxed);
  // Handles are used again: events of an older CQ are told from ours by where its sequence started.
  static std::atomic<std::uint32_t> created{0};
  cq->first_arm_sequence = (created.fetch_add(1, std::memory_order_relaxed) << 16) & 0x3fffffff;
  cq->reported_arm_sequence = cq->first_arm_sequence;
  std::atomic_ref(cq->shared->arm).store(cq->first_arm_sequence << 2, std::memory_order_relaxed);

  cq->verbs.context = context;
  cq->verbs.channel = channel;
  cq->verbs.cq_context = cq_context;
  cq->verbs.handle = reply->cq;
  cq->verbs.cqe = static_cast<int>(reply->cqe);
  pthread_mutex_init(&cq->verbs.mutex, nullptr);
  pthread_cond_init(&cq->verbs.cond, nullptr);

  {
    std::lock_guard lock((*attachment)->objects_mutex());
    if (channel != nullptr) {  // before the table knows of it: nothing fails afterwards
      auto& cqs = Channel::of(channel).cqs;
      if (cqs.size() == cqs.capacity()) cqs.reserve(2 * cqs.size() + 1);
      if (!Channel::of(channel).events.make_room_for(cqs.size() + 1)) return Errno{ENOMEM};
    }
    (*attachment)->cqs[reply->cq] = cq.get();
    if (channel != nullptr) {
      Channel::of(channel).cqs.push_back(cq.get());
      ++channel->refcnt;
    }
  }
  made.keep();
  return cq.release()->base();
}

// Nobody finds the CQ by its handle any more; events that were read and not acknowledged are waited for.
void withdraw(Cq& cq) {
  {
    std::lock_guard lock(cq.attachment->objects_mutex());
    auto found = cq.attachment->cqs.find(cq.verbs.handle);
    if (found != cq.attachment->cqs.end() && found->second == &cq) cq.attachment->cqs.erase(found);
    if (cq.verbs.channel != nullptr) std::erase(Channel::of(cq.verbs.channel).cqs, &cq);
  }
  purge_async_events(cq.verbs.context, cq.verbs.handle);
  if (cq.verbs.channel != nullptr) {
    Channel& channel = Channel::of(cq.verbs.channel);
    end_if_lost(*channel.pipe, channel.events);
    channel.events.purge(channel.verbs.fd, channel.pipe->get(), cq.verbs.handle);
    std::lock_guard lock(cq.attachment->objects_mutex());
    --channel.verbs.refcnt;
  }
  pthread_mutex_lock(&cq.verbs.mutex);
  while (cq.verbs.comp_events_completed != cq.completion_events_reported ||
         cq.verbs.async_events_completed != cq.async_events_reported)
    pthread_cond_wait(&cq.verbs.cond, &cq.verbs.mutex);
  pthread_mutex_unlock(&cq.verbs.mutex);
}

Status destroy_cq(Cq& cq) {
  if (cq.users.load(std::memory_order_relaxed) != 0) return Errno{EBUSY};
  if (!cq.liveness->gone()) {
    auto gone = cq.attachment->call<control::Request::destroy_cq>({cq.verbs.handle, 0});
    if (!gone && value(gone.error()) != EIO) return gone.error();
  }
  if (cq.liveness->inherited()) {
    if (cq.verbs.channel != nullptr) --cq.verbs.channel->refcnt;
  } else {
    withdraw(cq);
  }
  if (cq.parent_domain != nullptr) cq.parent_domain->users.fetch_sub(1, std::memory_order_relaxed);
  delete &cq;
  return ok();
}

}  // namespace
}  // namespace vrdma::guest

using namespace vrdma;
using namespace vrdma::guest;

VRDMA_EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  return as_ptr([&] { return create_channel(context); });
}

VRDMA_EXPORT int ibv_destroy_comp_channel(ibv_comp_channel* verbs) {
  return as_int([&]() -> Status {
    Channel& channel = Channel::of(verbs);
    if (verbs->refcnt != 0) return Errno{EBUSY};
    const Inside inside(channel);
    Liveness& liveness = channel.attachment->liveness();
    channel.readers.close(liveness.inherited());
    if (!liveness.gone()) {
      auto gone = channel.attachment->call<control::Request::destroy_channel>({channel.handle, 0});
      // Else it is gone, also with its context: rdma-core asks no kernel, and closes what the program waits at.
      if (!gone && value(gone.error()) == EBUSY) return channel.readers.reopen(), gone.error();
    }
    OwnNumbers::close_marked(verbs->fd);
    return ok();
  });
}

VRDMA_EXPORT ibv_cq* ibv_create_cq(ibv_context* context, int cqe, void* cq_context, ibv_comp_channel* channel,
                                   int comp_vector) {
  return as_ptr([&] { return create_cq(context, cqe, cq_context, channel, comp_vector); });
}

VRDMA_EXPORT int ibv_resize_cq(ibv_cq* verbs, int cqe) {
  return as_int([&]() -> Status {
    if (cqe < 1 || static_cast<std::uint32_t>(cqe) > limits::cqe_max) return Errno{EINVAL};
    auto reply =
        Cq::of(verbs).attachment->call<control::Request::resize_cq>({verbs->handle, static_cast<std::uint32_t>(cqe)});
    if (!reply) return reply.error();
    verbs->cqe = static_cast<int>(reply->cqe);
    return ok();
  });
}

VRDMA_EXPORT int ibv_destroy_cq(ibv_cq* verbs) {
  return as_int([&] { return destroy_cq(Cq::of(verbs)); });
}
