// The shapes of what a guest and the service share besides WQEs and CQEs: a VMCI queue pair and a "look at these" bitmap.
// Here, and not with the code that works on them (vmci_channel/), because control requests carry the geometry.
//
//   QueuePairHeader | produce queue: records | consume queue: records or completion entries
//
// Layout is computed by one function from the two sizes; both sides and every size check use it. Plain data; any thread.
#pragma once

#include <cstdint>

#include "vrdma/wire.hpp"

namespace vmci {

// bytes: both queues are byte streams (vmci_channel/byte_queue.hpp), counted in slots of 64.
enum class QueueKind : std::uint32_t { none = 0, records = 1, completions = 2, bytes = 3 };

// Written by the creator (guest) only.
struct alignas(128) CreatorCursor {
  std::uint32_t consumed;        // consume queue: position up to which entries were taken
  std::uint32_t produced_count;  // produce queue: records published so far (an SRQ's limit is reckoned from it)
  std::uint32_t waiting;         // control pair: someone sleeps until the consume queue has a record
  std::uint32_t reserved[29];
};
// Written by the attacher (service) only.
struct alignas(128) AttacherCursor {
  std::uint32_t consumed;        // produce queue: position up to which slots were taken
  std::uint32_t needs_doorbell;  // 0: the attacher looks at the produce queue by itself; 1: ring after publishing
  std::uint32_t direct_offer;    // of a send queue: the connection that the guest may run by itself (vrdma/direct.hpp); 0: none
  std::uint32_t reserved[29];
};
struct QueuePairHeader {
  CreatorCursor creator;
  AttacherCursor attacher;
};
static_assert(vrdma::WireRecord<CreatorCursor> && vrdma::WireRecord<AttacherCursor> && sizeof(QueuePairHeader) == 256);

struct QueuePairGeometry {
  std::uint32_t produce_slots;    // records; 64 bytes each; a power of two, ≥ 2
  std::uint32_t consume_entries;  // slots (64 bytes) or completions (32 bytes); a power of two, or 0
  QueueKind consume_kind;
  std::uint32_t reserved;

  constexpr std::uint64_t produce_offset() const { return sizeof(QueuePairHeader); }
  constexpr std::uint64_t consume_offset() const { return produce_offset() + std::uint64_t{produce_slots} * vrdma::slot_bytes; }
  constexpr std::uint64_t consume_entry_bytes() const {
    return consume_kind == QueueKind::none ? 0 : consume_kind == QueueKind::completions ? sizeof(vrdma::Cqe) : vrdma::slot_bytes;
  }
  constexpr std::uint64_t total_bytes() const { return consume_offset() + consume_entries * consume_entry_bytes(); }
};
static_assert(vrdma::WireRecord<QueuePairGeometry>);

// Two levels of bits, one for each of up to 16 384 members; see vmci_channel/ready_bitmap.hpp.
constexpr std::uint32_t ready_members_max = 16384;

struct alignas(128) ReadyWords {
  std::uint64_t summary[4];     // bit w of the 256: words[w] may be non-zero
  std::uint64_t reserved[12];
  std::uint64_t words[256];     // bit m of the 16 384
};
static_assert(sizeof(ReadyWords) == 128 + 2048);

}  // namespace vmci
