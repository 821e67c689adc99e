// write(2) until all of it is written: files and pipes of a process's own. Any thread.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string_view>

namespace vrdma {

// False: not all was written, and errno says why.
inline bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written == 0) errno = ENOSPC;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

}  // namespace vrdma
