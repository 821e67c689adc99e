#include "guest_lib/memory/mover.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "guest_lib/memory/raw_map.hpp"
#include "guest_lib/memory/write_freeze.hpp"

namespace vrdma::memory {
namespace {

// Bounds how long a writer waits and how much memory exists twice.
constexpr std::uint64_t chunk_bytes = 4 << 20;

void* pointer(std::uint64_t address) {
  return reinterpret_cast<void*>(address);
}

bool move_chunk_in(const Window& window, Range chunk, int protection, OtherThreads others) {
  std::optional<WriteFreeze> freeze;
  if (others == OtherThreads::some) {
    auto frozen = WriteFreeze::freeze(chunk, WriteFreeze::Memory::anonymous);
    if (!frozen) return false;
    freeze.emplace(std::move(*frozen));
  }
  if (!window.copy_from_memory(chunk) || !window.map(chunk, protection)) {
    freeze.reset();
    (void)window.punch(chunk);
    return false;
  }
  if (freeze) freeze->replaced();
  return true;
}

// Alone: a fresh mapping put straight at the address merges with its neighbours again, which mremap's result never
// does.
bool replace_alone(const Window& window, Range chunk, int protection) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_POPULATE;
  if (raw_mmap(chunk.begin, chunk.bytes(), PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED &&
      window.copy_to(pointer(chunk.begin), chunk)) {
    if (protection != (PROT_READ | PROT_WRITE)) raw_mprotect(chunk.begin, chunk.bytes(), protection);
    return true;
  }
  // The old mapping may be gone already (the commit limit is checked late); the contents are still in the window.
  (void)window.map(chunk, protection);
  return false;
}

// Not alone: the finished copy replaces the frozen mapping in one step.
bool replace_frozen(const Window& window, Range chunk, int protection) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  void* const copy = raw_mmap(0, chunk.bytes(), PROT_READ | PROT_WRITE, flags, -1, 0);
  if (copy == MAP_FAILED) return false;
  const auto address = reinterpret_cast<std::uint64_t>(copy);
  ::syscall(SYS_madvise, copy, chunk.bytes(), populate_write);  // before the freeze: writers wait only for the copy
  {
    auto frozen = WriteFreeze::freeze(chunk, WriteFreeze::Memory::window);
    if (frozen && window.copy_to(copy, chunk) &&
        (protection == (PROT_READ | PROT_WRITE) || raw_mprotect(address, chunk.bytes(), protection)) &&
        ::syscall(SYS_mremap, copy, chunk.bytes(), chunk.bytes(), MREMAP_MAYMOVE | MREMAP_FIXED, chunk.begin) != -1) {
      frozen->replaced();
      return true;
    }
  }
  raw_munmap(address, chunk.bytes());
  return false;
}

template <class MoveChunk>
std::uint64_t by_chunks(Range range, MoveChunk&& move_chunk) {
  std::uint64_t at = range.begin;
  while (at < range.end) {
    const Range chunk{at, std::min(range.end, (at / chunk_bytes + 1) * chunk_bytes)};
    if (!move_chunk(chunk)) break;
    at = chunk.end;
  }
  return at - range.begin;
}

}  // namespace

std::uint64_t move_in(const Window& window, Range range, int protection, OtherThreads others) {
  return by_chunks(range, [&](Range chunk) { return move_chunk_in(window, chunk, protection, others); });
}

std::uint64_t move_out(const Window& window, Range range, int protection, OtherThreads others) {
  if (!window.intact()) return 0;
  return by_chunks(range, [&](Range chunk) {
    return others == OtherThreads::some ? replace_frozen(window, chunk, protection)
                                        : replace_alone(window, chunk, protection);
  });
}

}  // namespace vrdma::memory
