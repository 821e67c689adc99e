// Time that goes on while the host is suspended (CLOCK_BOOTTIME): a lease runs out for its holder when it does for who gave it.
#pragma once

#include <time.h>

#include <chrono>

namespace vrdma::hosts {

struct BootClock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<BootClock>;
  static constexpr bool is_steady = true;

  static time_point now() {
    timespec now{};
    ::clock_gettime(CLOCK_BOOTTIME, &now);
    return time_point(std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec));
  }
};

}  // namespace vrdma::hosts
