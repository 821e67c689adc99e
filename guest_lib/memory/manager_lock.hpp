// Holding MemoryManager's lock: with signals blocked, so that no handler of this thread finds it held, and the copy gate closed.
#pragma once

#include "guest_lib/memory/copy_gate.hpp"
#include "guest_lib/memory/manager.hpp"
#include "guest_lib/memory/threads.hpp"

namespace vrdma::memory {

class MemoryManager::Locked {
 public:
  explicit Locked(MemoryManager& manager) : lock_(manager.mutex_) { manager.gate_closed_ = gate_.holds(); }

 private:
  SignalsBlocked signals_;  // first in, last out
  CopyGate::Closed gate_;
  std::lock_guard<std::mutex> lock_;
};

}  // namespace vrdma::memory
