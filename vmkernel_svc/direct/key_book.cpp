#include "vmkernel_svc/direct/key_book.hpp"

#include <atomic>

#include "vmkernel_svc/objects.hpp"

namespace vrdma::svc {

namespace {

// The longest run of pieces that lie one behind the other in one file that may be lent.
direct::KeyEntry mapped_part(Guest& guest, const Region& region) {
  direct::KeyEntry best{}, here{};
  for (const Piece& piece : region.pieces) {
    const auto backing = piece.host != nullptr ? guest.backings.find(piece.backing) : guest.backings.end();
    if (backing == guest.backings.end() || backing->second.lendable_fd() < 0) {
      here = {};
      continue;
    }
    if (here.mapped_bytes == 0 || here.backing != piece.backing || here.backing_offset + here.mapped_bytes != piece.backing_offset) {
      here = {};
      here.mapped_from = piece.offset;
      here.backing = piece.backing;
      here.backing_offset = piece.backing_offset;
    }
    here.mapped_bytes += piece.bytes;
    if (here.mapped_bytes > best.mapped_bytes) best = here;
  }
  return best;
}

}  // namespace

Result<std::unique_ptr<KeyBook>> KeyBook::create(Guest& guest, RegionTable& regions) {
  auto segment = vmci::Segment::create("vrdma-keys", sizeof(direct::KeyTable), true);
  if (!segment) return segment.error();
  auto book = std::make_unique<KeyBook>();
  book->segment_ = std::move(*segment);
  for (const auto& [handle, slot] : guest.mrs) book->add(guest, regions.slot(slot));
  return book;
}

void KeyBook::add(Guest& guest, const Region& region) {
  direct::KeyEntry found = mapped_part(guest, region);
  found.address = guest.reached_by_service ? region.address : 0;
  if (found.mapped_bytes == 0 && found.address == 0) return;
  found.access = region.access;
  found.pd = direct::pd_number(region.pd);
  found.iova = region.iova;
  found.bytes = region.bytes;
  for (std::uint32_t probe = 0; probe < direct::key_probes; ++probe) {
    direct::KeyEntry& entry = table().entries[direct::key_place(region.key.value, probe)];
    if (entry.key != 0) continue;
    entry = found;  // its key is 0
    // T2: pairs with T1 in DirectPorts::look.
    std::atomic_ref(entry.key).store(region.key.value, std::memory_order_release);
    return;
  }
}

void KeyBook::remove(Key key) {
  for (std::uint32_t probe = 0; probe < direct::key_probes; ++probe) {
    direct::KeyEntry& entry = table().entries[direct::key_place(key.value, probe)];
    if (entry.key == key.value) std::atomic_ref(entry.key).store(0, std::memory_order_relaxed);
  }
}

}  // namespace vrdma::svc
