// A ring of records in shared memory: one writer, one reader, each in a process of its own that does not trust the other.
//
//   slot      |  0 |  1 |  2 |  3 | …        64 bytes each, a power of two of them
//   record    [ head, body… ][head][ head, body…
//
// A record is 1..64 slots and may wrap round the end. It starts with a RecordHead whose `control` holds the phase: it
// flips on every lap, so that a slot is readable when its phase is that of the reader's position. The rest of a record is
// raw bytes that could look like a head on a later lap; therefore the writer first marks the slot *after* the record as
// not ready, and always keeps that one slot free.
//
// Positions run free (slot = position & mask). Each end keeps its own in private memory: the truth about how far the
// writer got is the phases; how far the reader got comes back to the writer by another way (a completion's queue_position,
// a cursor) as set_freed().
//
// RecordWriter: one thread at a time. RecordReader: one thread at a time. Neither blocks, allocates or trusts a byte.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "vrdma/wire.hpp"

namespace vmci {

namespace detail {
constexpr std::uint32_t phase_at(std::uint32_t position, std::uint32_t slot_count) {
  return (position & slot_count) ? 0u : vrdma::control_phase_bit;  // first lap: 1, so that zeroed memory is not ready
}
inline std::atomic_ref<std::uint32_t> control_at(std::byte* slots, std::uint32_t index) {
  return std::atomic_ref<std::uint32_t>(
      reinterpret_cast<vrdma::RecordHead*>(slots + std::size_t{index} * vrdma::slot_bytes)->control);
}
// Of a size known here: `rep movs`, which compilers make of others, takes longer to start than a slot to copy, and who reads the copy
// waits until all stores before it have reached the cache.
inline void copy_slots(std::byte* to, const std::byte* from, std::uint32_t slots) {
  for (; slots != 0; --slots, to += vrdma::slot_bytes, from += vrdma::slot_bytes) std::memcpy(to, from, vrdma::slot_bytes);
}
}  // namespace detail

class RecordWriter {
 public:
  RecordWriter() = default;
  // slots: 64-byte aligned, slot_count a power of two ≥ 2; `position` is where a writer before this one stopped.
  RecordWriter(std::byte* slots, std::uint32_t slot_count, std::uint32_t position = 0)
      : slots_(slots), slot_count_(slot_count), mask_(slot_count - 1), tail_(position), freed_(position), heads_since_(position) {}

  bool has_room(std::uint32_t record_slots) const { return slot_count_ - (tail_ - freed_) > record_slots; }

  // The bytes [offset, offset + from.size()) of the record that publish() will make visible; not the first 16.
  void write(std::size_t offset, std::span<const std::byte> from) {
    if (from.empty()) return;  // memcpy wants pointers even for nothing
    const std::size_t ring_bytes = std::size_t{slot_count_} * vrdma::slot_bytes;
    const std::size_t at = (std::size_t{tail_ & mask_} * vrdma::slot_bytes + offset) & (ring_bytes - 1);
    const std::size_t first = from.size() < ring_bytes - at ? from.size() : ring_bytes - at;
    std::memcpy(slots_ + at, from.data(), first);
    if (first < from.size()) std::memcpy(slots_, from.data() + first, from.size() - first);
  }

  // Likewise a part whose size divides a slot's and `offset`, so that it does not wrap: without a call.
  template <class Part>
  void put(std::size_t offset, const Part& part) {
    static_assert(vrdma::slot_bytes % sizeof(Part) == 0);
    const std::size_t ring_bytes = std::size_t{slot_count_} * vrdma::slot_bytes;
    std::memcpy(slots_ + ((std::size_t{tail_ & mask_} * vrdma::slot_bytes + offset) & (ring_bytes - 1)), &part, sizeof(Part));
  }

  // Makes a record of `record_slots` slots readable. user_control: 25 bits.
  void publish(std::uint64_t tag, std::uint32_t word, std::uint32_t user_control, std::uint32_t record_slots) {
    mark_after(record_slots);
    auto* head = reinterpret_cast<vrdma::RecordHead*>(slots_ + std::size_t{tail_ & mask_} * vrdma::slot_bytes);
    head->tag = tag;
    head->word = word;
    // P1: pairs with R1 in RecordReader::peek; the record and the mark after it are written before.
    std::atomic_ref(head->control)
        .store(detail::phase_at(tail_, slot_count_) | ((record_slots - 1) << vrdma::control_slots_shift) |
                   (user_control & vrdma::control_user_mask),
               std::memory_order_release);
    tail_ += record_slots;
  }

