// The lock of a data path between threads of one process: a few instructions when free; a waiter spins briefly, then gives
// the processor away, because with fewer cores than threads the holder needs it.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "guest_lib/single_thread.hpp"
#include "vmci_channel/arch.hpp"

namespace vrdma::guest {

class SpinLock {
 public:
  void lock() {
    if (single_threaded()) {  // nobody to keep out; a thread to come sees the store by way of its creation
      locked_.store(true, std::memory_order_relaxed);
      return;
    }
    if (!locked_.exchange(true, std::memory_order_acquire)) return;
    wait();
  }
  bool try_lock() { return !locked_.exchange(true, std::memory_order_acquire); }
  void unlock() { locked_.store(false, std::memory_order_release); }

 private:
  [[gnu::noinline]] void wait() {
    constexpr int spins_before_yield = 64;
    for (int spins = 0;; ++spins) {
      if (!locked_.load(std::memory_order_relaxed) && !locked_.exchange(true, std::memory_order_acquire)) return;
      if (spins < spins_before_yield) {
        vmci::cpu_relax();
      } else {
        sched_yield();
      }
    }
  }

  std::atomic<bool> locked_{false};
};

}  // namespace vrdma::guest
