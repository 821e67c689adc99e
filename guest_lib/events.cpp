// ibv_get_cq_event, ibv_get_async_event and their acknowledgements. An event is one 16-byte record in a pipe; it is counted
// on its object while the table is locked, so that destroying the object waits for exactly those that were read.
//
// The blocking verbs are cancellation points: across their waits live only what a cancelled thread has to give back (readers.hpp, Deafness).
// They leave errno as it was when they give an event, as verbs_result.hpp has it for others.
#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <optional>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/descriptors.hpp"
#include "guest_lib/interruption.hpp"
#include "guest_lib/objects.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

namespace {

bool may_block(int event_fd) {
  const int flags = ::fcntl(event_fd, F_GETFL);
  return flags < 0 || (flags & O_NONBLOCK) == 0;  // one that is closed is found out below
}

// 0: look again. -1 with errno EAGAIN where the application asked for that on the descriptor, or EINTR. busy: null to sleep at once.
template <class Events>
int wait_readable(int event_fd, bool blocks, PrivateFd& pipe, Events& events, BusyWait* busy = nullptr) {
  if (!blocks) {
    errno = EAGAIN;
    return -1;
  }
  pollfd readable{event_fd, POLLIN, 0};
  // Where the program has closed the pipe, nothing would ever come.
  if (pipe.due_for_a_look() && end_if_lost(pipe, events)) return 0;
  if ((busy != nullptr ? busy->wait(readable) : sleep_as_read(readable)) < 0) return -1;
  if (readable.revents & POLLNVAL) {
    errno = EBADF;
    return -1;
  }
  return 0;
}

// --- completion events

// The arm's sequence number, where the CQ waits for any completion; the caller reports it now. The service, and peers in direct mode, claim
// arms likewise.
std::optional<std::uint32_t> claim_arm(Cq& cq) {
  const auto arm = std::atomic_ref(cq.shared->arm);
  std::uint32_t now = arm.load(std::memory_order_relaxed);
  if ((now & 3) != control::arm_next) return std::nullopt;
  if (!arm.compare_exchange_strong(now, (now & ~3u) | control::arm_fired, std::memory_order_acq_rel)) return std::nullopt;
  return now >> 2;
}

constexpr std::uint32_t sequence_mask = 0x3fffffff;

// The application is about to read the event. The table is locked.
void count_reported(Cq& cq, std::uint32_t arm_sequence) {
  // The service and peers have a pipe each, and an arm may follow another one before its event is read: records may change places.
  if (((arm_sequence - cq.reported_arm_sequence) & sequence_mask) <= sequence_mask / 2) cq.reported_arm_sequence = arm_sequence;
  ++cq.completion_events_reported;
  cq.polled.store(false, std::memory_order_relaxed);
}

Cq* count_event(Channel& channel, const control::CompletionRecord& record) {
  std::lock_guard lock(channel.attachment->objects_mutex());
  auto found = channel.attachment->cqs.find(record.cq);
  if (found == channel.attachment->cqs.end()) return nullptr;  // destroyed meanwhile
  Cq& cq = *found->second;
  if (cq.verbs.channel != &channel.verbs) return nullptr;
  const std::uint32_t armed = std::atomic_ref(cq.shared->arm).load(std::memory_order_relaxed) >> 2;
  // Twice, where the service could not know whether a peer that has ended, or stands still, had reported it before.
  if (record.arm_sequence == cq.reported_arm_sequence) return nullptr;
  if (((record.arm_sequence - cq.first_arm_sequence) & sequence_mask) > ((armed - cq.first_arm_sequence) & sequence_mask))
    return nullptr;  // of an older CQ with the same handle
  count_reported(cq, record.arm_sequence);
  return &cq;
}

struct Requests {
  bool any_outstanding = false;
  std::uint32_t posted = 0;  // ever
};
Requests requests_of(Cq& cq) {
  Requests all;
  const auto add = [&all](const auto& queue) { all.any_outstanding |= queue.any_outstanding(), all.posted += queue.posted(); };
  std::lock_guard lock(cq.lock);
  for (Lane* lane : cq.lanes) {
    if (lane == nullptr || (lane->receive != nullptr && lane->qp->base().srq != nullptr)) continue;
    all.any_outstanding |= lane->reader.next() != nullptr;
    // Whoever holds it posts, perhaps this thread between its ibv_wr_start and ibv_wr_complete.
    const std::unique_lock queue(lane->send != nullptr ? lane->qp->send_lock : lane->qp->receive_lock, std::try_to_lock);
    if (!queue) all.any_outstanding = true;
    else if (lane->send != nullptr) add(*lane->send);
    else add(*lane->receive);
  }
  return all;
}

bool holds_entries(Cq& cq) {
  std::lock_guard lock(cq.lock);
  return std::ranges::any_of(cq.lanes, [](Lane* lane) { return lane != nullptr && lane->reader.next() != nullptr; });
}

// Arming does not fire for completions that are there already (IBA 11.4.2.2), so who arms has to poll until nothing is left.
// perftest -e polls one full batch only and then waits; ConnectX compares the consumer index on arming and lets it get away
// with that. A thread that is about to block here while an armed CQ, left off in the middle, holds completions gets that event.
// Completions that came after the last poll and the arm are not for us to report: the service is about to, and would raise
// another event, for nothing, if the CQ were armed again by then (ib_send_lat -e takes that for its send's completion).
Cq* count_left_off_event(Channel& channel) {
  std::lock_guard lock(channel.attachment->objects_mutex());
  for (Cq* cq : channel.cqs) {
    if (!cq->left_off.load(std::memory_order_relaxed) || !holds_entries(*cq)) continue;
    const auto sequence = claim_arm(*cq);
    if (!sequence) continue;
    count_reported(*cq, *sequence);
    return cq;
  }
  return nullptr;
}

// What is flushed once the service is gone counts as having come since the last event only where something was polled or posted since then: who arms
// on each event, and polls after the last, would have one for ever.
bool any_to_flush(Cq& cq) {
  const Requests now = requests_of(cq);
  return now.any_outstanding && (cq.polled.load(std::memory_order_relaxed) || now.posted != cq.posted_at_fatal_event);
}

// The service is gone: every armed CQ gets the event of its arm, later arms only where there is something to flush. It may
// have died between claiming an arm and sending the event: that one is owed, too.
bool fatal_event_due(Cq& cq) {
  const std::uint32_t now = std::atomic_ref(cq.shared->arm).load(std::memory_order_relaxed);
  if ((now & 3) == control::arm_fired) return now >> 2 != cq.reported_arm_sequence;
  if ((now & 3) != control::arm_next && (now & 3) != control::arm_solicited) return false;
  return cq.fatal_event_owed || any_to_flush(cq);
}

Cq* count_fatal_event(Channel& channel) {
  std::lock_guard lock(channel.attachment->objects_mutex());
  Cq* found = nullptr;
  bool more = false;
  for (Cq* cq : channel.cqs) {
    if (!fatal_event_due(*cq)) continue;
    more = found != nullptr;
    if (more) break;
    found = cq;
  }
  if (found != nullptr) {
    const auto arm = std::atomic_ref(found->shared->arm);
    const std::uint32_t now = arm.load(std::memory_order_relaxed);
    arm.store((now & ~3u) | control::arm_fired, std::memory_order_relaxed);
    count_reported(*found, now >> 2);
    found->fatal_event_owed = false;
    found->posted_at_fatal_event = requests_of(*found).posted;
  }
  // The closed pipe stays readable. Without a further event the descriptor must not be: applications that found it so
  // would block here, or spin.
  if (!more && channel.pipe_watched) {
    unwatch_pipe(channel.verbs.fd, channel.pipe->get());
    channel.pipe_watched = false;
  }
  return found;
}

// The table is locked.
void watch_if_due(Channel& channel, Cq& cq) {
  if (fatal_event_due(cq) && !channel.pipe_watched && watch_pipe(channel.verbs.fd, channel.pipe->get())) channel.pipe_watched = true;
}

// --- asynchronous events

enum class Element { cq, qp, srq, port };
Element element_of(std::uint32_t event) {
  switch (event) {
    case IBV_EVENT_CQ_ERR:
      return Element::cq;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      return Element::qp;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
      return Element::srq;
    default:
      return Element::port;
  }
}

template <class Table>
auto* find_in(Table& table, std::uint32_t handle) {
  auto found = table.find(handle);
  return found == table.end() ? nullptr : found->second;
}

// False: the object is gone, and the event with it.
bool count_event(Attachment& attachment, const control::AsyncRecord& record, ibv_async_event& event) {
  event.event_type = static_cast<ibv_event_type>(record.event);
  std::lock_guard lock(attachment.objects_mutex());
  switch (element_of(record.event)) {
    case Element::cq:
      if (Cq* cq = find_in(attachment.cqs, record.handle)) {
        ++cq->async_events_reported;
        event.element.cq = cq->base();
        return true;
      }
      return false;
    case Element::qp:
      if (Qp* qp = find_in(attachment.qps, record.handle)) {
        ++qp->events_reported;
        event.element.qp = &qp->base();
        return true;
      }
      return false;
    case Element::srq:
      if (Srq* srq = find_in(attachment.srqs, record.handle)) {
        ++srq->events_reported;
        event.element.srq = &srq->verbs;
        return true;
      }
      return false;
    case Element::port:
      event.element.port_num = record.event == IBV_EVENT_DEVICE_FATAL ? 0 : 1;
      return true;
  }
  return false;
}

template <class Verbs>
void acknowledge(Verbs& object, std::uint32_t& completed, std::uint32_t count) {
  pthread_mutex_lock(&object.mutex);
  completed += count;
  pthread_cond_broadcast(&object.cond);
  pthread_mutex_unlock(&object.mutex);
}

}  // namespace

