// Pages of this process held where they are, for a service that reaches them by their physical addresses (DESIGN.md D11): as the
// registered buffers of an io_uring, which stay for as long as anybody has the ring open. Nothing is ever submitted to it.
//
// Any thread. mlock would not do: it keeps pages in memory, not in place.
#pragma once

#include <cstdint>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::memory {

// The ring, disabled (IORING_SETUP_R_DISABLED): whoever takes it over can forbid that the pages are let go. All whole pages around
// [address, address + bytes) are pinned. EFAULT: not all of it is there, or it cannot be written; EOPNOTSUPP: a kind of memory
// that cannot be pinned (mapped files); ENOSYS, EPERM: no io_uring here; ENOMEM: more than the limit of locked memory.
Result<vmci::UniqueFd> pin_pages(std::uint64_t address, std::uint64_t bytes);

}  // namespace vrdma::memory
