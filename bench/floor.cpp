// The floors that the figures of the mediated path are compared with, measured the same way in the same run:
//   floor relay [SECONDS [CPU CPU CPU]]  8 bytes A → service → B and back, three processes that wait like ours; half round trip.
//                                  On the processors given for A, service and B; else wherever the scheduler puts them
//   floor relay-sleep [SECONDS]    likewise, everyone sleeps in read(2) of an eventfd; half round trip
//   floor request [SECONDS]        8 bytes to a service on another core and its answer; the whole round trip
//   floor bounce [SECONDS [CPU CPU]]  8 bytes between two processes that poll: a cache line there and back; half round trip
//   floor bounce-sleep [SECONDS [CPU CPU]]  likewise, both sleep in read(2) of an eventfd; half round trip
//   floor loop [SECONDS]           what a loop costs that reads the clock each time, as perftest's does; and the clock's cycles in a ns
//   floor memcpy [SECONDS [BYTES BUFFERS]]  plain copies between buffers of two mappings, used by turns; GB/s.
//                                  Without a size: one buffer of 64 KiB, then one of 1 MiB
// Prints JSON objects, one a line: nanoseconds p50, p99, p99.9, or GB/s.
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "children.hpp"
#include "figures.hpp"
#include "vmci_channel/backoff.hpp"

namespace {

using bench::start;

constexpr std::size_t samples_max = 200'000;
double seconds = 1.0;
int cpus[3] = {-1, -1, -1};  // of A, service and B; -1: any

struct alignas(128) Line {
  std::atomic<std::uint64_t> word;
};
struct Shared {
  Line to_service[2], from_service[2];
  Line stop;
};

Shared& share() {
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::perror("floor: mmap"), std::exit(1);
  return *static_cast<Shared*>(memory);
}

void run_on(int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  ::sched_setaffinity(0, sizeof(set), &set);  // one core: then it is where it is
}

// What lies in `inboxes` goes to `outboxes`, until told to stop.
void forward(Shared& shared, std::size_t count, Line* inboxes[], Line* outboxes[]) {
  vmci::Backoff backoff;
  std::uint64_t seen[2] = {};
  for (;;) {
    bool worked = false;
    for (std::size_t side = 0; side < count; ++side) {
      const std::uint64_t now = inboxes[side]->word.load(std::memory_order_acquire);
      if (now == seen[side]) continue;
      seen[side] = now;
      outboxes[side]->word.store(now, std::memory_order_release);
      worked = true;
    }
    if (worked) backoff.reset();
    else if (shared.stop.word.load(std::memory_order_relaxed)) return;
    else backoff.idle();
  }
}

bench::Samples measure(Shared& shared) {
  vmci::Backoff backoff;
  bench::Samples samples(seconds, samples_max);
  for (std::uint64_t i = 1; samples.more(); ++i) {
    const std::uint64_t before = vmci::cycles();
    shared.to_service[0].word.store(i, std::memory_order_release);
    while (shared.from_service[0].word.load(std::memory_order_acquire) != i) backoff.idle();
    backoff.reset();
    samples.add(vmci::cycles() - before);
  }
  shared.stop.word.store(1);
  return samples;
}

int relay() {
  Shared& shared = share();
  const pid_t service = start([&] {
    run_on(cpus[1]);
    Line* inboxes[] = {&shared.to_service[0], &shared.to_service[1]};
    Line* outboxes[] = {&shared.from_service[1], &shared.from_service[0]};
    forward(shared, 2, inboxes, outboxes);
  });
  const pid_t echo = start([&] {
    run_on(cpus[2]);
    Line *inboxes[] = {&shared.from_service[1]}, *outboxes[] = {&shared.to_service[1]};
    forward(shared, 1, inboxes, outboxes);
  });
  run_on(cpus[0]);
  bench::Samples samples = measure(shared);
  ::waitpid(service, nullptr, 0);
  ::waitpid(echo, nullptr, 0);
  bench::print("relay", samples.json(2));
  return 0;
}

// Two processes, nobody between them.
int bounce() {
  Shared& shared = share();
  const pid_t echo = start([&] {
    run_on(cpus[1]);
    Line *inboxes[] = {&shared.to_service[0]}, *outboxes[] = {&shared.from_service[0]};
    forward(shared, 1, inboxes, outboxes);
  });
  run_on(cpus[0]);
  bench::Samples samples = measure(shared);
  ::waitpid(echo, nullptr, 0);
  bench::print("bounce", samples.json(2));
  return 0;
}

int request() {
  Shared& shared = share();
  const pid_t service = start([&] {
    run_on(1);
    Line *inboxes[] = {&shared.to_service[0]}, *outboxes[] = {&shared.from_service[0]};
    forward(shared, 1, inboxes, outboxes);
  });
  run_on(0);
  bench::Samples samples = measure(shared);
  ::waitpid(service, nullptr, 0);
  bench::print("request", samples.json());
  return 0;
}

void pass_on(int from, int to) {
  std::uint64_t value;
  if (::read(from, &value, 8) != 8 || ::write(to, &value, 8) != 8) std::_Exit(1);
}

int bounce_sleep() {
  const int there = ::eventfd(0, 0), back = ::eventfd(0, 0);
  const pid_t echo = start([&] {
    run_on(cpus[1]);
    for (;;) pass_on(there, back);
  });
  run_on(cpus[0]);
  bench::Samples samples(seconds, samples_max);
  while (samples.more()) {
    std::uint64_t value = 1;
    const std::uint64_t before = vmci::cycles();
    if (::write(there, &value, 8) != 8 || ::read(back, &value, 8) != 8) return 1;
    samples.add(vmci::cycles() - before);
  }
  ::kill(echo, SIGKILL), ::waitpid(echo, nullptr, 0);
  bench::print("bounce-sleep", samples.json(2));
  return 0;
}

int loop() {
  bench::Samples samples(seconds, samples_max);
  std::uint64_t before = vmci::cycles();
  while (samples.more()) {
    before = vmci::cycles();
    const std::uint64_t now = vmci::cycles();
    samples.add(now - before);
  }
  char text[64];
  std::snprintf(text, sizeof(text), ", \"cycles_per_ns\": %.6f", 1e6 / samples.clock().ns(1'000'000));
  bench::print("loop", samples.json() + text);
  return 0;
}

int relay_sleep() {
  const int to_service = ::eventfd(0, 0), to_echo = ::eventfd(0, 0), back = ::eventfd(0, 0), to_us = ::eventfd(0, 0);
  // One service process serves both directions by turns: the traffic is a ping-pong.
  const pid_t children[] = {start([&] {
                              for (;;) pass_on(to_service, to_echo), pass_on(back, to_us);
                            }),
                            start([&] {
                              for (;;) pass_on(to_echo, back);
                            })};
  bench::Samples samples(seconds, samples_max);
  while (samples.more()) {
    std::uint64_t value = 1;
    const std::uint64_t before = vmci::cycles();
    if (::write(to_service, &value, 8) != 8 || ::read(to_us, &value, 8) != 8) return 1;
    samples.add(vmci::cycles() - before);
  }
  for (const pid_t child : children) ::kill(child, SIGKILL), ::waitpid(child, nullptr, 0);
  bench::print("relay-sleep", samples.json(2));
  return 0;
}

char* mapping(std::size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) std::perror("floor: mmap"), std::exit(1);
  std::memset(memory, 1, bytes);
  return static_cast<char*>(memory);
}

