// Pages of this process held where they are, for somebody who reaches them by their physical addresses (DESIGN.md D11): as the
// registered buffers of an io_uring, which stay for as long as anybody has the ring open. Nothing is ever submitted to it.
//
// Any thread. mlock would not do: it keeps pages in memory, not in place.
#pragma once

#include <cstddef>
#include <span>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vmci {

// The ring, disabled (IORING_SETUP_R_DISABLED): whoever takes it over can forbid that the pages are let go. All whole pages around
// the memory are pinned, and come into being. EFAULT: not all of it is there, or it cannot be written; EOPNOTSUPP: a kind of memory
// that cannot be pinned (mapped files); ENOSYS, EPERM: no io_uring here; ENOMEM: more than the limit of locked memory, or than
// this machine can have.
vrdma::Result<UniqueFd> pin_pages(std::span<const std::byte> memory);

}  // namespace vmci
