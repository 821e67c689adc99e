#include "cli/output.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace vrdma::cli {

void print_all(std::string_view text) {
  if (write_all(STDOUT_FILENO, text)) return;
  if (errno == EPIPE) ::_exit(128 + SIGPIPE);  // where SIGPIPE is ignored
  throw std::runtime_error(fmt::format("cannot write to standard output ({}): redirect it to where there is room", std::strerror(errno)));
}

std::string json_text(const nlohmann::json& value) { return value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"; }

}  // namespace vrdma::cli
