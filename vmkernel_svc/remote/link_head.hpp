// What the carrier puts before a record on its way to another host.
//
// A *run* is one life of a vrdmad: a random number. Two services shake hands before anything else counts:
//     hello(mine, 0) →      ← hello(theirs, mine)      hello(mine, theirs) →
// so that who is believed to be a new run has heard of ours: an old packet played back is not. Records are numbered from 1 in each
// session (a pair of runs), acknowledged by number, kept until then, and sent again on a new connection; the receiver takes each once.
#pragma once

#include <cstdint>

#include "vmkernel_svc/engine/far_frame.hpp"
#include "vmkernel_svc/remote/tag.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::remote {

enum class LinkKind : std::uint16_t { hello = 1, record = 2, alive = 3 };

constexpr std::uint32_t link_magic = 0x616d6476;  // "vdma"
constexpr std::uint16_t link_version = 2;  // 2: P_Keys

struct LinkHead {
  std::uint32_t magic;
  std::uint16_t version;
  LinkKind kind;
  std::uint64_t run;         // of the sender
  std::uint64_t your_run;    // as the sender knows it; 0: it does not
  std::uint64_t number;      // record
  std::uint64_t acknowledged;  // all up to this one have come
  char name[64];             // of the sender
  std::uint8_t reserved[4];
  std::uint32_t bytes;       // of record and payload, which follow
  Tag tag;                   // of all of it, this field being 0
};
static_assert(WireRecord<LinkHead> && sizeof(LinkHead) == engine::FarFrame::carrier_bytes);
constexpr std::size_t host_name_max = sizeof(LinkHead::name) - 1;

}  // namespace vrdma::remote
