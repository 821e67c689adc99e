#include "guest_lib/memory/kept_pages.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "guest_lib/memory/raw_copy.hpp"
#include "guest_lib/memory/raw_map.hpp"

namespace vrdma::memory {
namespace {

constexpr int dont_unmap = 4;      // MREMAP_DONTUNMAP, Linux 5.7; of shared memory 5.13

// Takes the pages of a mapping to where the kernel finds room; the mapping stays, empty, so that nobody else's comes to lie there.
std::uint64_t put_aside(Range range) {
  const long address = ::syscall(SYS_mremap, range.begin, range.bytes(), range.bytes(), MREMAP_MAYMOVE | dont_unmap, 0);
  return address == -1 ? 0 : static_cast<std::uint64_t>(address);
}

bool put_in_place(std::uint64_t aside, Range range) {
  return ::syscall(SYS_mremap, aside, range.bytes(), range.bytes(), MREMAP_MAYMOVE | MREMAP_FIXED, range.begin) != -1;
}

bool map_private(Range range) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_POPULATE;
  return raw_mmap(range.begin, range.bytes(), read_write, flags, -1, 0) != MAP_FAILED;
}

// Pages that were given back to the system since, or are guarded, might not be had: to be learned here, and not by a signal.
bool can_be_read(Range range) { return ::syscall(SYS_madvise, range.begin, range.bytes(), populate_read) == 0; }

// Of a mapping, which has one protection key: whether this thread may use it so now.
bool allows(std::uint64_t address, int how) { return ::syscall(SYS_madvise, address, page_bytes(), how) == 0; }

}  // namespace

KeptPages::~KeptPages() {
  for (std::size_t i = 0; i < count_; ++i) let_go(kept_[i]);
}

bool KeptPages::move_in(Range range) {
  Kept* const kept = find(range, false);
  std::uint64_t private_pages = 0;
  const bool moved = kept != nullptr && allows(range.begin, populate_read) && allows(kept->aside, populate_write) && replace_by_window(range, kept->aside, private_pages);
  if (moved) kept->aside = 0;
  unmap(range);
  if (!moved) return false;
  moved_in(range);
  keep({range, private_pages, true});
  return true;
}

// On success, or where it failed half way and was undone, the pages that were in place are there or aside; none is lost.
bool KeptPages::replace_by_window(Range range, std::uint64_t aside, std::uint64_t& private_pages) {
  raw_copy(aside, range.begin, range.bytes());
  private_pages = put_aside(range);
  if (private_pages == 0) return false;
  if (put_in_place(aside, range)) return true;
  if (!put_in_place(private_pages, range)) {
    // The window has a copy, but so that the caller can count on nothing having happened:
    if (map_private(range)) raw_copy(range.begin, private_pages, range.bytes());
    raw_munmap(private_pages, range.bytes());
  }
  return false;
}

void KeptPages::moved_in(Range range) {
  for (std::size_t i = count_; i-- > 0;)
    if (!kept_[i].registered && kept_[i].range.begin >= range.begin && kept_[i].range.end <= range.end) erase(i);
}

bool KeptPages::move_out(Range range) {
  if (range.bytes() < bytes_min || !window_.intact() || !can_be_read(range)) return false;
  std::uint64_t private_pages = 0;
  if (Kept* const kept = find(range, true)) private_pages = std::exchange(kept->aside, 0);
  unmap(range);
  if (private_pages != 0 && !allows(private_pages, populate_write)) raw_munmap(std::exchange(private_pages, 0), range.bytes());
  if (private_pages != 0) raw_copy(private_pages, range.begin, range.bytes());
  const std::uint64_t aside = put_aside(range);
  bool moved = aside != 0 && private_pages != 0 && put_in_place(private_pages, range);
  if (!moved) {
    if (private_pages != 0) raw_munmap(private_pages, range.bytes());
    if (aside == 0) return false;
    moved = map_private(range);
    if (moved) raw_copy(range.begin, aside, range.bytes());
  }
  if (!moved) {
    // The commit limit is checked late. The contents are still in the window.
    (void)window_.map(range, read_write);
    raw_munmap(aside, range.bytes());
    return false;
  }
  // The application may have taken back meanwhile what it had said of forks.
  ::syscall(SYS_madvise, range.begin, range.bytes(), MADV_DOFORK);
  keep({range, aside, false});
  return true;
}

void KeptPages::unmap(Range range) {
  for (std::size_t i = count_; i-- > 0;) {
    if (!kept_[i].range.overlaps(range)) continue;
    let_go(kept_[i]);
    if (kept_[i].registered) erase(i);
  }
}

void KeptPages::drop_private() {
  for (std::size_t i = count_; i-- > 0;)
    if (kept_[i].registered) drop(i);
}

void KeptPages::keep(Kept kept) {
  while (count_ == count_max || (count_ > 0 && bytes_ + kept.range.bytes() > bytes_max)) drop(0);
  kept_[count_++] = kept;
  bytes_ += kept.range.bytes();
}

void KeptPages::drop(std::size_t index) {
  Kept dropped = kept_[index];
  erase(index);
  let_go(dropped);
  if (dropped.registered) return;
  for (std::size_t i = 0; i < count_; ++i)  // their pages go, too
    if (!kept_[i].registered && kept_[i].range.overlaps(dropped.range)) let_go(kept_[i]);
  for (std::uint64_t at = dropped.range.begin; at < dropped.range.end;) {
    const Range used = resident_->first_overlap({at, dropped.range.end});
    const std::uint64_t free_end = used.empty() ? dropped.range.end : used.begin;
    if (at < free_end) (void)window_.punch({at, free_end});
    at = used.empty() ? dropped.range.end : used.end;
  }
}

void KeptPages::erase(std::size_t index) {
  bytes_ -= kept_[index].range.bytes();
  std::move(kept_ + index + 1, kept_ + count_--, kept_ + index);
}

KeptPages::Kept* KeptPages::find(Range range, bool registered) {
  const auto found = std::find_if(kept_, kept_ + count_, [&](const Kept& kept) {
    return kept.range == range && kept.registered == registered && kept.aside != 0;
  });
  return found == kept_ + count_ || !is_there(*found) ? nullptr : found;
}

void KeptPages::let_go(Kept& kept) {
  if (kept.aside != 0 && is_there(kept)) raw_munmap(kept.aside, kept.range.bytes());
  kept.aside = 0;
}

// Our tables never prove a mapping: an application may have put one of its own there.
bool KeptPages::is_there(const Kept& kept) const {
  return kept.registered ? private_pages_are_at(kept.aside, kept.range.bytes()) : window_is_at(kept.aside, kept.range);
}

bool KeptPages::window_is_at(std::uint64_t address, Range range) const {
  auto reader = VmaReader::open();
  const auto vma = reader ? reader->at_or_after(address) : Result<Vma>(reader.error());
  return vma && window_.holds(*vma) && vma->protection() == read_write && vma->range.begin <= address &&
         vma->range.end >= address + range.bytes() && vma->file_offset + (address - vma->range.begin) == range.begin;
}

bool KeptPages::private_pages_are_at(std::uint64_t address, std::uint64_t bytes) const {
  auto reader = VmaReader::open();
  const auto vma = reader ? reader->at_or_after(address) : Result<Vma>(reader.error());
  return vma && !vma->shared && vma->file.inode == 0 && vma->protection() == read_write && vma->range.begin <= address &&
         vma->range.end >= address + bytes;
}

}  // namespace vrdma::memory
