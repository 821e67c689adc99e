#include "guest_lib/memory/remap.hpp"

#include <errno.h>

#include <algorithm>

#include "guest_lib/memory/raw_map.hpp"
#include "guest_lib/memory/vma.hpp"

namespace vrdma::memory {

namespace {

void* raw_mremap(std::uint64_t address, std::uint64_t old_bytes, std::uint64_t new_bytes, int flags, std::uint64_t target) {
  return reinterpret_cast<void*>(::syscall(SYS_mremap, address, old_bytes, new_bytes, flags, target));
}

void* refused(int error) {
  errno = error;
  return MAP_FAILED;
}

// What it is protected by, where it is private anonymous memory without a gap and alike throughout; else -1.
int common_protection(Range range) {
  auto reader = VmaReader::open();
  int protection = -1;
  for (std::uint64_t at = range.begin; reader && at < range.end;) {
    const auto vma = reader->at_or_after(at);
    if (!vma || vma->range.begin > at || !vma->private_anonymous() || (protection != -1 && vma->protection() != protection)) return -1;
    protection = vma->protection();
    at = vma->range.end;
  }
  return protection;
}

// Mapping by mapping. How many bytes arrived: fewer than there are where the kernel wants no more mappings.
std::uint64_t move_pieces(Range from, std::uint64_t to) {
  for (std::uint64_t at = from.begin; at < from.end;) {
    auto reader = VmaReader::open();  // what it has read ahead is not true any more
    const auto vma = reader ? reader->at_or_after(at) : Result<Vma>(reader.error());
    if (!vma || vma->range.begin > at) return at - from.begin;
    const std::uint64_t end = std::min(vma->range.end, from.end);
    if (raw_mremap(at, end - at, end - at, MREMAP_MAYMOVE | MREMAP_FIXED, to + (at - from.begin)) == MAP_FAILED) return at - from.begin;
    at = end;
  }
  return from.bytes();
}

void* map(std::uint64_t address, std::uint64_t bytes, int protection, int flags) {
  return raw_mmap(address, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

void* remap_pieces(Range old, std::uint64_t new_bytes, int flags, std::uint64_t target, int protection) {
  if ((flags & MREMAP_FIXED) == 0) {
    if (new_bytes <= old.bytes()) {
      if (new_bytes < old.bytes()) raw_munmap(old.begin + new_bytes, old.bytes() - new_bytes);
      return reinterpret_cast<void*>(old.begin);
    }
    void* const behind = map(old.end, new_bytes - old.bytes(), protection, MAP_FIXED_NOREPLACE);
    if (behind == reinterpret_cast<void*>(old.end)) return reinterpret_cast<void*>(old.begin);
    if (behind != MAP_FAILED) raw_munmap(reinterpret_cast<std::uint64_t>(behind), new_bytes - old.bytes());  // before Linux 4.17: somewhere else
    if ((flags & MREMAP_MAYMOVE) == 0) return refused(ENOMEM);
  }
  void* const fresh = map(target, new_bytes, protection, (flags & MREMAP_FIXED) != 0 ? MAP_FIXED : 0);
  if (fresh == MAP_FAILED) return MAP_FAILED;
  const auto there = reinterpret_cast<std::uint64_t>(fresh);
  const Range moved{old.begin, old.begin + std::min(old.bytes(), new_bytes)};
  const std::uint64_t arrived = move_pieces(moved, there);
  if (arrived < moved.bytes()) {
    if (arrived != 0) move_pieces({there, there + arrived}, old.begin);
    raw_munmap(there, new_bytes);
    return refused(ENOMEM);
  }
  if (moved.end < old.end) raw_munmap(moved.end, old.end - moved.end);
  return fresh;
}

}  // namespace

void* remap(Mremap* next, void* address, std::size_t old_bytes, std::size_t new_bytes, int flags, void* target) {
  const auto begin = reinterpret_cast<std::uint64_t>(address);
  const int before = errno;
  void* const result = next != nullptr ? next(address, old_bytes, new_bytes, flags, target)
                                       : raw_mremap(begin, old_bytes, new_bytes, flags, reinterpret_cast<std::uint64_t>(target));
  if (result != MAP_FAILED || errno != EFAULT) [[likely]] return result;
  const Range old{begin, page_ceiling(begin + old_bytes)};
  const bool known = (flags & ~(MREMAP_MAYMOVE | MREMAP_FIXED)) == 0 && (flags & MREMAP_FIXED ? flags & MREMAP_MAYMOVE : true);
  if (!known || old.empty() || new_bytes == 0 || page_ceiling(new_bytes) < new_bytes) return refused(EFAULT);
  // Where it is to be shrunk and moved, some kernels (6.1) have unmapped its end by now: only what moves has to be whole.
  const std::uint64_t wanted = page_ceiling(new_bytes), whole = (flags & MREMAP_FIXED) != 0 ? std::min(wanted, old.bytes()) : old.bytes();
  const int protection = common_protection({old.begin, old.begin + whole});
  if (protection == -1) return refused(EFAULT);
  void* const done = remap_pieces(old, wanted, flags, (flags & MREMAP_FIXED) != 0 ? reinterpret_cast<std::uint64_t>(target) : 0, protection);
  if (done != MAP_FAILED) errno = before;
  return done;
}

}  // namespace vrdma::memory
