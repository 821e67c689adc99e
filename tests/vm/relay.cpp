// The floor for data between two User Mode Linux machines: a word of each machine's link, and a process of the host that carries what
// is written to one over to the other, as vrdmad's shard does. Two programs of the machines wait as perftest does, by looking; the one
// of the host as the shard does.
//
//   relay carry BAR BAR            on the host; until it is killed
//   relay pong /dev/mmapper        in a machine; until it is killed
//   relay ping /dev/mmapper COUNT  in the other: prints half the round trip, "p50 US p99 US"; so many times, or for ten seconds
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/backoff.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vrdma/vm_link.hpp"

namespace {

using namespace vrdma;

struct alignas(128) Word {
  std::atomic<std::uint64_t> value;
};
// The link leaves the last page alone.
struct Words {
  Word from_machine, to_machine;
};
static_assert(vm::queues_offset + vm::queues.total_bytes() <= vm::bar_bytes - vm::page_bytes);

Words& words_of(const char* path) {
  const vmci::UniqueFd file(::open(path, O_RDWR | O_CLOEXEC));
  void* const bar = ::mmap(nullptr, vm::bar_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (bar == MAP_FAILED) {
    std::perror(path);
    std::exit(1);
  }
  return *reinterpret_cast<Words*>(static_cast<std::byte*>(bar) + vm::bar_bytes - vm::page_bytes);
}

void await(const std::atomic<std::uint64_t>& word, std::uint64_t value) {
  while (word.load(std::memory_order_acquire) != value) vmci::cpu_relax();
}

[[noreturn]] void carry(Words& one, Words& two) {
  vmci::Backoff backoff;
  for (;;) {
    bool anything = false;
    for (auto [from, to] : {std::pair{&one, &two}, {&two, &one}})
      if (const std::uint64_t value = from->from_machine.value.load(std::memory_order_acquire); value != to->to_machine.value.load(std::memory_order_relaxed)) {
        to->to_machine.value.store(value, std::memory_order_release);
        anything = true;
      }
    if (anything)
      backoff.stay_busy();
    else
      backoff.idle();
  }
}

[[noreturn]] void pong(Words& words) {
  std::uint64_t seen = words.to_machine.value.load(std::memory_order_acquire);
  std::puts("ready");
  std::fflush(stdout);
  for (;;) {
    std::uint64_t value;
    while ((value = words.to_machine.value.load(std::memory_order_acquire)) == seen) vmci::cpu_relax();
    seen = value;
    words.from_machine.value.store(value, std::memory_order_release);
  }
}

void ping(Words& words, std::size_t count) {
  std::vector<double> halves_us;
  const std::uint64_t until_ns = vmci::monotonic_ns() + 10'000'000'000;
  const double per_us = static_cast<double>(vmci::cycles_per_us());
  std::uint64_t value = words.from_machine.value.load() + 1;
  for (std::size_t i = 0; i < count && vmci::monotonic_ns() < until_ns; ++i, ++value) {
    const std::uint64_t begin = vmci::cycles();
    words.from_machine.value.store(value, std::memory_order_release);
    await(words.to_machine.value, value);
    halves_us.push_back(static_cast<double>(vmci::cycles() - begin) / per_us / 2);
  }
  std::sort(halves_us.begin(), halves_us.end());
  std::printf("p50 %.3f p99 %.3f\n", halves_us[halves_us.size() / 2], halves_us[halves_us.size() * 99 / 100]);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view role = argc > 2 ? argv[1] : "";
  if (role == "carry" && argc == 4) carry(words_of(argv[2]), words_of(argv[3]));
  if (role == "pong") pong(words_of(argv[2]));
  const std::size_t count = argc == 4 ? std::strtoul(argv[3], nullptr, 10) : 0;
  if (role == "ping" && count != 0) return ping(words_of(argv[2]), count), 0;
  std::fputs("relay carry BAR BAR | pong DEVICE | ping DEVICE COUNT\n", stderr);
  return 2;
}
