// The events that wait in a channel: in the order in which they were raised, and those of each identifier or membership together, so that
// whoever goes or moves takes its own along without a look at anybody else's. Used by the shard's thread only.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "vrdma/cm.hpp"

namespace vrdma::svc {

class CmEventQueue {
 public:
  struct Waiting {
    std::uint32_t counted_at;  // identifier, or membership, whose event it is
    control::CmEvent event;
  };

  // written: of the events in all queues of a guest, how many it has written for itself.
  explicit CmEventQueue(std::uint32_t& written) : written_(&written) {}

  bool empty() const { return waiting_.empty(); }
  const std::map<std::uint64_t, Waiting>& waiting() const { return waiting_; }
  // Of one, in order.
  template <class F>
  void each_of(std::uint32_t one, F&& does) const {
    for (auto at = first_of(one); is_of(at, one); ++at) does(waiting_.at(at->second));
  }

  // number: greater than those of all queues before.
  void push(std::uint64_t number, const Waiting& waiting) {
    *written_ += is_written(waiting);
    of_.emplace(waiting.counted_at, number);
    waiting_.emplace(number, waiting);
  }
  // There is one.
  Waiting pop() {
    const auto [number, first] = *waiting_.begin();
    of_.erase({first.counted_at, number});
    take_out(waiting_.begin());
    return first;
  }
  void drop(std::uint32_t one) {
    for (auto at = first_of(one); is_of(at, one); at = of_.erase(at)) take_out(waiting_.find(at->second));
  }
  // To another queue of the same guest, where they are among those that are older and younger.
  void move(std::uint32_t one, CmEventQueue& to) {
    for (auto at = first_of(one); is_of(at, one);) {
      to.waiting_.insert(waiting_.extract(at->second));
      to.of_.insert(of_.extract(at++));
    }
  }
  void clear() {
    while (!empty()) take_out(waiting_.begin());
    of_.clear();
  }

 private:
  using Of = std::set<std::pair<std::uint32_t, std::uint64_t>>;
  Of::const_iterator first_of(std::uint32_t one) const { return of_.lower_bound({one, 0}); }
  bool is_of(Of::const_iterator at, std::uint32_t one) const { return at != of_.end() && at->first == one; }
  static bool is_written(const Waiting& waiting) { return waiting.event.event == control::cm_user || waiting.event.event == control::cm_internal; }
  void take_out(std::map<std::uint64_t, Waiting>::const_iterator at) {
    *written_ -= is_written(at->second);
    waiting_.erase(at);
  }

  std::uint32_t* written_;
  std::map<std::uint64_t, Waiting> waiting_;  // by number
  Of of_;                                     // whose the numbers are
};

}  // namespace vrdma::svc
