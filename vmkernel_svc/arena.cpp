#include "vmkernel_svc/arena.hpp"

#include <algorithm>
#include <cstring>

namespace vrdma::svc {

namespace {
constexpr std::uint64_t page_bytes = 4096;
}

Result<Arena> Arena::create(std::uint64_t bytes) {
  auto segment = vmci::Segment::create("vrdma-arena", bytes);
  if (!segment) return segment.error();
  Arena arena = over(std::move(*segment));
  arena.fresh_from_ = 0;
  return arena;
}

Arena Arena::over(vmci::Segment segment) {
  Arena arena;
  arena.segment_ = std::move(segment);
  arena.free_.emplace(0, arena.segment_.bytes());
  arena.fresh_from_ = arena.segment_.bytes();
  return arena;
}

Result<std::uint64_t> Arena::allocate(std::uint64_t bytes) {
  const std::uint64_t wanted = (bytes + page_bytes - 1) / page_bytes * page_bytes;
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (range->second < wanted) continue;
    const auto [offset, size] = *range;
    free_.erase(range);
    if (size > wanted) free_.emplace(offset + wanted, size - wanted);
    used_.emplace(offset, wanted);
    used_bytes_ += wanted;
    if (offset < fresh_from_) std::memset(segment_.data() + offset, 0, std::min(wanted, fresh_from_ - offset));
    fresh_from_ = std::max(fresh_from_, offset + wanted);
    return offset;
  }
  return Errno{ENOMEM};
}

void Arena::release(std::uint64_t offset) {
  const auto used = used_.find(offset);
  if (used == used_.end()) return;
  std::uint64_t bytes = used->second;
  used_.erase(used);
  used_bytes_ -= bytes;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

}  // namespace vrdma::svc
