#include "guest_lib/direct/peer_memory.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "guest_lib/memory/manager.hpp"
#include "guest_lib/segment_mapping.hpp"

namespace vrdma::guest {

namespace {
memory::Range range_of(const std::byte* data, std::uint64_t bytes) {
  const auto begin = reinterpret_cast<std::uint64_t>(data);
  return {begin, begin + bytes};
}
}  // namespace

Status PeerMemory::add(std::uint32_t backing, int fd, std::uint64_t offset) {
  std::lock_guard lock(mutex_);
  if (has(backing, offset, 1)) return ok();
  struct stat file;
  if (::fstat(fd, &file) != 0) return last_error();
  const std::uint64_t index = offset / direct::chunk_bytes, begin = index * direct::chunk_bytes;
  const auto size = static_cast<std::uint64_t>(file.st_size);
  if (offset >= size) return Errno{ERANGE};
  const SparseMapping sparse;
  const std::uint64_t bytes = std::min(direct::chunk_bytes + direct::message_bytes_max, size - begin);
  // One of the files may be this process's own window: its memory manager has to know what is mapped of that.
  const auto data = memory::MemoryManager::map_view(fd, begin, bytes);
  if (!data) return data.error();
  if (Status kept = keep_private(*data, bytes); !kept) {
    memory::MemoryManager::unmap_view(range_of(*data, bytes));
    return kept;
  }
  std::atomic<Chunk*>& first = place(backing, index);
  // M2: pairs with M1.
  first.store(new Chunk{backing, index, *data, bytes, first.load(std::memory_order_relaxed)}, std::memory_order_release);
  return ok();
}

void PeerMemory::abandon() {
  for (auto& first : places_)
    for (Chunk* chunk = first.load(std::memory_order_relaxed); chunk != nullptr; chunk = const_cast<Chunk*>(chunk->next)) chunk->data = nullptr;
}

PeerMemory::~PeerMemory() {
  for (auto& first : places_)
    for (const Chunk* chunk = first.load(std::memory_order_relaxed); chunk != nullptr;) {
      if (chunk->data != nullptr) memory::MemoryManager::unmap_view(range_of(chunk->data, chunk->bytes));
      delete std::exchange(chunk, chunk->next);
    }
}

}  // namespace vrdma::guest
