// mremap for an application whose private memory may be in several mappings where it made one: pages that come back from the
// window do not always merge with their neighbours again, and the kernel resizes only what is a single mapping (and before
// Linux 6.17 moves nothing else).
//
// Any thread, also inside an allocator with its locks held: never allocates.
#pragma once

#include <cstddef>

namespace vrdma::memory {

using Mremap = void*(void*, std::size_t, std::size_t, int, ...);
// As mremap(2): MAP_FAILED and errno. Nothing of the range may be in the window (MemoryManager::before_mremap). `next` is tried first, or, where
// that is nullptr, the system call.
void* remap(Mremap* next, void* address, std::size_t old_bytes, std::size_t new_bytes, int flags, void* target);

}  // namespace vrdma::memory
