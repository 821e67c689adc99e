// A poster in direct mode at its peer's queues: the receive request that is next there, and where it tells the peer of a message: an entry of
// the peer's completion lane, a bit of its ready bitmap, an event. As vmci_channel/lane.hpp and ready_bitmap.hpp have them, by stores that it
// loses with its claim: false, and nothing is written, where it has.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

#include "vmci_channel/claim.hpp"
#include "vmci_channel/claimed_stores.hpp"
#include "vmci_channel/lane.hpp"
#include "vmci_channel/ready_bitmap.hpp"
#include "vmci_channel/record_ring.hpp"
#include "vmci_channel/stamp.hpp"
#include "vrdma/control.hpp"
#include "vrdma/queue_layout.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::guest {

// Where the completions of one end go.
struct Told {
  control::CqShared* cq = nullptr;
  std::uint32_t lane = control::no_lane;

  bool wants_stamps() const { return vmci::wants_stamps(*cq); }
  bool is_hot() const { return vmci::is_named(cq->hot, lane); }
};
// The receiver's completion channel.
struct PeerChannel {
  int pipe = -1;         // for its events; -1: there is none
  std::uint32_t cq = 0;  // the completion queue's handle
};

// The next receive request of one buffer. False: there is none, or one that the engine must look at.
inline bool next_receive(const vmci::RecordReader& ring, bool needs_buffer, std::uint64_t& wr_id, Sge& buffer) {
  alignas(RecordHead) std::byte wqe[slot_bytes];
  std::uint32_t slots = 0;
  if (ring.peek(wqe, 1, slots) != vmci::RecordReader::Peek::ready) return false;
  const auto& head = *reinterpret_cast<const RecordHead*>(wqe);
  wr_id = head.tag;
  const WqeControl control = unpack_wqe_control(head.control);
  if (control.count == 1) std::memcpy(&buffer, wqe + receive_wqe_payload_offset, sizeof(buffer));
  return control.opcode == WrOpcode::receive && control.count <= 1 && (!needs_buffer || control.count == 1);
}

// The receiver's event, after its completions and a full fence. False: it is left to the service.
bool raise_at_peer(const vmci::PosterClaim& claim, control::CqShared& cq, const PeerChannel& channel, bool solicited);

// entries: those of `lane`.
[[gnu::always_inline]] inline bool push_to_peer(vmci::LaneWriter& lane, Cqe* entries, const Cqe& cqe, std::uint32_t state, const vmci::ClaimedStores& stores) {
  if (!stores.guarded()) return lane.push(cqe, state), true;
  static_assert(offsetof(Cqe, byte_len) == 8 && offsetof(Cqe, src_qp) == 16 && offsetof(Cqe, queue_position) == 24 && offsetof(Cqe, state) == 28);
  // Each field by itself: two that were just stored, loaded as one word, would wait until every store before them, the payload's among
  // them, has reached its line (docs/performance.md, "Copies that wait for stores"). Compilers join plain loads.
  const auto field = [](const std::uint32_t& of) { return std::uint64_t{std::atomic_ref(const_cast<std::uint32_t&>(of)).load(std::memory_order_relaxed)}; };
  const auto pair = [](std::uint64_t low, std::uint64_t high) { return low | high << 32; };
  const std::uint64_t route = std::uint64_t{cqe.slid} | std::uint64_t{cqe.sl} << 16 | std::uint64_t{cqe.stamp_high} << 24;
  const std::uint32_t at = lane.position(), phase = (at & lane.entry_count()) ? 0u : control_phase_bit;
  // The last word holds the state: L1 of the lane.
  if (!stores.store4(reinterpret_cast<std::uint64_t*>(&entries[at & (lane.entry_count() - 1)]), cqe.wr_id, pair(field(cqe.byte_len), field(cqe.imm_data)),
                     pair(field(cqe.src_qp), route), pair(field(cqe.queue_position), (state & ~control_phase_bit) | phase)))
    return false;
  lane.skip_to(at + 1);
  return true;
}

// B1 of the bitmap.
inline bool set_peers_bit(vmci::ReadyWords& ready, std::uint32_t member, const vmci::ClaimedStores& stores) {
  const std::uint32_t word = (member / 64) % 256;
  return stores.set_bits(&ready.words[word], std::uint64_t{1} << (member % 64)) &&
         stores.set_bits(&ready.summary[word / 64], std::uint64_t{1} << (word % 64));
}

// Tells the receiver of completions in its lane; after a full fence. False: its event is left to the service.
inline bool tell_peer(const vmci::PosterClaim& claim, const Told& received, const PeerChannel& channel, bool solicited) {
  // Where the claim is lost, the service tells the receiver.
  if (!received.is_hot()) set_peers_bit(received.cq->ready, received.lane, claim.stores());
  return channel.pipe < 0 || raise_at_peer(claim, *received.cq, channel, solicited);
}

}  // namespace vrdma::guest
