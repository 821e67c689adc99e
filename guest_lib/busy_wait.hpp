// A thread that waits for an event looks for a while before it sleeps, where events have been coming fast: to be woken up takes 5 to 40 µs,
// of which the waker pays a part. As KVM's halt polling and the kernel's net.core.busy_read do.
//
//   waits have been short        look for twice as long as they took, 10 to 100 µs, then sleep
//   the last one was long        sleep at once, until one is short again
//   looking was in vain          sleep at once, this time and the next; more times each time
//   others want the processor    likewise
//
// So a program without events uses no processor, and one with events at most what being woken up for each would have cost again.
// Any thread. Several may wait at once, and share what is learnt.
#pragma once

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "guest_lib/interruption.hpp"
#include "vmci_channel/arch.hpp"

namespace vrdma::guest {

class BusyWait {
 public:
  // As sleep_as_read(): a signal that comes while it looks is handled in the sleep after it.
  int wait(pollfd& one) {
    const std::uint64_t begun = vmci::cycles();
    int ready;
    if (worth_a_look()) {
      const Deafness deaf;
      ready = look(one, begun);
      if (ready > 0) return ready;
      ready = sleep_as_read(one, deaf);
    } else {
      ready = sleep_as_read(one);
    }
    const std::uint64_t waited = vmci::cycles() - begun;
    if (waited <= short_us * us_) learn(waited);
    else budget_.store(0, std::memory_order_relaxed);
    return ready;
  }

 private:
  static constexpr std::uint64_t short_us = 200;  // two that sleep wake each other within 60 to 100
  static constexpr std::uint64_t budget_us_min = 10, budget_us_max = 100;
  static constexpr std::uint64_t others_us = 10;  // a yield that took so long let others run than who answers
  static constexpr std::uint32_t setback_max = 1024;

  bool worth_a_look() {
    if (budget_.load(std::memory_order_relaxed) == 0) return false;
    const std::uint32_t skip = skip_.load(std::memory_order_relaxed);
    if (skip != 0) skip_.store(skip - 1, std::memory_order_relaxed);
    return skip == 0;
  }
  int look(pollfd& one, std::uint64_t begun) {
    const std::uint64_t budget = budget_.load(std::memory_order_relaxed);
    for (std::uint64_t before = begun;;) {
      timespec at_once{};
      const auto ready = static_cast<int>(::syscall(SYS_ppoll, &one, 1, &at_once, nullptr, 0));  // no cancellation point
      const std::uint64_t now = vmci::cycles();
      const bool wanted = now - before >= others_us * us_;
      const bool over = wanted || now - begun >= budget;
      if (ready > 0) learn(now - begun);
      if (ready > 0 && !wanted) setback_.store(1, std::memory_order_relaxed);
      else if (over) sleep_at_once();
      if (ready > 0 || over) return ready;
      before = now;
      ::sched_yield();
    }
  }
  void sleep_at_once() {
    const std::uint32_t setback = setback_.load(std::memory_order_relaxed);
    skip_.store(setback, std::memory_order_relaxed);
    setback_.store(std::min(setback * 2, setback_max), std::memory_order_relaxed);
  }
  void learn(std::uint64_t waited) {
    const std::uint64_t before = budget_.load(std::memory_order_relaxed);
    budget_.store(std::clamp(std::max(2 * waited, before - before / 8), budget_us_min * us_, budget_us_max * us_), std::memory_order_relaxed);
  }

  // Cycles. All are hints, which pair with nothing.
  std::uint64_t us_ = vmci::cycles_per_us();
  std::atomic<std::uint64_t> budget_{0};  // 0: sleep at once
  std::atomic<std::uint32_t> skip_{0};    // so many waits
  std::atomic<std::uint32_t> setback_{1};
};

}  // namespace vrdma::guest
