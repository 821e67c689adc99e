// The two ends of control::EventRing: completion events of a guest that the service interrupts. The writer is used by the service's
// shard, the reader under a lock of the guest's. Neither blocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "vrdma/control.hpp"

namespace vmci {

class EventRingWriter {
 public:
  EventRingWriter() = default;
  explicit EventRingWriter(vrdma::control::EventRing* ring) : ring_(ring) {}
  explicit operator bool() const { return ring_ != nullptr; }

  enum class Put { full, done, interrupt };  // interrupt: the guest is to be interrupted
  Put put(const vrdma::control::CompletionRecord& record) {
    using namespace vrdma::control;
    // E1: pairs with E4: the guest has read the records before it. One that makes no sense leaves no room.
    const std::uint32_t consumed = std::atomic_ref(ring_->consumed).load(std::memory_order_acquire);
    if (((position_ - consumed) & event_position_mask) >= event_records) return Put::full;
    ring_->records[position_ % event_records] = record;
    position_ = (position_ + 1) & event_position_mask;
    // E2: pairs with E3: the record is there. If the bit was set, E3 is still to come after the interrupt of that time, and sees this one.
    const std::uint32_t before = std::atomic_ref(ring_->news).exchange(position_ << 1 | 1, std::memory_order_acq_rel);
    return (before & 1) != 0 ? Put::done : Put::interrupt;
  }

 private:
  vrdma::control::EventRing* ring_ = nullptr;
  std::uint32_t position_ = 0;  // the truth: what stands in the ring is the guest's to overwrite
};

class EventRingReader {
 public:
  EventRingReader() = default;
  explicit EventRingReader(vrdma::control::EventRing* ring) : ring_(ring) {}

  // An interrupt has come that nothing was taken for, or will come.
  bool interrupt_due() const { return (std::atomic_ref(ring_->news).load(std::memory_order_relaxed) & 1) != 0; }

  // Hands over what is there. After an interrupt was taken note of, never before: E3 asks for the next.
  template <class Handler>
  void take(Handler&& handler) {
    using namespace vrdma::control;
    // E3: pairs with E2.
    const std::uint32_t end = std::atomic_ref(ring_->news).fetch_and(~1u, std::memory_order_acq_rel) >> 1;
    const std::uint32_t count = std::min((end - consumed_) & event_position_mask, event_records);
    for (std::uint32_t i = 0; i < count; ++i) handler(ring_->records[((consumed_ + i) & event_position_mask) % event_records]);
    consumed_ = end;
    // E4: pairs with E1.
    std::atomic_ref(ring_->consumed).store(end, std::memory_order_release);
  }

 private:
  vrdma::control::EventRing* ring_ = nullptr;
  std::uint32_t consumed_ = 0;
};

}  // namespace vmci
