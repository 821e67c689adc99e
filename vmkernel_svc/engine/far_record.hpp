// What the two halves of a connection say to each other when a carrier lies between them: the requester's half runs where the
// guest posted, the responder's on the target's host, by a stand-in of the requester (far_responder.hpp).
//
//     requester (far_requester.hpp)                          stand-in on the target's host
//       open      who asks, and with which attributes    →     a stand-in, or a fresh one in place of an older epoch's
//       request   the head of a message, its first bytes →     runs the responder's rules and places the bytes,
//       more      the bytes that follow                  →       in order, one message at a time
//                                                        ←   answer    how the message ended; READ, atomics: the (last) bytes
//                                                        ←   part      bytes of a long READ
//                                                        ←   credit    nothing but `taken`
//       credit, close (the requester is done or gone)    →
//       pkey      another P_Key than `open` said         →
//       datagram  a message of a UD queue pair           →     delivered or dropped
//       hca       what the two services agree on where the bytes go by HCAs (remote/hca_message.hpp), both ways
//       groups    which multicast groups have members on the sender's host (remote/far_groups.hpp), both ways
//       mad       a management datagram of a guest (mad/far_message.hpp), both ways
//       mark      to be sent back at once (far_marks.hpp), both ways
//       cm        what the hosts' connection managers say to each other (cm/message.hpp), both ways
//
// The carrier delivers these once each and in order, or says that the far end has lost what it knew. Each direction of a
// connection has a window of bytes: whoever takes payload in says how much it took, and its peer stays within window_bytes of that.
//
// Fixed width, little endian. What comes in is checked by far_frame.hpp and by whoever acts on it.
#pragma once

#include <cstdint>

#include "vrdma/attributes.hpp"

namespace vrdma::engine {

// news: never between hosts; a carrier's word that the far end has begun anew. `bytes`: what that one understands (remote/link_head.hpp).
enum class FarKind : std::uint8_t { news = 0, open = 1, request, more, answer, part, credit, close, datagram, pkey, hca, groups, cm, mad, mark };

constexpr std::uint32_t far_part_bytes = 64 * 1024 - 512;  // payload of one record
constexpr std::uint64_t far_window_bytes = 1024 * 1024;    // under way in one direction of a connection
constexpr std::uint32_t far_window_messages = 128;
// The same for an engine of certain ports: tests have smaller ones, to come to their ends often.
template <class P>
struct FarLimits {
  static constexpr std::uint32_t part_bytes = far_part_bytes;
  static constexpr std::uint64_t window_bytes = far_window_bytes;
  static constexpr std::uint32_t window_messages = far_window_messages;
};

struct FarRecord {
  FarKind kind;
  std::uint8_t opcode;       // request, datagram: WrOpcode; groups: GroupsWord
  std::uint8_t flags;        // far_solicited, …
  std::uint8_t status;       // answer: WcStatus
  std::uint32_t connection;  // QPN of the requester, whichever way the record goes
  std::uint32_t epoch;       // of its connection: grows with every RESET
  std::uint32_t message;     // counts the connection's messages
  std::uint32_t psn;         // request
  std::uint32_t imm_data;    // network order
  std::uint64_t bytes;       // request: of the whole message; pkey: the P_Key; groups: the number of a change; mark: its number
  std::uint64_t taken;       // payload of this connection that the sender of the record has taken in so far
  std::uint64_t remote_address;
  std::uint64_t compare_add, swap;  // atomics
  std::uint32_t rkey;
  std::uint32_t payload_bytes;  // that follow this record
};
static_assert(WireRecord<FarRecord> && sizeof(FarRecord) == 72);
// The SRQ that a request of an XRC initiator is for, where its opcode leaves room: atomics have no immediate, others nothing to compare.
inline void set_srqn(FarRecord& request, bool atomic, std::uint32_t srqn) {
  if (atomic) request.imm_data = srqn;
  else request.compare_add = srqn;
}
inline std::uint32_t srqn_of(const FarRecord& request, bool atomic) {
  return atomic ? request.imm_data : static_cast<std::uint32_t>(request.compare_add);
}
constexpr std::uint8_t far_solicited = 1;
constexpr std::uint8_t far_back = 1;  // mark: it is on its way back

// Payload of `open`: what the responder's rules ask of a requester.
struct FarOpen {
  AddressVector path;        // as the requester's owner gave it
  std::uint64_t guid;        // of the requester's port; its GIDs follow from these three
  std::uint32_t link_layer;
  std::uint16_t lid;
  std::uint8_t type;         // QpType
  std::uint8_t timeout, retry_cnt, rnr_retry;
  std::uint8_t path_mtu;
  std::uint8_t reserved;
  std::uint32_t dest_qp_num;
  std::uint16_t pkey;        // of the requester's packets, as its host says
  std::uint8_t reserved_too[6];
};
static_assert(WireRecord<FarOpen> && sizeof(FarOpen) == 64);

// Precedes the payload of a `datagram`.
struct FarDatagram {
  UdOperand ud;
  std::uint64_t guid;
  std::uint32_t link_layer;
  std::uint32_t qkey;
  std::uint16_t lid, pkey;
  std::uint8_t reserved[4];
};
static_assert(WireRecord<FarDatagram> && sizeof(FarDatagram) == 56);

}  // namespace vrdma::engine
