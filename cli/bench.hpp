// `vrdma bench`: hands over to the scripts that measure.
#pragma once

#include <string>
#include <vector>

namespace vrdma::cli {

// Replaces this program by the measuring one, which knows the options. Returns only by a std::runtime_error with a message for a person.
[[noreturn]] void bench(const std::vector<std::string>& arguments);

}  // namespace vrdma::cli
