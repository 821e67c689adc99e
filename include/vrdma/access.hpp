// What may be done to a region, and by whom: IBA 10.6.3.1, by the numbers of enum ibv_access_flags, which guests and the service pass on as
// they are.
#pragma once

#include <cstdint>

namespace vrdma {

enum Access : std::uint32_t {
  access_local_read = 0,
  access_local_write = 1,
  access_remote_write = 2,
  access_remote_read = 4,
  access_remote_atomic = 8,
  access_remote_any = access_remote_write | access_remote_read | access_remote_atomic,
  access_mw_bind = 16,
  access_zero_based = 32,
  access_on_demand = 64,
  access_hugetlb = 128,
  access_known = 255,  // all of these
};

// Who may write from afar must be allowed to write here.
constexpr bool access_is_consistent(std::uint32_t access) {
  return (access & (access_remote_write | access_remote_atomic)) == 0 || (access & access_local_write) != 0;
}

}  // namespace vrdma
