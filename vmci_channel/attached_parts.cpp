#include "vmci_channel/attached_parts.hpp"

#include <bit>

#include "vmci_channel/control_exchange.hpp"
#include "vmci_channel/memcheck.hpp"

namespace vmci {

using namespace vrdma::control;
using vrdma::Errno;
using vrdma::Result;

namespace {

bool carries_records(const QueuePairGeometry& geometry) {
  const auto good = [](std::uint32_t slots) { return std::has_single_bit(slots) && slots >= 2; };
  return geometry.consume_kind == QueueKind::records && good(geometry.produce_slots) && good(geometry.consume_entries);
}

}  // namespace

Result<AttachedParts> AttachedParts::map(const AttachReply& reply, std::span<UniqueFd> descriptors, Map& map) {
  if (descriptors.size() != 4) return not_brought(descriptors);
  const QueuePairGeometry& geometry = reply.control_geometry;
  if (reply.shard >= std::size(ServicePage{}.shards) || !carries_records(geometry) ||
      !lies_inside(reply.arena_bytes, reply.control_offset, geometry.total_bytes()) ||
      !lies_inside(reply.arena_bytes, reply.doorbell_offset, sizeof(ReadyWords)))
    return Errno{EPROTO};
  auto arena = map(descriptors[0], reply.arena_bytes, Writable::yes);
  if (!arena) return arena.error();
  auto page = map(descriptors[1], sizeof(ServicePage), Writable::no);
  if (!page) return page.error();

  std::byte* const rings = arena->data() + reply.control_offset;
  std::byte* const ready_words = arena->data() + reply.doorbell_offset;
  memcheck::hide(arena->data(), arena->bytes());
  memcheck::show(rings, geometry.total_bytes());
  memcheck::show(ready_words, sizeof(ReadyWords));
  return AttachedParts{std::move(*arena), std::move(*page), std::move(descriptors[2]), std::move(descriptors[3]),
                       QueuePairView(rings, geometry), reinterpret_cast<ReadyWords*>(ready_words)};
}

}  // namespace vmci
