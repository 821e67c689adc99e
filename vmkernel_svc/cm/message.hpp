// What connection managers say to each other (IBA 12.6), within a host and between hosts: the specification's messages, by their names,
// without its transaction numbers, timers and resending, for here a message arrives once and in order, or its host is lost.
//
//     who connects                                who listens
//       req         with its queue pair's number →  CONNECT_REQUEST
//                                                ←  rep       accepted, with that of the other one; or rej
//       rtu         it is ready                  →  ESTABLISHED
//       dreq        either side                  ↔  drep      answered at once: DISCONNECTED on both sides
//       sidr_req    datagrams: who is there      →  CONNECT_REQUEST
//                                                ←  sidr_rep  a queue pair's number and Q_Key, or a status that says why not
//
//     between hosts, before that
//       who_has     whose is this address        →
//                                                ←  has       ours; silence: not ours
#pragma once

#include <cstdint>

#include "vrdma/cm.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::svc {

enum class CmKind : std::uint32_t { req = 1, rep, rtu, rej, dreq, drep, sidr_req, sidr_rep, who_has, has };

// Private data of each message, in bytes: what a sender may give, and what its receiver is always given (IBA 12.6).
constexpr std::uint32_t req_private_bytes = 92, rep_private_bytes = 196, rej_private_bytes = 148;
constexpr std::uint32_t sidr_req_private_bytes = 216, sidr_rep_private_bytes = 136;
// Of a request, IP addresses take 36 bytes (A11.2).
inline std::uint32_t request_private_bytes(bool datagrams, const control::CmAddress& to) {
  return (datagrams ? sidr_req_private_bytes : req_private_bytes) - (to.family == AF_IB ? 0 : 36);
}

// IBA 12.6.7.2, 12.11.1.2: what applications see as the status of their events.
constexpr std::int32_t rej_no_resources = 3, rej_timeout = 4, rej_invalid_service_id = 8, rej_invalid_lid = 13, rej_consumer = 28;
constexpr std::int32_t sidr_unsupported = 1, sidr_reject = 2;

// The port of the sender, from which its addresses follow (addresses.hpp).
struct CmPort {
  std::uint64_t guid;
  std::uint32_t link_layer;  // LinkLayer
  std::uint16_t lid;
  std::uint8_t mtu;          // enum ibv_mtu
  std::uint8_t reserved;
};

struct CmMessage {
  CmKind kind;
  std::uint32_t from, to;    // identifiers; `to` of a request is 0
  std::uint32_t port_space;
  std::uint32_t psn;         // that its sender's queue pair begins with
  std::int32_t status;       // rej: reason; sidr_rep; req, sidr_req: the traffic class of the path, 0 from older hosts
  std::uint32_t ack_timeout; // req: 4.096 us << n; 0: its sender does not say. Not of others: older hosts say it in a rep, too
  std::uint16_t is_local;    // the destination is an address of the sender's network namespace
  std::uint8_t was_kept;     // by the receiver, for somebody who listens; 0 between hosts
  std::uint8_t qp_type;      // of the sender, engine::QpType; 0: its host is older, and does not say
  CmPort port;
  control::CmAddress source, destination;
  std::uint16_t pkeys[limits::pkey_table];  // req: those of the sender; rep: the first is that of the connection
  control::CmParameters parameters;
};
static_assert(WireRecord<CmMessage>);

}  // namespace vrdma::svc
