// Finds a descriptor of the file behind a shared mapping, so that the file can be passed to the service.
//
// Any thread; allocates. Takes only what can never shrink under the service: memfds (hugetlb ones too), which it seals
// against shrinking where the application has not. tmpfs files from shm_open, System V segments and regular files
// cannot be sealed.
#pragma once

#include <cstdint>

#include "guest_lib/memory/vma.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::memory {

struct ShareableFile {
  vmci::UniqueFd fd;  // a duplicate
  std::uint64_t bytes;
};
// ENOENT: no descriptor of this process names it for reading and writing. EPERM: it cannot be sealed.
Result<ShareableFile> open_shareable(const Vma& vma);

}  // namespace vrdma::memory
