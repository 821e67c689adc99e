#include "cli/output.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace vrdma::cli {

void print_all(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EPIPE) ::_exit(128 + SIGPIPE);  // where SIGPIPE is ignored
    if (written < 0)
      throw std::runtime_error(fmt::format("cannot write to standard output ({}): redirect it to where there is room", std::strerror(errno)));
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace vrdma::cli
