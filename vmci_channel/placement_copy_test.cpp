#include "vmci_channel/placement_copy.hpp"

#include <doctest/doctest.h>

#include <memory>
#include <random>
#include <thread>
#include <vector>

using vmci::placement_copy;

namespace {

constexpr std::size_t guard = 128;

// Copies into a guarded place and looks at every byte, those around included.
bool copies_exactly(std::size_t bytes, std::size_t to_misaligned, std::size_t from_misaligned) {
  static std::vector<std::byte> from_memory, to_memory;
  from_memory.resize(std::max(from_memory.size(), bytes + 2 * guard + 64));
  to_memory.assign(bytes + 2 * guard + 64, std::byte{0xcd});
  std::byte* const from = from_memory.data() + guard + from_misaligned;
  std::byte* const to = to_memory.data() + guard + to_misaligned;
  for (std::size_t i = 0; i < bytes; ++i) from[i] = static_cast<std::byte>(i * 131 + (i >> 8) * 7 + 1);
  placement_copy(to, from, bytes);
  if (bytes != 0 && std::memcmp(to, from, bytes) != 0) return false;
  for (const std::byte* at = to_memory.data(); at < to; ++at)
    if (*at != std::byte{0xcd}) return false;
  for (const std::byte* at = to + bytes; at < to_memory.data() + to_memory.size(); ++at)
    if (*at != std::byte{0xcd}) return false;
  return true;
}

}  // namespace

TEST_CASE("Every size up to 300 copies exactly, at every alignment of both sides") {
  for (std::size_t bytes = 0; bytes <= 300; ++bytes)
    for (std::size_t to = 0; to < 16; ++to)
      for (std::size_t from = 0; from < 16; from += to == 0 ? 1 : 5)
        REQUIRE_MESSAGE(copies_exactly(bytes, to, from), bytes << " bytes, to +" << to << ", from +" << from);
}

TEST_CASE("Every alignment to a cache line copies exactly") {
  for (std::size_t bytes = 250; bytes <= 700; bytes += 3)
    for (std::size_t to = 0; to < 64; to += 1 + bytes % 3)
      REQUIRE_MESSAGE(copies_exactly(bytes, to, bytes % 64), bytes << " bytes, to +" << to);
}

TEST_CASE("Larger sizes copy exactly, the borders between the ways included") {
  for (const std::size_t around : {std::size_t{512}, std::size_t{4096}, std::size_t{8192}, std::size_t{65536}})
    for (std::size_t bytes = around - 66; bytes <= around + 66; ++bytes)
      REQUIRE_MESSAGE(copies_exactly(bytes, bytes % 16, bytes % 7), bytes << " bytes");
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) {
    const std::size_t bytes = random() % (std::size_t{1} << (10 + random() % 12));
    REQUIRE_MESSAGE(copies_exactly(bytes, random() % 64, random() % 64), bytes << " bytes");
  }
}

TEST_CASE("Who sees the last byte sees all bytes") {
  // A second thread polls the last byte as an application does that waits for an RDMA WRITE, then compares everything.
  struct Case {
    std::size_t bytes, misaligned;
    std::uint32_t rounds;
  };
  std::vector<Case> cases;
  for (const std::size_t bytes : {2, 3, 5, 8, 9, 12, 15, 16, 17, 24, 31, 63, 64, 65, 100, 300})
    for (const std::size_t misaligned : {0, 1, 7, 53, 60}) cases.push_back({bytes, misaligned, 3000});
  for (const std::size_t bytes : {1024, 4096, 8192, 8193, 16384})
    for (const std::size_t misaligned : {0, 1, 13, 60}) cases.push_back({bytes, misaligned, 1500});
  for (const std::size_t bytes : {65536, 1 << 20}) cases.push_back({bytes, 3, 200});

  constexpr std::size_t largest = (1 << 20) + 128;
  std::vector<std::byte> memory(largest + 64);
  std::byte* const target = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
  std::vector<std::byte> source(largest);
  std::atomic<std::uint32_t> go{0}, done{0};
  std::atomic<std::size_t> wrong{0};
  std::thread watcher([&] {
    std::uint32_t round = 0;
    for (const Case& c : cases) {
      volatile const std::byte* const last = target + c.misaligned + c.bytes - 1;
      for (std::uint32_t i = 0; i < c.rounds; ++i) {
        ++round;
        while (go.load(std::memory_order_acquire) != round) sched_yield();
        const std::byte value = static_cast<std::byte>(round % 255 + 1);
        for (std::uint32_t spins = 0; *last != value; ++spins)
          if (spins % 256 == 255) sched_yield();
        std::atomic_thread_fence(std::memory_order_acquire);
        std::size_t bad = 0;
        for (std::size_t at = 0; at < c.bytes; ++at) bad += target[c.misaligned + at] != value;
        if (bad != 0) wrong.fetch_add(1, std::memory_order_relaxed);
        done.store(round, std::memory_order_release);
      }
    }
  });
  std::uint32_t round = 0;
  for (const Case& c : cases)
    for (std::uint32_t i = 0; i < c.rounds; ++i) {
      ++round;
      std::memset(source.data(), static_cast<int>(round % 255 + 1), c.bytes);
      go.store(round, std::memory_order_release);
      for (std::uint32_t pause = round % 64; pause > 0; --pause) vmci::cpu_relax();
      placement_copy(target + c.misaligned, source.data(), c.bytes);
      while (done.load(std::memory_order_acquire) != round) sched_yield();
    }
  watcher.join();
  CHECK(wrong.load() == 0);
}
