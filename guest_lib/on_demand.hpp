// On-demand paging (ibv_reg_mr(3), IBV_ACCESS_ON_DEMAND): regions that name addresses, not pages. What is mapped there when a request
// comes is what it reaches, also in another mapping than at registration; where there is nothing the request fails as it does for a
// deregistered region. Nothing moves, nothing is held: it is all reached through the process (reach.hpp), a few microseconds a message.
//
// Not in virtual machines whose device lends pages: the kernel copies to those on nobody's behalf.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

namespace vrdma::guest {

class Attachment;
struct Mr;

// What an implicit region (address 0, SIZE_MAX bytes) stands for: all addresses, but for those of null pointers.
constexpr std::uint64_t first_address = 4096, address_space_bytes = std::uint64_t{1} << 56;

bool offers_on_demand(const Attachment& attachment);
void report_on_demand(ibv_device_attr_ex& to);

// For ibv_advise_mr, which knows regions by their keys: of one that is new or has changed, and before one ends. No lock is held.
void know_on_demand(const Mr& mr);
void forget_on_demand(const Mr& mr);

// EOPNOTSUPP: unknown advice; EINVAL: unknown flags or no ranges; ENOENT: not a region of this protection domain on demand;
// EFAULT: beyond the region, or nothing is mapped there (ibv_advise_mr(3)).
int advise_mr(ibv_pd* pd, ibv_advise_mr_advice advice, std::uint32_t flags, ibv_sge* ranges, std::uint32_t count);

}  // namespace vrdma::guest
