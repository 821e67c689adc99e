// How the engine reaches a range of this process's memory (DESIGN.md D6): the one place that knows.
// Any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "guest_lib/attachment.hpp"
#include "vrdma/control.hpp"

namespace vrdma::guest {

// The extents that cover [address, address + bytes), in order. EFAULT: not all of it is mapped with the rights that `access`
// (enum ibv_access_flags) needs.
Result<std::vector<control::Extent>> reach(Attachment& attachment, std::uint64_t address, std::uint64_t bytes,
                                           std::uint32_t access);

}  // namespace vrdma::guest
