// The guest's private side of a work queue: the ring's writer, which work requests are outstanding, and their wr_ids (should
// the service die, the guest itself completes them as flushed).
//
// Two parties, each under a lock of its own: the poster (the queue pair's or SRQ's lock) and the poller (the completion
// queue's lock), which says what is free again. Counts run free.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>

#include "guest_lib/single_thread.hpp"
#include "vmci_channel/queue_pair.hpp"
#include "vmci_channel/record_ring.hpp"

namespace vrdma::guest {

class SendQueue {
 public:
  void open(vmci::QueuePairView view, std::uint32_t max_wr) {
    view_ = view;
    writer_ = vmci::RecordWriter(view.produce(), view.geometry().produce_slots);
    max_wr_ = max_wr;
    wr_id_mask_ = std::bit_ceil(max_wr == 0 ? 1u : max_wr) - 1;
    wr_ids_.reset(new std::uint64_t[wr_id_mask_ + 1]);
    count_at_.reset(new std::uint32_t[view.geometry().produce_slots]);
  }

  // --- poster
  // For `count` work requests of that many slots in all.
  bool has_room(std::uint32_t slots, std::uint32_t count = 1) {
    if (posted_ - completed_seen_ + count <= max_wr_ && writer_.has_room(slots)) return true;
    // S1: pairs with S2: the runner has read the slots before, and completed_ is at least as new.
    writer_.set_freed(freed_.load(std::memory_order_acquire));
    completed_seen_ = completed_.load(std::memory_order_relaxed);
    return posted_ - completed_seen_ + count <= max_wr_ && writer_.has_room(slots);
  }
  vmci::RecordWriter& writer() { return writer_; }
  std::uint32_t position() const { return writer_.position(); }
  void publish(std::uint64_t wr_id, std::uint32_t word, std::uint32_t control, std::uint32_t slots) {
    wr_ids_[posted_ & wr_id_mask_] = wr_id;
    ++posted_;
    count_at(writer_.position() + slots - 1).store(posted_, std::memory_order_relaxed);
    writer_.publish(wr_id, word, control, slots);
  }
  // A work request that its poster carries out itself: it is outstanding for as long as any other, without a WQE that could be read.
  void pass(std::uint64_t wr_id) {
    wr_ids_[posted_ & wr_id_mask_] = wr_id;
    ++posted_;
    count_at(writer_.position()).store(posted_, std::memory_order_relaxed);
    writer_.pass();
  }
  std::atomic_ref<std::uint32_t> needs_doorbell() const { return std::atomic_ref(view_.header().attacher.needs_doorbell); }
  std::atomic_ref<std::uint32_t> direct_offer() const { return std::atomic_ref(view_.header().attacher.direct_offer); }
  const vmci::QueuePairView& view() const { return view_; }

  // --- poller. Everything up to this position is done, unsignalled work requests before it included.
  void completed_up_to(std::uint32_t position) {
    // The poster stored it before it published; the completion came by way of the service, which had acquired that.
    completed_.store(count_at(position - 1).load(std::memory_order_relaxed), std::memory_order_relaxed);
    // S2: pairs with S1.
    freed_.store(position, std::memory_order_release);
  }

  // --- both locks held
  std::uint32_t posted() const { return posted_; }
  bool any_outstanding() const { return posted_ != completed_.load(std::memory_order_relaxed); }
  // The oldest outstanding work request, which counts as completed from now on.
  bool take_oldest(std::uint64_t& wr_id) {
    const std::uint32_t completed = completed_.load(std::memory_order_relaxed);
    if (completed == posted_) return false;
    wr_id = wr_ids_[completed & wr_id_mask_];
    completed_.store(completed + 1, std::memory_order_relaxed);
    if (completed + 1 == posted_) freed_.store(writer_.position(), std::memory_order_release);
    return true;
  }
  void forget_all() {
    completed_.store(posted_, std::memory_order_relaxed);
    freed_.store(writer_.position(), std::memory_order_release);
  }

 private:
  std::atomic_ref<std::uint32_t> count_at(std::uint32_t position) {
    return std::atomic_ref(count_at_[position & (writer_.slot_count() - 1)]);
  }

