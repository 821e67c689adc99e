// The files of one guest in which registered memory lies, as this process maps them for direct mode: in overlapping chunks, on demand.
//
// around() and has() are called by any thread, without a lock; add() by any thread. What is mapped stays until the object goes.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "vrdma/direct.hpp"
#include "vrdma/result.hpp"

namespace vrdma::guest {

class PeerMemory {
 public:
  PeerMemory() = default;
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  ~PeerMemory();

  // A part of a file, and where it is mapped.
  struct Part {
    std::byte* data = nullptr;
    std::uint64_t offset = 0, bytes = 0;
  };
  // The mapped part that [offset, offset + bytes) of the file lies in; without data: not mapped yet, or not in one piece.
  Part around(std::uint32_t backing, std::uint64_t offset, std::uint64_t bytes) const {
    const std::uint64_t index = offset / direct::chunk_bytes;
    // M1: pairs with M2 in add().
    for (const Chunk* chunk = place(backing, index).load(std::memory_order_acquire); chunk != nullptr; chunk = chunk->next) {
      if (chunk->backing != backing || chunk->index != index) continue;
      const std::uint64_t within = offset - index * direct::chunk_bytes;
      if (within > chunk->bytes || bytes > chunk->bytes - within) return {};
      return {chunk->data, index * direct::chunk_bytes, chunk->bytes};
    }
    return {};
  }
  bool has(std::uint32_t backing, std::uint64_t offset, std::uint64_t bytes) const { return around(backing, offset, bytes).data != nullptr; }
  // Maps the chunk that `offset` lies in, unless it is there. ERANGE: beyond the file's end; else as mmap(2).
  Status add(std::uint32_t backing, int fd, std::uint64_t offset);
  void abandon();  // in a fork's child

 private:
  struct Chunk {
    std::uint32_t backing;
    std::uint64_t index;
    std::byte* data;  // nullptr: not mapped in this process
    std::uint64_t bytes;
    const Chunk* next;
  };
  static constexpr std::size_t places = 64;
  std::atomic<Chunk*>& place(std::uint32_t backing, std::uint64_t index) { return places_[(backing + index) % places]; }
  const std::atomic<Chunk*>& place(std::uint32_t backing, std::uint64_t index) const { return places_[(backing + index) % places]; }

  std::array<std::atomic<Chunk*>, places> places_{};
  std::mutex mutex_;
};

}  // namespace vrdma::guest
