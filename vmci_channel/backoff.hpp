// The timed-yield adaptive poll: how every thread here waits for a cache line to change (DESIGN.md D4).
//
// Spin for a budget, then time one sched_yield. A yield that returned at once found nobody else to run: spinning is
// cheap, double the budget. One that took a little let a cooperating poller run: do not spin at all. One that took long
// let a CPU hog run until the next tick: for a while, take naps instead. A thread that comes from sleep preempts the hog at
// once, one that yields waits for it; a relay of three processes beside two hogs on two cores takes 100 µs instead of 2 ms.
// What is long depends on the machine: in an emulated one the turn of a cooperating poller takes as long as the tick of a hog elsewhere.
// One object per waiting thread. For longer sleep there is tired(): who has something to sleep on asks it.
#pragma once

#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/found_once.hpp"

namespace vmci {

class Backoff {
 public:
  // There was something to do.
  void reset() {
    waiting_ = false;
    fruitless_yields_ = 0;
  }

  // There was something to do, as there has been for a while: now and then lets a poller run that shares the processor, which
  // would else wait for the next tick. Not where a hog takes such an offer: then less often by as much as it took.
  void stay_busy() {
    reset();
    const std::uint64_t now = cycles();
    if (now < next_courtesy_) return;
    sched_yield();
    const std::uint64_t after = cycles();
    const std::uint64_t took = after - now;
    next_courtesy_ = after + (took < hog_cycles_ ? 20 * cycles_per_us_ : took * 8);
  }

  // There was nothing to do: returns at once (the caller polls again) or after one sched_yield or nap. Who expects an answer from
  // another processor spins for `patience_us` before the first of these.
  void idle(std::uint32_t patience_us = 0) {
    const std::uint64_t now = cycles();
    const std::uint64_t budget = fruitless_yields_ == 0 ? std::max(budget_cycles_, patience_us * cycles_per_us_) : budget_cycles_;
    if (!waiting_) {
      waiting_ = true;
      since_ = now;
      if (budget != 0) return;
    }
    if (now - since_ < budget) {
      cpu_relax();
      return;
    }
    give_way(now);
  }

  // Several yields in a row found nobody else to run on this processor.
  bool alone() const { return budget_cycles_ >= 16 * cycles_per_us_; }

  // Yielding has not helped for a while: time to sleep, for those who may. Soon, for who seems alone: a yield gives way within its
  // scheduling group only. Others, say a virtual machine, wait behind a poller for the end of its slice, and it waits for theirs;
  // who comes from sleep takes the processor at once.
  bool tired() const { return fruitless_yields_ > (alone() ? tired_after_yields_alone : tired_after_yields); }

 private:
  static constexpr std::uint32_t tired_after_yields = 50, tired_after_yields_alone = 1;

  // A yield that takes longer let somebody else run, who may be a CPU hog: that runs until a tick, of which there are at most 1000 in a
  // second. `calls`: of a system call that does nothing.
  static constexpr std::uint64_t other_ns = 950, other_calls = 3;
  static constexpr std::uint64_t hog_us = 200, hog_calls = 1500, hog_us_max = 1000;
  static constexpr std::uint32_t shortest_nap_run = 4, longest_nap_run = 1024;

  void give_way(std::uint64_t before) {
    ++fruitless_yields_;
    if (naps_left_ != 0)
      nap();
    else
      yield(before);
  }

  void yield(std::uint64_t before) {
    sched_yield();
    since_ = cycles();
    const std::uint64_t us = cycles_per_us_;
    const std::uint64_t took = since_ - before;
    if (took >= hog_cycles_) {
      naps_left_ = nap_run_;
      nap_ns_ = timers_are_exact() ? 50'000 : 1;
      nap_run_ = std::min(nap_run_ * 4, longest_nap_run);
      return;
    }
    nap_run_ = std::max(nap_run_ / 2, shortest_nap_run);
    if (took >= other_cycles_) {  // a cooperating poller ran
      budget_cycles_ = 0;
    } else {  // nobody else ran
      budget_cycles_ = budget_cycles_ == 0 ? us / 2 : std::min(budget_cycles_ * 2, 20 * us);
    }
  }

  // What a system call that does nothing takes here.
  static std::uint64_t measure_syscall() {
    std::uint64_t least = ~std::uint64_t{0};
    for (int i = 0; i < 16; ++i) {
      const std::uint64_t before = cycles();
      ::syscall(SYS_getppid);
      least = std::min(least, cycles() - before);
    }
    return least ? least : 1;  // 0: of a coarse counter
  }
  static std::uint64_t syscall_cycles() { return found_once<measure_syscall>(); }

  // About 60 µs, with the default timer slack from one nanosecond on. Where timers are exact that is over before anybody else has run: of threads of a
  // real-time class, and of those which asked for it (prctl(2)).
  static bool timers_are_exact() {
    constexpr long slack_ns = 20'000;
    const int policy = ::sched_getscheduler(0) & ~SCHED_RESET_ON_FORK;  // negative: not known
    return policy == SCHED_FIFO || policy == SCHED_RR || policy == SCHED_DEADLINE || ::prctl(PR_GET_TIMERSLACK) < slack_ns;
  }
  void nap() {
    --naps_left_;
    const timespec short_time{0, nap_ns_};
    ::syscall(SYS_nanosleep, &short_time, nullptr);  // not nanosleep(2): polling is no cancellation point
    since_ = cycles();
    budget_cycles_ = 3 * cycles_per_us_;
  }

  std::uint64_t cycles_per_us_ = vmci::cycles_per_us();
  std::uint64_t other_cycles_ = std::max(cycles_per_us_ * other_ns / 1000, other_calls * syscall_cycles());
  std::uint64_t hog_cycles_ = std::clamp(hog_calls * syscall_cycles(), hog_us * cycles_per_us_, hog_us_max * cycles_per_us_);
  std::uint64_t budget_cycles_ = 0;
  std::uint64_t since_ = 0;
  std::uint64_t next_courtesy_ = 0;
  std::uint32_t fruitless_yields_ = 0;
  std::uint32_t naps_left_ = 0;
  std::uint32_t nap_run_ = shortest_nap_run;  // the next time that a hog is met
  long nap_ns_ = 1;
  bool waiting_ = false;
};

}  // namespace vmci
