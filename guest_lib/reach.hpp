// How the engine reaches a range of this process's memory (DESIGN.md D6): the one place that knows. The pages move, or their file
// is announced, or they stay where they are and are reached through the process.
//
// One thread at a time per attachment (its registration mutex is held).
#pragma once

#include <cstdint>
#include <vector>

#include "guest_lib/attachment.hpp"
#include "guest_lib/memory/manager.hpp"

namespace vrdma::guest {

struct Reached {
  memory::Registration registration;     // to be given back as it is
  std::vector<control::Extent> extents;  // the same with the service's numbers of their backings
};

// Before any registration: the manager's first tables must not come to lie in a hole of the memory that is about to be registered.
void prepare_reach();

// The extents that cover [address, address + bytes), in order. EFAULT: not all of it is mapped with the rights that `access`
// (enum ibv_access_flags) needs. On demand nothing needs to be mapped: all is reached through the process, whatever it will be.
Result<Reached> reach(Attachment& attachment, std::uint64_t address, std::uint64_t bytes, std::uint32_t access);

// The service has confirmed that it no longer touches the memory, or is gone.
void unreach(memory::Registration&& registration);

}  // namespace vrdma::guest
