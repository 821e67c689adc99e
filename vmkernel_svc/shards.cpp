#include "vmkernel_svc/shards.hpp"

#include <algorithm>

#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

void Shards::place(Guest& guest) {
  const auto with_fewest = std::min_element(all_.begin(), all_.end(), [](const Shard* a, const Shard* b) { return a->guest_count() < b->guest_count(); });
  Shard& shard = guest.machine ? first() : **with_fewest;
  groups_.push_back(std::make_unique<GuestGroup>(GuestGroup{&shard, {&guest}, guest.machine != nullptr}));
  guest.group = groups_.back().get();
  // Lines may be shared, at the price of a needless ring now and then. A machine's copy of the page has the first one alone.
  constexpr std::uint32_t lines = std::size(control::ServicePage{}.shards);
  guest.line = count_ == 1 || guest.machine ? 0 : 1 + lines_given_++ % (lines - 1);
}

Shard* Shards::of(const engine::Qp<MediatedPorts>& qp) const {
  return qp.port.owner != nullptr ? qp.port.owner->guest->group->shard : all_.front();
}

void Shards::remove(Guest& guest) {
  GuestGroup* const group = std::exchange(guest.group, nullptr);
  std::erase(group->guests, &guest);
  if (group->guests.empty()) std::erase_if(groups_, [group](const auto& known) { return known.get() == group; });
}

void Shards::move(GuestGroup& group, Shard& to) {
  group.shard->give_up(group);
  group.shard = &to;
  to.take_over(group);
}

void Shards::merge(GuestGroup& from, GuestGroup& into) {
  if (from.shard != into.shard) move(from, *into.shard);
  for (Guest* const guest : from.guests) guest->group = &into;
  into.guests.insert(into.guests.end(), from.guests.begin(), from.guests.end());
  into.pinned |= from.pinned;
  std::erase_if(groups_, [&from](const auto& known) { return known.get() == &from; });
}

void Shards::bring_together(Guest& a, Guest& b) {
  if (a.group == b.group) return;
  // Few move rather than many, and of equals those on the shard that has more.
  const auto stays = [](const GuestGroup& group) { return std::tuple(group.pinned, group.guests.size(), ~group.shard->guest_count()); };
  const bool a_moves = stays(*a.group) < stays(*b.group);
  merge(a_moves ? *a.group : *b.group, a_moves ? *b.group : *a.group);
}

void Shards::pin(Guest& guest) {
  GuestGroup& group = *guest.group;
  if (group.pinned) return;
  group.pinned = true;
  if (group.shard != &first()) move(group, first());
}

void Shards::finished(ProcessJob* job) { all_[job->shard]->finished(job); }

}  // namespace vrdma::svc
