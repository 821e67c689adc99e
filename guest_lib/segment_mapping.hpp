// Mappings of memory that is shared with the service and with peers: queues, keys, windows. They are sparse, and this process's alone.
#pragma once

#include <sys/mman.h>

#include <cstdint>

#include "guest_lib/sparse_mapping.hpp"
#include "vmci_channel/segment.hpp"
#include "vrdma/result.hpp"

namespace vrdma::guest {

// Not for a fork's child; nor for a core dump, which would fill the holes: a gigabyte for each arena.
inline Status keep_private(std::byte* data, std::uint64_t bytes) {
  if (::madvise(data, bytes, MADV_DONTFORK) != 0) return last_error();
  ::madvise(data, bytes, MADV_DONTDUMP);  // a courtesy, where a sandbox allows it
  return ok();
}
inline Status keep_private(const vmci::Mapping& mapping) { return keep_private(mapping.data(), mapping.bytes()); }

inline Result<vmci::Mapping> map_segment(const vmci::UniqueFd& fd, std::uint64_t bytes, vmci::Writable writable) {
  const SparseMapping sparse;
  auto mapping = vmci::map_sealed(fd, bytes, writable);
  if (!mapping) return mapping;
  if (Status kept = keep_private(*mapping); !kept) return kept.error();
  return mapping;
}

}  // namespace vrdma::guest
