#include "guest_lib/memory/fork_guard.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "guest_lib/memory/raw_map.hpp"

namespace vrdma::memory {
namespace {

constexpr std::uint64_t small_bytes = 64 << 10;

void* map_private(std::size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

// mincore(2) tells it without a descriptor.
bool is_hole(std::uint64_t page) {
  unsigned char in_core;
  return ::syscall(SYS_mincore, page, page_bytes(), &in_core) != 0 && errno == ENOMEM;
}

}  // namespace

bool ForkGuard::reserve(std::size_t count) {
  if (count <= piece_capacity_) return true;
  const std::size_t capacity = std::max<std::size_t>(count, std::max<std::size_t>(64, piece_capacity_ * 2));
  // The system call: mremap() is ours (interpose.cpp), and waits for the lock that the thread that forks holds.
  void* pieces = piece_capacity_ == 0 ? map_private(capacity * sizeof(Piece))
                                      : reinterpret_cast<void*>(::syscall(SYS_mremap, pieces_, piece_capacity_ * sizeof(Piece),
                                                                          capacity * sizeof(Piece), MREMAP_MAYMOVE));
  if (pieces == nullptr || pieces == MAP_FAILED) return false;
  pieces_ = static_cast<Piece*>(pieces);
  piece_capacity_ = capacity;
  return true;
}

void ForkGuard::list_pieces(const Window& window, const PageCounts& resident) {
  auto reader = VmaReader::open();
  const auto list = [this](Range piece, int protection, bool seen) {
    if (!reserve(piece_count_ + 1)) return false;
    pieces_[piece_count_++] = {piece, copied_bytes_, static_cast<std::uint64_t>(protection), seen};
    copied_bytes_ += piece.bytes();
    return true;
  };
  const Range bounds = resident.bounds();
  for (std::uint64_t at = bounds.begin; at < bounds.end;) {
    const Range run = resident.first_overlap({at, bounds.end});
    if (run.empty()) return;
    const auto vma = reader ? reader->at_or_after(run.begin) : Result<Vma>(reader.error());
    if (!vma) {
      if (vma.error() == Errno{ENOENT} || !list(run, read_write, false)) return;
      at = run.end;
      continue;
    }
    at = std::max(run.begin, vma->range.begin);
    if (vma->range.begin >= run.end) {
      at = run.end;
      continue;
    }
    // Pages that the application has unmapped or replaced meanwhile are not ours to bring back.
    const Range piece = run.clipped_to(vma->range);
    if (window.holds_in_place(*vma) && !list(piece, vma->protection(), true)) return;
    at = piece.end;
  }
}

void ForkGuard::copy(const Window& window, const PageCounts& resident, bool inherited) {
  inherited_ = false;
  piece_count_ = 0;
  copied_bytes_ = 0;
  copies_ = nullptr;
  if (!window || resident.empty()) return;
  list_pieces(window, resident);
  if (copied_bytes_ == 0) return;
  copies_ = static_cast<char*>(map_private(copied_bytes_));
  if (copies_ == nullptr) return;
  inherited_ = inherited && std::all_of(pieces_, pieces_ + piece_count_, [](const Piece& piece) { return piece.seen; });
  if (inherited_) {  // before the copies, which are to be as of the fork
    advise(window, MADV_DOFORK);
    ::syscall(SYS_madvise, copies_, copied_bytes_, populate_write);
  }
  // Small pieces last: what else is in their pages may be an allocator's, whose other variables are the child's as of the fork itself.
  for (const bool small : {false, true}) {
    for (std::size_t i = 0; i < piece_count_ && copies_ != nullptr; ++i) {
      if ((pieces_[i].range.bytes() <= small_bytes) != small || window.copy_to(copies_ + pieces_[i].copy_offset, pieces_[i].range)) continue;
      ::munmap(copies_, copied_bytes_);
      copies_ = nullptr;
    }
  }
}

// What is still mapped of the pieces: meanwhile another thread may have put something of its own there.
void ForkGuard::advise(const Window& window, int advice) const {
  auto reader = VmaReader::open();
  for (std::size_t i = 0; i < piece_count_ && reader; ++i) {
    const Range piece = pieces_[i].range;
    for (std::uint64_t at = piece.begin; at < piece.end;) {
      const auto vma = reader->at_or_after(at);
      if (!vma) return;
      const Range part = Range{at, piece.end}.clipped_to(vma->range);
      if (!part.empty() && window.holds_in_place(*vma)) ::syscall(SYS_madvise, part.begin, part.bytes(), advice);
      at = vma->range.end;
    }
  }
}

void ForkGuard::end(const Window& window) {
  if (inherited_) advise(window, MADV_DONTFORK);
  discard();
}

void ForkGuard::clear(Range range) const {
  for (std::size_t i = 0; i < piece_count_ && copies_ != nullptr; ++i) {
    if (!pieces_[i].range.overlaps(range)) continue;
    const Range part = range.clipped_to(pieces_[i].range);
    ::syscall(SYS_madvise, copies_ + pieces_[i].copy_offset + (part.begin - pieces_[i].range.begin), part.bytes(), MADV_DONTNEED);
  }
}

void ForkGuard::discard() {
  if (copies_ != nullptr) ::munmap(copies_, copied_bytes_);
  if (pieces_ != nullptr) ::munmap(pieces_, piece_capacity_ * sizeof(Piece));
  pieces_ = nullptr;
  copies_ = nullptr;
  piece_count_ = piece_capacity_ = 0;
}

void ForkGuard::install() {
  for (std::size_t i = 0; i < piece_count_; ++i) {
    const Piece& piece = pieces_[i];
    const Range whole = piece.range;
    if (piece.seen) install(whole, piece.copy_offset, static_cast<int>(piece.protection));
    for (std::uint64_t at = whole.begin, end; !piece.seen && at < whole.end; at = end) {
      const bool hole = is_hole(at);
      for (end = at + page_bytes(); end < whole.end && is_hole(end) == hole;) end += page_bytes();
      if (hole) install({at, end}, piece.copy_offset + (at - whole.begin), read_write);
    }
  }
  copies_ = nullptr;  // every piece of it has moved away
  discard();
}

void ForkGuard::install(Range range, std::uint64_t copy_offset, int protection) {
  if (copies_ == nullptr ||
      ::syscall(SYS_mremap, copies_ + copy_offset, range.bytes(), range.bytes(), MREMAP_MAYMOVE | MREMAP_FIXED, range.begin) == -1) {
    raw_mmap(range.begin, range.bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return;
  }
  if (protection != read_write) raw_mprotect(range.begin, range.bytes(), protection);
}

}  // namespace vrdma::memory
