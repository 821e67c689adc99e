// Takers of one ring of records that are interrupted before any access that changes something, by others that take meanwhile, and that
// may then be gone for good: each record has one taker, and of each that is gone it is known whether it had taken what it had named.
#include "vmci_channel/record_turns.hpp"

#include <array>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "doctest/doctest.h"

namespace vmci {
namespace {

using vrdma::direct::Turns;

constexpr std::uint32_t nobody = 99;

// The stores of a taker that somebody interrupts: `before` is called at each, and says whether the taker still lives.
struct InterruptedStores {
  const std::function<bool()>* before;
  bool compare_and_swap(std::uint64_t* to, std::uint64_t& value, std::uint64_t swap) const {
    if (!(*before)()) return false;
    std::atomic_ref(*to).compare_exchange_strong(value, swap);
    return true;
  }
};

// Everything is decided by a list of choices, which the search counts through.
class World {
 public:
  explicit World(std::vector<std::uint32_t>& choices) : choices_(choices) {}
  void run() {
    for (int round = 0; round < 2; ++round) take(1 + choose(takers), 0);
    std::uint32_t taken = 0;
    for (const std::uint32_t owner : owner_) taken += owner != nobody;
    REQUIRE(RecordTurns::next(turns_.last()) == taken);
  }
  // The next list of choices; false: there is none.
  bool next() {
    while (!choices_.empty()) {
      if (++choices_.back() < options_[choices_.size() - 1]) return true;
      choices_.pop_back();
    }
    return false;
  }

 private:
  static constexpr std::uint32_t takers = 3, depth_max = 2, interruptions_max = 3;

  std::uint32_t choose(std::uint32_t options) {
    if (made_ == choices_.size()) choices_.push_back(0);
    options_.push_back(options);
    return choices_[made_++];
  }
  void take(std::uint32_t who, std::uint32_t depth) {
    if (gone_[who] || inside_[who]) return;
    inside_[who] = true;
    bool alive = true;
    const std::function<bool()> before = [&] {
      // Nothing happens, it is gone, or another takes one record or two.
      if (interruptions_ == interruptions_max) return true;
      const std::uint32_t what = choose(depth < depth_max ? 2 + takers : 2);
      interruptions_ += what != 0;
      if (what == 1) alive = false;
      if (what >= 2) {
        const std::uint32_t other = 1 + (what - 2);
        take(other, depth + 1);
        if (choose(2) == 1) take(other, depth + 1);
      }
      return alive;
    };
    for (int tries = 0; tries < 4 && alive; ++tries) {
      const std::uint64_t last = turns_.last();
      const std::uint32_t index = RecordTurns::next(last);
      named_[who] = index;
      if (!turns_.take(last, who, InterruptedStores{&before})) continue;
      REQUIRE(owner_[index] == nobody);
      owner_[index] = who;
      break;
    }
    if (!alive) gone_[who] = true;
    inside_[who] = false;
    for (std::uint32_t other = 1; other <= takers; ++other)
      if (!inside_[other]) REQUIRE(turns_.took(other, named_[other]) == (owner_[named_[other]] == other));
  }

  std::vector<std::uint32_t>& choices_;
  std::size_t made_ = 0;
  std::uint32_t interruptions_ = 0;
  std::vector<std::uint32_t> options_;
  std::unique_ptr<Turns> words_ = std::make_unique<Turns>();
  RecordTurns turns_{words_.get()};
  std::array<std::uint32_t, 64> owner_ = [] {
    std::array<std::uint32_t, 64> none;
    none.fill(nobody);
    return none;
  }();
  std::array<std::uint32_t, takers + 1> named_{};
  std::array<bool, takers + 1> gone_{}, inside_{};
};

}  // namespace

TEST_CASE("Each record has one taker, whoever is interrupted or gone at whichever access") {
  std::vector<std::uint32_t> choices;
  std::size_t runs = 0;
  for (;;) {
    World world(choices);
    world.run();
    ++runs;
    if (!world.next()) break;
  }
  CHECK(runs > 10'000);
}

TEST_CASE("What a taker has taken stays known when slower ones write what they saw before") {
  const auto words = std::make_unique<Turns>();
  const RecordTurns turns(words.get());
  const ClaimedStores stores;
  REQUIRE(turns.take(turns.last(), 1, stores));
  const std::uint64_t before = turns.last();
  REQUIRE(turns.take(turns.last(), 1, stores));
  // One that has seen record 0 taken writes so just as another is about to write that record 1 was.
  const std::function<bool()> late = [&] { return words->passed[1] = before, true; };
  CHECK_FALSE(turns.take(turns.last(), 2, InterruptedStores{&late}));
  CHECK(turns.took(1, 1));
  REQUIRE(turns.take(turns.last(), 2, stores));
  CHECK(turns.took(1, 1));
  // One that comes with what it saw long ago.
  CHECK_FALSE(turns.take(before, 3, stores));
  CHECK(turns.took(1, 1));
  CHECK(turns.took(2, 2));
  CHECK_FALSE(turns.took(3, 1));
}

TEST_CASE("Threads take all records, each once, and each taker in order") {
  constexpr std::uint32_t records = 200'000, takers = 4;
  const auto words = std::make_unique<Turns>();
  std::vector<std::vector<std::uint32_t>> taken(takers);
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < takers; ++i)
    threads.emplace_back([&, i] {
      const RecordTurns turns(words.get());
      const std::uint32_t who = i;  // 0: the service, whom nobody passes
      for (;;) {
        const std::uint64_t last = turns.last();
        const std::uint32_t index = RecordTurns::next(last);
        if (index >= records) return;
        if (!turns.take(last, who, ClaimedStores())) continue;
        taken[i].push_back(index);
        if (who != 0) CHECK(turns.took(who, index));
      }
    });
  for (std::thread& thread : threads) thread.join();
  std::vector<int> times(records);
  for (const auto& own : taken)
    for (std::size_t i = 0; i < own.size(); ++i) {
      ++times[own[i]];
      if (i != 0) REQUIRE(own[i] > own[i - 1]);
    }
  for (const int count : times) REQUIRE(count == 1);
}

TEST_CASE("A taker's number that is none is not believed") {
  const auto words = std::make_unique<Turns>();
  const RecordTurns turns(words.get());
  words->last = vrdma::direct::turn_word(7, vrdma::direct::takers_max + 5);
  CHECK_FALSE(turns.take(turns.last(), 1, ClaimedStores()));
  CHECK_FALSE(turns.took(vrdma::direct::takers_max + 6, 6));
}

}  // namespace vmci
