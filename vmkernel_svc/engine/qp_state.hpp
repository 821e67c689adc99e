// Which changes of a queue pair are legal, as a table, and the one function that carries them out. IBA 10.3.1, table 91; the same
// rules as the Linux kernel's ib_modify_qp_is_ok. Pure: no ports, no side effects but on the attributes given.
#pragma once

#include "vmkernel_svc/engine/types.hpp"
#include "vrdma/attributes.hpp"
#include "vrdma/result.hpp"

namespace vrdma::engine {

struct PortLimits {
  std::uint32_t pkey_count;
  std::uint32_t gid_count;
  std::uint32_t max_mtu;  // enum ibv_mtu
  std::uint32_t max_rd_atomic;
  bool ethernet;
  // Which entries of the GID table are filled, a bit each.
  std::uint32_t gids_present;
};

// Applies `wanted`, as far as `mask` names it, to `attributes` (whose `state` is the current one). EINVAL, and nothing is
// changed, when the transition, the mask or a value is not legal.
Status modify(QpType type, QpAttributes& attributes, const QpAttributes& wanted, std::uint32_t mask, const PortLimits& limits);

// The masks of one transition; legal is false where there is none. For tests and messages.
struct TransitionMasks {
  bool legal;
  std::uint32_t required, optional;
};
TransitionMasks transition_masks(QpType type, QpState from, QpState to);

}  // namespace vrdma::engine
