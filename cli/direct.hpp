// `vrdma direct`: whether guests may be direct (docs/direct.md), from now on.
#pragma once

#include <cstdint>
#include <string>

namespace vrdma::cli {

struct DirectOptions {
  std::string mode;         // auto or mediated
  std::uint32_t guest = 0;  // context id; 0: all
  std::string socket;       // empty: where find_service() looks
};

// Exit code. Throws std::runtime_error with a message for a person.
int direct(const DirectOptions& options);

}  // namespace vrdma::cli
