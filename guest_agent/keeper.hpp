// A second process that shares every descriptor of the agent and does nothing, until the agent ends without having said good-bye
// (SIGKILL, out of memory). The pages that the agent held for processes are then still held, by the descriptors of their rings;
// the keeper has the service let go of them by beginning another session, and only then leaves, and the pages with it.
// Without it the service would go on writing to pages that the kernel has given to somebody else.
//
// Made by a process of one thread, before it opens anything else; ended by the destructor, when all is in order.
#pragma once

#include <sys/types.h>

#include "guest_agent/device.hpp"

namespace vrdma::agent {

class Keeper {
 public:
  // The device stays open for as long as this lives. Throws std::runtime_error.
  explicit Keeper(const Device& device);
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

 private:
  [[noreturn]] static void keep(const Device& device, int agent);

  vmci::UniqueFd agent_;  // a pidfd of this process
  pid_t pid_ = -1;
};

}  // namespace vrdma::agent
