// One guest's arena: the memfd that carries all its queues, carved into page-aligned ranges by the service. The map of what
// is in use is private to the service; the guest is only told offsets.
//
// Used by the shard that owns the guest. A range is zero when it is handed out and its pages go back to the system when it
// is released.
#pragma once

#include <cstdint>
#include <map>

#include "vmci_channel/segment.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

class Arena {
 public:
  static Result<Arena> create(std::uint64_t bytes);

  // Offset of a new range of at least `bytes`; ENOMEM when the arena is full.
  Result<std::uint64_t> allocate(std::uint64_t bytes);
  void release(std::uint64_t offset);

  const vmci::Segment& segment() const { return segment_; }
  std::uint64_t used_bytes() const { return used_bytes_; }

 private:
  vmci::Segment segment_;
  std::map<std::uint64_t, std::uint64_t> free_;  // offset → bytes, never adjacent
  std::map<std::uint64_t, std::uint64_t> used_;
  std::uint64_t used_bytes_ = 0;
};

}  // namespace vrdma::svc
