// Files of the kernel's, whose size nobody knows before they are read. Any thread.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <string>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::agent {

// The whole of it. path: from that folder, or AT_FDCWD. Errors as openat(2) and read(2).
inline Result<std::string> read_all(int folder, const std::string& path) {
  const vmci::UniqueFd file(::openat(folder, path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return last_error();
  std::string text;
  for (char part[4096];;) {
    const ssize_t got = ::read(file.get(), part, sizeof(part));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return last_error();
    if (got == 0) return text;
    text.append(part, static_cast<std::size_t>(got));
  }
}

}  // namespace vrdma::agent
