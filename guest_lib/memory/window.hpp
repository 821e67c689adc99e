// The window: one sparse, sealed memfd per process in which a byte's file offset is its virtual address. There is
// nothing to allocate, neighbouring registrations become one mapping and one extent, and giving a page back is punching
// a hole.
//
// Not thread-safe (MemoryManager holds its lock); never allocates memory, so that it may run while other threads are
// frozen. The application may close any descriptor (closefrom) and get the number again for a file of its own: each
// operation first checks that the number still names the window and fails with EBADF otherwise.
#pragma once

#include <cstdint>

#include "guest_lib/memory/lent_memory.hpp"
#include "guest_lib/memory/vma.hpp"
#include "guest_lib/own_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::memory {

#if defined(__x86_64__)
constexpr std::uint64_t window_bytes = std::uint64_t{1} << 47;  // addresses above are only given to who asks for them
#else
constexpr std::uint64_t window_bytes = std::uint64_t{1} << 48;
#endif

class Window {
 public:
  Window() = default;
  // EFBIG where RLIMIT_FSIZE or the kernel does not allow a file that large.
  static Result<Window> create();
  // In its place: lent pages, which outlive this. There is nothing to punch then.
  static Window over(const LentMemory& lent) {
    Window window;
    window.lent_ = &lent;
    return window;
  }

  explicit operator bool() const { return fd_ || lent_ != nullptr; }
  bool lent() const { return lent_ != nullptr; }
  int fd() const { return fd_.get(); }
  bool intact() const;
  // Whether writing to the file cannot raise SIGXFSZ.
  static bool size_limit_allows();

  bool holds(const Vma& vma) const;           // any mapping of the window, wherever it is
  bool holds_in_place(const Vma& vma) const;  // one whose addresses are its file offsets

  // Copies the memory at `range` into the file. Reads through the kernel, so that it works under a write-protection.
  Status copy_from_memory(Range range) const;
  // Copies the file's bytes at `range` to `to`, which may be anywhere.
  Status copy_to(void* to, Range range) const;
  // Replaces whatever is mapped at `range`. A child of fork never inherits the mapping (its copies come from
  // ForkGuard).
  Status map(Range range, int protection) const;
  Status punch(Range range) const;

  // A mapping of its own for a page in place, until join(): the C library's realloc would take memory that is one mapping along by mremap,
  // made longer by what the window holds of the memory behind. So it copies.
  void set_apart(std::uint64_t page) const;
  void join(Range range) const;  // what is in place of it

 private:
  OwnFd fd_;
  FileId id_;
  const LentMemory* lent_ = nullptr;
};

}  // namespace vrdma::memory
