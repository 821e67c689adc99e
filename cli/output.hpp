// Standard output that does not lose what it could not write, and standard error, which may.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "vrdma/write_all.hpp"

namespace vrdma::cli {

// Writes all of `text` to standard output. Throws std::runtime_error where that fails (a full disk); a reader that has gone
// away (`| head`) ends the program as SIGPIPE would.
void print_all(std::string_view text);
// With a line end. What is not UTF-8, as JSON has to be and paths need not, becomes U+FFFD.
std::string json_text(const nlohmann::json& value);

// To standard error, in one piece. Where nothing can be written, that is no reason not to go on.
template <class... Values>
void tell(fmt::format_string<Values...> text, Values&&... values) {
  (void)write_all(STDERR_FILENO, fmt::format(text, std::forward<Values>(values)...));
}

}  // namespace vrdma::cli
