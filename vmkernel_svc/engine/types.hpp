// The engine's own small types: states, queue pair kinds, what a run came to.
#pragma once

#include <cstdint>

#include "vrdma/access.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::engine {

enum class QpType : std::uint8_t { rc = 2, uc = 3, ud = 4, xrc_send = 9, xrc_recv = 10 };                // enum ibv_qp_type
enum class QpState : std::uint8_t { reset = 0, init = 1, rtr = 2, rts = 3, sqd = 4, sqe = 5, err = 6 };  // enum ibv_qp_state

// IBA annex A14: an XRC initiator and its target are to each other what two RC queue pairs are.
constexpr bool is_reliable(QpType type) { return type == QpType::rc || type == QpType::xrc_send || type == QpType::xrc_recv; }
constexpr QpType peer_type(QpType type) { return type == QpType::xrc_send ? QpType::xrc_recv : type == QpType::xrc_recv ? QpType::xrc_send : type; }

enum class Direction : std::uint8_t { send, receive };

using enum Access;

// enum ibv_event_type, those that the engine raises.
enum class AsyncEvent : std::uint32_t {
  cq_err = 0,
  qp_fatal = 1,
  qp_req_err = 2,
  qp_access_err = 3,
  comm_est = 4,
  sq_drained = 5,
  srq_limit_reached = 15,
  qp_last_wqe_reached = 16,
};

// How a turn of one queue pair ended.
enum class Progress : std::uint8_t {
  idle,     // nothing posted that could run
  worked,   // did something and would have gone on but for the budget, or is done for now
  waiting,  // for the peer (RNR, silence) or a copy: worth another look in a while; a timer is set where time matters
};

// What is left of a turn. The run stops at the first that is used up; a slice may overdraw bytes.
struct Budget {
  std::int64_t bytes;
  std::int32_t wqes;
  bool spent() const { return bytes <= 0 || wqes <= 0; }
};

constexpr std::uint64_t slice_bytes = 64 * 1024;  // one copy: a few microseconds, far below the 20 µs of D7

constexpr std::uint32_t mtu_bytes(std::uint32_t mtu) { return 128u << (mtu < 1 ? 1 : mtu > 5 ? 5 : mtu); }
constexpr std::uint32_t packets(std::uint64_t bytes, std::uint32_t mtu) {
  if (bytes <= mtu_bytes(1)) return 1;
  const std::uint32_t size = mtu_bytes(mtu);
  return bytes <= size ? 1 : static_cast<std::uint32_t>((bytes + size - 1) / size);
}

// IBA 9.7.5.2.8, table 45: RNR NAK timer field to nanoseconds.
constexpr std::uint64_t rnr_timer_ns(std::uint8_t field) {
  constexpr std::uint32_t tens_of_us[32] = {65536, 1,    2,    3,    4,    6,    8,    12,    16,    24,   32,
                                            48,    64,   96,   128,  192,  256,  384,  512,   768,   1024, 1536,
                                            2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
  return std::uint64_t{tens_of_us[field & 31]} * 10'000;
}
// IBA 9.9.2.1: local ACK timeout, 4.096 µs · 2^field; 0: no timeout.
constexpr std::uint64_t ack_timeout_ns(std::uint8_t field) {
  return (field & 31) == 0 ? 0 : std::uint64_t{4096} << (field & 31);
}

}  // namespace vrdma::engine
