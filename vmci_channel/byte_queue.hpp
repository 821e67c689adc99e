// The byte queues of a queue pair: two streams in shared memory, one each way, between sides that do not trust each other.
//
//   ByteCursor of the creator | ByteCursor of the attacher | produce queue (creator → attacher) | consume queue (back)
//
// Each side writes only its own cursor. Positions run free modulo 2^32; a queue has at most 2^30 bytes. What the other side says
// is read once, compared with what is possible, and otherwise the stream is broken: nobody copies outside the queue.
//
// Waking: the reader numbers its armings (data_wanted); after publishing, the writer rings if the number is one that it has not
// rung for. A writer without room says so (space_wanted) and clogs its doorbell; the reader drains it when it has read all.
//
// ByteWriter: one thread at a time. ByteReader: one thread at a time. Neither blocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/queue_pair.hpp"

namespace vmci {

struct alignas(128) ByteCursor {  // exactly one side writes this
  std::uint32_t produced;
  std::uint32_t consumed;
  std::uint32_t data_wanted;
  std::uint32_t space_wanted;
  std::uint32_t closed;  // closed_for_*
  std::uint32_t reserved[27];
};
static_assert(vrdma::WireRecord<ByteCursor> && sizeof(ByteCursor) == 128);
constexpr std::uint32_t closed_for_writing = 1;
constexpr std::uint32_t closed_for_reading = 2;

// Of a queue pair: whose produce queue the first one is.
enum class End : bool { creator, attacher };

// What one side knows: the shared places, and nothing that the other side can change.
struct ByteSide {
  ByteCursor* mine;
  const ByteCursor* theirs;
  std::byte* out;
  const std::byte* in;
  std::uint32_t out_bytes, in_bytes;

  // base: geometry.total_bytes() of memory, aligned to 128; both queues' sizes powers of two of at most 2^30 bytes.
  static ByteSide of(std::byte* base, const QueuePairGeometry& geometry, End end) {
    auto* const cursors = reinterpret_cast<ByteCursor*>(base);
    std::byte* const produce = base + geometry.produce_offset();
    std::byte* const consume = base + geometry.consume_offset();
    const auto produce_bytes = static_cast<std::uint32_t>(geometry.produce_slots * vrdma::slot_bytes);
    const auto consume_bytes = static_cast<std::uint32_t>(geometry.consume_entries * vrdma::slot_bytes);
    return end == End::creator ? ByteSide{&cursors[0], &cursors[1], produce, consume, produce_bytes, consume_bytes}
                               : ByteSide{&cursors[1], &cursors[0], consume, produce, consume_bytes, produce_bytes};
  }
  static std::uint32_t load(const std::uint32_t& word, std::memory_order order) {
    return std::atomic_ref(const_cast<std::uint32_t&>(word)).load(order);
  }
  static void store(std::uint32_t& word, std::uint32_t value, std::memory_order order) { std::atomic_ref(word).store(value, order); }
};

class ByteWriter {
 public:
  explicit ByteWriter(const ByteSide& side) : side_(side) {}

  // Copies what fits, and publishes it. 0: no room, or broken().
  std::size_t write(std::span<const std::byte> from) {
    // W1: pairs with R2 in ByteReader::read: the bytes before `consumed` were copied out.
    const std::uint32_t consumed = ByteSide::load(side_.theirs->consumed, std::memory_order_acquire);
    if (produced_ - consumed > produced_ - freed_) {  // it went back, or beyond what there is
      broken_ = true;
      return 0;
    }
    freed_ = consumed;
    const std::uint32_t room = side_.out_bytes - (produced_ - freed_);
    const auto bytes = static_cast<std::uint32_t>(from.size() < room ? from.size() : room);
    if (bytes == 0) return 0;
    const std::uint32_t at = produced_ & (side_.out_bytes - 1);
    const std::uint32_t first = bytes < side_.out_bytes - at ? bytes : side_.out_bytes - at;
    std::memcpy(side_.out + at, from.data(), first);
    if (first < bytes) std::memcpy(side_.out, from.data() + first, bytes - first);
    produced_ += bytes;
    // W2: pairs with R1 in ByteReader::available.
    ByteSide::store(side_.mine->produced, produced_, std::memory_order_release);
    return bytes;
  }

  // After publishing: whether the reader wants to be rung, and with which token.
  bool wants_ring(std::uint32_t& token) {
    store_load_fence();  // W3: pairs with R3 in ByteReader::arm: it sees the bytes or we see its arming
    token = ByteSide::load(side_.theirs->data_wanted, std::memory_order_relaxed);
    if (token == rung_) return false;
    rung_ = token;
    return true;
  }

  bool room() const { return produced_ - ByteSide::load(side_.theirs->consumed, std::memory_order_acquire) < side_.out_bytes; }
  // Before clogging the doorbell; look for room once more after it and store_load_fence().
  void want_space() { ByteSide::store(side_.mine->space_wanted, ++space_wanted_, std::memory_order_relaxed); }
  bool broken() const { return broken_; }

 private:
  ByteSide side_;
  std::uint32_t produced_ = 0, freed_ = 0;
  std::uint32_t rung_ = 0xffffffff;  // no arming has this number
  std::uint32_t space_wanted_ = 0;
  bool broken_ = false;
};

class ByteReader {
 public:
  explicit ByteReader(const ByteSide& side) : side_(side) {}

  std::uint32_t available() {
    // R1: pairs with W2 in ByteWriter::write: the bytes before `produced` are there.
    const std::uint32_t produced = ByteSide::load(side_.theirs->produced, std::memory_order_acquire);
    if (produced - consumed_ > side_.in_bytes || produced - consumed_ < seen_ - consumed_) {
      broken_ = true;
      return 0;
    }
    seen_ = produced;
    return produced - consumed_;
  }

  // Copies out what is there, and gives the room back. 0: nothing, or broken().
  std::size_t read(std::span<std::byte> to) {
    const std::uint32_t there = available();
    const auto bytes = static_cast<std::uint32_t>(to.size() < there ? to.size() : there);
    if (bytes == 0) return 0;
    const std::uint32_t at = consumed_ & (side_.in_bytes - 1);
    const std::uint32_t first = bytes < side_.in_bytes - at ? bytes : side_.in_bytes - at;
    std::memcpy(to.data(), side_.in + at, first);
    if (first < bytes) std::memcpy(to.data() + first, side_.in, bytes - first);
    consumed_ += bytes;
    // R2: pairs with W1 in ByteWriter::write.
    ByteSide::store(side_.mine->consumed, consumed_, std::memory_order_release);
    return bytes;
  }

  // The next publication will be rung for with this number. Look for bytes once more afterwards.
  std::uint32_t arm() {
    if (++armed_ == 0xffffffff) armed_ = 0;
    ByteSide::store(side_.mine->data_wanted, armed_, std::memory_order_relaxed);
    store_load_fence();  // R3: pairs with W3 in ByteWriter::wants_ring
    return armed_;
  }

  // Whether the writer has clogged its doorbell since the last one served; after a fence that follows read().
  std::uint32_t space_wanted() const { return ByteSide::load(side_.theirs->space_wanted, std::memory_order_relaxed); }
  bool space_to_serve() const { return space_wanted() != space_served_; }
  void space_served(std::uint32_t wanted) { space_served_ = wanted; }
  bool broken() const { return broken_; }

 private:
  ByteSide side_;
  std::uint32_t consumed_ = 0, seen_ = 0;
  std::uint32_t armed_ = 0;  // so that the first publication rings
  std::uint32_t space_served_ = 0;
  bool broken_ = false;
};

}  // namespace vmci
