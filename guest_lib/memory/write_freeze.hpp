// Holds back every write to a range, by threads and by system calls alike, until it is released; reads go on. Writers
// wait in the kernel and find whatever is mapped at the range afterwards.
//
// Made of userfaultfd write-protection with kernel faults. A USER_MODE_ONLY descriptor would make system calls into the
// range fail with EFAULT, and so would mprotect: neither is ever used. Between freeze and release the calling thread
// must not write to the range, nor wait for anyone who might; it must have signals blocked and not allocate.
#pragma once

#include "guest_lib/memory/vma.hpp"
#include "guest_lib/own_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::memory {

class WriteFreeze {
 public:
  enum class Memory { anonymous, window };
  // `range` lies in one mapping. EPERM where not permitted, ENOSYS before Linux 5.7 (anonymous) and 5.19 (window), EBUSY where the
  // application watches it with its own userfaultfd: where nothing is frozen, nobody finds out (DESIGN.md, "What escapes").
  static Result<WriteFreeze> freeze(Range range, Memory memory);

  WriteFreeze(WriteFreeze&& other) noexcept = default;
  WriteFreeze& operator=(WriteFreeze&&) = delete;
  ~WriteFreeze();

  // The range has been replaced by another mapping: nothing is left to unprotect, only to wake.
  void replaced();

 private:
  struct Kept;
  static Kept& kept_of(Memory memory);
  WriteFreeze(OwnFd fd, Range range, Kept* keeper) : fd_(std::move(fd)), range_(range), keeper_(keeper) {}
  OwnFd fd_;
  Range range_;
  Kept* keeper_;  // of the descriptor, when this ends; nullptr: it is closed
  bool replaced_ = false;
};

}  // namespace vrdma::memory
