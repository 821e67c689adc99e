// How a command gives up: main() prints what was thrown.
#pragma once

#include <stdexcept>
#include <string>

namespace vrdma::cli {

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

}  // namespace vrdma::cli
