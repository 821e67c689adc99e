// How many users each page has, kept as maximal runs of equal counts. Page-aligned ranges only.
//
// Not thread-safe. Takes memory only from the resource it is given. Functions that may need memory throw std::bad_alloc
// and then have changed nothing that can be seen.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>

#include "guest_lib/memory/vma.hpp"

namespace vrdma::memory {

class PageCounts {
 public:
  explicit PageCounts(std::pmr::memory_resource* resource) : runs_(resource) {}

  void raise(Range range);
  // One user fewer on each page of `range` that has any; calls fell_to_zero(Range) for each maximal run that has none
  // now.
  template <class F>
  void lower(Range range, F&& fell_to_zero);

  // As a set: the count becomes 1 or 0, whatever it was.
  void insert(Range range);
  void erase(Range range);

  bool any(Range range) const { return !first_overlap(range).empty(); }
  Range first_overlap(
      Range range) const;  // the lowest maximal part of `range` with one count; empty where none has users
  std::uint64_t bytes() const { return bytes_; }
  bool empty() const { return runs_.empty(); }
  Range bounds() const { return empty() ? Range{} : Range{runs_.begin()->first, runs_.rbegin()->second.end}; }

 private:
  struct Run {
    std::uint64_t end;
    std::uint32_t count;
  };
  using Runs = std::pmr::map<std::uint64_t, Run>;

  void split(std::uint64_t address);
  void fill_gaps(Range range);
  void join(
      Range range);  // drops runs without users and merges equal neighbours, from just before to just after `range`
  Runs::iterator drop(Runs::iterator run);

  Runs runs_;  // by begin
  std::uint64_t bytes_ = 0;
};

// The parts of `range` that have users in both.
template <class F>
void for_common(const PageCounts& a, const PageCounts& b, Range range, F&& visit) {
  for (Range rest = range;;) {
    const Range one = a.first_overlap(rest);
    if (one.empty()) return;
    for (Range inner = one;;) {
      const Range both = b.first_overlap(inner);
      if (both.empty()) break;
      visit(both);
      inner.begin = both.end;
    }
    rest.begin = one.end;
  }
}

template <class F>
void PageCounts::lower(Range range, F&& fell_to_zero) {
  split(range.begin);
  split(range.end);
  Range zero;
  for (auto run = runs_.lower_bound(range.begin); run != runs_.end() && run->first < range.end; ++run) {
    if (--run->second.count != 0) continue;
    if (zero.end != run->first || zero.empty()) {
      if (!zero.empty()) fell_to_zero(zero);
      zero.begin = run->first;
    }
    zero.end = run->second.end;
  }
  join(range);
  if (!zero.empty()) fell_to_zero(zero);
}

}  // namespace vrdma::memory
