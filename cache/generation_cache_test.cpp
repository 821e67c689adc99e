#include "cache/generation_cache.hpp"

#include <doctest/doctest.h>

#include <map>
#include <random>

using vrdma::cache::GenerationCache;

TEST_CASE("An answer is found again under the generation that it was stored with, and under no other") {
  GenerationCache<int, int> cache(8);
  CHECK(cache.find(5, 1) == nullptr);
  cache.insert(5, 1, 50);
  REQUIRE(cache.find(5, 1) != nullptr);
  CHECK(*cache.find(5, 1) == 50);
  CHECK(cache.find(5, 2) == nullptr);
  CHECK(cache.find(5, 1) == nullptr);  // what was found stale is gone
  CHECK(cache.counters().hits == 2);
  CHECK(cache.counters().misses == 3);
  CHECK(cache.counters().invalidations == 1);
}

TEST_CASE("A key is stored once: a newer answer takes the place of the older one") {
  GenerationCache<int, int> cache(2);
  cache.insert(1, 1, 10);
  cache.insert(2, 1, 20);
  cache.insert(1, 2, 11);
  REQUIRE(cache.find(1, 2) != nullptr);
  CHECK(*cache.find(1, 2) == 11);
  CHECK(cache.find(1, 1) == nullptr);
}

TEST_CASE("Whatever is stored, changed and forgotten, a hit is never stale") {
  for (std::uint32_t seed = 1; seed <= 50; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    GenerationCache<std::uint32_t, std::uint64_t> cache(16);
    std::map<std::uint32_t, std::uint64_t> truth;
    std::uint64_t generation = 1, hits = 0;
    for (int step = 0; step < 5000; ++step) {
      const auto key = static_cast<std::uint32_t>(random() % 40);
      if (random() % 50 == 0) {  // the world changes
        ++generation;
        truth[key] = random();
      } else if (const std::uint64_t* known = cache.find(key, generation)) {
        REQUIRE(*known == truth[key]);
        ++hits;
      } else {
        cache.insert(key, generation, truth[key]);
      }
    }
    CHECK(hits > 0);
    CHECK(cache.counters().hits == hits);
  }
}
