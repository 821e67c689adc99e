#include "guest_lib/memory/mapped_memory.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "guest_lib/memory/vma.hpp"

namespace vrdma::memory {

void* MappedMemory::do_allocate(std::size_t bytes, std::size_t alignment) {
  if (alignment > page_bytes() || bytes > SIZE_MAX / 2) throw std::bad_alloc();
  void* memory = ::mmap(nullptr, page_ceiling(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

void MappedMemory::do_deallocate(void* memory, std::size_t bytes, std::size_t) {
  ::munmap(memory, page_ceiling(bytes));
}

}  // namespace vrdma::memory
