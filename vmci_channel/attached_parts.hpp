// What the service's answer to attach brings, checked and mapped: for the library (guest_lib/attachment.hpp) and for contexts. Nothing of the answer is
// trusted before, and nothing needs to be looked at again after that.
#pragma once

#include <cstdint>
#include <span>

#include "vmci_channel/queue_pair.hpp"
#include "vmci_channel/segment.hpp"
#include "vrdma/control.hpp"

namespace vmci {

// Whether [offset, offset + bytes) lies wholly inside an arena, and begins a line of its own, as all that replies place there does.
constexpr bool lies_inside(std::uint64_t arena_bytes, std::uint64_t offset, std::uint64_t bytes) {
  return offset <= arena_bytes && bytes <= arena_bytes - offset && offset % 128 == 0;
}

struct AttachedParts {
  // How the caller maps a segment, of at least so many bytes: map_sealed(), or what does more.
  using Map = vrdma::Result<Mapping>(const UniqueFd& fd, std::uint64_t bytes, Writable writable);
  // Takes the doorbell and the pipe of the descriptors; the segments' stay the caller's. EMFILE: not all could be received; EPROTO; errors of `map`.
  static vrdma::Result<AttachedParts> map(const vrdma::control::AttachReply& reply, std::span<UniqueFd> descriptors, Map& map);

  Mapping arena, page;
  UniqueFd doorbell, wake;
  QueuePairView rings;      // in the arena: the control queue pair
  ReadyWords* ready_words;  // in the arena
};

}  // namespace vmci
