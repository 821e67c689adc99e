// The BAR of a User Mode Linux machine: a file of its host, which the kernel offers as /dev/mmapper where it was started with
// iomem=mmapper,FILE. Nobody interrupts anybody. One thread.
#pragma once

#include <string>

#include "guest_agent/device.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace vrdma::agent {

class MapperDevice {
 public:
  // Throws std::runtime_error that says what to do; NoDevice where that is none.
  explicit MapperDevice(const std::string& path);
  MapperDevice(const MapperDevice&) = delete;
  MapperDevice& operator=(const MapperDevice&) = delete;
  ~MapperDevice();

  const Device& device() const { return device_; }

 private:
  vmci::UniqueFd file_;  // locked
  Device device_;
};

}  // namespace vrdma::agent
