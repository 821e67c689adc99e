// How polls keep their distance from a stream of receives.
//
// Who polls without a pause takes each line of completions away from its writer as soon as there is one in it, and the writer has to fetch it
// back for the next one: with every message both wait until a line has crossed between processors. Who comes a little later finds many at a
// time, and does not disturb the writer. (8 B SENDs between two processors that are 110 ns apart: 7.2 M/s without a pause, 12 with one of
// 0.5 us, 15 of 4. An adapter moderates its interrupts for the same reason.)
//
// It is tried where the writer is as fast as the reader, so that polls find something all the time, and kept while that makes the stream
// faster. So nobody's messages are late for nothing: who sends one and waits for the answer gets less by it, and has it back at once. A thread
// that posts sends answers what it receives, and is not even asked. And the writer must not run out of receive requests meanwhile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vmci_channel/arch.hpp"

namespace vrdma::guest {

// By this thread.
[[gnu::tls_model("initial-exec")]] inline constinit thread_local std::uint32_t sends_posted = 0;

struct CycleClock {
  static std::uint64_t now() { return vmci::cycles(); }
  static std::uint64_t per_us() { return vmci::cycles_per_us(); }
  static void relax() { vmci::cpu_relax(); }
};

// Of one completion queue, under its lock.
template <class Clock = CycleClock>
class StreamPace {
 public:
  // Before a poll. A clock that was set back, as a virtual machine's may be when it is moved, holds nobody.
  void wait() const {
    if (lag_ == 0) [[likely]] return;
    while (Clock::now() - caught_up_ < lag_) Clock::relax();
  }

  void found_nothing() {
    if (lag_ != 0) rest();  // it has ended
    else streak_ -= std::min(streak_, cost_of_nothing);  // the writer is slower
  }

  // caught_up: a poll has found so many completions, and after them none. receives_left(): receive requests that the writer has.
  template <class ReceivesLeft>
  void found(std::uint32_t completions, bool caught_up, ReceivesLeft&& receives_left) {
    if (sends_posted != sends_seen_) {
      sends_seen_ = sends_posted;
      return rest();
    }
    if (idle_polls_ != 0) {
      --idle_polls_;
      return;
    }
    sampled_ += completions;
    if (!caught_up) {
      caught_up_ = 0;  // long ago
      return;
    }
    ++streak_;
    if (lag_ == 0) {
      if (streak_ == sample_polls) begin_sample();
      if (streak_ < 2 * sample_polls) return;
      rate_without_ = rate();
      streak_ = 0;
      lag_ = receives_left() >= receives_min ? Clock::per_us() / 4 : 0;
    } else {
      if (completions < enough) lag_ = std::min(lag_ * 2, Clock::per_us() * lag_max_us);
      if (streak_ == sample_polls) begin_sample();
      if (streak_ == 2 * sample_polls) {
        const bool helps = rate() > worthwhile * rate_without_;
        idle_polls_ = helps ? 0 : idle_next_;
        idle_next_ = helps ? idle_min : std::min(idle_next_ * 2, idle_max);
        if (!helps) return rest();
      }
      if (streak_ == paced_polls || receives_left() < receives_min) return rest();  // and is looked at anew
    }
    caught_up_ = Clock::now();
  }

 private:
  static constexpr std::uint32_t sample_polls = 32, paced_polls = 2048, cost_of_nothing = 4;
  static constexpr std::uint32_t idle_min = 1 << 12, idle_max = 1 << 20;
  static constexpr std::uint64_t lag_max_us = 4;
  static constexpr double worthwhile = 1.25;
  static constexpr std::uint32_t enough = 24;         // completions at a time: more of them gain little
  static constexpr std::uint32_t receives_min = 256;  // more than come within the longest lag

  void begin_sample() { sampled_since_ = Clock::now(), sampled_ = 0; }
  // Completions in each cycle since then.
  double rate() const { return static_cast<double>(sampled_) / static_cast<double>(Clock::now() - sampled_since_ + 1); }

  void rest() { lag_ = 0, streak_ = 0; }

  std::uint64_t lag_ = 0, caught_up_ = 0;  // caught_up_: when, in cycles
  std::uint32_t sends_seen_ = 0;
  std::uint32_t streak_ = 0;  // polls that have caught up, since the last change
  std::uint32_t idle_polls_ = 0, idle_next_ = idle_min;
  std::uint64_t sampled_since_ = 0, sampled_ = 0;
  double rate_without_ = 0;
};

}  // namespace vrdma::guest
