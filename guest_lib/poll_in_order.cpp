// Completions of several queue pairs on one completion queue, in the order in which they came about, as in the one queue of an adapter: what somebody
// did because of a completion, or because of the message that it tells of, is not polled before it.
//
// Entries carry the time of their writing (vmci_channel/stamp.hpp), and each lane is in order by itself. Of that they have 40 bits, and the rest by the
// clock, which each poll that finds something reads once: nothing that is there can have been written later. So an entry that has lain longer than
// stamps tell apart may come before older ones, but never waits behind all that is still to come. What is left is to take the oldest head,
// and to know that no older one is coming: a lane that was found empty may have got its entry since, and another lane, looked at later, a younger
// one because of that. So the lanes that were looked at before that one are looked at again. What is found then may have older ones once more, but
// whatever is not younger than the youngest of the first look has none: they were written, and announced, before that one was, hence
// before the second look.
#include <algorithm>

#include "guest_lib/lanes.hpp"
#include "vmci_channel/ready_bitmap.hpp"
#include "vmci_channel/stamp.hpp"

namespace vrdma::guest {

namespace {

constexpr std::uint32_t look_ahead = 16;  // entries of a lane that can be taken without looking at the others again

bool comes_later(const Lane* a, const Lane* b) { return a->place > b->place; }

// Later than all that has no stamp because it was written before there were several queue pairs. An entry of who does not know stamps, an older
// library or service, comes when it is found.
std::uint64_t place_of(Cq& cq, const Lane& lane, const Cqe& entry) {
  constexpr std::uint64_t before_all = std::uint64_t{1} << 61, first = std::uint64_t{1} << 62;
  std::uint64_t place = before_all;
  if (lane.unstamped == 0) [[likely]] {
    if (cq.latest == 0) cq.latest = first + stamp_for(cq) + stamps_ahead_max;
    place = has_stamp(cq, entry) ? time_of_stamp(stamp_of(entry, lane.send != nullptr), cq.latest) : cq.latest - stamps_ahead_max;
  }
  cq.newest = std::max(cq.newest, place);
  return place;
}

void look_ahead_in(Cq& cq, const Lane& lane) {
  if (lane.unstamped != 0) return;
  vmci::LaneReader ahead = lane.reader;
  ahead.pop();
  const Cqe* last = nullptr;
  for (std::uint32_t i = 1; i < look_ahead; ++i) {
    const Cqe* const entry = ahead.next();
    if (entry == nullptr) break;
    last = entry;
    ahead.pop();
  }
  if (last != nullptr) (void)place_of(cq, lane, *last);
}

// Whether it holds something that was not in the row.
bool joins(Cq& cq, Lane& lane) {
  if (lane.lined_up) return false;
  line_up(cq, lane);
  if (!lane.lined_up) return false;
  look_ahead_in(cq, lane);
  return true;
}

bool look_at_hot(Cq& cq, std::uint32_t index) { return cq.hot[index] != nullptr && joins(cq, *cq.hot[index]); }

bool look_at_announced(Cq& cq) {
  vmci::ReadyBitmap ready(&cq.shared->ready);
  if (!ready.any()) return false;
  bool found = false;
  ready.take([&](std::uint32_t number) { found |= number < cq.lanes.size() && cq.lanes[number] != nullptr && joins(cq, *cq.lanes[number]); });
  return found;
}

// False: there is nothing.
bool settle(Cq& cq) {
  if (!cq.heads.empty()) look_ahead_in(cq, *cq.heads.front());
  else cq.newest = 0;  // the clock may have been set back, as a machine was moved
  std::uint32_t before_last = 0;  // hot lanes that were looked at before the last that held something
  for (std::uint32_t i = 0; i < control::hot_lanes; ++i)
    if (look_at_hot(cq, i)) before_last = i;
  const bool announced = look_at_announced(cq);
  if (announced) before_last = control::hot_lanes;
  if (cq.heads.empty()) return false;
  const std::uint64_t newest = cq.newest;
  for (std::uint32_t i = 0; i < before_last; ++i) look_at_hot(cq, i);
  if (announced) look_at_announced(cq);
  cq.settled = newest;
  return true;
}

// The first of the row, whose head was taken, goes to where its next entry belongs.
void line_up_again(Cq& cq, Lane& lane) {
  if (lane.unstamped != 0) --lane.unstamped;
  const Cqe* const next = lane.reader.next();
  if (next != nullptr) {
    lane.place = place_of(cq, lane, *next);
    if (cq.heads.size() == 1) return;
  }
  std::ranges::pop_heap(cq.heads, comes_later);
  if (next != nullptr) {
    std::ranges::push_heap(cq.heads, comes_later);
  } else {
    cq.heads.pop_back();
    lane.lined_up = false;
  }
}

}  // namespace

void line_up(Cq& cq, Lane& lane) {
  if (lane.lined_up) return;
  const Cqe* const entry = lane.reader.next();
  if (entry == nullptr) return;
  lane.place = place_of(cq, lane, *entry);
  lane.lined_up = true;
  cq.heads.push_back(&lane);  // room for all lanes is there
  std::ranges::push_heap(cq.heads, comes_later);
}

void begin_order(Cq& cq) {
  cq.ask_for_stamps();
  cq.in_order = true;
  for (Lane* const lane : cq.lanes) {
    if (lane == nullptr) continue;
    vmci::LaneReader written = lane->reader;
    for (const Cqe* entry = nullptr; lane->unstamped < written.entry_count() && (entry = written.next()) != nullptr && !has_stamp(cq, *entry); written.pop())
      ++lane->unstamped;
    line_up(cq, *lane);
  }
}

void step_out(Cq& cq, Lane& lane) {
  std::erase(cq.heads, &lane);
  std::ranges::make_heap(cq.heads, comes_later);
  lane.lined_up = false;
}

int poll_in_order(Cq& cq, int room, ibv_wc* wc) {
  int got = 0;
  cq.latest = 0;
  while (got < room) {
    if ((cq.heads.empty() || cq.heads.front()->place > cq.settled) && !settle(cq)) break;
    Lane& lane = *cq.heads.front();
    Taken taken;
    do {
      const Cqe* const entry = lane.reader.next();
      if (entry == nullptr) {  // somebody has taken its commit bit back, who may not
        step_out(cq, lane);
        break;
      }
      take(lane, *entry, wc[got++], taken);
      line_up_again(cq, lane);
    } while (got < room && lane.lined_up && cq.heads.front() == &lane && lane.place <= cq.settled);
    give_back(lane, taken);
    if (taken.entries == 0) break;
    note_visit(cq, lane);
  }
  return got;
}

bool holds_more_in_order(Cq& cq) {
  if (!cq.heads.empty()) return true;
  cq.latest = 0;  // the last poll may be long ago
  return settle(cq);
}

}  // namespace vrdma::guest
