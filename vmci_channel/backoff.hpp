// The timed-yield adaptive poll: how every thread here waits for a cache line to change (DESIGN.md D4).
//
// Spin for a budget, then time one sched_yield. A yield that returned at once found nobody else to run: spinning is
// cheap, double the budget. One that took a little let a cooperating poller run: do not spin at all. One that took long
// let a CPU hog run for its whole time slice: spin long before giving the processor away again.
// One object per waiting thread; never sleeps: who wants to, asks tired().
#pragma once

#include <sched.h>

#include <cstdint>

#include "vmci_channel/arch.hpp"

namespace vmci {

class Backoff {
 public:
  // There was something to do.
  void reset() {
    waiting_ = false;
    fruitless_yields_ = 0;
  }

  // There was nothing to do: returns at once (the caller polls again) or after one sched_yield.
  void idle() {
    const std::uint64_t now = cycles();
    if (!waiting_) {
      waiting_ = true;
      since_ = now;
      if (budget_cycles_ != 0) return;
    }
    if (now - since_ < budget_cycles_) {
      cpu_relax();
      return;
    }
    yield(now);
  }

  // Yielding has not helped for a while: time to sleep, for those who may.
  bool tired() const { return fruitless_yields_ > tired_after_yields; }

 private:
  static constexpr std::uint32_t tired_after_yields = 50;

  void yield(std::uint64_t before) {
    sched_yield();
    const std::uint64_t after = cycles();
    const std::uint64_t us = cycles_per_us_;
    const std::uint64_t took = after - before;
    if (took < us * 95 / 100) {  // nobody else ran
      budget_cycles_ = budget_cycles_ == 0 ? us / 2 : (budget_cycles_ * 2 < 20 * us ? budget_cycles_ * 2 : 20 * us);
    } else if (took < 200 * us) {  // a cooperating poller ran
      budget_cycles_ = 0;
    } else {
      // A hog ran: keep the processor for longer before giving it away again. Not for so long that pollers who all think so
      // take one another for hogs: the spins of two others together must stay below the 200 µs above.
      budget_cycles_ = 50 * us;
    }
    since_ = after;
    ++fruitless_yields_;
  }

  std::uint64_t cycles_per_us_ = vmci::cycles_per_us();
  std::uint64_t budget_cycles_ = 0;
  std::uint64_t since_ = 0;
  std::uint32_t fruitless_yields_ = 0;
  bool waiting_ = false;
};

}  // namespace vmci
