// For the mapping of memory that is sparse on purpose in a program that has all it maps filled and locked (mlockall(2) with
// MCL_FUTURE, as programs that care for latency do): the kernel would bring a whole arena into being.
//
// Any thread. What other threads map meanwhile is locked as it is touched, too, instead of at once.
#pragma once

#include <sys/mman.h>

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
  // The kernel tells nobody what the flags are: whether a new page is there before it was touched does.
  static bool filled_at_once() {
    void* const page = ::mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return false;
    unsigned char resident = 0;
    const bool seen = ::mincore(page, 1, &resident) == 0;
    ::munmap(page, 1);
    return seen && (resident & 1) != 0;
  }

  bool relaxed_;
};

}  // namespace vrdma::guest
