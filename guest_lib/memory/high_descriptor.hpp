// Descriptors of ours, out of the way of programs that expect the lowest numbers, close those that they count on, or use select().
#pragma once

#include <fcntl.h>

#include "guest_lib/own_fd.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace vrdma::memory {

// Where the limit of descriptors allows it, else with a low number. Empty: as fcntl(2).
inline vmci::UniqueFd high_duplicate(int fd) {
  vmci::UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, OwnFd::first_high));
  if (!copy) copy.reset(::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  return copy;
}

}  // namespace vrdma::memory
