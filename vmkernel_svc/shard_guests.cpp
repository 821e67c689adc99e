// Which guests a shard has, and how groups of them come and go (shards.hpp). For who is alone, but bring_together(), which a turn only notes.
#include <algorithm>
#include <cassert>

#include "vmkernel_svc/events.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

Status Shard::add(Guest& guest) {
  // A machine's doorbell is one for all its processes: its port has the first shard watch that.
  if (guest.doorbell_fd)
    if (const auto watched = watch(guest.doorbell_fd.get()); !watched) return watched;
  adopt(guest);
  return ok();
}

void Shard::adopt(Guest& guest) {
  guests_.push_back(&guest);
  guest.silent_looks = 0;
  std::swap(guests_.back(), guests_[attended_++]);
  ++on_line_[guest.line];
  wake();  // it does not say on the guest's line that it sleeps
}

void Shard::remove(Guest& guest) {
  const auto found = std::find(guests_.begin(), guests_.end(), &guest);
  if (found == guests_.end()) return;
  const auto index = static_cast<std::size_t>(found - guests_.begin());
  guests_.erase(found);
  if (index < attended_) --attended_;
  if (index < next_silent_) --next_silent_;
  --on_line_[guest.line];
  if (guest.doorbell_fd) unwatch(guest.doorbell_fd.get());
}

void Shard::give_up(const GuestGroup& group) {
  const auto is_of = [&group](const Qp* qp) { return qp == nullptr || (qp->port.owner != nullptr && qp->port.owner->guest->group == &group); };
  for (RunList* const list : running_)
    runnable_count_ -= list->queue_pairs.remove_if([&](Qp& qp) { return is_of(&qp) && std::exchange(qp.port.runnable, false); });
  for (Guest* const guest : group.guests) {
    // What another shard would go on with.
    for ([[maybe_unused]] auto& [handle, qp] : guest->qps)
      assert(is_of(qp->core.accepted_by) && is_of(qp->core.serves) && is_of(qp->core.port.waiting_at) && is_of(qp->core.port.waiting_sender));
    remove(*guest);
  }
}

void Shard::take_over(const GuestGroup& group) {
  for (Guest* const guest : group.guests) {
    if (guest->doorbell_fd && !watch(guest->doorbell_fd.get())) guest->broken = true;  // it could not wake anybody
    adopt(*guest);
    for (auto& [handle, qp] : guest->qps) {
      if (const std::uint64_t at_ns = std::exchange(qp->core.port.wake_ns, 0); at_ns != 0) take_timer(qp->core, at_ns);
      take_in(qp->core);  // whatever it was waiting for is found out anew
    }
  }
  ++fabric_.topology_generation;
}

void Shard::bring_together(Qp& sender, QueuePair& receiver) {
  const GuestId other = sender.port.owner != nullptr ? sender.port.owner->guest->id : GuestId{};
  apart_.emplace_back(receiver.guest->id, other);
}

void Shard::unite() {
  for (const auto& [id, other_id] : std::exchange(apart_, {})) {
    Guest* const guest = fabric_.guest(id);
    if (guest == nullptr) continue;
    if (other_id.value == 0) shards_.pin(*guest);  // who sends is of another host
    else if (Guest* const other = fabric_.guest(other_id)) shards_.bring_together(*guest, *other);
  }
}

void Shard::freeze(Guest& guest) {
  if (guest.frozen) return;
  for (auto& [handle, qp] : guest.qps) take_out(qp->core), ports_.leave_line(qp->core);
  for (const auto& [handle, slot] : guest.mrs) fabric_.regions.slot(slot).frozen = true;
  guest.frozen = true;
  ++fabric_.topology_generation;  // its peers look for it anew, and find nobody
}

void Shard::thaw(Guest& guest) {
  if (!guest.frozen) return;
  guest.frozen = false;
  for (const auto& [handle, slot] : guest.mrs) fabric_.regions.slot(slot).frozen = false;
  ++fabric_.topology_generation;
  for (auto& [handle, qp] : guest.qps) {
    qp->watch_receives(qp->core.state == engine::QpState::err || qp->core.port.waiting_sender != nullptr);
    make_runnable(qp->core);
  }
  interrupt_again(guest);
  guest.control_held = true;  // what it rang for meanwhile
  // Whoever waits for it looks now, not when its patience says so.
  for (auto& [qpn, qp] : fabric_.by_qpn)
    if (engine_.busy(qp->core)) make_runnable(qp->core);
}

std::uint64_t Shard::moved_bytes(const Tenant& tenant) const {
  const auto found = lists_.find(&tenant);
  return found != lists_.end() ? found->second.moved_bytes : 0;
}

}  // namespace vrdma::svc
