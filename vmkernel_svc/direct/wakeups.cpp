// Receivers of direct connections that sleep on a completion channel: the poster wakes them. What it owes them, because it could not, or
// stands still before it has, is this file's.
#include <algorithm>
#include <type_traits>

#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/direct/link.hpp"
#include "vmkernel_svc/events.hpp"

namespace vrdma::svc {

// The events that the poster owes the receiver: of an arm that it may have claimed and not reported (its pipe was full, or it stands still
// or has ended between the two; a record too many is dropped by the reader), and of completions that it may not have told of.
void DirectDesk::report(const DirectLink& link, int i, const QueuePair& to) {
  CompletionQueue& cq = *to.receive_cq;
  // V2: pairs with V1 in the poster's raise_at_peer, by the claim, or because the poster does not run.
  const std::uint32_t claimed = std::atomic_ref(link.claims[i].direction().claimed_arm).load(std::memory_order_relaxed);
  if (cq.channel == nullptr || (claimed == 0 && !link.revoked[i])) return;
  if (claimed != 0) raise_claimed(cq, claimed);
  const std::uint32_t entries = to.core.receive_lane.entry_count();
  // Pairs with L3 in guest_lib/lanes.hpp.
  vmci::LaneReader unread(to.receive_view.consume_completions(), entries, std::atomic_ref(to.receive_view.header().creator.consumed).load(std::memory_order_acquire));
  bool any = false, urgent = false;
  for (std::uint32_t looked = 0; looked < entries; ++looked, unread.pop()) {
    const Cqe* const entry = unread.next();
    if (entry == nullptr) break;
    const CqeState state = unpack_cqe_state(std::atomic_ref(const_cast<std::uint32_t&>(entry->state)).load(std::memory_order_relaxed));
    any = true, urgent |= state.status != WcStatus::success || (state.flags & wc_solicited) != 0;
  }
  if (any) raise_if_armed(cq, urgent);
}

void DirectDesk::watch(DirectLink& link, int i, bool on) {
  watched_ += static_cast<std::uint32_t>(on) - static_cast<std::uint32_t>(std::exchange(link.watched[i], on));
  link.inside_at[i].reset();
}

bool DirectDesk::look(std::uint64_t now_ns) {
  if (now_ns - looked_ns_ < look_interval_ns) return false;
  looked_ns_ = now_ns;
  bool took = false;
  for (const auto& [key, link] : links_) {
    for (int i = 0; i < 2; ++i) {
      if (!link->watched[i]) continue;
      const direct::Direction& direction = link->claims[i].direction();
      const auto word = [](const auto& value) { return std::atomic_ref(const_cast<std::remove_cvref_t<decltype(value)>&>(value)).load(std::memory_order_relaxed); };
      const auto holder = direct::holder_of(word(direction.claim));
      std::optional<std::uint64_t> inside;
      if (holder != direct::held_by_nobody || word(direction.claimed_arm) != 0) inside = std::uint64_t{word(direction.handouts)} << 32 | word(direction.current);
      const bool stands = inside && inside == link->inside_at[i];
      link->inside_at[i] = inside;
      if (!stands || link->ends[1 - i] == nullptr) continue;
      QueuePair& to = *link->ends[1 - i];
      if (!(link->datagrams ? take_inbox(to) : take_back(to))) continue;
      took = true;
      if (link->whole()) hand_out(to);
    }
  }
  return took;
}

}  // namespace vrdma::svc
