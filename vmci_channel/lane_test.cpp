#include "vmci_channel/lane.hpp"

#include <doctest/doctest.h>

#include <thread>
#include <vector>

#include "vmci_channel/backoff.hpp"

using vmci::LaneReader;
using vmci::LaneWriter;
using vrdma::Cqe;

namespace {
Cqe numbered(std::uint64_t n) {
  Cqe cqe{};
  cqe.wr_id = n;
  cqe.byte_len = static_cast<std::uint32_t>(n * 5);
  cqe.queue_position = static_cast<std::uint32_t>(n + 1);
  return cqe;
}
}  // namespace

TEST_CASE("A fresh lane has nothing, and entries come out in order over many laps") {
  for (const std::uint32_t entries : {1u, 2u, 16u, 256u}) {
    std::vector<Cqe> memory(entries);
    LaneWriter writer(memory.data(), entries);
    LaneReader reader(memory.data(), entries);
    CHECK(reader.next() == nullptr);
    std::uint64_t written = 0;
    for (std::uint64_t read = 0; read < 5 * entries + 3;) {
      for (std::uint32_t burst = 0; burst < 1 + read % entries; ++burst) writer.push(numbered(written++), 0x80123456u);
      while (const Cqe* entry = reader.next()) {
        REQUIRE(entry->wr_id == read);
        REQUIRE(entry->byte_len == static_cast<std::uint32_t>(read * 5));
        REQUIRE((entry->state & ~vrdma::control_phase_bit) == 0x00123456u);  // the phase is the lane's, not the caller's
        reader.pop();
        ++read;
      }
      REQUIRE(written == read);
    }
    CHECK(reader.position() == writer.position());
  }
}

TEST_CASE("A lane may start at any position, as after its first user has left") {
  constexpr std::uint32_t entries = 8;
  for (const std::uint32_t start : {0u, 3u, 8u, 13u, 0xfffffffcu}) {
    // What a user before left behind: entries of the laps up to `start`.
    std::vector<Cqe> memory(entries);
    LaneWriter before(memory.data(), entries, start - 16);
    for (int i = 0; i < 16; ++i) before.push(numbered(99), 0);
    LaneWriter writer(memory.data(), entries, start);
    LaneReader reader(memory.data(), entries, start);
    CHECK(reader.next() == nullptr);
    for (std::uint64_t i = 0; i < 20; ++i) {
      writer.push(numbered(i), 7);
      REQUIRE(reader.next() != nullptr);
      CHECK(reader.next()->wr_id == i);
      reader.pop();
      CHECK(reader.next() == nullptr);
    }
  }
}

TEST_CASE("An entry is whole when its state says so: writer and reader in two threads") {
  constexpr std::uint32_t entries = 32;
  constexpr std::uint64_t count = 200'000;
  std::vector<Cqe> memory(entries);
  LaneWriter writer(memory.data(), entries);
  LaneReader reader(memory.data(), entries);
  std::atomic<std::uint64_t> taken{0};
  std::thread producer([&] {
    vmci::Backoff backoff;
    for (std::uint64_t i = 0; i < count; ++i) {
      while (i - taken.load(std::memory_order_acquire) >= entries) backoff.idle();
      backoff.reset();
      writer.push(numbered(i), static_cast<std::uint32_t>(i));
    }
  });
  std::uint64_t bad = 0;
  vmci::Backoff backoff;
  for (std::uint64_t i = 0; i < count;) {
    const Cqe* const entry = reader.next();
    if (entry == nullptr) {
      backoff.idle();
      continue;
    }
    backoff.reset();
    bad += entry->wr_id != i || entry->byte_len != static_cast<std::uint32_t>(i * 5) ||
           entry->queue_position != static_cast<std::uint32_t>(i + 1);
    reader.pop();
    taken.store(++i, std::memory_order_release);
  }
  producer.join();
  CHECK(bad == 0);
}
