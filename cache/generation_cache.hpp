// A bounded look-aside table for answers that repeat (DESIGN.md D9): routes, keys, query replies. Every entry is stamped with
// the generation of what it was derived from; an entry of another generation is a miss, so nobody has to visit the table
// when something changes. Two-way set associative, the older of a set makes room.
//
// One thread at a time (or under the lock of its owner). Never allocates after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace vrdma::cache {

struct CacheCounters {
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;         // nothing there
  std::uint64_t invalidations = 0;  // there, but of another generation
};

template <class Key, class Value, class Hash = std::hash<Key>>
class GenerationCache {
 public:
  // entry_count: a power of two ≥ 2.
  explicit GenerationCache(std::size_t entry_count)
      : set_mask_(entry_count / 2 - 1), entries_(std::make_unique<Entry[]>(entry_count)) {}

  // The value stored for `key` under this very generation, or nullptr.
  const Value* find(const Key& key, std::uint64_t generation) {
    Entry* const set = set_of(key);
    for (int way = 0; way < 2; ++way) {
      Entry& entry = set[way];
      if (entry.generation == 0 || !(entry.key == key)) continue;
      if (entry.generation == generation) {
        ++counters_.hits;
        return &entry.value;
      }
      ++counters_.invalidations;
      entry.generation = 0;
    }
    ++counters_.misses;
    return nullptr;
  }

  // generation: not 0.
  void insert(const Key& key, std::uint64_t generation, const Value& value) {
    Entry* const set = set_of(key);
    const int way = (set[0].generation == 0 || set[0].key == key) ? 0
                    : (set[1].generation == 0 || set[1].key == key) ? 1
                    : set[0].generation <= set[1].generation ? 0 : 1;
    set[way] = {generation, key, value};
  }

  const CacheCounters& counters() const { return counters_; }

 private:
  struct Entry {
    std::uint64_t generation = 0;  // 0: empty
    Key key{};
    Value value{};
  };
  Entry* set_of(const Key& key) {
    const std::uint64_t mixed = Hash{}(key) * 0x9e3779b97f4a7c15u;
    return &entries_[((mixed >> 32) & set_mask_) * 2];
  }

  std::size_t set_mask_;
  std::unique_ptr<Entry[]> entries_;
  CacheCounters counters_;
};

}  // namespace vrdma::cache
