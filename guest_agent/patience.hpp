// Waiting for what another process is about to give up: an agent that has just been killed holds the device until its keeper has
// had the host let go of the machine's memory. Nobody tells when that is.
#pragma once

#include <time.h>

#include <cstdint>

#include "vmci_channel/backoff.hpp"

namespace vrdma::agent {

// Tries until `taken` says that there is nothing to wait for any more. False: it never did, for ten seconds.
template <class Taken>
bool taken_in_time(const Taken& taken) {
  constexpr std::uint64_t patience_ns = 10'000'000'000;
  for (const std::uint64_t until = vmci::monotonic_ns() + patience_ns; !taken();) {
    if (vmci::monotonic_ns() > until) return false;
    const timespec nap{0, 20'000'000};
    ::nanosleep(&nap, nullptr);
  }
  return true;
}

}  // namespace vrdma::agent
