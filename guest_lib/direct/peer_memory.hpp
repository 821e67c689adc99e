// The files of one guest in which registered memory lies, as this process maps them for direct mode: in overlapping chunks, on demand.
//
// around() and has() are called by any thread, without a lock, the rest by any. A file is unmapped when no key names it any more: all directions
// that could read the guest's keys have been the service's since, and whoever enters one forgets what it knew and catches up first. So nobody
// is at that file who has found a key of it, and a chunk that is looked for stays. But one whose claim was revoked while it stood still may be in
// the midst of it: its next store has no effect, its next load must find something. The addresses of such a chunk are read as zeroes, until another
// chunk is mapped there.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

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
    const std::uint64_t index = offset / direct::chunk_bytes, wanted = id_of(backing, index);
    if (index > indices_max) [[unlikely]] return {};
    // M1: pairs with M2 in add().
    for (const Chunk* chunk = place(backing, index).load(std::memory_order_acquire); chunk != nullptr; chunk = chunk->next) {
      if (chunk->id.load(std::memory_order_acquire) != wanted) continue;
      const std::uint64_t within = offset - index * direct::chunk_bytes;
      if (within > chunk->bytes || bytes > chunk->bytes - within) return {};
      return {chunk->data, index * direct::chunk_bytes, chunk->bytes};
    }
    return {};
  }
  bool has(std::uint32_t backing, std::uint64_t offset, std::uint64_t bytes) const { return around(backing, offset, bytes).data != nullptr; }
  // Maps the chunk that `offset` lies in, unless it is there. changes: what changes() was before the file was asked for. EAGAIN: some have been
  // unmapped since, perhaps this one. ERANGE: beyond the file's end; else as mmap(2).
  Status add(std::uint32_t backing, int fd, std::uint64_t offset, std::uint32_t changes);
  std::uint32_t changes() const { return changes_.load(std::memory_order_relaxed); }
  // No key of the guest names that file any more.
  void forget(std::uint32_t backing);
  // Nor those which its service has told of since the last call. Inside a claim, before a key is used.
  void catch_up(const direct::LetGo& let_go) {
    if (std::atomic_ref(const_cast<std::uint32_t&>(let_go.count)).load(std::memory_order_acquire) != caught_up_.load(std::memory_order_acquire)) [[unlikely]]
      forget_all_of(let_go);
  }
  void abandon();  // in a fork's child

 private:
  struct Chunk {
    std::atomic<std::uint64_t> id;
    std::byte* data;  // nullptr: nothing of this process
    std::uint64_t bytes, bytes_there;  // mapped; that lie there for it, or the next one
    Chunk* next;  // for ever: a chunk that is mapped no more serves for another one
  };
  static constexpr std::uint64_t no_chunk = ~std::uint64_t{0};  // of no file: a backing of that number is a process
  static constexpr std::uint64_t indices_max = ~std::uint32_t{0};  // beyond, 2^60 bytes into a file, memory stays the service's
  static std::uint64_t id_of(std::uint32_t backing, std::uint64_t index) { return std::uint64_t{backing} << 32 | index; }
  void forget_all_of(const direct::LetGo& let_go);
  void unmap(Chunk& chunk);
  void blank(Chunk& chunk);
  template <class F>
  void for_each(F&& visit) {
    for (auto& first : places_)
      for (Chunk* chunk = first.load(std::memory_order_relaxed); chunk != nullptr;) visit(*std::exchange(chunk, chunk->next));
  }
  static constexpr std::size_t places = 64;
  std::atomic<Chunk*>& place(std::uint32_t backing, std::uint64_t index) { return places_[(backing + index) % places]; }
  const std::atomic<Chunk*>& place(std::uint32_t backing, std::uint64_t index) const { return places_[(backing + index) % places]; }

  std::array<std::atomic<Chunk*>, places> places_{};
  std::atomic<std::uint32_t> changes_{0}, caught_up_{0};
  std::mutex mutex_;
};

}  // namespace vrdma::guest
