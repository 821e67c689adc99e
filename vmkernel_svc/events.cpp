#include "vmkernel_svc/events.hpp"

#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "vmkernel_svc/eventfd_signal.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::svc {

namespace {

// Whoever does not hear of a record would sleep beside it: what could not be rung is owed.
void interrupt(Channel& channel) { channel.interrupt_owed = !signal_eventfd(channel.interrupt); }
bool owes(const Channel& channel) { return channel.interrupt_owed; }
bool owes(const Context&) { return false; }

// Whether there is nothing left to do for the record: it is on its way, or nobody can read it any more.
template <class Record>
bool put(int pipe, const Record& record) {
  return ::write(pipe, &record, sizeof(record)) == static_cast<ssize_t>(sizeof(record)) || errno == EPIPE || errno == ECONNRESET;
}
bool put(Channel& channel, const control::CompletionRecord& record) {
  if (!channel.ring) return put(channel.pipe.get(), record);
  const auto result = channel.ring.put(record);
  if (result == vmci::EventRingWriter::Put::interrupt) interrupt(channel);
  return result != vmci::EventRingWriter::Put::full;
}
bool put(Context& context, const control::AsyncRecord& record) { return put(context.async_pipe.get(), record); }

template <class Target, class Record>
void send(Guest& guest, Target& target, const Record& record) {
  auto& backlog = target.backlog;
  if (backlog.empty() && put(target, record)) {
    guest.events_held |= owes(target);
    return;
  }
  guest.events_held = true;
  if (backlog.size() < 65536) backlog.push_back(record);  // beyond that the guest has not read for 70 000 events
}

template <class Target>
bool resend(Target& target) {
  auto& backlog = target.backlog;
  std::size_t sent = 0;
  while (sent < backlog.size() && put(target, backlog[sent])) ++sent;
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
  send(*cq.guest, *cq.channel, control::CompletionRecord{cq.handle.value, seen >> 2, 0});
  VRDMA_CRASH_POINT("service.event.sent");
}

void raise_claimed(CompletionQueue& cq, std::uint32_t arm) {
  if (std::atomic_ref(cq.shared->arm).load(std::memory_order_acquire) != ((arm & ~3u) | control::arm_fired)) return;
  send(*cq.guest, *cq.channel, control::CompletionRecord{cq.handle.value, arm >> 2, 0});
}

void raise_async(Guest& guest, std::uint32_t context, std::uint32_t event, Handle handle) {
  const auto found = guest.contexts.find(context);
  if (found == guest.contexts.end()) return;
  send(guest, *found->second, control::AsyncRecord{event, handle.value, 0});
}

bool flush_events(Guest& guest) {
  if (!guest.events_held || guest.frozen) return false;
  bool held = false;
  for (auto& [handle, channel] : guest.channels) {
    if (channel->interrupt_owed) interrupt(*channel);
    if (!channel->backlog.empty()) held |= resend(*channel);
    held |= channel->interrupt_owed;
  }
  for (auto& [handle, context] : guest.contexts)
    if (!context->backlog.empty()) held |= resend(*context);
  return guest.events_held = held;
}

void interrupt_again(Guest& guest) {
  for (auto& [handle, channel] : guest.channels)
    if (channel->ring) interrupt(*channel), guest.events_held |= channel->interrupt_owed;
}

}  // namespace vrdma::svc