void purge_async_events(ibv_context* verbs, std::uint32_t handle) {
  Context& context = Context::of(verbs);
  end_if_lost(*context.async_pipe, context.events);
  context.events.purge(verbs->async_fd, context.async_pipe->get(), handle);
}

// A completion that came between the application's last poll and its arm: UCX sleeps on the descriptor without another look,
// because ConnectX compares the consumer index on arming. Who arms before the poll, as most do, has not polled since the event.
bool raise_missed(Cq& cq) {
  Channel& channel = Channel::of(cq.verbs.channel);
  return channel.events.add(channel.verbs.fd, [&]() -> std::optional<control::CompletionRecord> {
    const auto sequence = claim_arm(cq);
    if (!sequence) return std::nullopt;
    return control::CompletionRecord{cq.verbs.handle, *sequence, 0};
  });
}

void watch_after_death(Cq& cq) {
  if (cq.verbs.channel == nullptr) return;
  Channel& channel = Channel::of(cq.verbs.channel);
  std::lock_guard lock(channel.attachment->objects_mutex());
  // Decided now: the application may well poll what is flushed before it fetches the event.
  cq.fatal_event_owed |= any_to_flush(cq);
  watch_if_due(channel, cq);
}

void watch_for_posted(Cq& cq) {
  if (cq.verbs.channel == nullptr) return;
  Channel& channel = Channel::of(cq.verbs.channel);
  std::lock_guard lock(channel.attachment->objects_mutex());
  watch_if_due(channel, cq);
}

}  // namespace vrdma::guest

