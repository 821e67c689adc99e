// Descriptors of the synthetic tree's directories. Each is one of a real directory, /proc where there is one, and its file offset says which of
// the tree's it stands for:
//
//     offset = first_offset + index --> paths[index], "/sys/class/infiniband/vrdma0/ports"
//
// So what dup(2), fcntl(2), fork(2) and close(2) make of descriptors needs no bookkeeping: a number that is another file's by now has
// another offset or is another directory. Offsets so high are reached by no listing of /proc, and a read of the kernel's by one finds its end.
//
// Any thread, a fork's child and signal handlers: no locks, no memory. Until the first is opened, a call on any descriptor costs one load.
// Not known any more: after exec, and when the program moves the offset itself (lseek(2) instead of rewinddir(3)).
#pragma once

#include <atomic>

namespace vrdma::folder_descriptors {

extern std::atomic<bool> any;

// A descriptor for the tree's directory at `path`. Of `flags` O_CLOEXEC and O_NONBLOCK count. -1 with errno.
int open(const char* path, int flags);

// The normalised path of the directory that `fd` stands for, for ever; nullptr: none of the tree's. Leaves errno alone.
const char* find(int fd);

inline const char* path_of(int fd) {
  return __builtin_expect(any.load(std::memory_order_relaxed), 0) && fd >= 0 ? find(fd) : nullptr;
}

}  // namespace vrdma::folder_descriptors
