#include "guest_lib/memory/page_counts.hpp"

#include <iterator>

namespace vrdma::memory {

void PageCounts::split(std::uint64_t address) {
  auto run = runs_.upper_bound(address);
  if (run == runs_.begin()) return;
  --run;
  if (run->first == address || run->second.end <= address) return;
  runs_.emplace_hint(std::next(run), address, run->second);
  run->second.end = address;
}

PageCounts::Runs::iterator PageCounts::drop(Runs::iterator run) {
  bytes_ -= run->second.end - run->first;
  return runs_.erase(run);
}

void PageCounts::fill_gaps(Range range) {
  std::uint64_t at = range.begin;
  for (auto run = runs_.lower_bound(range.begin); at < range.end; ++run) {
    const std::uint64_t gap_end = run == runs_.end() || run->first > range.end ? range.end : run->first;
    if (at < gap_end) {
      run = runs_.emplace_hint(run, at, Run{gap_end, 0});
      bytes_ += gap_end - at;
    }
    at = run->second.end;
  }
}

void PageCounts::join(Range range) {
  auto run = runs_.lower_bound(range.begin);
  if (run != runs_.begin()) --run;
  while (run != runs_.end() && run->first <= range.end) {
    if (run->second.count == 0) {
      run = drop(run);
      continue;
    }
    const auto next = std::next(run);
    if (next != runs_.end() && next->first == run->second.end && next->second.count == run->second.count) {
      run->second.end = next->second.end;
      runs_.erase(next);
      continue;
    }
    run = next;
  }
}

void PageCounts::raise(Range range) {
  if (range.empty()) return;
  try {
    split(range.begin);
    split(range.end);
    fill_gaps(range);
  } catch (...) {
    join(range);
    throw;
  }
  for (auto run = runs_.lower_bound(range.begin); run != runs_.end() && run->first < range.end; ++run)
    ++run->second.count;
  join(range);
}

void PageCounts::insert(Range range) {
  if (range.empty()) return;
  try {
    split(range.begin);
    split(range.end);
    fill_gaps(range);
  } catch (...) {
    join(range);
    throw;
  }
  for (auto run = runs_.lower_bound(range.begin); run != runs_.end() && run->first < range.end; ++run)
    run->second.count = 1;
  join(range);
}

void PageCounts::erase(Range range) {
  if (range.empty()) return;
  split(range.begin);
  split(range.end);
  for (auto run = runs_.lower_bound(range.begin); run != runs_.end() && run->first < range.end;) run = drop(run);
}

Range PageCounts::first_overlap(Range range) const {
  auto run = runs_.upper_bound(range.begin);
  if (run != runs_.begin() && std::prev(run)->second.end > range.begin) --run;
  if (run == runs_.end() || run->first >= range.end) return {};
  return Range{run->first, run->second.end}.clipped_to(range);
}

}  // namespace vrdma::memory
