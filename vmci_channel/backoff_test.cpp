#include "vmci_channel/backoff.hpp"

#include <doctest/doctest.h>
#include <sched.h>
#include <sys/prctl.h>
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

TEST_CASE("Beside a hog a thread whose timers are exact sleeps, too") {
  std::atomic<bool> over{false};
  const auto on_one_processor = [] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<unsigned>(::sched_getcpu()), &one);
    REQUIRE(::sched_setaffinity(0, sizeof(one), &one) == 0);
  };
  long sleeps = 0;
  std::thread waiting([&] {
    on_one_processor();
    REQUIRE(::prctl(PR_SET_TIMERSLACK, 1) == 0);
    std::thread hog([&] {
      while (!over.load(std::memory_order_relaxed)) vmci::cpu_relax();
    });
    const auto slept = [] {
      rusage now;
      ::getrusage(RUSAGE_THREAD, &now);
      return now.ru_nvcsw;  // a yield is none
    };
    const long before = slept();
    vmci::Backoff backoff;
    for (int turns = 0; turns < 100'000 && sleeps < 20; ++turns) backoff.idle(), sleeps = slept() - before;
    over = true;
    hog.join();
  });
  waiting.join();
  CHECK(sleeps >= 20);
}
