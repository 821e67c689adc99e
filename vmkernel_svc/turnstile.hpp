// How the shards of a service work side by side: each in turns, during which it touches what is its own; and what is everybody's is
// changed by one of them alone, while no other is in a turn.
//
//   shard 0   ├─ turn ─┤├─ turn ─┤    waits      ├─ turn ─┤
//   shard 1     ├─ turn ─┤      ├─── alone ────┤├─ turn ─┤
//   shard 2        asleep, in no turn
//
// A big-reader lock: a turn takes a mutex that nobody else wants, unless somebody is or will be alone; who wants to be alone takes all.
// With one shard there is nothing to take.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace vrdma::svc {

class Turnstile {
 public:
  explicit Turnstile(std::size_t shard_count) : turns_(shard_count > 1 ? shard_count : 0) {}

  // By the thread of that shard, around its turns.
  void enter(std::size_t shard) {
    if (turns_.empty()) return;
    // Mutexes are not fair: without this, a shard that is always busy would keep the others out for as long as it is. Most are alone for
    // some microseconds; one that waits for its processor meanwhile is not helped by who looks again and again.
    for (int looks = 0; wanted_.load(std::memory_order_relaxed) != 0; ++looks) {
      if (looks < looks_before_sleep) {
        ::sched_yield();
      } else {  // once: whoever asks for it again and again has to wait for this turn
        const std::lock_guard until_it_is_through(order_);
        break;
      }
    }
    turns_[shard].mutex.lock();
  }
  void leave(std::size_t shard) {
    if (!turns_.empty()) turns_[shard].mutex.unlock();
  }

  // By any thread that is in no turn: `what` while nobody is, one such thread after the other.
  template <class F>
  void alone(F&& what) {
    if (turns_.empty()) return what();
    struct All {
      Turnstile& turnstile;
      explicit All(Turnstile& of) : turnstile(of) {
        turnstile.wanted_.fetch_add(1, std::memory_order_relaxed);
        turnstile.order_.lock();
        for (Turn& turn : turnstile.turns_) turn.mutex.lock();
      }
      ~All() {
        for (Turn& turn : turnstile.turns_) turn.mutex.unlock();
        turnstile.order_.unlock();
        turnstile.wanted_.fetch_sub(1, std::memory_order_relaxed);
      }
    } const all(*this);
    what();
  }

 private:
  static constexpr int looks_before_sleep = 8;
  struct alignas(64) Turn {
    std::mutex mutex;
  };
  std::vector<Turn> turns_;
  std::mutex order_;                      // of those who want to be alone
  std::atomic<std::uint32_t> wanted_{0};  // how many are, or want to be: a hint, the mutexes decide
};

}  // namespace vrdma::svc
