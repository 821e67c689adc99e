// `vrdma run`: starts a program with libvrdma in place of libibverbs.
#pragma once

#include <string>
#include <vector>

namespace vrdma::cli {

struct RunOptions {
  std::string link_layer;  // "", "ib" or "ethernet"
  std::string name;
  bool stats = false;
  bool mediated = false;    // by a private service that offers no direct mode
  std::vector<std::string> command;
};

// The exit code of the command, 128 + n if signal n ended it, 127 if it does not exist, 126 if it cannot be executed.
// Throws std::runtime_error with a message for a person when the service or the library cannot be had.
int run(const RunOptions& options);

}  // namespace vrdma::cli
