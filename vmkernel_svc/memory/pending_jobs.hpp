// Copies and atomics that are under way in guests' processes: which queue pair waits for each. Any shard; a guest may have moved to
// another one since it asked, and a job that is not here was given up.
#pragma once

#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <mutex>

namespace vrdma::svc {

template <class Waiter>
class PendingJobs {
 public:
  std::uint64_t add(Waiter& waiter) {  // its number, never 0
    const std::lock_guard lock(mutex_);
    waiters_.emplace(++last_, &waiter);
    return last_;
  }
  Waiter* find(std::uint64_t job) const {  // nullptr: not here
    const std::lock_guard lock(mutex_);
    const auto found = waiters_.find(job);
    return found != waiters_.end() ? found->second : nullptr;
  }
  void remove(std::uint64_t job) {
    const std::lock_guard lock(mutex_);
    waiters_.erase(job);
  }
  template <class Visit>
  void for_each(Visit&& visit) const {
    const std::lock_guard lock(mutex_);
    for (const auto& [job, waiter] : waiters_) visit(*waiter);
  }
  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return waiters_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::uint64_t last_ = 0;
  boost::unordered_flat_map<std::uint64_t, Waiter*> waiters_;
};

}  // namespace vrdma::svc
