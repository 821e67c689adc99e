// How many more mappings this process can bear. Every isolated run of pages in the window costs up to two; at
// vm.max_map_count malloc and thread creation fail, so moving stops at half of it.
//
// Not thread-safe; never allocates. Counting reads all of /proc/self/maps, so it is done once in `recount_after` moves.
#pragma once

#include <cstdint>

#include "guest_lib/memory/vma.hpp"

namespace vrdma::memory {

class VmaBudget {
 public:
  // Whether one more run may move. Call once for each.
  bool take();

 private:
  static constexpr std::uint64_t recount_after = 128;
  std::uint64_t moves_left_ = recount_after;  // until the next count
  std::uint64_t limit_ = 0;
  bool exhausted_ = false;
};

}  // namespace vrdma::memory