  // Leaves a slot behind as if a record had been written and read there. Whoever reads has to be told of it (skip_to()) before it looks.
  void pass() {
    mark_after(1);
    detail::control_at(slots_, tail_ & mask_).store(detail::phase_at(tail_, slot_count_), std::memory_order_relaxed);
    ++tail_;
  }

  void set_freed(std::uint32_t position) { freed_ = position; }
  std::uint32_t freed() const { return freed_; }
  std::uint32_t position() const { return tail_; }
  std::uint32_t slot_count() const { return slot_count_; }

 private:
  // The slot after the record must not look like a head. Where it held one a lap ago it does not: its phase is the old one.
  // Marking it costs the poster a cache line that the reader had last.
  void mark_after(std::uint32_t record_slots) {
    const std::uint32_t next = tail_ + record_slots;
    if (record_slots != 1) heads_since_ = next;
    if (next - heads_since_ < slot_count_)
      detail::control_at(slots_, next & mask_)
          .store(detail::phase_at(next, slot_count_) ^ vrdma::control_phase_bit, std::memory_order_relaxed);
  }

  std::byte* slots_ = nullptr;
  std::uint32_t slot_count_ = 0;
  std::uint32_t mask_ = 0;
  std::uint32_t tail_ = 0;
  std::uint32_t freed_ = 0;
  std::uint32_t heads_since_ = 0;  // from this position on every slot is a record of its own
};

class RecordReader {
 public:
  enum class Peek { empty, ready, malformed };

  RecordReader() = default;
  RecordReader(std::byte* slots, std::uint32_t slot_count, std::uint32_t position = 0)
      : slots_(slots), slot_count_(slot_count), mask_(slot_count - 1), head_(position) {}

  bool empty() const {
    const std::uint32_t control = detail::control_at(slots_, head_ & mask_).load(std::memory_order_relaxed);
    return ((control ^ detail::phase_at(head_, slot_count_)) & vrdma::control_phase_bit) != 0;
  }

  // Copies the next record to `to` without advancing. The copy's control word is the one that was checked; shared memory is
  // not looked at again. Malformed: the record claims more slots than `slots_limit` or than the ring has; nothing copied.
  // `to` has room for slots_limit slots. On ready, record_slots says how many were copied. Who is in a hurry reads the copied head
  // by RecordHead's fields, each on its own: a wider load waits for the control word's store to be in the cache.
  Peek peek(std::byte* to, std::uint32_t slots_limit, std::uint32_t& record_slots) const {
    // R1: pairs with P1 in RecordWriter::publish.
    const std::uint32_t control = detail::control_at(slots_, head_ & mask_).load(std::memory_order_acquire);
    if (((control ^ detail::phase_at(head_, slot_count_)) & vrdma::control_phase_bit) != 0) return Peek::empty;
    const std::uint32_t slots = ((control >> vrdma::control_slots_shift) & vrdma::control_slots_mask) + 1;
    if (slots > slots_limit || slots > slot_count_) return Peek::malformed;
    const std::uint32_t index = head_ & mask_;
    const std::uint32_t first = slots < slot_count_ - index ? slots : slot_count_ - index;
    detail::copy_slots(to, slots_ + std::size_t{index} * vrdma::slot_bytes, first);
    if (first < slots) [[unlikely]] detail::copy_slots(to + std::size_t{first} * vrdma::slot_bytes, slots_, slots - first);
    reinterpret_cast<vrdma::RecordHead*>(to)->control = control;
    record_slots = slots;
    return Peek::ready;
  }

  void advance(std::uint32_t record_slots) {
    head_ += record_slots;
    // What a writer has published of late is in its cache, not in ours.
    __builtin_prefetch(slots_ + std::size_t{head_ & mask_} * vrdma::slot_bytes);
    __builtin_prefetch(slots_ + std::size_t{(head_ + 1) & mask_} * vrdma::slot_bytes);
  }
  // Skips to where the writer says it is (a queue that is being reset).
  void skip_to(std::uint32_t position) { head_ = position; }
  std::uint32_t position() const { return head_; }
  std::uint32_t slot_count() const { return slot_count_; }

 private:
  std::byte* slots_ = nullptr;
  std::uint32_t slot_count_ = 0;
  std::uint32_t mask_ = 0;
  std::uint32_t head_ = 0;
};

}  // namespace vmci
