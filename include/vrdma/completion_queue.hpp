// What a completion queue has in the guest's arena, and how its events come: as records in a pipe, or in a ring of a channel's own. Guest, host
// service and peers in direct mode read and write these without a request; those are control.hpp's.
#pragma once

#include <cstdint>

#include "vrdma/queue_layout.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::control {

enum ArmState : std::uint32_t { arm_none = 0, arm_solicited = 1, arm_next = 2, arm_fired = 3 };
constexpr std::uint32_t hot_lanes = 4;
constexpr std::uint32_t no_lane = 0xffffffff;

// A CQ in the arena. The first line is the guest's to write, except that the service, or a poster in direct mode, moves `arm` to arm_fired.
// The service reads the first line after each completion, and the guest writes to the second at each: apart, both keep theirs.
struct alignas(128) CqShared {
  std::uint32_t arm;              // sequence << 2 | ArmState; the guest arms, who reports (the service, a poster) claims by compare-and-swap
  std::uint32_t hot[hot_lanes];   // lanes that the guest looks at without being told; no_lane: none
  std::uint32_t poller;           // the processor on which it is polled, plus 1; 0: not known
  std::uint32_t wants_stamps;     // 1: several queue pairs complete here, or both directions of one, and each entry says when it was written (vmci_channel/stamp.hpp)
  std::uint32_t reserved[9];
  std::uint32_t consumed;         // completions polled (or dropped with their QP), all lanes together
  std::uint32_t left_work;        // lane of a send queue that the service has handed out with work in it, plus 1: whoever polls takes it up
  std::uint32_t offers_ended;     // 1: of queue pairs that complete here: whoever polls lets go of what they have of their peers
  std::uint32_t reserved_too[13];
  vmci::ReadyWords ready;         // lanes with news; the service sets, the guest takes
};
static_assert(sizeof(CqShared) == 128 + sizeof(vmci::ReadyWords));

// What the pipes carry; one record is one event (16 bytes, written whole).
struct CompletionRecord {
  std::uint32_t cq;
  std::uint32_t arm_sequence;
  std::uint64_t reserved;
};
struct AsyncRecord {
  std::uint32_t event;   // enum ibv_event_type
  std::uint32_t handle;  // the QP, CQ or SRQ; 0 for port and device events
  std::uint64_t reserved;
};
static_assert(sizeof(CompletionRecord) == 16 && sizeof(AsyncRecord) == 16);

// Completion events of one channel, where the service can interrupt the guest for it. The service interrupts once, then not until the
// guest has looked; and the guest looks when it was interrupted, and takes what was there at that very moment. So an interrupt that has
// come stands for records that nobody has taken, as a readable pipe does.
//
//   service   record; news = position << 1 | 1, in one step with reading the bit before: interrupts if that was 0
//   guest     reads its eventfd; clears the bit, in one step with reading the position: the records up to there; consumed
struct alignas(128) EventRing {
  std::uint32_t news;         // position of the next record << 1 | an interrupt is on its way
  std::uint32_t reserved[31];
  std::uint32_t consumed;     // position of the first record that the guest has not taken
  std::uint32_t reserved_too[31];
  CompletionRecord records[128];  // a power of two: positions wrap
};
constexpr std::uint32_t event_records = sizeof(EventRing::records) / sizeof(CompletionRecord);
constexpr std::uint32_t event_position_mask = 0x7fffffff;
static_assert(WireRecord<EventRing> && sizeof(EventRing) == 256 + 2048 && (event_records & (event_records - 1)) == 0);

}  // namespace vrdma::control