  vmci::QueuePairView view_;
  vmci::RecordWriter writer_;
  std::uint32_t max_wr_ = 0;
  std::uint32_t wr_id_mask_ = 0;
  std::uint32_t posted_ = 0;
  std::uint32_t completed_seen_ = 0;
  std::unique_ptr<std::uint64_t[]> wr_ids_;      // by running number of the work request
  std::unique_ptr<std::uint32_t[]> count_at_;    // by last slot: the running count after it
  alignas(64) std::atomic<std::uint32_t> completed_{0};
  std::atomic<std::uint32_t> freed_{0};
};

// Of a queue pair, or shared: then completions come through several completion queues, in any order. Every WQE takes the
// same number of slots and the service takes WQEs in order, so that only their number counts.
class ReceiveQueue {
 public:
  // Not kept of an SRQ, whose outstanding work requests belong to no queue pair and are never flushed.
  enum class WrIds { kept, not_kept };
  void open(vmci::QueuePairView view, std::uint32_t max_wr, std::uint32_t record_slots, WrIds wr_ids) {
    view_ = view;
    writer_ = vmci::RecordWriter(view.produce(), view.geometry().produce_slots);
    max_wr_ = max_wr;
    record_slots_ = record_slots;
    wr_id_mask_ = std::bit_ceil(max_wr == 0 ? 1u : max_wr) - 1;
    if (wr_ids == WrIds::kept) wr_ids_.reset(new std::uint64_t[wr_id_mask_ + 1]);
  }

  // --- poster
  bool has_room() {
    if (posted_ - completed_seen_ < max_wr_ && writer_.has_room(record_slots_)) return true;
    // S3: pairs with S4.
    completed_seen_ = completed_.load(std::memory_order_acquire);
    writer_.set_freed(completed_seen_ * record_slots_);
    return posted_ - completed_seen_ < max_wr_ && writer_.has_room(record_slots_);
  }
  vmci::RecordWriter& writer() { return writer_; }
  void publish(std::uint64_t wr_id, std::uint32_t control) {
    if (wr_ids_) wr_ids_[posted_ & wr_id_mask_] = wr_id;
    std::atomic_ref(posted_).store(posted_ + 1, std::memory_order_relaxed);  // for outstanding()
    writer_.publish(wr_id, 0, control, record_slots_);
  }
  // How many records there are, for an SRQ's limit; after the last of a batch.
  void publish_count() { std::atomic_ref(view_.header().creator.produced_count).store(posted_, std::memory_order_release); }
  std::atomic_ref<std::uint32_t> needs_doorbell() const { return std::atomic_ref(view_.header().attacher.needs_doorbell); }
  std::uint32_t max_wr() const { return max_wr_; }
  void set_max_wr(std::uint32_t max_wr) { max_wr_ = max_wr; }

  // --- poller
  // About so many, while others post.
  std::uint32_t outstanding() {
    return std::atomic_ref(posted_).load(std::memory_order_relaxed) - completed_.load(std::memory_order_relaxed);
  }
  void completed(std::uint32_t count) {
    // S4: pairs with S3. A read-modify-write, since several completion queues may report for one SRQ.
    if (single_threaded())
      completed_.store(completed_.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
    else
      completed_.fetch_add(count, std::memory_order_acq_rel);
  }

  // --- both locks held; not for an SRQ
  std::uint32_t posted() const { return posted_; }
  bool any_outstanding() const { return posted_ != completed_.load(std::memory_order_relaxed); }
  bool take_oldest(std::uint64_t& wr_id) {
    const std::uint32_t completed = completed_.load(std::memory_order_relaxed);
    if (completed == posted_) return false;
    wr_id = wr_ids_[completed & wr_id_mask_];
    completed_.store(completed + 1, std::memory_order_release);
    return true;
  }
  void forget_all() { completed_.store(posted_, std::memory_order_release); }

 private:
  vmci::QueuePairView view_;
  vmci::RecordWriter writer_;
  std::uint32_t max_wr_ = 0;
  std::uint32_t record_slots_ = 1;
  std::uint32_t wr_id_mask_ = 0;
  std::uint32_t posted_ = 0;
  std::uint32_t completed_seen_ = 0;
  std::unique_ptr<std::uint64_t[]> wr_ids_;
  alignas(64) std::atomic<std::uint32_t> completed_{0};
};

}  // namespace vrdma::guest
