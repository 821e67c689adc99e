// How many more mappings this process can bear. Every isolated run of pages in the window costs up to two; at
// vm.max_map_count malloc and thread creation fail, so moving stops at half of it. Before Linux 6.11 a registration reads the lines of
// all mappings below it (0.3 us each), so there small runs stop much earlier: at `grown_max` more than the process had.
//
// Not thread-safe; never allocates. Counting reads all of /proc/self/maps, tens of milliseconds at the limit. So it is done again when moves
// may have used half of what was left, and, where nothing is left, after twice as many refusals as before.
#pragma once

#include <cstdint>

#include "guest_lib/memory/vma.hpp"

namespace vrdma::memory {

class VmaBudget {
 public:
  using Count = Result<std::uint64_t>();
  explicit VmaBudget(Count* count = count_mappings) : count_(count) {}

  // Whether one more run, of so many bytes, may move. Call once for each.
  bool take(std::uint64_t bytes);

 private:
  void recount();

  static constexpr std::uint64_t small_bytes = 256 << 10;
  static constexpr std::uint64_t grown_max = 2048;
  static constexpr std::uint64_t recount_after = 128;  // moves or refusals, at least
  Count* count_;  // how it counts
  std::uint64_t moves_left_ = recount_after;  // until the next count
  std::uint64_t refusals_ = recount_after;    // until the one after that, where nothing fits
  std::uint64_t limit_ = 0, small_limit_ = 0;
  bool fits_ = true, small_fits_ = true;
};

}  // namespace vrdma::memory
