// The files of one guest in which registered memory lies, as this process maps them for direct mode: in overlapping chunks, on demand.
//
// at() is called by any thread, without a lock; add() by any thread. What is mapped stays until the object goes.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "vmci_channel/segment.hpp"
#include "vrdma/direct.hpp"

namespace vrdma::guest {

class PeerMemory {
 public:
  PeerMemory() = default;
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  ~PeerMemory();

  // Where [offset, offset + bytes) of the file is mapped; nullptr: not yet, or not in one piece.
  std::byte* at(std::uint32_t backing, std::uint64_t offset, std::uint64_t bytes) const {
    const std::uint64_t index = offset / direct::chunk_bytes;
    // M1: pairs with M2 in add().
    for (const Chunk* chunk = place(backing, index).load(std::memory_order_acquire); chunk != nullptr; chunk = chunk->next) {
      if (chunk->backing != backing || chunk->index != index) continue;
      const std::uint64_t within = offset - index * direct::chunk_bytes;
      return within <= chunk->mapping.bytes() && bytes <= chunk->mapping.bytes() - within ? chunk->mapping.data() + within : nullptr;
    }
    return nullptr;
  }
  // Maps the chunk that `offset` lies in, unless it is there. ERANGE: beyond the file's end; else as mmap(2).
  Status add(std::uint32_t backing, int fd, std::uint64_t offset);
  void abandon();  // in a fork's child

 private:
  struct Chunk {
    std::uint32_t backing;
    std::uint64_t index;
    vmci::Mapping mapping;
    const Chunk* next;
  };
  static constexpr std::size_t places = 64;
  std::atomic<Chunk*>& place(std::uint32_t backing, std::uint64_t index) { return places_[(backing + index) % places]; }
  const std::atomic<Chunk*>& place(std::uint32_t backing, std::uint64_t index) const { return places_[(backing + index) % places]; }

  std::array<std::atomic<Chunk*>, places> places_{};
  std::mutex mutex_;
};

}  // namespace vrdma::guest
