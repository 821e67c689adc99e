// A number that is measured, or asked for, once, and stays: as a static of a function, but without that one's guard, which stays locked in a
// fork's child if another thread was about to find the number at the moment of the fork. Two that look at once both find one, and all have the
// first. Any thread, also after fork(2).
#pragma once

#include <atomic>
#include <cstdint>

namespace vmci {

template <std::uint64_t (*find)()>  // never 0
std::uint64_t found_once() {
  static constinit std::atomic<std::uint64_t> first{0};  // a number alone, which pairs with nothing
  std::uint64_t known = first.load(std::memory_order_relaxed);
  if (known != 0) [[likely]] return known;
  const std::uint64_t found = find();
  return first.compare_exchange_strong(known, found, std::memory_order_relaxed) ? found : known;
}

}  // namespace vmci
