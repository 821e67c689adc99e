// Allocations at whole pages, as programs make them for what they register: they end at a whole page, too. So their last page holds
// nothing else, and moves with a registration that fills it in part (plan.cpp: aligned_block). `ib_write_bw -s 5000` allocates 10112 bytes
// at a page: reached through the process beyond the first two pages it moved 1.3 GB/s.
//
// Linked into libvrdma.so as an object, as interpose.cpp is; not under sanitizers, which have an allocator of their own
// and want to see where blocks end.
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#include "guest_lib/memory/vma.hpp"
#include "guest_lib/next_function.hpp"
#include "vmci_channel/memcheck.hpp"

namespace {

// What to ask for; a size that cannot be had stays one.
std::size_t to_whole_pages(std::size_t alignment, std::size_t bytes) {
  const std::size_t page = vrdma::memory::page_bytes();
  return alignment < page || bytes > SIZE_MAX - page ? bytes : vrdma::memory::page_ceiling(bytes);
}

void* none() {
  errno = ENOMEM;
  return nullptr;
}

constinit vrdma::NextFunction<void*(std::size_t, std::size_t)> next_memalign("memalign"), next_aligned_alloc("aligned_alloc");
constinit vrdma::NextFunction<int(void**, std::size_t, std::size_t)> next_posix_memalign("posix_memalign");
constinit vrdma::NextFunction<void*(std::size_t)> next_valloc("valloc");

}  // namespace

extern "C" {

[[gnu::visibility("default")]] void* memalign(std::size_t alignment, std::size_t bytes) noexcept {
  auto* const next = next_memalign.get();
  return next != nullptr ? next(alignment, to_whole_pages(alignment, bytes)) : none();
}

[[gnu::visibility("default")]] void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  auto* const next = next_aligned_alloc.get();
  return next != nullptr ? next(alignment, to_whole_pages(alignment, bytes)) : none();
}

[[gnu::visibility("default")]] int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) noexcept {
  auto* const next = next_posix_memalign.get();
  return next != nullptr ? next(memory, alignment, to_whole_pages(alignment, bytes)) : ENOMEM;
}

[[gnu::visibility("default")]] void* valloc(std::size_t bytes) noexcept {
  auto* const next = next_valloc.get();
  return next != nullptr ? next(to_whole_pages(vrdma::memory::page_bytes(), bytes)) : none();
}

}  // extern "C"

// libvrdma's own, which would else call the functions above, past the entries that others patch in its tables of imports, and free()
// through these: UCX with UCX_MEM_MMAP_HOOK_MODE=reloc has an allocator of its own there, and ended the program. Hidden, like all of C++ here.
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto whole = static_cast<std::size_t>(alignment) + sizeof(void*);
  void* const block = bytes > SIZE_MAX - whole ? nullptr : std::malloc(bytes + whole);
  if (block == nullptr) throw std::bad_alloc();
  const auto end = reinterpret_cast<std::uintptr_t>(block) + whole;
  void** const object = reinterpret_cast<void**>(end - end % static_cast<std::size_t>(alignment));
  object[-1] = block;
  vmci::memcheck::allocated(object, bytes);
  return object;
}
void operator delete(void* object, std::align_val_t) noexcept {
  if (object == nullptr) return;
  void* const block = static_cast<void**>(object)[-1];
  vmci::memcheck::released(object);
  std::free(block);
}
void operator delete(void* object, std::size_t, std::align_val_t alignment) noexcept { operator delete(object, alignment); }
