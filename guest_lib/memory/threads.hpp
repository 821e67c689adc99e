// What else runs in this process: how many threads, where their stacks are, and keeping signal handlers away meanwhile.
//
// Any thread; never allocates.
#pragma once

#include <cstdint>
#include <memory_resource>
#include <vector>

#include "guest_lib/memory/vma.hpp"

namespace vrdma::memory {

// Threads of this process as the kernel counts them; 0 where it does not say.
std::uint64_t thread_count();

// For each thread but the first an address inside its control block, which lies at the top of its stack's mapping.
// Threads that never told the kernel a robust list (not from pthread_create) are missing.
std::pmr::vector<std::uint64_t> thread_control_blocks(std::pmr::memory_resource* resource);

// An address on the main thread's stack, in the part that the kernel filled at exec.
std::uint64_t main_stack_address();

// Blocks every signal of the calling thread, those that the C library keeps to itself included: a handler must not
// write to memory that is being copied or that is protected against writing by this very thread.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  std::uint64_t previous_ = 0;
};

}  // namespace vrdma::memory
