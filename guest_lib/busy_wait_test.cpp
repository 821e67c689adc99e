// Waiting for a descriptor by looking before sleeping, against threads that write to it and send signals.
#include "guest_lib/busy_wait.hpp"

#include <doctest/doctest.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "vmci_channel/unique_fd.hpp"

using vrdma::guest::BusyWait;

namespace {

void signal_to(int fd) {
  const std::uint64_t one = 1;
  CHECK(::write(fd, &one, sizeof(one)) == sizeof(one));
}
void await(BusyWait& busy, int fd) {
  pollfd readable{fd, POLLIN, 0};
  CHECK(busy.wait(readable) == 1);
  CHECK(readable.revents == POLLIN);
  std::uint64_t count;
  CHECK(::read(fd, &count, sizeof(count)) == sizeof(count));
}
std::uint64_t processor_ns() {
  timespec used;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<std::uint64_t>(used.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(used.tv_nsec);
}
long sleeps() {
  rusage used;
  getrusage(RUSAGE_THREAD, &used);
  return used.ru_nvcsw;
}

struct Pair {
  vmci::UniqueFd there{::eventfd(0, EFD_CLOEXEC)}, back{::eventfd(0, EFD_CLOEXEC)};
  BusyWait busy;

  // So many turns; how often the calling thread slept in them.
  long talk(int turns) {
    std::thread other([&] {
      BusyWait others;
      for (int turn = 0; turn < turns; ++turn) {
        await(others, there.get());
        signal_to(back.get());
      }
    });
    const long before = sleeps();
    for (int turn = 0; turn < turns; ++turn) {
      signal_to(there.get());
      await(busy, back.get());
    }
    const long slept = sleeps() - before;
    other.join();
    return slept;
  }
};

TEST_CASE("two threads that answer one another at once soon sleep no more") {
  Pair pair;
  constexpr int turns = 2000;
  bool seen = false;  // in one of these, others leave both a processor
  for (int attempt = 0; attempt < 200 && !seen; ++attempt) seen = pair.talk(turns) < turns / 4;
  CHECK(seen);
}

TEST_CASE("who waits long uses no processor for it, whatever came before") {
  Pair pair;
  (void)pair.talk(200);
  const std::uint64_t before = processor_ns();
  for (int i = 0; i < 5; ++i) {
    std::thread late([&] {
      constexpr timespec pause{0, 100'000'000};
      nanosleep(&pause, nullptr);
      signal_to(pair.back.get());
    });
    await(pair.busy, pair.back.get());
    late.join();
  }
  CHECK(processor_ns() - before < 100'000'000);  // of 500
}

TEST_CASE("a signal ends the wait, also one that comes while the thread looks") {
  struct sigaction action {}, old;
  action.sa_handler = [](int) {};
  sigaction(SIGUSR1, &action, &old);
  Pair pair;
  const pthread_t self = pthread_self();
  constexpr int rounds = 200;
  int missed = 0;  // by a signal that came before the wait had begun, at best
  for (int round = 0; round < rounds; ++round) {
    (void)pair.talk(3);  // makes it look again
    std::atomic<bool> begun{false}, ended{false};
    std::thread sender([&] {
      while (!begun) vmci::cpu_relax();
      const std::uint64_t until = vmci::cycles() + vmci::cycles_per_us() * static_cast<std::uint64_t>(2 + round % 8);
      while (vmci::cycles() < until) vmci::cpu_relax();
      pthread_kill(self, SIGUSR1);
      for (constexpr timespec pause{0, 20'000'000}; nanosleep(&pause, nullptr), !ended; pthread_kill(self, SIGUSR1)) ++missed;
    });
    pollfd never{pair.back.get(), POLLIN, 0};
    begun = true;
    CHECK(pair.busy.wait(never) == -1);
    CHECK(errno == EINTR);
    ended = true;
    sender.join();
  }
  CHECK(missed < rounds / 4);
  sigaction(SIGUSR1, &old, nullptr);
}

}  // namespace
