// The lanes of a completion queue: one for each direction of each queue pair that completes there, in shared memory. All under the lock of the
// completion queue.
//
// Hot lanes are looked at directly; the others announce themselves in the CQ's bitmap. Writers skip the bitmap for lanes that they see in
// CqShared::hot, hence the promotion protocol in lanes.cpp.
#pragma once

#include "guest_lib/objects.hpp"
#include "vmci_channel/stamp.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

static_assert(IBV_WC_GENERAL_ERR == int(WcStatus::general_err) && IBV_WC_RETRY_EXC_ERR == int(WcStatus::retry_exc_err) &&
              IBV_WC_REM_ABORT_ERR == int(WcStatus::rem_abort_err) && IBV_WC_FETCH_ADD == int(WcOpcode::fetch_add) &&
              IBV_WC_RECV_RDMA_WITH_IMM == int(WcOpcode::recv_rdma_with_imm) && IBV_WC_GRH == int(wc_grh) &&
              IBV_WC_WITH_IMM == int(wc_with_imm));

inline void convert(const Cqe& from, std::uint32_t qpn, ibv_wc& to) {
  const CqeState state = unpack_cqe_state(from.state);
  const bool success = state.status == WcStatus::success;
  to.wr_id = from.wr_id;
  to.status = static_cast<ibv_wc_status>(state.status);
  to.opcode = static_cast<ibv_wc_opcode>(state.opcode);
  to.vendor_err = success ? 0 : from.imm_data;
  to.byte_len = from.byte_len;
  to.imm_data = from.imm_data;
  to.qp_num = qpn != 0 ? qpn : from.src_qp;
  to.src_qp = from.src_qp;
  to.wc_flags = state.flags & ~static_cast<unsigned>(wc_solicited | wc_stamped);
  to.pkey_index = 0;
  to.slid = from.slid;
  to.sl = from.sl;
  to.dlid_path_bits = 0;
}

// Whether it says when it was written (vmci_channel/stamp.hpp).
inline bool has_stamp(const Cq& cq, const Cqe& entry) { return cq.timed || (unpack_cqe_state(entry.state).flags & wc_stamped) != 0; }

// The time of now as this queue's stamps have it.
inline std::uint64_t stamp_for(Cq& cq) { return cq.timed ? cq.clock_ns() : vmci::stamp_now(); }

// A poll may find entries that are written after it has read the clock: as far beyond that.
constexpr std::uint64_t stamps_ahead_max = std::uint64_t{1} << 30;
// As times: by as much as the clock that was compared once (know_clock in cq_ex.cpp) has gone wrong meanwhile, too; a machine's is another than its host's.
constexpr std::uint64_t times_ahead_max = std::uint64_t{1} << 37;
// The whole of a stamp's time: the last that is not later than `latest`.
constexpr std::uint64_t time_of_stamp(std::uint64_t stamp, std::uint64_t latest) {
  return latest - ((latest - stamp) & ((std::uint64_t{1} << cqe_stamp_bits) - 1));
}

// Entries that were taken from a lane, and are not given back to its writer yet.
struct Taken {
  int entries = 0;
  std::uint32_t queue_position = 0;  // of the last one
};

inline void take(Lane& lane, const Cqe& entry, ibv_wc& wc, Taken& taken) {
  convert(entry, lane.qpn, wc);
  if (lane.timed != nullptr && &wc == &lane.timed->current) [[unlikely]]
    lane.timed->current_time_ns = time_of_stamp(stamp_of(entry, lane.send != nullptr), lane.timed->clock_ns() + times_ahead_max);
  taken.queue_position = entry.queue_position;
  ++taken.entries;
  lane.reader.pop();
}

inline void give_back(Lane& lane, const Taken& taken) {
  if (taken.entries == 0) return;
  VRDMA_CRASH_POINT("guest.poll.before_consumed");
  if (lane.send != nullptr) {
    lane.send->completed_up_to(taken.queue_position);
  } else {
    lane.receive->completed(static_cast<std::uint32_t>(taken.entries));
  }
  // L3: pairs with the service's acquire in DirectDesk::report, which looks for completions that were not told of from here on.
  std::atomic_ref(lane.header->creator.consumed).store(lane.reader.position(), std::memory_order_release);
  VRDMA_CRASH_POINT("guest.poll.lane_consumed");
}

// Something was taken from the lane: those that complete often become hot.
void note_visit(Cq& cq, Lane& lane);

// The completions of several queue pairs, the oldest first.
int poll_in_order(Cq& cq, int room, ibv_wc* wc);
bool holds_more_in_order(Cq& cq);
void begin_order(Cq& cq);
// The lane is looked at anew by the next poll; or is not in the order any more.
void line_up(Cq& cq, Lane& lane);
void step_out(Cq& cq, Lane& lane);

}  // namespace vrdma::guest
