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

// How much processor time a turn takes is the machine's affair: beside another program a turn is a nap, and where timers are dear
// 20 ms of processor time are 400 of them.
TEST_CASE("Idling needs nobody's wake-up: any number of turns end by themselves, and use the processor") {
  vmci::Backoff backoff;
  const std::uint64_t cpu_before = thread_cpu_ns();
  for (int turns = 0; turns < 5000; ++turns) backoff.idle();  // would never end for a thread that sleeps until it is woken
  CHECK(thread_cpu_ns() > cpu_before);
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
