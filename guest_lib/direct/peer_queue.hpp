// Where a poster in direct mode tells its peer of a message: an entry of the peer's completion lane, a bit of its ready bitmap. As
// vmci_channel/lane.hpp and ready_bitmap.hpp have them, by stores that it loses with its claim: false, and nothing is written, where it has.
#pragma once

#include <array>
#include <bit>
#include <cstddef>

#include "vmci_channel/claimed_stores.hpp"
#include "vmci_channel/lane.hpp"
#include "vrdma/queue_layout.hpp"

namespace vrdma::guest {

// entries: those of `lane`.
inline bool push_to_peer(vmci::LaneWriter& lane, Cqe* entries, const Cqe& cqe, std::uint32_t state, const vmci::ClaimedStores& stores) {
  if (!stores.guarded()) return lane.push(cqe, state), true;
  static_assert(offsetof(Cqe, byte_len) == 8 && offsetof(Cqe, src_qp) == 16 && offsetof(Cqe, queue_position) == 24 && offsetof(Cqe, state) == 28);
  const auto pair = [](std::uint32_t low, std::uint32_t high) { return std::bit_cast<std::uint64_t>(std::array{low, high}); };
  const auto route = std::bit_cast<std::uint32_t>(std::array{cqe.slid, static_cast<std::uint16_t>(cqe.sl)});
  const std::uint32_t at = lane.position(), phase = (at & lane.entry_count()) ? 0u : control_phase_bit;
  // The last word holds the state: L1 of the lane.
  if (!stores.store4(reinterpret_cast<std::uint64_t*>(&entries[at & (lane.entry_count() - 1)]), cqe.wr_id, pair(cqe.byte_len, cqe.imm_data),
                     pair(cqe.src_qp, route), pair(cqe.queue_position, (state & ~control_phase_bit) | phase)))
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

}  // namespace vrdma::guest
