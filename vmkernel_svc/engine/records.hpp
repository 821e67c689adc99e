// What requester and responder say to each other about one message. On one host they exchange these by a call; a carrier to
// another host takes them there. IBA 9.2 (headers), 9.7.5 (responses).
#pragma once

#include <cstdint>

#include "vmkernel_svc/engine/opcodes.hpp"
#include "vrdma/ids.hpp"

namespace vrdma::engine {

struct Request {
  WrOpcode opcode;
  bool solicited;
  Psn psn;                 // of its first packet
  std::uint32_t packets;
  std::uint64_t bytes;     // payload to or (READ) from the responder
  std::uint32_t imm_data;  // network order
  std::uint64_t remote_address;
  Key rkey;
  std::uint32_t srqn;      // XRC: of which SRQ the receive WQE and the memory are
  Qpn source_qpn;
};

struct Response {
  enum class Kind : std::uint8_t {
    proceed,  // accepted: move the payload, then finish()
    silence,  // nobody answers: the ACK timer decides
    rnr,      // receiver not ready
    nak,      // refused: `status` is what the requester completes with
  } kind;
  WcStatus status = WcStatus::success;
  std::uint64_t rnr_ns = 0;

  static Response proceed() { return {Kind::proceed}; }
  static Response silence() { return {Kind::silence}; }
  static Response not_ready(std::uint64_t ns) { return {Kind::rnr, WcStatus::success, ns}; }
  static Response nak(WcStatus status) { return {Kind::nak, status}; }
};

}  // namespace vrdma::engine
