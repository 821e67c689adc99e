// What starts a virtual machine with vrdma's device: QEMU's arguments, and libvirt's XML. Texts only, nothing is looked up.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vrdma/vm_link.hpp"

namespace vrdma::cli {

constexpr std::uint64_t mib = 1 << 20;

struct Vm {
  std::string name;
  std::string link;  // socket of the service for this machine's device; beside it monitor.sock, where the service hears of resets;
                     // of a plain one the file that is the device's memory
  std::string ram;   // file; empty: private
  std::uint64_t memory_bytes = 0;
  bool plain = false;
  std::uint32_t vectors = vm::fixed_vectors;  // interrupts of the device
  std::uint64_t bar_bytes = vm::bar_bytes;    // of its memory
};

// Words for an exec, not for a shell.
std::vector<std::string> qemu_arguments(const Vm& vm);
// Those that interrupts need besides, in a VM whose vrdma-guestd shall sleep instead of poll.
std::vector<std::string> qemu_interrupt_arguments();
// One word as bash wants it.
std::string shell_quoted(const std::string& word);
// A <domain> of what vrdma needs; libvirt cannot name the file that is the RAM, so QEMU is told past it.
std::string libvirt_xml(const Vm& vm);

}  // namespace vrdma::cli
