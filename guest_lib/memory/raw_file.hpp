// Files as this folder opens and looks at them, under the manager's lock, too: by bare system calls. open(2), stat(2) and fstat(2) are this
// library's own; they may wait for locks whose holders wait for the manager's at a fork (character_files.hpp), and what other libraries have
// put behind them may use the heap. And open(2), read(2), pread(2) and fallocate(2) are cancellation points, which madvise(2), mremap(2), fork(2)
// and data verbs, which come here, are not: a thread that ended inside would leave the lock held. Any thread; errors as of the system calls.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>

#include "vmci_channel/unique_fd.hpp"

namespace vrdma::memory {

inline vmci::UniqueFd raw_open(const char* path, int flags) {
  return vmci::UniqueFd(static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC)));
}
inline ssize_t raw_pread(int fd, void* to, std::size_t bytes, off_t position) { return ::syscall(SYS_pread64, fd, to, bytes, position); }
// So much of the file reads as zeroes.
inline bool raw_punch(int fd, off_t position, off_t bytes) {
  return ::syscall(SYS_fallocate, fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, position, bytes) == 0;
}
inline bool raw_stat(const char* path, struct stat& status) { return ::syscall(SYS_newfstatat, AT_FDCWD, path, &status, 0) == 0; }
inline bool raw_fstat(int fd, struct stat& status) { return ::syscall(SYS_fstat, fd, &status) == 0; }

}  // namespace vrdma::memory
