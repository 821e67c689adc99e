// When a completion is written, for completion queues where several queue pairs complete, or both directions of one: each has a lane of its own, and who polls takes what lies
// in them in the order of these stamps (guest_lib/poll_in_order.cpp).
//
// Whoever caused a completion by what it saw of another (polled it, or got the message that it tells of) stamps later: the processor's counter is
// one for all that share a kernel. Writers are of one kernel always: the service, and posters in direct mode, which virtual machines do not
// have. The counter is read without a fence (waiting for all loads before it costs 40 ns of a SEND's 130), so early by what the processor has in flight:
// that is at most the load by which the other completion was seen, and as long as it takes the line to come from its writer's core, the
// writer's store took after its own stamp to get it from there.
#pragma once

#include <atomic>
#include <cstdint>

#include "vmci_channel/arch.hpp"
#include "vrdma/control.hpp"

namespace vmci {

// As fine as matters, so that 40 bits are some minutes at least.
inline std::uint64_t stamp_now() { return cycles() >> fine_cycle_bits; }

// Said by whoever made the completion queue, once there are several queue pairs, and before the second is connected; or when the only one posts its first receive, before that.
inline bool wants_stamps(const vrdma::control::CqShared& cq) {
  return std::atomic_ref(const_cast<std::uint32_t&>(cq.wants_stamps)).load(std::memory_order_relaxed) != 0;
}

inline void put_stamp(vrdma::Cqe& cqe, vrdma::CqeState& state, bool sent, std::uint64_t stamp) {
  vrdma::set_stamp(cqe, sent, stamp);
  state.flags |= vrdma::wc_stamped;
}

}  // namespace vmci
