// Which devices the tree shows now: any thread reads them, also in a signal handler, while one sets others. Four slots, one of them current; no
// lock, which a signal handler could find held.
#pragma once

#include <cstdint>
#include <span>

#include "guest_lib/synthetic_tree.hpp"

namespace vrdma::synthetic {

struct Devices {
  std::size_t count;
  SyntheticDevice device[synthetic_devices_max];
};

// What holds while one of these is there: devices that are set meanwhile go to another slot.
class Reading {
 public:
  Reading();
  ~Reading();
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  std::span<const SyntheticDevice> devices() const;

 private:
  std::uint32_t slot_;
  Devices defaults_;  // filled only before the first set_synthetic_devices()
};

bool devices_are_default();  // nobody has set any

}  // namespace vrdma::synthetic
