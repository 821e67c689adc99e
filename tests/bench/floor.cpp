// The floors that the figures of the mediated path are compared with, measured the same way in the same run:
//   floor relay        8 bytes A → service → B and back, three processes that wait like ours; half round trip
//   floor relay-sleep  likewise, everyone sleeps in read(2) of an eventfd; half round trip
//   floor memcpy       plain copies between two buffers of two mappings, GB/s at 64 KiB and 1 MiB
// Prints one JSON object: nanoseconds p50, p99, p99.9, or GB/s.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "vmci_channel/backoff.hpp"

namespace {

constexpr int rounds = 100'000, sleeping_rounds = 5'000, warm_up = 2'000;

struct alignas(128) Line {
  std::atomic<std::uint64_t> word;
};
struct Shared {
  Line to_service[2], from_service[2];
  Line stop;
};

void die_with_parent() { ::prctl(PR_SET_PDEATHSIG, SIGKILL); }

std::uint64_t wait_change(std::atomic<std::uint64_t>& word, std::uint64_t seen, vmci::Backoff& backoff, std::atomic<std::uint64_t>& stop) {
  for (;;) {
    const std::uint64_t now = word.load(std::memory_order_acquire);
    if (now != seen) {
      backoff.reset();
      return now;
    }
    if (stop.load(std::memory_order_relaxed)) std::_Exit(0);
    backoff.idle();
  }
}

void print_percentiles(const char* name, std::vector<std::uint64_t>& half_ns) {
  std::sort(half_ns.begin(), half_ns.end());
  const auto at = [&](double p) { return half_ns[static_cast<std::size_t>(static_cast<double>(half_ns.size() - 1) * p)]; };
  std::printf("{\"floor\": \"%s\", \"p50_ns\": %lu, \"p99_ns\": %lu, \"p999_ns\": %lu}\n", name, at(0.5), at(0.99), at(0.999));
}

int relay() {
  auto* const shared = static_cast<Shared*>(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const pid_t service = ::fork();
  if (service == 0) {
    die_with_parent();
    vmci::Backoff backoff;
    std::uint64_t seen[2] = {};
    for (;;) {
      bool worked = false;
      for (int side = 0; side < 2; ++side) {
        const std::uint64_t now = shared->to_service[side].word.load(std::memory_order_acquire);
        if (now == seen[side]) continue;
        seen[side] = now;
        shared->from_service[1 - side].word.store(now, std::memory_order_release);
        worked = true;
      }
      if (worked) backoff.reset();
      else if (shared->stop.word.load(std::memory_order_relaxed)) std::_Exit(0);
      else backoff.idle();
    }
  }
  const pid_t echo = ::fork();
  if (echo == 0) {
    die_with_parent();
    vmci::Backoff backoff;
    for (std::uint64_t seen = 0;;) {
      seen = wait_change(shared->from_service[1].word, seen, backoff, shared->stop.word);
      shared->to_service[1].word.store(seen, std::memory_order_release);
    }
  }
  vmci::Backoff backoff;
  std::vector<std::uint64_t> half_ns;
  half_ns.reserve(rounds);
  for (std::uint64_t i = 1; i <= rounds + warm_up; ++i) {
    const std::uint64_t before = vmci::cycles();
    shared->to_service[0].word.store(i, std::memory_order_release);
    while (shared->from_service[0].word.load(std::memory_order_acquire) != i) backoff.idle();
    backoff.reset();
    if (i > warm_up) half_ns.push_back((vmci::cycles() - before) * 500 / vmci::cycles_per_us());
  }
  shared->stop.word.store(1);
  ::waitpid(service, nullptr, 0);
  ::waitpid(echo, nullptr, 0);
  print_percentiles("relay", half_ns);
  return 0;
}

int relay_sleep() {
  int to_service = ::eventfd(0, 0), to_echo = ::eventfd(0, 0), back = ::eventfd(0, 0), to_us = ::eventfd(0, 0);
  std::uint64_t value;
  const auto forward = [&](int from, int to) {
    while (::read(from, &value, 8) == 8)
      if (::write(to, &value, 8) != 8) std::_Exit(1);
  };
  pid_t children[3];
  const int routes[3][2] = {{to_service, to_echo}, {to_echo, back}, {back, to_us}};
  // One service process serves both directions by turns: the traffic is a ping-pong.
  children[0] = ::fork();
  if (children[0] == 0) {
    die_with_parent();
    for (;;) {
      if (::read(to_service, &value, 8) != 8 || ::write(to_echo, &value, 8) != 8) std::_Exit(1);
      if (::read(back, &value, 8) != 8 || ::write(to_us, &value, 8) != 8) std::_Exit(1);
    }
  }
  children[1] = ::fork();
  if (children[1] == 0) {
    die_with_parent();
    forward(routes[1][0], routes[1][1]);
    std::_Exit(0);
  }
  std::vector<std::uint64_t> half_ns;
  for (int i = 0; i < sleeping_rounds + 200; ++i) {
    const std::uint64_t one = 1, before = vmci::cycles();
    if (::write(to_service, &one, 8) != 8 || ::read(to_us, &value, 8) != 8) return 1;
    if (i >= 200) half_ns.push_back((vmci::cycles() - before) * 500 / vmci::cycles_per_us());
  }
  for (int i = 0; i < 2; ++i) ::kill(children[i], SIGKILL), ::waitpid(children[i], nullptr, 0);
  print_percentiles("relay-sleep", half_ns);
  return 0;
}

int plain_memcpy() {
  for (const std::size_t bytes : {std::size_t{65536}, std::size_t{1} << 20}) {
    const std::size_t total = std::size_t{1} << 31;
    auto* const from = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
    auto* const to = static_cast<char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
    std::memset(from, 1, bytes);
    const std::uint64_t before = vmci::monotonic_ns();
    for (std::size_t done = 0; done < total; done += bytes) {
      std::memcpy(to, from, bytes);
      asm volatile("" ::: "memory");
    }
    std::printf("{\"floor\": \"memcpy\", \"bytes\": %zu, \"gb_per_s\": %.2f}\n", bytes,
                static_cast<double>(total) / static_cast<double>(vmci::monotonic_ns() - before));
    ::munmap(from, bytes), ::munmap(to, bytes);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "relay") return relay();
  if (what == "relay-sleep") return relay_sleep();
  if (what == "memcpy") return plain_memcpy();
  std::fprintf(stderr, "usage: floor relay|relay-sleep|memcpy\n");
  return 2;
}
