// How a command gives up: main() prints what was thrown.
#pragma once

#include <stdexcept>
#include <string>

namespace vrdma::cli {

// Of what was asked for, which cannot be: the exit code is that of wrong usage.
struct WrongUsage : std::runtime_error {
  using runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

}  // namespace vrdma::cli
