#include "vmkernel_svc/memory/region.hpp"

#include <sys/random.h>

#include <new>

namespace vrdma::svc {

namespace {
constexpr std::size_t resting_keys = 4096;
constexpr std::size_t windows_max = 1 << 20;  // of all guests; then a sixteenth of all keys are windows'
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
    if (key != 0 && !by_key_.contains(key) && !resting_count_.contains(key) && !windows_.contains(key >> window_key_bits)) return key;
  }
}

// What grows at once by more than is kept in reserve (memory_reserve.hpp): a block of regions, a table of keys.
bool RegionTable::make_room() {
  try {
    if (by_key_.size() >= by_key_.max_load()) by_key_.reserve(by_key_.size() + 1);
    if (windows_.size() >= windows_.max_load()) windows_.reserve(windows_.size() + 1);
    if (free_.capacity() <= regions_.size()) free_.reserve(2 * regions_.size() + 64);
    if (!free_.empty()) return true;
    regions_.emplace_back();
    free_.push_back(static_cast<std::uint32_t>(regions_.size() - 1));
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

Region& RegionTable::take_slot(std::uint32_t& slot) {
  slot = free_.back();
  free_.pop_back();
  Region& region = regions_[slot];
  region.generation = next_generation_++;
  return region;
}

Region& RegionTable::add(std::uint32_t& slot) {
  Region& region = take_slot(slot);
  region.key = Key{new_key()};
  by_key_.emplace(region.key.value, slot);
  return region;
}

Region* RegionTable::add_window(std::uint32_t& slot) {
  constexpr std::uint32_t keys = 1u << window_key_bits, tries = 64;
  std::uint32_t first = 0;
  for (std::uint32_t tried = 0; first == 0; ++tried) {
    if (tried == tries || windows_.size() >= windows_max) return nullptr;
    first = new_key() & ~(keys - 1);
    for (std::uint32_t tag = 0; tag < keys && first != 0; ++tag)
      if (by_key_.contains(first + tag) || resting_count_.contains(first + tag)) first = 0;
  }
  Region& window = take_slot(slot);
  window.key = Key{first};
  window.access = Region::is_window;
  windows_.emplace(first >> window_key_bits, slot);
  return &window;
}

void RegionTable::bind_window(std::uint32_t slot, Key key, std::uint32_t access, std::uint64_t iova, std::uint64_t bytes, std::uint32_t of,
                              std::uint64_t offset, std::uint32_t qpn) {
  Region& window = regions_[slot];
  unbind_window(window);
  renew(slot);
  constexpr std::uint32_t tag = (1u << window_key_bits) - 1;
  window.key = Key{(window.key.value & ~tag) | (key.value & tag)};
  window.access = Region::is_window | access;
  window.iova = iova;
  window.bytes = bytes;
  window.window_slot = of;
  window.window_generation = regions_[of].generation;
  window.window_offset = offset;
  window.window_qpn = qpn;
  ++regions_[of].windows;
}

void RegionTable::unbind_window(Region& window) {
  if (Region* const bound_to = at(window.window_slot, window.window_generation); bound_to != nullptr && window.window_generation != 0) --bound_to->windows;
  window.window_generation = 0;
  window.window_qpn = 0;
  window.access = Region::is_window;
}

bool RegionTable::invalidate_window(Key key, std::uint64_t pd, std::uint32_t qpn) {
  const auto slot = find_window(key);
  if (!slot || regions_[*slot].pd != pd || regions_[*slot].window_qpn != qpn) return false;
  unbind_window(regions_[*slot]);
  return true;
}

void RegionTable::remove(std::uint32_t slot) {
  Region& region = regions_[slot];
  if ((region.access & Region::is_window) != 0) {
    unbind_window(region);
    windows_.erase(region.key.value >> window_key_bits);
    return give_back(slot);
  }
  by_key_.erase(region.key.value);
  if (const std::uint32_t rested = resting_[resting_next_]; rested != 0) resting_count_.erase(rested);
  resting_[resting_next_] = region.key.value;
  resting_count_.emplace(region.key.value, 1);
  resting_next_ = (resting_next_ + 1) % resting_keys;
  give_back(slot);
}

void RegionTable::give_back(std::uint32_t slot) {
  regions_[slot] = Region{};
  free_.push_back(slot);
  if (by_key_.empty() && windows_.empty() && regions_.size() > slots_kept) {  // who had so many has left; generations go on
    regions_ = {};
    free_ = {};
    by_key_ = {}, windows_ = {};
  }
}

}  // namespace vrdma::svc
