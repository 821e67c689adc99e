// Moves private anonymous pages into the window, at the same address, and back, without losing a write that another
// thread or system call makes meanwhile. Nobody but the speed of one write notices.
//
// The caller holds MemoryManager's lock with signals blocked. Never allocates. Where losslessness cannot be had (other
// threads run and userfaultfd is not permitted) nothing is moved: EPERM.
#pragma once

#include "guest_lib/memory/vma.hpp"
#include "guest_lib/memory/window.hpp"
#include "vrdma/result.hpp"

namespace vrdma::memory {

enum class OtherThreads : bool { none, some };

// Moves `range`, which lies in one writable private anonymous mapping. Returns how many bytes from its beginning are in
// the window now; fewer than asked where memory, mappings or permission ran out.
std::uint64_t move_in(const Window& window, Range range, int protection, OtherThreads others);

// Moves `range`, which lies in one in-place mapping of the window, back to private memory with the same contents.
// Returns how many bytes from its beginning are private now; the rest is untouched. The window's pages stay allocated.
std::uint64_t move_out(const Window& window, Range range, int protection, OtherThreads others);

}  // namespace vrdma::memory
