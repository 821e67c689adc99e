#include "guest_lib/direct/peer_memory.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "guest_lib/memory/manager.hpp"
#include "guest_lib/segment_mapping.hpp"
#include "vmci_channel/memcheck.hpp"

namespace vrdma::guest {

namespace {
memory::Range range_of(const std::byte* data, std::uint64_t bytes) {
  const auto begin = reinterpret_cast<std::uint64_t>(data);
  return {begin, begin + bytes};
}
}  // namespace

Status PeerMemory::add(std::uint32_t backing, int fd, std::uint64_t offset, std::uint32_t changes) {
  std::lock_guard lock(mutex_);
  if (has(backing, offset, 1)) return ok();
  if (changes != changes_.load(std::memory_order_relaxed)) return Errno{EAGAIN};
  struct stat file;
  if (::fstat(fd, &file) != 0) return last_error();
  const std::uint64_t index = offset / direct::chunk_bytes, begin = index * direct::chunk_bytes;
  const auto size = static_cast<std::uint64_t>(file.st_size);
  if (offset >= size || index > indices_max) return Errno{ERANGE};
  const SparseMapping sparse;
  const std::uint64_t bytes = std::min(direct::chunk_bytes + direct::message_bytes_max, size - begin);
  // One of the files may be this process's own window: its memory manager has to know what is mapped of that.
  const auto map = [&](memory::Range blank) {
    auto data = memory::MemoryManager::map_view(fd, begin, bytes, blank);
    if (!data) return data;
    const Status kept = keep_private(*data, bytes);
    if (kept) return data;
    memory::MemoryManager::unmap_view(range_of(*data, bytes));
    return Result<std::byte*>(kept.error());
  };
  std::atomic<Chunk*>& first = place(backing, index);
  const auto unused = [&](auto&& suits) {
    Chunk* chunk = first.load(std::memory_order_relaxed);
    while (chunk != nullptr && !(chunk->id.load(std::memory_order_relaxed) == no_chunk && suits(*chunk))) chunk = chunk->next;
    return chunk;
  };
  Chunk* chunk = unused([bytes](const Chunk& one) { return one.data != nullptr && one.bytes_there >= bytes; });
  auto data = chunk != nullptr ? map(range_of(chunk->data, chunk->bytes_there)) : Result<std::byte*>(Errno{ENOMEM});
  std::unique_ptr<Chunk> made;
  if (!data) {  // also where a file of huge pages does not go there
    if (chunk != nullptr) chunk->data = nullptr;  // nobody knows what the kernel has left of the range: it is not mapped over again
    chunk = unused([](const Chunk& one) { return one.data == nullptr; });
    if (chunk == nullptr) {
      made.reset(new Chunk{no_chunk, nullptr, 0, 0, first.load(std::memory_order_relaxed)});
      chunk = made.get();
    }
    data = map({});
  }
  if (!data) return data.error();
  vmci::memcheck::hide(*data, bytes);  // sparse; what keys name of it is shown by who finds them
  if (chunk->data == nullptr) chunk->bytes_there = bytes;
  chunk->data = *data;
  chunk->bytes = bytes;
  // M2: pairs with M1, by either.
  chunk->id.store(id_of(backing, index), std::memory_order_release);
  if (made) first.store(made.release(), std::memory_order_release);
  return ok();
}

void PeerMemory::unmap(Chunk& chunk) {
  chunk.id.store(no_chunk, std::memory_order_relaxed);
  if (std::byte* const data = std::exchange(chunk.data, nullptr)) memory::MemoryManager::unmap_view(range_of(data, chunk.bytes_there));
}

void PeerMemory::blank(Chunk& chunk) {
  chunk.id.store(no_chunk, std::memory_order_relaxed);
  if (chunk.data != nullptr && !memory::MemoryManager::blank_view(range_of(chunk.data, chunk.bytes))) chunk.data = nullptr;
}

void PeerMemory::forget(std::uint32_t backing) {
  std::lock_guard lock(mutex_);
  changes_.fetch_add(1, std::memory_order_relaxed);
  for_each([&](Chunk& chunk) {
    if (chunk.id.load(std::memory_order_relaxed) >> 32 == backing) unmap(chunk);
  });
}

void PeerMemory::forget_all_of(const direct::LetGo& let_go) {
  std::lock_guard lock(mutex_);
  const std::uint32_t count = std::atomic_ref(const_cast<std::uint32_t&>(let_go.count)).load(std::memory_order_acquire);
  const std::uint32_t news = count - caught_up_.load(std::memory_order_relaxed);
  if (news == 0) return;
  const SparseMapping sparse;
  changes_.fetch_add(1, std::memory_order_relaxed);
  const auto is_among = [&](std::uint32_t backing) {
    if (news > direct::let_go_kept) return true;  // nobody knows which; the others are mapped anew
    for (std::uint32_t n = count - news; n != count; ++n)
      if (std::atomic_ref(const_cast<std::uint32_t&>(let_go.backings[n % direct::let_go_kept])).load(std::memory_order_relaxed) == backing) return true;
    return false;
  };
  for_each([&](Chunk& chunk) {
    const std::uint64_t id = chunk.id.load(std::memory_order_relaxed);
    if (id != no_chunk && is_among(static_cast<std::uint32_t>(id >> 32))) blank(chunk);
  });
  // Pairs with catch_up(): whoever finds it so uses nothing that is being unmapped here.
  caught_up_.store(count, std::memory_order_release);
}

void PeerMemory::abandon() {
  for_each([](Chunk& chunk) {
    if (const std::byte* const data = std::exchange(chunk.data, nullptr)) vmci::memcheck::hide(data, chunk.bytes_there);
  });
}

PeerMemory::~PeerMemory() {
  for_each([this](Chunk& chunk) {
    unmap(chunk);
    delete &chunk;
  });
}

}  // namespace vrdma::guest
