// Management datagrams (IBA 13) that programs send and receive by /dev/infiniband/umad: what control requests carry of them. A datagram
// is 256 bytes (IBA 13.4.2); longer ones (IBA 13.6, RMPP) travel whole here, as programs see them.
#pragma once

#include <array>
#include <cstdint>

#include "vrdma/ids.hpp"

namespace vrdma::control {

constexpr std::uint32_t mad_bytes = 256;
constexpr std::uint32_t mad_bytes_max = 3840;        // that a program may send: what a control request has room for
constexpr std::uint32_t mad_piece_bytes = 3840;      // that one mad_take brings
constexpr std::uint32_t mad_head_bytes = 24;         // IBA 13.4.2: the common head
constexpr std::uint32_t mad_segment_head_bytes = 36; // … with RMPP's

struct MadOpenReply {
  std::uint32_t channel;
  std::uint32_t reserved;
};
struct MadChannelRequest {
  std::uint32_t channel;
  std::uint32_t reserved;
};
// An agent: who sends requests of a class, and gets the answers; and, where `methods` names any, whom requests of these are for.
struct MadRegisterRequest {
  std::uint32_t channel;
  std::uint32_t qpn;         // 0 subnet management, 1 everything else
  std::uint8_t management_class;
  std::uint8_t class_version;
  std::uint16_t reserved;
  std::uint32_t oui;         // of a class from 0x30 to 0x4f
  std::uint64_t methods[2];  // bit n: method n
};
struct MadAgent {
  std::uint32_t channel;
  std::uint32_t agent;  // of the channel, from 0
};

// Where it goes to, or has come from. Numbers are in host order; names are the kernel's (struct ib_user_mad_hdr).
struct MadAddress {
  Gid gid;  // with grh_present
  std::uint32_t qpn, qkey;
  std::uint32_t flow_label;
  std::uint16_t lid, pkey_index;
  std::uint8_t sl, path_bits, grh_present, gid_index, hop_limit, traffic_class;
  std::uint16_t reserved;
};
struct MadSendRequest {
  MadAgent by;
  MadAddress to;
  std::uint32_t timeout_ms;  // 0: no answer is waited for
  std::uint32_t retries;
  std::uint32_t bytes;
  std::uint32_t reserved;
  std::array<std::uint8_t, mad_bytes_max> data;
};

// The oldest datagram of a channel, a piece of it: from `offset` on. It is taken with its last piece, or left where it is longer than `room`.
struct MadTakeRequest {
  std::uint32_t channel;
  std::uint32_t room;
  std::uint32_t offset;
  std::uint32_t reserved;
};
struct MadTakeReply {
  std::uint32_t found;   // 0: nothing waits
  std::uint32_t last;    // 1: the channel's pipe holds a record that nothing waits for any more
  std::uint32_t agent;
  std::uint32_t status;  // ETIMEDOUT: what its own agent sent was not answered, of which these are the first bytes
  std::uint32_t total_bytes;
  std::uint32_t bytes;   // of this piece
  MadAddress from;
  std::array<std::uint8_t, mad_piece_bytes> data;
};

}  // namespace vrdma::control

// Rows of the control table (vrdma/control.hpp): name, request body, reply body, on the socket?
#define VRDMA_MAD_REQUESTS(X)                                   \
  X(mad_open, Empty, MadOpenReply, true)                        \
  X(mad_close, MadChannelRequest, Empty, false)                 \
  X(mad_register, MadRegisterRequest, MadAgent, false)          \
  X(mad_unregister, MadAgent, Empty, false)                     \
  X(mad_send, MadSendRequest, Empty, false)                     \
  X(mad_take, MadTakeRequest, MadTakeReply, false)
