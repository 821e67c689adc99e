// One guest's arena: the memfd that carries all its queues, carved into page-aligned ranges by the service. The map of what
// is in use is private to the service; the guest is only told offsets.
//
// Used by the shard that owns the guest. A range is zeroed when it is handed out. The pages of released ranges stay the guest's,
// who could have touched them anyway: a system call that punched them out would wait for the file's lock, which a guest can hold
// for as long as it likes by writing to the file from a page that does not come.
#pragma once

#include <cstdint>
#include <map>

#include "vmci_channel/segment.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

class Arena {
 public:
  static Result<Arena> create(std::uint64_t bytes);
  // Over memory that a virtual machine has lent; whatever is there now is the guest's own rubbish.
  static Arena over(vmci::Segment segment);

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
  std::uint64_t fresh_from_ = 0;  // zero from here on: never handed out
};

}  // namespace vrdma::svc
