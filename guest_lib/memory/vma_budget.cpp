#include "guest_lib/memory/vma_budget.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "guest_lib/memory/raw_file.hpp"

namespace vrdma::memory {
namespace {

std::uint64_t max_mappings() {
  std::uint64_t value = 65530;  // the kernel's default
  const vmci::UniqueFd file = raw_open("/proc/sys/vm/max_map_count", O_RDONLY);
  char text[32];
  const ssize_t got = file ? raw_pread(file.get(), text, sizeof text, 0) : 0;
  if (got > 0) std::from_chars(text, text + got, value);
  return value;
}

// Whether each look at a mapping costs as much as there are mappings below it.
bool mappings_are_read() {
  auto reader = VmaReader::open();
  return !reader || !reader->at_or_after(0) || reader->reads_text();
}

}  // namespace

bool VmaBudget::take(std::uint64_t bytes) {
  if (moves_left_ > 0)
    --moves_left_;
  else
    recount();
  return bytes < small_bytes ? small_fits_ : fits_;
}

void VmaBudget::recount() {
  constexpr std::uint64_t mappings_per_move = 2, margin = mappings_per_move * (recount_after + 1);
  const auto count = count_();
  if (limit_ == 0 && count) {
    limit_ = max_mappings() / 2;
    small_limit_ = mappings_are_read() ? std::min(limit_, *count + grown_max) : limit_;
  }
  fits_ = count && *count + margin <= limit_;
  small_fits_ = fits_ && *count + margin <= small_limit_;
  // The program's own mappings count, too: half of what is left is used before another look.
  const std::uint64_t left = fits_ ? (small_fits_ ? small_limit_ : limit_) - *count : 0;
  moves_left_ = fits_ ? std::max(left / 2 / mappings_per_move, recount_after) : refusals_;
  if (small_fits_) {
    refusals_ = recount_after;
  } else {
    moves_left_ = std::min(moves_left_, refusals_);
    if (count) refusals_ = std::min(2 * refusals_, std::max(recount_after, limit_ / 8));
  }
}

}  // namespace vrdma::memory
