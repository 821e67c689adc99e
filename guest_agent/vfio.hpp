// A PCI device that the kernel's vfio-pci driver lends to this process, where the machine has an IOMMU: its BARs, and one of its
// interrupts as an eventfd. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

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
  // So many MSI-X vectors at most, from 0 on; once, before any is used. How many there are: at least one.
  std::uint32_t enable_interrupts(std::uint32_t count_max) const;
  // An eventfd, non-blocking, that counts interrupts of this MSI-X vector from now on, in place of one before. None, and errno: it cannot be had.
  vmci::UniqueFd interrupt(std::uint32_t vector) const;
  // An eventfd that is always empty: whatever is added to it has the kernel write `word` there, before the call that adds returns. Whoever
  // has it can do that and nothing else, not even keep others from it. None where the kernel does not do so.
  vmci::UniqueFd writing(unsigned bar, std::uint64_t offset, std::uint32_t word) const;

 private:
  bool set_interrupts(std::uint32_t first, std::span<const int> eventfds) const;

  vmci::UniqueFd container_, group_, device_;
};

}  // namespace vrdma::agent
