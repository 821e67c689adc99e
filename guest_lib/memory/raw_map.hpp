// Changes of mappings that hold an application's memory, as bare system calls: the C library's functions may be hooked. UCX takes a mapping
// that is put over a registered buffer for the buffer's end, and registers it anew for every message; and a hook's code, which may
// use the heap, must not run while part of that is on its way (DESIGN.md, 5). Any thread; errors as of the system calls.
#pragma once

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace vrdma::memory {

// MADV_POPULATE_*, Linux 5.14, which many systems' headers do not have yet.
constexpr int populate_read = 22, populate_write = 23;
constexpr int read_write = PROT_READ | PROT_WRITE;

// MAP_FAILED, as mmap(2).
inline void* raw_mmap(std::uint64_t address, std::uint64_t bytes, int protection, int flags, int fd, std::uint64_t offset) {
  return reinterpret_cast<void*>(::syscall(SYS_mmap, address, bytes, protection, flags, fd, offset));
}
inline void raw_munmap(std::uint64_t address, std::uint64_t bytes) { ::syscall(SYS_munmap, address, bytes); }
inline bool raw_mprotect(std::uint64_t address, std::uint64_t bytes, int protection) {
  return ::syscall(SYS_mprotect, address, bytes, protection) == 0;
}

}  // namespace vrdma::memory
