// For the mapping of memory that is sparse on purpose in a program that has all it maps filled and locked (mlockall(2) with
// MCL_FUTURE, as programs that care for latency do): the kernel would bring a whole arena into being.
//
// Any thread. What other threads map meanwhile is locked as it is touched, too, instead of at once.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "guest_lib/memory/vma.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace vrdma::guest {

class SparseMapping {
 public:
  SparseMapping() : relaxed_(filled_at_once() && ::mlockall(MCL_FUTURE | MCL_ONFAULT) == 0) {}
  ~SparseMapping() {
    if (relaxed_) ::mlockall(MCL_FUTURE);
  }
  SparseMapping(const SparseMapping&) = delete;
  SparseMapping& operator=(const SparseMapping&) = delete;

 private:
  // The kernel tells nobody what the flags are: whether a new page is locked, and there before it was touched, does. mincore(2) would
  // say the latter at once, but is not in systemd's @system-service: who uses it is killed in the many services that have that filter.
  static bool filled_at_once() {
    void* const page = ::mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return false;
    const bool locked = ::syscall(SYS_madvise, page, 1, MADV_DONTNEED) != 0;
    const bool filled = locked && is_present(page);
    ::munmap(page, 1);
    return filled;
  }

  // Where nobody says, it is: few ask for MCL_ONFAULT.
  static bool is_present(const void* page) {
    constexpr std::uint64_t present = 1ull << 63;
    std::uint64_t entry = present;
    const vmci::UniqueFd pages(static_cast<int>(::syscall(SYS_openat, AT_FDCWD, "/proc/self/pagemap", O_RDONLY | O_CLOEXEC)));
    const std::uint64_t at = reinterpret_cast<std::uint64_t>(page) / memory::page_bytes() * sizeof(entry);
    if (!pages || ::syscall(SYS_pread64, pages.get(), &entry, sizeof(entry), at) != static_cast<long>(sizeof(entry))) return true;
    return (entry & present) != 0;
  }

  bool relaxed_;
};

}  // namespace vrdma::guest
