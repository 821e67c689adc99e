#include "vmkernel_svc/events.hpp"
#include "vrdma/fault.hpp"

#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace vrdma::svc {

namespace {

// Whether there is nothing left to do for the record: it is in the pipe, or nobody can read it any more.
template <class Record>
bool put(int pipe, const Record& record) {
  return ::write(pipe, &record, sizeof(record)) == static_cast<ssize_t>(sizeof(record)) || errno == EPIPE;
}

template <class Record>
void send(Guest& guest, int pipe, std::vector<Record>& backlog, const Record& record) {
  if (backlog.empty() && put(pipe, record)) return;
  guest.events_held = true;
  if (backlog.size() < 65536) backlog.push_back(record);  // beyond that the guest has not read for 70 000 events
}

template <class Record>
bool resend(int pipe, std::vector<Record>& backlog) {
  std::size_t sent = 0;
  while (sent < backlog.size() && put(pipe, backlog[sent])) ++sent;
  backlog.erase(backlog.begin(), backlog.begin() + static_cast<std::ptrdiff_t>(sent));
  return !backlog.empty();
}

}  // namespace

void raise_if_armed(CompletionQueue& cq, bool solicited_or_error) {
  std::atomic_ref arm(cq.shared->arm);
  std::uint32_t seen = arm.load(std::memory_order_acquire);
  const std::uint32_t state = seen & 3;
  if (state != control::arm_next && !(state == control::arm_solicited && solicited_or_error)) return;
  // The guest may re-arm meanwhile; it then looks at the CQ itself, and the next completion claims that arm.
  if (!arm.compare_exchange_strong(seen, (seen & ~3u) | control::arm_fired, std::memory_order_acq_rel)) return;
  VRDMA_CRASH_POINT("service.event.claimed");
  send(*cq.guest, cq.channel->pipe.get(), cq.channel->backlog, control::CompletionRecord{cq.handle.value, seen >> 2, 0});
  VRDMA_CRASH_POINT("service.event.sent");
}

void raise_async(Guest& guest, std::uint32_t context, std::uint32_t event, Handle handle) {
  const auto found = guest.contexts.find(context);
  if (found == guest.contexts.end()) return;
  send(guest, found->second->async_pipe.get(), found->second->backlog, control::AsyncRecord{event, handle.value, 0});
}

bool flush_events(Guest& guest) {
  if (!guest.events_held) return false;
  bool held = false;
  for (auto& [handle, channel] : guest.channels)
    if (!channel->backlog.empty()) held |= resend(channel->pipe.get(), channel->backlog);
  for (auto& [handle, context] : guest.contexts)
    if (!context->backlog.empty()) held |= resend(context->async_pipe.get(), context->backlog);
  return guest.events_held = held;
}

}  // namespace vrdma::svc
