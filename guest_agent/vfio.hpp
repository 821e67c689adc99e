// A PCI device that the kernel's vfio-pci driver lends to this process, where the machine has an IOMMU: its BARs, and one of its
// interrupts as an eventfd. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "vmci_channel/unique_fd.hpp"

namespace vrdma::agent {

class VfioDevice {
 public:
  // device: its folder in /sys/bus/pci/devices. Whether vfio has it, or takes it, as nobody else has. Without an IOMMU: false.
  static bool available(const std::filesystem::path& device);
  // Throws std::runtime_error that says what to do.
  explicit VfioDevice(const std::filesystem::path& device);

  struct Bar {
    void* memory;
    std::size_t bytes;
  };
  Bar map_bar(unsigned index) const;  // the caller's to unmap
  // An eventfd, non-blocking, that counts interrupts of this MSI-X vector.
  vmci::UniqueFd interrupt(std::uint32_t vector) const;

 private:
  vmci::UniqueFd container_, group_, device_;
};

}  // namespace vrdma::agent
