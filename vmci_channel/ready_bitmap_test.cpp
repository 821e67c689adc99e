#include "vmci_channel/ready_bitmap.hpp"

#include <doctest/doctest.h>

#include <memory>
#include <thread>
#include <vector>

#include "vmci_channel/backoff.hpp"

using vmci::ready_members_max;
using vmci::ReadyBitmap;
using vmci::ReadyWords;

TEST_CASE("Every member can be set and is found once, in ascending order") {
  const auto words = std::make_unique<ReadyWords>();
  ReadyBitmap bitmap(words.get());
  CHECK(!bitmap.any());
  std::vector<std::uint32_t> members;
  for (std::uint32_t m = 0; m < ready_members_max; m += 1 + m % 67) members.push_back(m);
  members.push_back(ready_members_max - 1);
  for (const std::uint32_t member : members) {
    bitmap.set(member);
    bitmap.set(member);
  }
  CHECK(bitmap.any());
  std::vector<std::uint32_t> found;
  bitmap.take([&](std::uint32_t member) { found.push_back(member); });
  CHECK(found == members);
  CHECK(!bitmap.any());
  bitmap.take([&](std::uint32_t) { FAIL("a member was found twice"); });
}

TEST_CASE("A member beyond the last never touches memory beyond the words") {
  struct Guarded {
    ReadyWords words{};
    std::uint64_t after[16]{};
  };
  const auto memory = std::make_unique<Guarded>();
  ReadyBitmap bitmap(&memory->words);
  for (const std::uint32_t member : {ready_members_max, ready_members_max * 2 - 1, 0xffffffffu}) bitmap.set(member);
  for (const std::uint64_t word : memory->after) CHECK(word == 0);
  bitmap.take([](std::uint32_t member) { CHECK(member < ready_members_max); });
}

TEST_CASE("A summary bit without a member behind it is no member") {
  const auto words = std::make_unique<ReadyWords>();
  words->summary[3] = ~std::uint64_t{0};
  ReadyBitmap bitmap(words.get());
  bitmap.take([](std::uint32_t) { FAIL("nothing was set"); });
  CHECK(!bitmap.any());
}

TEST_CASE("Members set by several threads while another takes are never lost, and their news is visible") {
  constexpr std::uint32_t setters = 3, rounds = 20'000;
  const auto words = std::make_unique<ReadyWords>();
  ReadyBitmap bitmap(words.get());
  // Each setter owns the members congruent to it, close together so that they share words.
  struct alignas(64) News {
    std::uint32_t value = 0;
  };
  std::vector<News> news(256);
  std::vector<std::uint32_t> last(256);
  std::atomic<std::uint32_t> running{setters};
  std::vector<std::atomic<std::uint32_t>> taken(256);
  std::vector<std::thread> threads;
  for (std::uint32_t s = 0; s < setters; ++s)
    threads.emplace_back([&, s] {
      vmci::Backoff backoff;
      for (std::uint32_t round = 1; round <= rounds; ++round) {
        const std::uint32_t member = s + setters * (round % 80);
        // The taker has read what this member had: its value may change again.
        while (taken[member].load(std::memory_order_acquire) != last[member]) backoff.idle();
        backoff.reset();
        news[member].value = round;
        last[member] = round;
        bitmap.set(member * 61);
      }
      running.fetch_sub(1, std::memory_order_release);
    });
  std::uint32_t found = 0;
  vmci::Backoff backoff;
  for (bool last_look = false;;) {
    bool any = false;
    bitmap.take([&](std::uint32_t bit) {
      const std::uint32_t member = bit / 61;
      taken[member].store(news[member].value, std::memory_order_release);
      ++found;
      any = true;
    });
    if (any) {
      backoff.reset();
      continue;
    }
    if (last_look) break;
    if (running.load(std::memory_order_acquire) == 0) last_look = true;
    backoff.idle();
  }
  for (auto& thread : threads) thread.join();
  CHECK(found == setters * rounds);  // every set was after the last one of that member had been taken
}
