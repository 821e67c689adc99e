#include "vmkernel_svc/memory/region.hpp"

#include <sys/random.h>

namespace vrdma::svc {

namespace {
constexpr std::size_t resting_keys = 4096;
constexpr std::size_t slots_kept = huge_page_bytes / sizeof(Region);
}

RegionTable::RegionTable() { resting_.assign(resting_keys, 0); }

std::uint32_t RegionTable::new_key() {
  static thread_local std::uint32_t pool[64];
  static thread_local std::size_t left = 0;
  for (;;) {
    if (left == 0) {
      if (::getrandom(pool, sizeof(pool), 0) != static_cast<ssize_t>(sizeof(pool))) std::abort();
      left = 64;
    }
    const std::uint32_t key = pool[--left];
    if (key != 0 && !by_key_.contains(key) && !resting_count_.contains(key)) return key;
  }
}

Region& RegionTable::add(std::uint32_t& slot) {
  if (free_.empty()) {
    free_.push_back(static_cast<std::uint32_t>(regions_.size()));
    regions_.emplace_back();
  }
  slot = free_.back();
  free_.pop_back();
  Region& region = regions_[slot];
  region.generation = next_generation_++;
  region.key = Key{new_key()};
  by_key_.emplace(region.key.value, slot);
  return region;
}

void RegionTable::remove(std::uint32_t slot) {
  Region& region = regions_[slot];
  by_key_.erase(region.key.value);
  if (const std::uint32_t rested = resting_[resting_next_]; rested != 0) resting_count_.erase(rested);
  resting_[resting_next_] = region.key.value;
  resting_count_.emplace(region.key.value, 1);
  resting_next_ = (resting_next_ + 1) % resting_keys;
  region = Region{};
  free_.push_back(slot);
  if (by_key_.empty() && regions_.size() > slots_kept) {  // who had so many has left; generations go on
    regions_ = {};
    free_ = {};
    by_key_ = {};
  }
}

}  // namespace vrdma::svc
