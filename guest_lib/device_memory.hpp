// Device memory (ibv_alloc_dm(3)): memory that a program asks the adapter for and reaches by ibv_memcpy_to_dm, ibv_memcpy_from_dm and
// regions. This adapter has none but its host's, so it is pages of the process, of which a region is a region like any other.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

namespace vrdma::guest {

constexpr std::uint64_t device_memory_bytes_max = 64 << 20;  // at once; of a real adapter it is all there is

// EINVAL: no bytes, an unknown comp_mask, or an alignment beyond a page's. ENOMEM: more than device_memory_bytes_max, or none left.
ibv_dm* alloc_dm(ibv_context* context, ibv_alloc_dm_attr* wanted);
int free_dm(ibv_dm* dm);  // EBUSY: it has regions
// EINVAL: outside of it, or without IBV_ACCESS_ZERO_BASED: its addresses are offsets.
ibv_mr* reg_dm_mr(ibv_pd* pd, ibv_dm* dm, std::uint64_t offset, std::size_t bytes, unsigned int access);

}  // namespace vrdma::guest
