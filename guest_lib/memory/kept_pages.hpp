// Pages that are kept for the next registration of the same memory, mapped aside with their page tables, so that it costs a copy and two
// changes of page tables, and not for every page a fault, a zeroed page and one that is freed:
//
//   not registered any more   the window's pages are aside, private pages are in place
//   registered again          the private pages are aside, the window's are in place
//
// Contents are always those of the pages in place. Private pages are kept for memory only that is registered repeatedly. Bounded in
// ranges and in bytes; the oldest leave first. For memory that nobody else writes to meanwhile: see mover.hpp for the other.
//
// The caller holds MemoryManager's lock with signals blocked. Never allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "guest_lib/memory/page_counts.hpp"
#include "guest_lib/memory/window.hpp"

namespace vrdma::memory {

class KeptPages {
 public:
  static constexpr std::uint64_t bytes_max = 32 << 20;
  static constexpr std::uint64_t bytes_min = 64 << 10;  // below, two changes of page tables cost as much as the faults

  // resident: the pages whose contents live in the window; what is dropped of others is given up there.
  KeptPages(const Window& window, const std::optional<PageCounts>& resident) : window_(window), resident_(resident) {}
  KeptPages(const KeptPages&) = delete;
  KeptPages& operator=(const KeptPages&) = delete;
  ~KeptPages();

  // Moves readable and writable private memory into the window. False: nothing was kept for it, and it is as it was. In any case
  // nothing that overlaps the range is mapped aside any more but its own private pages.
  bool move_in(Range range);
  // The window holds the range again, by whatever way: its pages are not kept any more but used.
  void moved_in(Range range);
  // Moves the range back, which is mapped in place, readable and writable. False: it is as it was.
  bool move_out(Range range);
  // Keeps the window's pages of a range that was moved back by another way.
  void retain(Range range) { keep({range, 0, false}); }
  // Of a range that is not registered any more, or has to be moved by another way, nothing is mapped aside.
  void unmap(Range range);
  // Before a fork: a child would inherit them.
  void drop_private();
  // In a child, where nothing of it is mapped.
  void forget() { count_ = 0, bytes_ = 0; }

 private:
  struct Kept {
    Range range;
    std::uint64_t aside;  // address, or 0: not mapped
    bool registered;      // what is aside are private pages
  };
  static constexpr std::size_t count_max = 64;

  void keep(Kept kept);
  void drop(std::size_t index);
  void erase(std::size_t index);
  // What is aside for exactly this range, and is still there.
  Kept* find(Range range, bool registered);
  void let_go(Kept& kept);
  bool is_there(const Kept& kept) const;
  bool window_is_at(std::uint64_t address, Range range) const;
  bool private_pages_are_at(std::uint64_t address, std::uint64_t bytes) const;
  bool replace_by_window(Range range, std::uint64_t aside, std::uint64_t& private_pages);

  const Window& window_;
  const std::optional<PageCounts>& resident_;
  Kept kept_[count_max];  // oldest first
  std::size_t count_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace vrdma::memory
