#include "guest_lib/memory/vma_budget.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>

namespace vrdma::memory {
namespace {

std::uint64_t max_mappings() {
  std::uint64_t value = 65530;  // the kernel's default
  const vmci::UniqueFd file(::open("/proc/sys/vm/max_map_count", O_RDONLY | O_CLOEXEC));
  char text[32];
  const ssize_t got = file ? ::read(file.get(), text, sizeof text) : 0;
  if (got > 0) std::from_chars(text, text + got, value);
  return value;
}

}  // namespace

bool VmaBudget::take() {
  if (moves_left_ > 0) {
    --moves_left_;
    return !exhausted_;
  }
  moves_left_ = recount_after;
  if (limit_ == 0) limit_ = max_mappings() / 2;
  const auto count = count_mappings();
  exhausted_ = !count || *count + 2 * recount_after > limit_;
  return !exhausted_;
}

}  // namespace vrdma::memory