using namespace vrdma;
using namespace vrdma::guest;

VRDMA_EXPORT int ibv_get_cq_event(ibv_comp_channel* verbs, ibv_cq** cq, void** cq_context) {
  const int errno_before = errno;
  Channel& channel = Channel::of(verbs);
  if (channel.attachment->liveness().inherited()) {
    errno = EIO;
    return -1;
  }
  const Inside inside(channel);
  const bool blocks = may_block(verbs->fd);
  // Who will sleep on the descriptor if there is nothing needs no system call to find out.
  using Look = EventSource<control::CompletionRecord>::Look;
  for (Look look = blocks ? Look::quick : Look::thorough;; look = Look::thorough) {
    control::CompletionRecord record;
    Cq* found = nullptr;
    if (channel.readers.closed()) return wait_for_ever(blocks);
    const auto next = channel.events.next(verbs->fd, channel.pipe->get(), record, look);
    if (next == EventSource<control::CompletionRecord>::Next::record) {
      VRDMA_CRASH_POINT("guest.event.read");
      found = count_event(channel, record);
      if (found == nullptr) continue;
    } else if (next == EventSource<control::CompletionRecord>::Next::end) {
      if (channel.readers.closed()) continue;
      channel.attachment->liveness().mark_dead();
      found = count_fatal_event(channel);
    } else {
      found = count_left_off_event(channel);
    }
    if (found != nullptr) {
      VRDMA_CRASH_POINT("guest.event.counted");
      *cq = found->base();
      *cq_context = found->verbs.cq_context;
      return errno = errno_before, 0;
    }
    const int ready = wait_readable(verbs->fd, blocks, *channel.pipe, channel.events, &channel.busy);
    if (ready != 0 && !channel.readers.closed()) return -1;
  }
}

VRDMA_EXPORT void ibv_ack_cq_events(ibv_cq* verbs, unsigned int count) {
  if (count != 0) acknowledge(*verbs, verbs->comp_events_completed, count);
  VRDMA_CRASH_POINT("guest.event.acknowledged");
}

VRDMA_EXPORT int ibv_get_async_event(ibv_context* verbs, ibv_async_event* event) {
  const int errno_before = errno;
  Context& context = Context::of(verbs);
  if (context.attachment->liveness().inherited()) {
    errno = EIO;
    return -1;
  }
  const Inside inside(context);
  const bool blocks = may_block(verbs->async_fd);
  end_if_lost(*context.async_pipe, context.events);
  for (;;) {
    control::AsyncRecord record;
    if (context.readers.closed()) return wait_for_ever(blocks);
    const auto next = context.events.next(verbs->async_fd, context.async_pipe->get(), record);
    if (next == EventSource<control::AsyncRecord>::Next::record) {
      if (count_event(*context.attachment, record, *event)) return errno = errno_before, 0;
      continue;
    }
    if (next == EventSource<control::AsyncRecord>::Next::end) {
      if (context.readers.closed()) continue;
      context.attachment->liveness().mark_dead();
      if (!context.fatal_reported.exchange(true)) {
        unwatch_pipe(verbs->async_fd, context.async_pipe->get());
        event->event_type = IBV_EVENT_DEVICE_FATAL;
        event->element.port_num = 0;
        return errno = errno_before, 0;
      }
    }
    const int ready = wait_readable(verbs->async_fd, blocks, *context.async_pipe, context.events);
    if (ready != 0 && !context.readers.closed()) return -1;
  }
}

VRDMA_EXPORT void ibv_ack_async_event(ibv_async_event* event) {
  switch (element_of(event->event_type)) {
    case Element::cq:
      acknowledge(*event->element.cq, event->element.cq->async_events_completed, 1);
      break;
    case Element::qp:
      acknowledge(*event->element.qp, event->element.qp->events_completed, 1);
      break;
    case Element::srq:
      acknowledge(*event->element.srq, event->element.srq->events_completed, 1);
      break;
    case Element::port:
      break;
  }
}
