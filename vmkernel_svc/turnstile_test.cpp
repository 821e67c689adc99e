#include "vmkernel_svc/turnstile.hpp"

#include <doctest/doctest.h>

#include <thread>

using vrdma::svc::Turnstile;

TEST_CASE("Nobody is in a turn while somebody is alone, nobody is alone beside somebody else, and everybody gets on") {
  constexpr std::size_t shards = 4;
  constexpr int rounds = 300;
  Turnstile turnstile(shards);
  // Plain words: ThreadSanitizer watches that no two threads are at one of them at once.
  long own[shards] = {};
  long common = 0;
  std::vector<std::thread> threads;
  for (std::size_t shard = 0; shard < shards; ++shard)
    threads.emplace_back([&, shard] {
      for (int round = 0; round < rounds; ++round) {
        turnstile.enter(shard);
        const long seen = common;
        ++own[shard];
        for (int i = 0; i < 100; ++i) CHECK(common == seen);
        turnstile.leave(shard);
        if (round % 8 != static_cast<int>(shard)) continue;
        turnstile.alone([&] {
          for (long& word : own) ++word;
          ++common;
        });
      }
    });
  std::thread other([&] {  // one that is no shard
    for (int round = 0; round < rounds; ++round) turnstile.alone([&] { ++common; });
  });
  for (auto& thread : threads) thread.join();
  other.join();
  long alone = 0;
  for (int round = 0; round < rounds; ++round) alone += round % 8 < static_cast<int>(shards);
  CHECK(common == alone + rounds);
  for (const long word : own) CHECK(word == alone + rounds);
}

TEST_CASE("A shard that is always in a turn does not keep others from being alone") {
  Turnstile turnstile(2);
  std::atomic<bool> stop{false};
  long turns = 0;
  std::thread busy([&] {
    while (!stop.load(std::memory_order_relaxed)) {
      turnstile.enter(1);
      ++turns;
      turnstile.leave(1);
    }
  });
  long seen = 0;
  for (int round = 0; round < 200; ++round) turnstile.alone([&] { seen = turns; });
  stop = true;
  busy.join();
  CHECK(turns >= seen);
}

TEST_CASE("A single shard takes nothing, and may be alone in its turn") {
  Turnstile turnstile(1);
  turnstile.enter(0);
  int done = 0;
  turnstile.alone([&] { ++done; });
  turnstile.leave(0);
  CHECK(done == 1);
}
