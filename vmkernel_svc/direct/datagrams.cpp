// UD queue pairs in direct mode. Each has a link of its own: its send queue, which is handed out to its guest, and its inbox, which is
// handed out to whoever may deliver there. The service takes an inbox for as long as it delivers there itself.
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
    link->to_be_given = !give_inbox(*link) && qp != nullptr && (qp->core.serves != nullptr || qp->core.inbound.active);
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

// Of a guest that goes: the inboxes that it may be inside of are to be had once its process has ended. Until then it is known, too.
void DirectDesk::forget_poster(const Guest& guest) {
  const std::uint32_t number = direct::poster_number(guest.id.value);
  for (const auto& [key, link] : links_)
    if (link->datagrams && !link->owned[1] && link->claims[1].poster() == number) haunted_.insert(link.get());
}

bool DirectDesk::settle_inbox(DirectLink& link) {
  if (!own(link, 1)) {
    if (!poster_ended(link, 1)) return false;
    recover(link, 1);
  }
  haunted_.erase(&link);
  give_inbox(link);
  return true;
}

}  // namespace vrdma::svc
