// A VMCI queue pair in shared memory: a produce queue and a consume queue, named from the side of its creator (the guest),
// with a cursor line for each side. Verbs queues are such pairs: the produce queue carries WQEs, the consume queue their
// completions; so is the channel's own control pair, whose queues both carry datagrams.
//
// Its layout is in vrdma/queue_layout.hpp.
#pragma once

#include <cstddef>

#include "vrdma/queue_layout.hpp"
#include "vrdma/wire.hpp"

namespace vmci {

// One side's view: where things are. Copying it copies pointers, never shared memory.
class QueuePairView {
 public:
  QueuePairView() = default;
  QueuePairView(std::byte* base, QueuePairGeometry geometry) : base_(base), geometry_(geometry) {}

  QueuePairHeader& header() const { return *reinterpret_cast<QueuePairHeader*>(base_); }
  std::byte* produce() const { return base_ + geometry_.produce_offset(); }
  std::byte* consume_records() const { return base_ + geometry_.consume_offset(); }
  vrdma::Cqe* consume_completions() const { return reinterpret_cast<vrdma::Cqe*>(base_ + geometry_.consume_offset()); }
  const QueuePairGeometry& geometry() const { return geometry_; }
  explicit operator bool() const { return base_ != nullptr; }

 private:
  std::byte* base_ = nullptr;
  QueuePairGeometry geometry_{};
};

}  // namespace vmci
