// Whose this memory is. A child of vfork(2), posix_spawn(3)'s too, works in its parent's until its exec, but with descriptors and a working
// directory of its own: a visitor, whose are not noted where its parent's are.
//
//   own_process.cpp   a process is at home when the library is loaded, and a fork's child in its copy: its handler runs after the memory's
//                     (memory/manager.hpp), when all pages are there, and before all others of ours
//   Process           who attaches is at home: a child by a bare system call, of which no handler tells. Before that it passes for a visitor.
//
// KeptMaps and WriteFreeze::Kept (memory/) ask something else: which process it was that opened a file, whoever is at home by now.
//
// Any thread; also for signal handlers.
#pragma once

#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>

namespace vrdma {

class OwnProcess {
 public:
  static bool is_visitor() {
    const pid_t owner = owner_.load(std::memory_order_relaxed);  // 0: constructors of others
    return owner != 0 && owner != ::getpid();
  }
  static void settle() { owner_.store(::getpid(), std::memory_order_relaxed); }
  // Of who attaches: not a vfork's child, whose memory stays its parent's. Where the kernel does not tell (kcmp(2)), as settle().
  static void settle_in_own_memory() {
    constexpr int kcmp_vm = 1;
    if (is_visitor() && ::syscall(SYS_kcmp, ::getpid(), owner_.load(std::memory_order_relaxed), kcmp_vm, 0, 0) == 0) return;
    settle();
  }

 private:
  static inline constinit std::atomic<pid_t> owner_{0};
};

}  // namespace vrdma
