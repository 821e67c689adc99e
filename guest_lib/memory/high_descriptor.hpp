// Descriptors of ours, out of the way of programs that expect the lowest numbers, close those that they count on, or use select().
#pragma once

#include <fcntl.h>

#include "vmci_channel/unique_fd.hpp"

namespace vrdma::memory {

constexpr int first_high_descriptor = 600;

// Where the limit of descriptors allows it, else with a low number. Empty: as fcntl(2).
inline vmci::UniqueFd high_duplicate(int fd) {
  vmci::UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, first_high_descriptor));
  if (!copy) copy.reset(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  return copy;
}
inline void move_high(vmci::UniqueFd& fd) {
  if (const int high = ::fcntl(fd.get(), F_DUPFD_CLOEXEC, first_high_descriptor); high >= 0) fd.reset(high);
}

}  // namespace vrdma::memory
