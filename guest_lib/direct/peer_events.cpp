// The poster's part of its receiver's completion events (guest_lib/events.cpp is the receiver's).
#include <sys/syscall.h>
#include <unistd.h>

#include "guest_lib/direct/peer_queue.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

// Completions were told of, and a full fence lies behind them. As the service's raise_if_armed, but for what becomes of the event if this
// thread gets no further: `claimed_arm` tells the service, from before the claim until the record is in the pipe.
bool raise_at_peer(const vmci::PosterClaim& claim, control::CqShared& cq, const PeerChannel& channel, bool solicited) {
  const std::atomic_ref claimed(claim.direction().claimed_arm);
  if (claimed.load(std::memory_order_relaxed) != 0) return false;  // it still owes the event before this one
  std::uint32_t seen = std::atomic_ref(cq.arm).load(std::memory_order_acquire);
  const std::uint32_t armed = seen, state = armed & 3;
  if (state != control::arm_next && !(state == control::arm_solicited && solicited)) return true;
  // V1: pairs with V2 in the service's DirectDesk::report.
  claimed.store(armed, std::memory_order_relaxed);
  VRDMA_CRASH_POINT("direct.guest.before_arm");
  const vmci::ClaimedStores& stores = claim.stores();
  const bool stored = stores.compare_and_swap(&cq.arm, seen, (armed & ~3u) | control::arm_fired);
  VRDMA_CRASH_POINT("direct.guest.arm_claimed");
  if (!stored || !stores.held()) return false;  // the service has revoked the claim, and knows by `claimed_arm` what is due
  if (seen == armed) {
    // Or it was armed anew meanwhile: then the receiver looks at the queue itself, and the next completion claims that arm.
    const control::CompletionRecord record{channel.cq, armed >> 2, 0};
    // Not write(2): posting is no cancellation point. It does not block.
    if (::syscall(SYS_write, channel.pipe, &record, sizeof(record)) != static_cast<long>(sizeof(record))) return false;
    VRDMA_CRASH_POINT("direct.guest.event_sent");
  }
  claimed.store(0, std::memory_order_relaxed);
  return true;
}

}  // namespace vrdma::guest
