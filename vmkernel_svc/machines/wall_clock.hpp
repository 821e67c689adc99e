// The host's wall clock, by which QEMU dates what it says, and whether somebody has set it. The server's thread.
//
// Both clocks of the kernel that are compared here are slewed alike and go on in suspend, so what lies between them changes only where
// the wall clock is set.
#pragma once

#include <time.h>

#include <cstdint>

namespace vrdma::svc {

class WallClock {
 public:
  // A little late, by as much as a change that look() does not see.
  std::uint64_t now_us() const { return ns_of(CLOCK_REALTIME) / 1000 + tolerance_ns / 1000; }
  // True: it was set since the last time.
  bool look() {
    const std::int64_t now = ahead_ns(), moved = now - ahead_ns_;
    if (moved < tolerance_ns && moved > -tolerance_ns) return false;
    ahead_ns_ = now;
    beats_since_ = 0;
    return true;
  }
  // Now and then, more than one wait for events apart.
  void beat() {
    if (beats_since_ < beats_lately) ++beats_since_;
  }
  // What comes in now may be from before it was set.
  bool set_lately() const { return beats_since_ < beats_lately; }

 private:
  static constexpr std::int64_t tolerance_ns = 200'000;
  static constexpr int beats_lately = 3;

  static std::uint64_t ns_of(clockid_t clock) {
    timespec time{};
    ::clock_gettime(clock, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
  }
  // How far it is ahead of the other; of several looks the one that was interrupted least.
  static std::int64_t ahead_ns() {
    std::int64_t best = 0;
    std::uint64_t took = ~std::uint64_t{0};
    for (int looks = 0; looks < 16 && took > tolerance_ns / 2; ++looks) {
      const std::uint64_t before = ns_of(CLOCK_BOOTTIME), wall = ns_of(CLOCK_REALTIME), after = ns_of(CLOCK_BOOTTIME);
      if (after - before >= took) continue;
      took = after - before;
      best = static_cast<std::int64_t>(wall - before - took / 2);
    }
    return best;
  }

  std::int64_t ahead_ns_ = ahead_ns();
  int beats_since_ = beats_lately;  // since it was set
};

}  // namespace vrdma::svc
