#include "vmci_channel/backoff.hpp"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <time.h>

#include <atomic>
#include <thread>

namespace {
std::uint64_t thread_cpu_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}
}  // namespace

TEST_CASE("Idling needs nobody's wake-up: the thread goes on to use the processor by itself") {
  vmci::Backoff backoff;
  const std::uint64_t cpu_before = thread_cpu_ns();
  std::uint64_t turns = 0;
  while (thread_cpu_ns() - cpu_before < 20'000'000) {  // would never be reached by a thread that sleeps for ever
    backoff.idle();
    ++turns;
  }
  CHECK(turns > 1000);
}

TEST_CASE("Backoff tires when yielding does not help, and a reset refreshes it") {
  vmci::Backoff backoff;
  std::uint64_t turns = 0;
  while (!backoff.tired()) {
    backoff.idle();
    REQUIRE(++turns < 500'000'000);
  }
  backoff.reset();
  CHECK(!backoff.tired());
}

TEST_CASE("Two threads that wait for each other by backoff both get on") {
  std::atomic<std::uint32_t> turn{0};
  constexpr std::uint32_t rounds = 20'000;
  const auto play = [&](std::uint32_t me) {
    vmci::Backoff backoff;
    for (std::uint32_t i = 0; i < rounds; ++i) {
      while (turn.load(std::memory_order_acquire) % 2 != me) backoff.idle();
      backoff.reset();
      turn.fetch_add(1, std::memory_order_acq_rel);
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  CHECK(turn.load() == 2 * rounds);
}
