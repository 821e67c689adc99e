// What each opcode is, as a table: on which queue pairs it is allowed, what it asks of the responder, how it completes.
// IBA table 38 (transport functions by service) and 11.4.1.1.
#pragma once

#include "vmkernel_svc/engine/types.hpp"

namespace vrdma::engine {

struct OpcodeRule {
  bool rc, uc, ud;
  bool takes_receive;        // consumes a receive WQE at the responder
  bool moves_to_receive;     // … whose buffers take the payload
  bool has_imm;
  std::uint32_t remote_access;  // right needed at the remote key; 0: none used
  bool reads;                // payload travels back (RDMA READ, atomics)
  bool atomic;
  WcOpcode send_opcode, receive_opcode;
  bool local = false;        // reaches nobody: of memory windows (WindowOperand)
  bool invalidates = false;  // ends a memory window of the responder's
  bool word = false;         // atomic or not, it is about 8 aligned bytes
};

constexpr OpcodeRule opcode_rules[] = {
    /* RDMA WRITE          */ {true, true, false, false, false, false, access_remote_write, false, false, WcOpcode::rdma_write, WcOpcode::recv},
    /* RDMA WRITE with imm */ {true, true, false, true, false, true, access_remote_write, false, false, WcOpcode::rdma_write, WcOpcode::recv_rdma_with_imm},
    /* SEND                */ {true, true, true, true, true, false, 0, false, false, WcOpcode::send, WcOpcode::recv},
    /* SEND with imm       */ {true, true, true, true, true, true, 0, false, false, WcOpcode::send, WcOpcode::recv},
    /* RDMA READ           */ {true, false, false, false, false, false, access_remote_read, true, false, WcOpcode::rdma_read, WcOpcode::recv},
    /* CMP_AND_SWP         */ {true, false, false, false, false, false, access_remote_atomic, true, true, WcOpcode::comp_swap, WcOpcode::recv, false, false, true},
    /* FETCH_AND_ADD       */ {true, false, false, false, false, false, access_remote_atomic, true, true, WcOpcode::fetch_add, WcOpcode::recv, false, false, true},
    /* LOCAL_INV           */ {true, true, false, false, false, false, 0, false, false, WcOpcode::local_inv, WcOpcode::recv, true, false},
    /* BIND_MW             */ {true, true, false, false, false, false, 0, false, false, WcOpcode::bind_mw, WcOpcode::recv, true, false},
    /* SEND with inv       */ {true, false, false, true, true, false, 0, false, false, WcOpcode::send, WcOpcode::recv, false, true},
    /* 10 to 14 of libibverbs are for others */ {}, {}, {}, {}, {},
    /* ATOMIC WRITE        */ {true, false, false, false, false, false, access_remote_write, false, false, WcOpcode::atomic_write, WcOpcode::recv, false, false, true},
};

// nullptr: no such operation on this kind of queue pair.
constexpr const OpcodeRule* opcode_rule(WrOpcode opcode, QpType type) {
  const auto index = static_cast<std::size_t>(opcode);
  if (index >= std::size(opcode_rules)) return nullptr;
  const OpcodeRule& rule = opcode_rules[index];
  const bool allowed = type == QpType::rc || type == QpType::xrc_send ? rule.rc : type == QpType::uc ? rule.uc : type == QpType::ud && rule.ud;
  return allowed ? &rule : nullptr;
}

// WcFlag of the receive completion.
constexpr std::uint8_t receive_flags(bool solicited, const OpcodeRule& rule) {
  return static_cast<std::uint8_t>((rule.has_imm ? wc_with_imm : 0) | (rule.invalidates ? wc_with_inv : 0) | (solicited ? wc_solicited : 0));
}

}  // namespace vrdma::engine