void plain_memcpy(std::size_t bytes, std::size_t buffers) {
  char* const from = mapping(bytes * buffers);
  char* const to = mapping(bytes * buffers);
  std::uint64_t began = 0, now, copied = 0;
  const std::uint64_t start_ns = vmci::monotonic_ns();
  const auto warm_ns = static_cast<std::uint64_t>(seconds * 1e8), end_ns = static_cast<std::uint64_t>(seconds * 1.1e9);
  for (std::size_t i = 0;; i = (i + 1) % buffers) {
    std::memcpy(to + i * bytes, from + i * bytes, bytes);
    asm volatile("" ::: "memory");
    copied += bytes;
    if (i != 0) continue;
    now = vmci::monotonic_ns() - start_ns;
    if (began == 0 && now >= warm_ns) began = now, copied = 0;
    if (began != 0 && copied != 0 && now >= end_ns) break;
  }
  std::printf("{\"what\": \"memcpy\", \"bytes\": %zu, \"buffers\": %zu, \"gb_per_s\": %.2f}\n", bytes, buffers,
              static_cast<double>(copied) / static_cast<double>(now - began));
  ::munmap(from, bytes * buffers), ::munmap(to, bytes * buffers);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (argc > 2) seconds = std::atof(argv[2]);
  if (what == "relay" && argc == 6)
    for (int i = 0; i < 3; ++i) cpus[i] = std::atoi(argv[3 + i]);
  if (what.starts_with("bounce") && argc == 5)
    for (int i = 0; i < 2; ++i) cpus[i] = std::atoi(argv[3 + i]);
  ::alarm(120);
  if (seconds > 0 && seconds <= 60) {
    if (what == "relay") return relay();
    if (what == "relay-sleep") return relay_sleep();
    if (what == "request") return request();
    if (what == "bounce") return bounce();
    if (what == "bounce-sleep") return bounce_sleep();
    if (what == "loop") return loop();
    if (what == "memcpy") {
      if (argc > 4) plain_memcpy(std::strtoul(argv[3], nullptr, 0), std::strtoul(argv[4], nullptr, 0));
      else plain_memcpy(65536, 1), plain_memcpy(std::size_t{1} << 20, 1);
      return 0;
    }
  }
  std::fprintf(stderr, "usage: floor relay|relay-sleep|request|bounce|bounce-sleep|loop|memcpy [SECONDS, at most 60 [CPU CPU CPU | BYTES BUFFERS]]\n");
  return 2;
}
