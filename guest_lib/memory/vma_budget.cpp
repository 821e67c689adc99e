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
  moves_left_ = recount_after;
  const auto count = count_mappings();
  if (limit_ == 0 && count) {
    limit_ = max_mappings() / 2;
    small_limit_ = mappings_are_read() ? std::min(limit_, *count + grown_max) : limit_;
  }
  fits_ = count && *count + 2 * recount_after <= limit_;
  small_fits_ = fits_ && *count + 2 * recount_after <= small_limit_;
}

}  // namespace vrdma::memory
