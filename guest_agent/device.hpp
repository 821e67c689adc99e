// The machine's ivshmem device (1af4:1110): a BAR that it shares with the host service, and a register that interrupts it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::agent {

// What the rest of the agent knows of a device; a test makes its own of plain memory. One thread.
struct Device {
  std::byte* bar = nullptr;                      // vm::bar_bytes
  volatile std::uint32_t* registers = nullptr;   // BAR 0
  int interrupt = -1;                            // eventfd of vm::link_vector; -1: there are no interrupts, the link is polled

  // Tells the service. Without effect where the device has no interrupts (ivshmem-plain): then the service polls.
  void ring(std::uint32_t vector) const { registers[vm::doorbell_register / sizeof(*registers)] = vm::service_peer << 16 | vector; }
};

// The real one, as long as this lives.
class IvshmemDevice {
 public:
  // bdf: as "0000:00:03.0"; empty: the only one that there is. Throws std::runtime_error that says what to do.
  explicit IvshmemDevice(std::string bdf);
  IvshmemDevice(const IvshmemDevice&) = delete;
  IvshmemDevice& operator=(const IvshmemDevice&) = delete;
  ~IvshmemDevice();

  const Device& device() const { return device_; }
  const std::string& bdf() const { return bdf_; }

 private:
  void open_by_sysfs();

  std::string bdf_;
  Device device_;
  std::size_t bar_bytes_ = 0, register_bytes_ = 0;
};

}  // namespace vrdma::agent
