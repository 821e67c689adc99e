// The folder of machines on disk. May be called by anybody; writes as atomically as a file system allows: a machine is there when its
// vm.json is, and that appears whole. What looks before it writes holds the lock of the folder, which only its owner can take.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::cli {

struct VmRecord {
  std::string name;
  std::string ram;                      // empty: of User Mode Linux, which makes it itself, or private
  std::uint64_t memory_bytes = 0;       // the size of that file, which is where it is kept; 0: of private RAM, which is nobody else's affair
  std::optional<std::uint32_t> tenant;  // else the service's own
  bool plain = false;                   // without interrupts: the device is a file
  std::uint32_t vectors = vm::vectors_max;  // else: how many its device has
  std::uint64_t bar_bytes = 0;              // of a machine whose RAM is QEMU's own: of its device's BAR
  bool private_ram() const { return bar_bytes != 0; }
  bool uml() const { return plain && ram.empty() && !private_ram(); }
};

class VmFolder {
 public:
  explicit VmFolder(std::string path) : path_(std::move(path)) {}

  struct Lock {
    vmci::UniqueFd fd;
  };

  // All throw std::runtime_error with a message for a person.
  [[nodiscard]] Lock lock() const;             // until it is given up; makes the folder where there is none
  void require_free(const std::string& name) const;
  void require_unused(const std::string& ram) const;  // by any machine: two would overwrite each other
  void add(const VmRecord& record);            // refuses a name that is taken
  void remove(const std::string& name);        // with what the service left beside vm.json
  VmRecord read(const std::string& name) const;
  std::vector<std::string> names() const;      // in order; none where there is no folder

  const std::string& path() const { return path_; }
  std::string own(const std::string& name) const { return path_ + "/" + name; }
  std::string link(const std::string& name, bool plain = false) const { return own(name) + (plain ? "/link.bar" : "/ivshmem.sock"); }
  std::string launcher(const std::string& name) const { return own(name) + "/launcher.sock"; }  // of User Mode Linux

 private:
  std::string file(const std::string& name) const { return path_ + "/" + name + "/vm.json"; }

  std::string path_;
};

// The file that shall be a machine's RAM: made of that size and closed to others (QEMU would make it readable for everybody), or,
// unless it `must_be_new`, found with that size. True: it was made. Throws likewise.
bool make_ram_file(const VmRecord& record, bool must_be_new);

}  // namespace vrdma::cli
