// Standard output that does not lose what it could not write.
#pragma once

#include <string_view>

namespace vrdma::cli {

// Writes all of `text` to standard output. Throws std::runtime_error where that fails (a full disk); a reader that has gone
// away (`| head`) ends the program as SIGPIPE would.
void print_all(std::string_view text);

}  // namespace vrdma::cli
