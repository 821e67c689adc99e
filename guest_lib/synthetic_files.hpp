// The files below each device's directories, as data: their paths, and what stands in them.
#pragma once

#include <span>
#include <string_view>

#include "guest_lib/synthetic_tree.hpp"

namespace vrdma::synthetic {

struct Text {
  char* out;
  std::size_t room;
  std::size_t bytes = 0;

  __attribute__((format(printf, 2, 3))) void print(const char* format, ...);
};

struct Row {
  const char* path;  // below the device's directory; "#" as last component stands for 0 ... count-1
  std::size_t count;
  // False where reading it is EINVAL.
  bool (*render)(const SyntheticDevice&, std::size_t index, Text&);
};

struct Root {
  std::string_view path;
  std::string_view abi_version;                         // in a file of that name beside the devices' directories; "": none
  std::span<const Row> rows;                            // below each device's directory; none: device nodes
  std::string_view (*device_name)(const SyntheticDevice&);  // "": it has none here
};

std::span<const Root> roots();
bool is_dev_root(const Root* root);
std::string_view mad_name(const SyntheticDevice& d);  // "": it has none

void show_traffic(const PortTraffic& now);  // in the port's counters, from now on

}  // namespace vrdma::synthetic
