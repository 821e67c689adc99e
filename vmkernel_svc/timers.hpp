// When queue pairs want to be looked at again, of one shard. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace vrdma::svc {

class Timers {
 public:
  struct Timer {
    std::uint64_t at_ns;
    std::uint32_t qpn;
    bool operator>(const Timer& other) const { return at_ns > other.at_ns; }
  };

  bool empty() const { return timers_.empty(); }
  std::uint64_t first_ns() const { return timers_.empty() ? 0 : timers_.top().at_ns; }  // 0: none

  // A queue pair's former timer stays until its time comes, which may be hours away: those that do not hold any more (holds(timer)) are sorted
  // out before they pile up beside `queue_pairs`.
  template <class Holds>
  void add(Timer timer, std::size_t queue_pairs, Holds&& holds) {
    timers_.push(timer);
    if (timers_.size() <= 1024 + 4 * queue_pairs) return;
    std::vector<Timer> valid;
    for (; !timers_.empty(); timers_.pop())
      if (holds(timers_.top())) valid.push_back(timers_.top());
    timers_ = decltype(timers_)(std::greater<>{}, std::move(valid));
  }

  // The next whose time has come, taken out.
  bool take_due(std::uint64_t now_ns, Timer& due) {
    if (timers_.empty() || timers_.top().at_ns > now_ns) return false;
    due = timers_.top();
    timers_.pop();
    return true;
  }

 private:
  std::priority_queue<Timer, std::vector<Timer>, std::greater<>> timers_;
};

}  // namespace vrdma::svc
