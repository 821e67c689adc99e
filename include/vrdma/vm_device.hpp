// Where this machine may have a device of vrdma's, as far as everybody may see: nothing is opened.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "vrdma/vm_link.hpp"

namespace vrdma::vm {

inline const std::filesystem::path pci_devices = "/sys/bus/pci/devices";
constexpr const char* mapper_path = "/dev/mmapper";  // of User Mode Linux

inline std::string word_in(const std::filesystem::path& file) {
  std::string word;
  std::ifstream(file) >> word;
  return word;
}

inline bool is_ivshmem(const std::filesystem::path& device) { return word_in(device / "vendor") == "0x1af4" && word_in(device / "device") == "0x1110"; }

// Names in pci_devices, in order. Others use such devices too, with BARs of their own sizes.
inline std::vector<std::string> ivshmem_devices() {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(pci_devices, none))
    if (is_ivshmem(entry.path()) && std::filesystem::file_size(entry.path() / "resource2", none) >= bar_bytes && !none)
      names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

// The device that the agent would take, as people name it; empty: there is none. Of several the first: only the agent may see which is vrdma's.
inline std::string device_seen() {
  if (const auto names = ivshmem_devices(); !names.empty()) return "PCI device " + names.front();
  std::error_code none;
  return std::filesystem::exists(mapper_path, none) ? mapper_path : "";
}

}  // namespace vrdma::vm
