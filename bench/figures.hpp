// Samples in cycles of the time stamp counter, and what is printed of them: one JSON object on a line. One thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "vmci_channel/arch.hpp"

namespace bench {

// Cycles become nanoseconds by the whole run's length, not by a short calibration that a busy machine may interrupt.
class Clock {
 public:
  double ns(std::uint64_t cycles) const {
    const std::uint64_t ran_cycles = vmci::cycles() - start_cycles_, ran_ns = elapsed_ns();
    return static_cast<double>(cycles) * static_cast<double>(ran_ns) / static_cast<double>(ran_cycles);
  }
  std::uint64_t elapsed_ns() const { return vmci::monotonic_ns() - start_ns_; }
  double seconds() const { return static_cast<double>(elapsed_ns()) / 1e9; }

 private:
  std::uint64_t start_ns_ = vmci::monotonic_ns();
  std::uint64_t start_cycles_ = vmci::cycles();
};

// How long to measure, and what came out. What comes in the first part of the time warms up and is dropped.
class Samples {
 public:
  Samples(double seconds, std::size_t count_max) : warm_ns_(seconds * 1e8), end_ns_(seconds * 1.1e9) { cycles_.reserve(count_max); }

  // Whether to go on: until the time is over, but not without a few samples, however slow.
  bool more() {
    const auto now = static_cast<double>(clock_.elapsed_ns());
    warm_ = now >= warm_ns_;
    return cycles_.size() < cycles_.capacity() && (now < end_ns_ || cycles_.size() < few);
  }
  void add(std::uint64_t cycles) {
    if (warm_ && cycles_.size() < cycles_.capacity()) cycles_.push_back(cycles);
  }
  const Clock& clock() const { return clock_; }

  // "p50_ns": … of the samples divided by `divisor`: 2 for half a round trip.
  std::string json(double divisor = 1) {
    std::sort(cycles_.begin(), cycles_.end());
    const auto at = [&](double part) {
      if (cycles_.empty()) return 0.0;
      return clock_.ns(cycles_[static_cast<std::size_t>(static_cast<double>(cycles_.size() - 1) * part)]) / divisor;
    };
    const double sum = std::accumulate(cycles_.begin(), cycles_.end(), 0.0);
    const double mean_ns = cycles_.empty() ? 0 : clock_.ns(1'000'000) / 1e6 * sum / static_cast<double>(cycles_.size()) / divisor;
    char text[200];
    std::snprintf(text, sizeof(text), "\"samples\": %zu, \"mean_ns\": %.1f, \"p50_ns\": %.1f, \"p99_ns\": %.1f, \"p999_ns\": %.1f", cycles_.size(),
                  mean_ns, at(0.5), at(0.99), at(0.999));
    return text;
  }

 private:
  static constexpr std::size_t few = 20;
  Clock clock_;
  std::vector<std::uint64_t> cycles_;
  double warm_ns_, end_ns_;
  bool warm_ = false;
};

inline void print(const std::string& what, const std::string& figures) {
  std::printf("{\"what\": \"%s\", %s}\n", what.c_str(), figures.c_str());
  std::fflush(stdout);
}

}  // namespace bench
