// A completion lane: fixed 32-byte entries in shared memory, one writer at a time (the runner of the queue that completes
// here), one reader (the guest, under its CQ's lock). The phase is bit 31 of an entry's state word, which is written last
// and is the commit point of a message (DESIGN.md D5).
//
// Capacity is at least the depth of the work queue it belongs to, so an honest guest never fills it. Nobody asks: of one that posts before
// it has read, entries that it has not read are written over (the guest loses its own queue, nobody else's).
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "vrdma/wire.hpp"

namespace vmci {

class LaneWriter {
 public:
  LaneWriter() = default;
  // entries: 32-byte aligned, entry_count a power of two.
  LaneWriter(vrdma::Cqe* entries, std::uint32_t entry_count, std::uint32_t position = 0)
      : entries_(entries), entry_count_(entry_count), tail_(position) {}

  [[gnu::always_inline]] void push(const vrdma::Cqe& cqe, std::uint32_t state) {
    vrdma::Cqe& entry = entries_[tail_ & (entry_count_ - 1)];
    // Field by field: a wide copy out of an entry that was just assembled waits for all stores before it, the payload's too.
    const auto put = [](auto& to, auto value) { std::atomic_ref(to).store(value, std::memory_order_relaxed); };
    put(entry.wr_id, cqe.wr_id);
    put(entry.byte_len, cqe.byte_len);
    put(entry.imm_data, cqe.imm_data);
    put(entry.src_qp, cqe.src_qp);
    put(entry.slid, cqe.slid);
    put(entry.sl, cqe.sl);
    put(entry.stamp_high, cqe.stamp_high);
    put(entry.queue_position, cqe.queue_position);
    const std::uint32_t phase = (tail_ & entry_count_) ? 0u : vrdma::control_phase_bit;
    // L1: pairs with L2 in LaneReader::next.
    std::atomic_ref(entry.state).store((state & ~vrdma::control_phase_bit) | phase, std::memory_order_release);
    ++tail_;
  }

  // Goes on where another writer stopped.
  void skip_to(std::uint32_t position) { tail_ = position; }
  std::uint32_t position() const { return tail_; }
  std::uint32_t entry_count() const { return entry_count_; }

 private:
  vrdma::Cqe* entries_ = nullptr;
  std::uint32_t entry_count_ = 0;
  std::uint32_t tail_ = 0;
};

class LaneReader {
 public:
  // Of no lane: nothing comes from it.
  LaneReader() = default;
  LaneReader(const vrdma::Cqe* entries, std::uint32_t entry_count, std::uint32_t position = 0)
      : entries_(entries), entry_count_(entry_count), head_(position) {}

  // The next completion, still in shared memory until pop(), or nullptr.
  const vrdma::Cqe* next() const {
    const vrdma::Cqe& entry = entries_[head_ & (entry_count_ - 1)];
    // L2: pairs with L1 in LaneWriter::push.
    const std::uint32_t state = std::atomic_ref(const_cast<std::uint32_t&>(entry.state)).load(std::memory_order_acquire);
    const std::uint32_t phase = (head_ & entry_count_) ? 0u : vrdma::control_phase_bit;
    return ((state ^ phase) & vrdma::control_phase_bit) == 0 ? &entry : nullptr;
  }
  void pop() { ++head_; }

  std::uint32_t position() const { return head_; }
  std::uint32_t entry_count() const { return entry_count_; }

 private:
  static constexpr vrdma::Cqe never_written{};  // as the first entry of a lane that nobody has written to

  const vrdma::Cqe* entries_ = &never_written;
  std::uint32_t entry_count_ = 1;
  std::uint32_t head_ = 0;
};

}  // namespace vmci
