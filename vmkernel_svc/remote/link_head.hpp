// What two hosts say to each other on their connection (tcp_connection.hpp): frames, each a head, the carrier's tag in it, and a record
// with its payload.
//
// A *run* is one life of a vrdmad as one host knows it: a random number, another one for each host, and for one that comes to be known by another
// certificate. So whoever has lost what it knew of a session, as a whole or of one host, says so by its run alone. A pair of runs is a session. On every new connection both sides say first
//     hello(run, peer_run, acknowledged)
// which run they are, which one of the other host they know, and how far its records have come; what is not acknowledged is sent
// again. A run that was not known begins a session: the numbers begin anew, from 1, and what was under way is lost. Records keep their
// order on a connection, so that a number tells a record that comes a second time from the next one; there is no third kind.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "vmkernel_svc/engine/far_frame.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::remote {

enum class LinkKind : std::uint16_t { hello = 1, record = 2, alive = 3 };

struct LinkHead {
  std::uint32_t bytes;         // of record and payload, which follow
  LinkKind kind;
  std::uint8_t reserved;
  std::uint8_t small_packets;   // hello of the one who dialed only: 1: the packets of this connection are small
  std::uint64_t run, peer_run;  // of the sender, and of the receiver as the sender knows it (0: not yet); hello only
  std::uint64_t number;        // record only
  std::uint64_t acknowledged;  // of the session: all up to this one have come
  std::uint32_t features;      // hello only: what the sender understands, besides what the first ones did; they said 0
  // Hello only: the sender's own LIDs and the receiver's, first and last, where a file on every host names them, which must agree. 0: they are
  // leased, or the sender is older than this.
  std::uint16_t lids[2], peer_lids[2];
  std::uint8_t reserved_2[60];
  std::array<std::byte, 16> tag;  // of all of the frame before and after it (frame_seal.hpp)
};
static_assert(WireRecord<LinkHead> && sizeof(LinkHead) == engine::FarFrame::carrier_bytes);
constexpr std::uint32_t link_knows_groups = 1;  // FarKind::groups
constexpr std::uint32_t link_knows_cm = 2;      // FarKind::cm
constexpr std::uint32_t link_knows_mads = 4;    // FarKind::mad
constexpr std::uint32_t link_knows_cm_by_gid = 8;  // FarKind::cm with addresses of AF_IB
constexpr std::uint32_t link_knows_flow_labels = 16;  // in FarDatagram's UdOperand
constexpr std::uint32_t link_knows_ipv4_groups = 32;  // FarKind::groups of RoCE v2's MGIDs of IPv4 groups
constexpr std::uint32_t link_knows_marks = 64;  // FarKind::mark
constexpr std::uint32_t link_features = link_knows_groups | link_knows_cm | link_knows_mads | link_knows_cm_by_gid | link_knows_flow_labels |
                                        link_knows_ipv4_groups | link_knows_marks;
constexpr std::size_t tagged_head_bytes = offsetof(LinkHead, tag);

}  // namespace vrdma::remote
