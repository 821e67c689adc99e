// First in, first out, with room that is made beforehand: who takes records from where they come from must not find then that there is no memory
// for them. Room that was made stays. One thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <vector>

namespace vrdma::guest {

template <class Record>
class KeptRecords {
 public:
  bool empty() const { return count_ == 0; }
  std::size_t count() const { return count_; }

  // For so many more than are there. False: there is no memory.
  bool make_room(std::size_t more) noexcept {
    if (count_ + more <= places_.size()) return true;
    try {
      std::vector<Record> bigger(std::max(2 * places_.size(), count_ + more));
      for (std::size_t i = 0; i < count_; ++i) bigger[i] = at(i);
      places_.swap(bigger);
      first_ = 0;
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }
  // There is room.
  void put(const Record& record) { at(count_++) = record; }
  // There is one.
  Record take() {
    const Record record = at(0);
    first_ = (first_ + 1) % places_.size();
    --count_;
    return record;
  }
  template <class Matches>
  void erase_if(Matches&& matches) {
    std::size_t left = 0;
    for (std::size_t i = 0; i < count_; ++i)
      if (!matches(at(i))) at(left++) = at(i);
    count_ = left;
  }

 private:
  Record& at(std::size_t i) { return places_[(first_ + i) % places_.size()]; }

  std::vector<Record> places_;
  std::size_t first_ = 0, count_ = 0;
};

}  // namespace vrdma::guest
