// ibv_get_sysfs_path and ibv_read_sysfs_file. Our devices' files come from the synthetic tree, so that they are there
// also when this library is not preloaded and nothing interposes open().
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/abi/private_abi.hpp"
#include "guest_lib/synthetic_tree.hpp"

namespace {

constexpr std::size_t path_bytes_max = 256;  // what libibverbs keeps of SYSFS_PATH

const char* chosen_sysfs_path() {
  // secure_getenv: a set-uid program must not be pointed at files of its caller's making.
  const char* wanted = secure_getenv("SYSFS_PATH");
  if (wanted == nullptr) return "/sys";
  char* path = strndup(wanted, path_bytes_max);
  if (path == nullptr) return "/sys";
  for (std::size_t bytes = std::strlen(path); bytes > 0 && path[bytes - 1] == '/'; --bytes) path[bytes - 1] = '\0';
  return path;
}

// The real file's bytes, else the synthetic entry's. -1 with errno.
ssize_t read_file(const char* path, char* out, std::size_t size) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd >= 0) {
    ssize_t bytes;
    do bytes = read(fd, out, size);
    while (bytes < 0 && errno == EINTR);
    const int error = errno;
    close(fd);
    errno = error;
    return bytes;
  }
  if (!vrdma::may_be_synthetic(path)) return -1;
  vrdma::look_at_port(path);
  const vrdma::SyntheticEntry entry = vrdma::find_synthetic(path);
  if (entry.kind != vrdma::EntryKind::text) return -1;
  if (entry.is_invalid) return errno = EINVAL, -1;
  const std::size_t bytes = std::min(size, entry.text_bytes);
  std::memcpy(out, entry.text, bytes);
  return static_cast<ssize_t>(bytes);
}

}  // namespace

VRDMA_EXPORT const char* ibv_get_sysfs_path(void) {
  static constinit std::atomic<const char*> kept{nullptr};
  // A1: pairs with the exchange below; the text behind the pointer is complete.
  if (const char* path = kept.load(std::memory_order_acquire)) return path;
  const char* mine = chosen_sysfs_path();
  const char* first = nullptr;
  if (kept.compare_exchange_strong(first, mine, std::memory_order_acq_rel)) return mine;  // R1
  if (std::strcmp(mine, "/sys") != 0) free(const_cast<char*>(mine));
  return first;
}

VRDMA_EXPORT int ibv_read_sysfs_file(const char* dir, const char* file, char* buf, std::size_t size) {
  char path[4096];
  const int wanted = std::snprintf(path, sizeof path, "%s/%s", dir, file);
  if (wanted < 0 || static_cast<std::size_t>(wanted) >= sizeof path) {
    errno = ENAMETOOLONG;
    return -1;
  }
  const ssize_t got = read_file(path, buf, size);
  if (got <= 0) return static_cast<int>(got);
  std::size_t bytes = static_cast<std::size_t>(got);
  if (buf[bytes - 1] == '\n')
    --bytes;
  else if (bytes >= size) {
    errno = EOVERFLOW;
    return -1;
  }
  buf[bytes] = '\0';
  return static_cast<int>(bytes);
}
