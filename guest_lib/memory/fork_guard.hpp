// What a fork's child gets in place of the window: private copies of every page that the window had mapped, as of the
// fork.
//
// The copies are made in the parent before the fork, into memory that the child inherits, so that nobody waits for the
// child and a write that happened before fork() is always in them. The child finds its addresses empty until it calls install(), unless
// the C library itself may need them by then. Native verbs kernels copy pinned pages at fork just so. Never calls
// malloc: it runs while the C library's and the allocator's own fork handlers hold their locks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "guest_lib/memory/page_counts.hpp"
#include "guest_lib/memory/window.hpp"

namespace vrdma::memory {

class ForkGuard {
 public:
  ForkGuard() = default;
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  // Before the fork: copies what is mapped of `resident`. Without memory for it the child finds its pages inaccessible:
  // it crashes on touching them rather than reading anything else or writing to the parent.
  // inherited: the child shares these pages with its parent until install().
  // Where nobody can tell what is mapped, all of `resident` is copied, and the child has it where it finds nothing.
  void copy(const Window& window, const PageCounts& resident, bool inherited);
  // Between copy() and the fork, by any thread: the child is to find zeroes in `range`, whole pages.
  void clear(Range range) const;
  // Afterwards, in the parent.
  void end(const Window& window);
  // Afterwards, in the child, which has one thread.
  void install();

 private:
  struct Piece {
    Range range;
    std::uint64_t copy_offset;
    std::uint64_t protection;
    bool seen;  // mapped in place
  };
  bool reserve(std::size_t count);
  void discard();
  void install(Range range, std::uint64_t copy_offset, int protection);
  void list_pieces(const Window& window, const PageCounts& resident);
  void advise(const Window& window, int advice) const;

  Piece* pieces_ = nullptr;  // mapped
  std::size_t piece_count_ = 0, piece_capacity_ = 0;
  char* copies_ = nullptr;  // mapped; null where there was no memory
  std::uint64_t copied_bytes_ = 0;
  bool inherited_ = false;
};

}  // namespace vrdma::memory
