#include "guest_lib/lanes.hpp"

#include <algorithm>

#include "vmci_channel/arch.hpp"

namespace vrdma::guest {

namespace {

constexpr std::uint32_t visits_before_promotion = 16;

// The lane comes to hot[index]; the one that was there goes back to the bitmap.
void promote(Cq& cq, Lane& lane, std::uint32_t index) {
  Lane* replaced = cq.hot[index];
  cq.hot[index] = &lane;
  lane.hot_index = index;
  lane.visits = 0;
  std::ranges::fill(cq.hot_hits, 0);
  std::atomic_ref(cq.shared->hot[index]).store(lane.number, std::memory_order_relaxed);
  // H1: pairs with the service's fence between a completion and its look at hot[]: what it wrote while it still saw the
  // replaced lane there has no bit, but is visible from here on.
  vmci::store_load_fence();
  if (replaced != nullptr) {
    replaced->hot_index = Lane::not_hot;
    if (cq.in_order) line_up(cq, *replaced);
  }
}

void consider_promotion(Cq& cq, Lane& lane) {
  std::uint32_t coldest = 0;
  for (std::uint32_t i = 0; i < control::hot_lanes; ++i) {
    if (cq.hot[i] == nullptr) return promote(cq, lane, i);
    if (cq.hot_hits[i] < cq.hot_hits[coldest]) coldest = i;
  }
  if (++lane.visits < visits_before_promotion) return;
  if (cq.hot_hits[coldest] < visits_before_promotion / 2) return promote(cq, lane, coldest);
  lane.visits = 0;
  for (auto& hits : cq.hot_hits) hits /= 2;
}

}  // namespace

void note_visit(Cq& cq, Lane& lane) {
  if (lane.hot_index != Lane::not_hot) ++cq.hot_hits[lane.hot_index];
  else consider_promotion(cq, lane);
}

// --- lanes come and go ------------------------------------------------------------------------------------------

void Cq::make_room_for(const Lane& lane) {
  std::lock_guard guard(lock);
  if (lanes.size() <= lane.number) lanes.resize(lane.number + 1);
  heads.reserve(lanes.size());
}

void Cq::add_lane(Lane& lane) {
  std::lock_guard guard(lock);
  latest = 0;
  if (!in_order && std::ranges::any_of(lanes, [&](const Lane* other) { return other != nullptr && other->qp != lane.qp; })) begin_order(*this);
  lanes[lane.number] = &lane;
  lane.timed = timed ? this : nullptr;
  for (std::uint32_t i = 0; i < control::hot_lanes; ++i) {
    if (hot[i] != nullptr) continue;
    promote(*this, lane, i);
    break;
  }
  // The lanes of the only queue pair are in the first two places: poll_one_queue_pair looks there.
  if (in_order) line_up(*this, lane);  // in case it completed something before it got here
}

void Cq::ask_for_stamps() {
  if (std::atomic_ref(shared->wants_stamps).load(std::memory_order_relaxed) != 0) return;
  emptied.store(stamp_for(*this), std::memory_order_relaxed);  // what is there has none
  std::atomic_ref(shared->wants_stamps).store(1, std::memory_order_relaxed);
}

void Cq::drop_entries(Lane& lane) {
  std::lock_guard guard(lock);
  if (lane.lined_up) step_out(*this, lane);
  lane.unstamped = 0;
  std::uint32_t dropped = 0;
  for (; lane.reader.next() != nullptr && dropped < lane.reader.entry_count(); ++dropped) lane.reader.pop();
  if (dropped != 0) {
    if (lane.receive != nullptr && lane.qp->base().srq != nullptr) lane.receive->completed(dropped);
    std::atomic_ref(lane.header->creator.consumed).store(lane.reader.position(), std::memory_order_release);
    consumed += dropped;
    std::atomic_ref(shared->consumed).store(consumed, std::memory_order_release);
  }
}

void Cq::remove_lane(Lane& lane) {
  drop_entries(lane);
  std::lock_guard guard(lock);
  if (lane.lined_up) step_out(*this, lane);
  lanes[lane.number] = nullptr;
  if (lane.hot_index != Lane::not_hot) {
    hot[lane.hot_index] = nullptr;
    std::atomic_ref(shared->hot[lane.hot_index]).store(control::no_lane, std::memory_order_relaxed);
    lane.hot_index = Lane::not_hot;
  }
}

}  // namespace vrdma::guest
