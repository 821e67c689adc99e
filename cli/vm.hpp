// `vrdma vm`: registers virtual machines with the host service, and says how to start them.
//
// A machine is a folder with the file vm.json (vmkernel_svc reads it; the service watches for it and serves ivshmem.sock beside it,
// or link.bar where nobody is to be interrupted).
// These commands write and read such folders; only `list` and `show` ask the service too, and do without where none answers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace vrdma::cli {

struct VmOptions {
  std::string name;
  std::string socket;  // empty: where find_service() looks
  std::string folder;  // of the machines; empty: where the service says, else "vm" beside its socket
  std::uint64_t memory_bytes = 2ull << 30;
  std::string ram;     // the file that becomes the machine's RAM; empty: vm_default_ram()
  std::optional<std::uint32_t> tenant;  // a uid; else the service's own
  bool json = false;
  bool plain = false;                // add: a device without interrupts
  bool private_ram = false;          // add: its RAM is QEMU's own, and what programs share lies in the device's BAR …
  std::optional<std::uint64_t> bar_bytes;  // … which is so big; else vm_default_bar_bytes
  bool uml = false;                  // add: a machine of User Mode Linux
  std::vector<std::string> command;  // uml: what starts it
};

constexpr std::uint64_t vm_default_bar_bytes = 256ull << 20;

// Exit code. Throw std::runtime_error with a message for a person.
int vm_add(const VmOptions& options);
int vm_list(const VmOptions& options);
int vm_show(const VmOptions& options);
int vm_remove(const VmOptions& options);
int vm_uml(const VmOptions& options);

// Empty, or why `name` cannot be a machine's.
std::string vm_name_error(const std::string& name);
std::string vm_default_ram(const std::string& name);

}  // namespace vrdma::cli
