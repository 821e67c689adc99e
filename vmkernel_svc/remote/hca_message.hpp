// What two services say to each other of HCAs: the payload of records of kind `hca`, which the carrier of records takes like any other,
// once and in order. A service that does not know the kind drops it, says nothing of an HCA itself, and so is spoken to by records.
//
//     host       at the beginning of a session: there is an HCA here, or there is none any more, and why
//     hello      this queue pair (record.connection, in its record.epoch) is physical QP `qpn` here, waiting for yours
//     none       … which has said hello in epoch `to_epoch`, meets one that goes by records, and why
//     ready      I have heard of yours, and take what you send
//     want_key   which key has the memory here that your queue pair may name by `rkey`?   →   key
//     revoke     … does not have it any more                                              →   revoked
//     ordinal    message `count` of those that take a receive WQE has had `bytes` by records
//     stalled    the HCA has had no answer for long, of `count` messages that take a receive WQE: who has given its HCA the WQEs for
//                them says lost
//     lost       my HCA is gone, or does not reach yours: `count` messages that take a receive WQE came; mine began with PSN `bytes`.
//                Both say it.
//     bye        the queue pair is reset, destroyed or in error
//     trunk        a physical QP for records is here (HcaTrunk): `qpn`, with `count` as its first PSN; record.epoch counts the tries. The
//                  host that dials says it first; the other one makes its own, connects it, and says so of it
//     trunk_ready  … by the one that dials: both are connected
//     trunk_gone   that try is over, and why
//
// A connection goes by HCAs once both ends have said hello with the other's epoch in `to_epoch`, whose hello they have heard; it is
// bound from then on to those two epochs. Who hears a hello that does not name its own says hello again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "vrdma/printable.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::remote {

enum class HcaKind : std::uint8_t { host = 1, hello, none, ready, want_key, key, revoke, revoked, ordinal, stalled, lost, bye, trunk, trunk_ready, trunk_gone };

constexpr std::uint16_t hca_version = 1;

struct HcaMessage {
  std::uint16_t version;
  std::uint8_t link_layer;       // host, hello, trunk: IBV_LINK_LAYER_…; host: 0 says that there is no HCA
  std::uint8_t mtu;              // hello, trunk: enum ibv_mtu, the largest that this end takes
  std::uint32_t to_qpn;          // all but host, revoke, revoked, trunk…: the queue pair that it is for, …
  std::uint32_t to_epoch;        // … in this epoch; hello: 0 where none has been heard
  std::uint32_t qpn;             // hello, trunk: physical
  std::uint8_t gid[16];          // hello, trunk
  std::uint64_t guid;            // hello, none: of the guest's port
  std::uint64_t count, bytes;    // ordinal; lost, stalled, trunk: count
  std::uint32_t guest_link_layer;
  std::uint16_t guest_lid;
  std::uint16_t lid;             // hello, trunk: of the HCA's port
  std::uint32_t rkey;            // want_key, key, revoke, revoked: the guest's
  std::uint32_t physical_rkey;   // key; 0: by records
  std::uint8_t max_dest_rd_atomic;  // hello
  std::uint8_t known;            // key: it may be kept until it is revoked
  std::uint8_t atomics_with_cpu;    // hello: the HCA's atomic operations are atomic against those of processors, too
  std::uint8_t padding;
  std::uint16_t pkey;            // hello: of the guest's queue pair
  std::uint8_t reserved[2];
  char text[96];                 // host: the device's name, or why there is none; none, lost, trunk_gone: why
};
static_assert(WireRecord<HcaMessage> && sizeof(HcaMessage) == 176);

inline void put_text(HcaMessage& to, const std::string& text) { std::memcpy(to.text, text.data(), std::min(text.size(), sizeof(to.text) - 1)); }
// For logs and terminals: whatever the other service put there.
inline std::string text_of(const HcaMessage& from) {
  return printable({from.text, ::strnlen(from.text, sizeof(from.text))});
}

}  // namespace vrdma::remote
