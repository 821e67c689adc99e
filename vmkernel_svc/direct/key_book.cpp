#include "vmkernel_svc/direct/key_book.hpp"

#include <algorithm>
#include <atomic>
#include <limits>

#include "vmkernel_svc/objects.hpp"

namespace vrdma::svc {

namespace {

// The longest run of pieces that lie one behind the other in one file that may be lent.
struct MappedPart {
  std::uint32_t backing = 0;
  std::uint64_t from = 0, bytes = 0, offset = 0;  // from the region's start; in the file
};
MappedPart mapped_part(Guest& guest, const Region& region) {
  MappedPart best, here;
  for (const Piece& piece : region.pieces) {
    const auto backing = piece.host != nullptr ? guest.backings.find(piece.backing) : guest.backings.end();
    if (backing == guest.backings.end() || backing->second.lendable_fd() < 0 || piece.backing >= direct::key_backings) {
      here = {};
      continue;
    }
    if (here.bytes == 0 || here.backing != piece.backing || here.offset + here.bytes != piece.backing_offset) {
      here = {piece.backing, piece.offset, 0, piece.backing_offset};
    }
    here.bytes += piece.bytes;
    if (here.bytes > best.bytes) best = here;
  }
  return best;
}

}  // namespace

Result<std::unique_ptr<KeyBook>> KeyBook::create(Guest& guest, RegionTable& regions) {
  auto segment = vmci::Segment::create("vrdma-keys", sizeof(direct::KeyTable), vmci::HandedOut::read_only);
  if (!segment) return segment.error();
  auto book = std::make_unique<KeyBook>();
  book->segment_ = std::move(*segment);
  for (const auto& [handle, slot] : guest.mrs) book->add(guest, regions.slot(slot));
  return book;
}

void KeyBook::add(Guest& guest, const Region& region) {
  const MappedPart part = mapped_part(guest, region);
  const std::uint64_t address = guest.reached_by_service ? region.address : 0;
  if (part.bytes == 0 && address == 0) return;
  for (std::uint32_t probe = 0; probe < direct::key_probes; ++probe) {
    const std::uint32_t place = direct::key_place(region.key.value, probe);
    direct::KeyEntry& entry = table().entries[place];
    if (entry.key != 0) continue;
    table().regions[place] = {region.iova, region.bytes, address, part.from, part.bytes, part.offset};
    entry = {0, direct::pd_number(region.pd), direct::key_file(region.access, part.backing),
             static_cast<std::uint32_t>(std::min<std::uint64_t>(part.bytes, std::numeric_limits<std::uint32_t>::max())), region.iova + part.from, part.offset};
    // T2: pairs with T1 in DirectPorts::look_up.
    std::atomic_ref(entry.key).store(region.key.value, std::memory_order_release);
    return;
  }
}

void KeyBook::remove(Key key) {
  for (std::uint32_t probe = 0; probe < direct::key_probes; ++probe) {
    direct::KeyEntry& entry = table().entries[direct::key_place(key.value, probe)];
    if (entry.key != key.value) continue;
    std::atomic_ref(entry.key).store(0, std::memory_order_relaxed);
    entry = {};  // who may be reading it yet was cut off inside its claim (DirectDesk::cut_off), and writes nothing more
    return;
  }
}

void KeyBook::let_go(std::uint32_t backing) {
  direct::LetGo& all = table().let_go;
  std::atomic_ref(all.backings[all.count % direct::let_go_kept]).store(backing, std::memory_order_relaxed);
  // Seen by who enters a claim after it was handed out (K4), at the latest.
  std::atomic_ref(all.count).store(all.count + 1, std::memory_order_release);
}

}  // namespace vrdma::svc
