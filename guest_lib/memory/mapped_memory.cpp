#include "guest_lib/memory/mapped_memory.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <utility>

namespace vrdma::memory {

void* MappedMemory::do_allocate(std::size_t bytes, std::size_t alignment) {
  if (alignment > page_bytes() || bytes > SIZE_MAX / 2) throw std::bad_alloc();
  const std::size_t whole = page_ceiling(bytes);
  constexpr int holes_max = 64;
  void* fillings[holes_max];
  int filled = 0;
  void* memory;
  for (;;) {
    memory = ::mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const auto begin = reinterpret_cast<std::uint64_t>(memory);
    if (memory == MAP_FAILED || !avoided_.overlaps({begin, begin + whole})) break;
    // A hole there, which the kernel likes to fill first: while it is filled, the next mapping lies elsewhere.
    fillings[filled++] = std::exchange(memory, MAP_FAILED);
    if (filled == holes_max) break;
  }
  while (filled != 0) ::munmap(fillings[--filled], whole);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

void MappedMemory::do_deallocate(void* memory, std::size_t bytes, std::size_t) {
  ::munmap(memory, page_ceiling(bytes));
}

}  // namespace vrdma::memory
