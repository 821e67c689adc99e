// What lies in shared memory between a guest and the runner of the engine: work queue entries, completion queue
// entries, and the flag values in them. Everything is fixed-width and little-endian on x86-64 and aarch64 alike;
// a golden-bytes test pins the layout. Numeric values of opcodes, statuses and flags are those of libibverbs
// (guest_lib asserts it), so that the guest converts by a cast.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vrdma/ids.hpp"

namespace vrdma {

template <class T>
concept WireRecord = std::is_standard_layout_v<T> && std::is_trivially_copyable_v<T> &&
                     std::has_unique_object_representations_v<T>;

// enum ibv_wr_opcode. IBA 9.2.1; the numbers are an agreement with libibverbs.
enum class WrOpcode : std::uint8_t {
  rdma_write = 0,
  rdma_write_with_imm = 1,
  send = 2,
  send_with_imm = 3,
  rdma_read = 4,
  atomic_cmp_and_swp = 5,
  atomic_fetch_and_add = 6,
  // Of memory windows (WindowOperand).
  local_inv = 7,
  bind_mw = 8,
  send_with_inv = 9,  // imm_data: the key
  atomic_write = 15,
  // Only in receive queues; never a value of ibv_wr_opcode.
  receive = 0x7f,
};

enum WrFlag : std::uint8_t {  // 7 bits in the control word
  wr_fence = 1,               // IBV_SEND_FENCE
  wr_signaled = 2,            // IBV_SEND_SIGNALED (or sq_sig_all, resolved by the guest)
  wr_solicited = 4,           // IBV_SEND_SOLICITED
  wr_inline = 8,              // IBV_SEND_INLINE: `count` is payload bytes, not SGEs
};

// enum ibv_wc_status
enum class WcStatus : std::uint8_t {
  success = 0,
  loc_len_err = 1,
  loc_qp_op_err = 2,
  loc_eec_op_err = 3,
  loc_prot_err = 4,
  wr_flush_err = 5,
  mw_bind_err = 6,
  bad_resp_err = 7,
  loc_access_err = 8,
  rem_inv_req_err = 9,
  rem_access_err = 10,
  rem_op_err = 11,
  retry_exc_err = 12,
  rnr_retry_exc_err = 13,
  rem_abort_err = 16,
  fatal_err = 19,
  resp_timeout_err = 20,
  general_err = 21,
};

// enum ibv_wc_opcode
enum class WcOpcode : std::uint8_t {
  send = 0,
  rdma_write = 1,
  rdma_read = 2,
  comp_swap = 3,
  fetch_add = 4,
  bind_mw = 5,
  local_inv = 6,
  atomic_write = 9,
  recv = 128,
  recv_rdma_with_imm = 129,
};

enum WcFlag : std::uint8_t {
  wc_grh = 1,       // IBV_WC_GRH
  wc_with_imm = 2,  // IBV_WC_WITH_IMM
  wc_with_inv = 8,  // IBV_WC_WITH_INV
  wc_stamped = 32,    // ours, cleared by the guest: the entry says when it was written (CqShared::wants_stamps)
  wc_solicited = 64,  // ours, cleared by the guest: the sender asked for a solicited event
};

// --- records: what a RecordRing carries (vmci_channel/record_ring.hpp) ---------------------------------------
constexpr std::size_t slot_bytes = 64;

// The first slot of every record. `control` is written last, with release: bit 31 the phase, bits 25–30 the number of
// slots minus one (both the ring's), bits 0–24 the user's.
struct alignas(8) RecordHead {
  std::uint64_t tag;
  std::uint32_t control;
  std::uint32_t word;
};
static_assert(WireRecord<RecordHead> && sizeof(RecordHead) == 16);

constexpr std::uint32_t control_phase_bit = 1u << 31;
constexpr std::uint32_t control_slots_shift = 25;
constexpr std::uint32_t control_slots_mask = 0x3f;
constexpr std::uint32_t control_user_mask = (1u << control_slots_shift) - 1;
constexpr std::uint32_t record_slots_max = control_slots_mask + 1;  // 4 KiB

// The user's 25 bits of a WQE's control word.
struct WqeControl {
  WrOpcode opcode;
  std::uint8_t flags;   // WrFlag
  std::uint16_t count;  // SGEs, or inline payload bytes; < 1024
};
constexpr std::uint32_t pack(WqeControl c) {
  return static_cast<std::uint32_t>(c.opcode) | (static_cast<std::uint32_t>(c.flags & 0x7f) << 8) |
         (static_cast<std::uint32_t>(c.count & 0x3ff) << 15);
}
constexpr WqeControl unpack_wqe_control(std::uint32_t control) {
  return {static_cast<WrOpcode>(control & 0xff), static_cast<std::uint8_t>((control >> 8) & 0x7f),
          static_cast<std::uint16_t>((control >> 15) & 0x3ff)};
}

struct Sge {
  std::uint64_t address;
  std::uint32_t bytes;
  std::uint32_t lkey;
};
static_assert(WireRecord<Sge> && sizeof(Sge) == 16);

// RDMA and atomic operations: where at the responder.
struct RemoteOperand {
  std::uint64_t address;
  std::uint64_t compare_add;
  std::uint64_t swap;
  std::uint32_t rkey;
  std::uint32_t srqn;  // XRC: the SRQ that the request is for; else 0
};
// UD: the address vector. `route_flags`: bit 0 = a GRH travels along (is_global). Of sl, route_flags and sgid_index the upper four bits are
// the flow label's (flow_label_of), as is what was reserved: 0 from guests that are older, and to services (control::minor_of_flow_labels).
struct UdOperand {
  std::uint32_t remote_qpn;
  std::uint32_t remote_qkey;
  std::uint16_t dlid;
  std::uint8_t sl;
  std::uint8_t route_flags;
  std::uint8_t sgid_index;
  std::uint8_t hop_limit;
  std::uint8_t traffic_class;
  std::uint8_t flow_label_low;
  std::uint8_t dgid[16];
};
static_assert(WireRecord<RemoteOperand> && sizeof(RemoteOperand) == 32);
static_assert(WireRecord<UdOperand> && sizeof(UdOperand) == 32);
constexpr std::uint8_t route_global = 1;
constexpr std::uint8_t sl_of(const UdOperand& operand) { return operand.sl & 0xf; }
constexpr std::uint8_t sgid_index_of(const UdOperand& operand) { return operand.sgid_index & 0xf; }
constexpr std::uint32_t flow_label_of(const UdOperand& operand) {
  return operand.flow_label_low | (operand.route_flags & 0xf0u) << 4 | (operand.sgid_index & 0xf0u) << 8 | (operand.sl & 0xf0u) << 12;
}
constexpr void set_flow_label(UdOperand& operand, std::uint32_t label) {  // 20 bits
  const auto nibble = [label](std::uint8_t& field, int shift) { field = static_cast<std::uint8_t>((field & 0xf) | (label >> shift & 0xf) << 4); };
  operand.flow_label_low = static_cast<std::uint8_t>(label);
  nibble(operand.route_flags, 8), nibble(operand.sgid_index, 12), nibble(operand.sl, 16);
}
// To a group (ids.hpp). IBA 9.6.2: by that QPN, of no queue pair.
inline bool is_multicast(const UdOperand& operand) {
  return operand.remote_qpn == multicast_qpn.value && is_multicast(std::to_array(operand.dgid));
}
// Eight bytes of it, 0 to 3. The first two fields are put there for each request: a wider copy would wait for the stores.
inline std::uint64_t word_of(const UdOperand& operand, std::size_t index) {
  std::uint64_t word;
  std::memcpy(&word, reinterpret_cast<const std::byte*>(&operand) + index * sizeof(word), sizeof(word));
  return word;
}

// Of BIND_MW and LOCAL_INV, which has no more than the key.
struct WindowOperand {
  std::uint32_t window, region;  // handles; region 0: bound to nothing
  std::uint32_t access;          // ibv_access_flags
  std::uint32_t rkey;
  std::uint64_t address, bytes;
};
static_assert(sizeof(WindowOperand) == 32);
// The word of such a WQE: it is carried out in its turn. Else a WcStatus: it was when it was posted, as older guests have it.
constexpr std::uint32_t window_in_turn = ~std::uint32_t{0};

// A send WQE: one slot with one SGE (or 16 inline bytes), further slots for the rest. In memory:
//   0 wr_id (tag) | 8 control | 12 imm_data, network order (word) | 16 operand | 48 Sge[] or inline payload, contiguous
struct SendWqe {
  RecordHead head;
  union {
    RemoteOperand remote;
    UdOperand ud;
    WindowOperand window;
  };
};
static_assert(sizeof(SendWqe) == 48);
constexpr std::size_t send_wqe_payload_offset = 48;
constexpr std::uint32_t send_sge_max = 30;
constexpr std::uint32_t inline_bytes_max = 512;  // what programs ask for that were written for other HCAs
constexpr std::uint32_t send_wqe_slots(std::uint32_t payload_bytes) {
  return static_cast<std::uint32_t>((send_wqe_payload_offset + payload_bytes + slot_bytes - 1) / slot_bytes);
}
constexpr std::uint32_t send_wqe_slots_max = send_wqe_slots(send_sge_max * sizeof(Sge));  // 9
static_assert(send_wqe_slots_max == 9 && send_wqe_slots(inline_bytes_max) == 9);

// A receive WQE: 0 wr_id | 8 control (opcode receive) | 12 0 | 16 Sge[]. Every WQE of a queue takes the same number of slots.
constexpr std::size_t receive_wqe_payload_offset = 16;
constexpr std::uint32_t receive_sge_max = 30;
constexpr std::uint32_t receive_wqe_slots(std::uint32_t max_sge) {
  return static_cast<std::uint32_t>((receive_wqe_payload_offset + max_sge * sizeof(Sge) + slot_bytes - 1) / slot_bytes);
}

// --- completions: what a Lane carries (vmci_channel/lane.hpp) -------------------------------------------------
// `state` is written last, with release, and is the commit point of the message.
struct alignas(32) Cqe {
  std::uint64_t wr_id;
  std::uint32_t byte_len;
  std::uint32_t imm_data;         // network order; the vendor error where status is not success
  std::uint32_t src_qp;           // UD: the sender's QPN
  std::uint16_t slid;
  std::uint8_t sl;
  std::uint8_t stamp_high;        // as below
  std::uint32_t queue_position;   // send lanes: the position after the WQE in its ring: all slots before it are free again
  std::uint32_t state;            // CqeState
};
static_assert(WireRecord<Cqe> && sizeof(Cqe) == 32);

// Where it is asked for, when it completed: 40 bits in what the fields of its direction leave free. In nanoseconds of the service's monotonic
// clock (16 minutes before and two after) on completion queues with times (control::Request::time_cq), else in units of vmci::stamp_now().
constexpr unsigned cqe_stamp_bits = 40;
inline void set_stamp(Cqe& cqe, bool sent, std::uint64_t stamp) {
  (sent ? cqe.src_qp : cqe.queue_position) = static_cast<std::uint32_t>(stamp);
  cqe.stamp_high = static_cast<std::uint8_t>(stamp >> 32);
}
inline std::uint64_t stamp_of(const Cqe& cqe, bool sent) {
  return (std::uint64_t{cqe.stamp_high} << 32) | (sent ? cqe.src_qp : cqe.queue_position);
}

struct CqeState {  // apart, or two that were just stored are loaded as one word, which waits for all stores before them
  alignas(4) WcStatus status;
  alignas(4) WcOpcode opcode;
  alignas(4) std::uint8_t flags;  // WcFlag
};
constexpr std::uint32_t pack(const CqeState& s) {  // bit 31 is the lane's phase
  return static_cast<std::uint32_t>(s.status) | (static_cast<std::uint32_t>(s.opcode) << 8) |
         (static_cast<std::uint32_t>(s.flags & 0x7f) << 16);
}
constexpr CqeState unpack_cqe_state(std::uint32_t state) {
  return {static_cast<WcStatus>(state & 0xff), static_cast<WcOpcode>((state >> 8) & 0xff),
          static_cast<std::uint8_t>((state >> 16) & 0x7f)};
}

}  // namespace vrdma
