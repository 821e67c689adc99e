// UD queue pairs in direct mode. Each has a link of its own: its send queue, which is handed out to its guest, and its inbox, which is
// handed out to whoever may deliver there. The service takes an inbox for as long as it delivers there itself.
#include <algorithm>

#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/direct/link.hpp"
#include "vmkernel_svc/shard.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::svc {

using engine::QpState;

// --- who delivers -----------------------------------------------------------------------------------------------

bool DirectDesk::take_inbox(QueuePair& qp) {
  DirectLink& link = *qp.core.port.link;
  if (!link.datagrams) return true;
  const bool taken = own(link, 1) || cut_off(link, 1);
  if (link.owned[1] && !std::exchange(link.to_be_given, true)) taken_inboxes_.push_back(&link);
  return taken;
}

void DirectDesk::give_inboxes() {
  if (taken_inboxes_.empty()) [[likely]] return;
  std::erase_if(taken_inboxes_, [this](DirectLink* link) {
    const QueuePair* const qp = link->ends[0];
    // What its guest asks for may need it, and others at the same time (ibv_dereg_mr).
    const bool asked_for = qp != nullptr && qp->guest->held_since_ns != 0;
    const bool needed = qp != nullptr && (qp->core.serves != nullptr || qp->core.inbound.active);
    link->to_be_given = asked_for || (!give_inbox(*link) && needed);
    return !link->to_be_given;
  });
}

bool DirectDesk::give_inbox(DirectLink& link) {
  const QueuePair* const qp = link.ends[0];
  if (qp == nullptr || !link.owned[1] || !engine::receives(qp->core) || !roomy(*qp) || qp->core.serves != nullptr || qp->core.inbound.active) return false;
  give(link, 1);
  VRDMA_CRASH_POINT("direct.service.inbox_given");
  return true;
}

bool DirectDesk::give_datagrams(DirectLink& link, bool with_work) {
  QueuePair& qp = *link.ends[0];
  auto& core = qp.core;
  give_inbox(link);
  if (!link.owned[0] || !sends_may_be_given(link) || core.state != QpState::rts || !roomy(qp) || shard_.engine().busy(core) || core.send_queue_lost ||
      core.port.job_sequence != 0 || (!with_work && !core.send_ring.empty()))
    return false;
  shard_.withdraw(core);
  qp.watch_sends(true);  // with a fence: who finds the claim taken finds this
  give(link, 0);
  // D3: pairs with the fence in the guest's post, as for connections.
  vmci::store_load_fence();
  give_work(qp, with_work);
  VRDMA_CRASH_POINT("direct.service.handed_out");
  return true;
}

// --- posters that are gone --------------------------------------------------------------------------------------

// A process has one descriptor here, however often it attaches.
void DirectDesk::note_poster(std::uint32_t number, const Guest& guest) {
  constexpr std::size_t gone_max = 4096;
  if (posters_.contains(number)) return;
  std::erase_if(posters_, [](const auto& poster) { return has_ended(*poster.second.pidfd); });
  if (posters_.size() >= fabric_.guests.size() + gone_max && haunted_.empty())
    std::erase_if(posters_, [this](const auto& poster) {
      return std::none_of(fabric_.guests.begin(), fabric_.guests.end(), [&](const auto& known) { return direct::poster_number(known.first) == poster.first; });
    });
  const auto same = std::find_if(posters_.begin(), posters_.end(), [&](const auto& poster) { return poster.second.pid == guest.credentials.pid; });
  posters_.emplace(number, same != posters_.end() ? same->second : Poster{guest.credentials.pid, guest.pidfd});
}

// Of a guest that goes: the inboxes that it may be inside of are to be had once its process has ended. Until then it is known, too.
void DirectDesk::forget_poster(const Guest& guest) {
  const std::uint32_t number = direct::poster_number(guest.id.value);
  for (const auto& [key, link] : links_)
    if (link->datagrams && !link->owned[1] && direct::poster_of(link->claims[1].word()) == number) haunted_.insert(link.get());
}

bool DirectDesk::settle_inbox(DirectLink& link) {
  if (!own(link, 1) && !take_from_ended(link, 1)) return false;
  haunted_.erase(&link);
  give_inbox(link);
  return true;
}

}  // namespace vrdma::svc
