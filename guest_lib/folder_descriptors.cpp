#include "guest_lib/folder_descriptors.hpp"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "guest_lib/synthetic_tree.hpp"

namespace vrdma::folder_descriptors {

constinit std::atomic<bool> any{false};

namespace {

// The tree has some twenty directories for each device. A path is never taken out again; one that two threads come with at once may be there twice.
enum class State : std::uint8_t { free, being_written, there };
struct Path {
  std::atomic<State> state;
  char text[256];
};
constexpr std::size_t paths_max = 256;
constinit Path paths[paths_max] = {};

constexpr off_t first_offset = 0x7f3a0000;  // procfs allows 31 bits

// The real directories that are opened for it: one, unless the program changes its root directory or mounts. Of many the oldest is forgotten.
constexpr std::size_t real_folders_max = 4;
constinit std::atomic<std::uint64_t> real_folders[real_folders_max] = {};
constinit std::atomic<std::size_t> real_folders_known{0};

std::uint64_t identity(const struct stat& status) { return (status.st_dev + 1) * 0x9e3779b97f4a7c15u ^ status.st_ino; }

bool is_real_folder(const struct stat& status) {
  for (const auto& folder : real_folders)
    if (folder.load(std::memory_order_relaxed) == identity(status)) return S_ISDIR(status.st_mode);
  return false;
}

bool look_at(int fd, struct stat& status) { return syscall(SYS_fstat, fd, &status) == 0; }

// paths_max: no room.
std::size_t index_of(const char* path) {
  for (std::size_t i = 0; i < paths_max; ++i) {
    State state = paths[i].state.load(std::memory_order_acquire);  // A1: pairs with R1; the text is whole
    if (state == State::there && strcmp(paths[i].text, path) == 0) return i;
    if (state != State::free || !paths[i].state.compare_exchange_strong(state, State::being_written, std::memory_order_relaxed)) continue;
    strcpy(paths[i].text, path);
    paths[i].state.store(State::there, std::memory_order_release);  // R1
    return i;
  }
  return paths_max;
}

bool mark(int fd, std::size_t index) {
  struct stat status;
  const off_t offset = first_offset + static_cast<off_t>(index);
  if (lseek(fd, offset, SEEK_SET) != offset || !look_at(fd, status)) return false;
  if (!is_real_folder(status))
    real_folders[real_folders_known.fetch_add(1, std::memory_order_relaxed) % real_folders_max].store(identity(status), std::memory_order_relaxed);
  any.store(true, std::memory_order_relaxed);
  return true;
}

}  // namespace

int open(const char* path, int flags) {
  char clean[sizeof(Path::text)];
  if (!normalise_synthetic(path, clean)) return errno = ENAMETOOLONG, -1;
  const std::size_t index = index_of(clean);
  if (index == paths_max) return errno = ENFILE, -1;
  for (const char* const real : {"/proc", "/"}) {
    const int fd = static_cast<int>(syscall(SYS_openat, AT_FDCWD, real, O_RDONLY | O_DIRECTORY | (flags & (O_CLOEXEC | O_NONBLOCK))));
    if (fd >= 0 && mark(fd, index)) return fd;
    if (fd >= 0) close(fd);
    else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) return -1;
  }
  return errno = EOPNOTSUPP, -1;
}

const char* find(int fd) {
  const int errno_before = errno;
  const off_t index = lseek(fd, 0, SEEK_CUR) - first_offset;
  struct stat status;
  const bool found = index >= 0 && index < static_cast<off_t>(paths_max) && look_at(fd, status) && is_real_folder(status) &&
                     paths[index].state.load(std::memory_order_acquire) == State::there;
  errno = errno_before;
  return found ? paths[index].text : nullptr;
}

}  // namespace vrdma::folder_descriptors
