// What poll(2) is not: restarted after a signal's handler with SA_RESTART, as reading from a device is (signal(7)). Any thread.
#pragma once

#include <signal.h>

#include <cerrno>

namespace vrdma::guest {

// After EINTR. Which handler has run is not known; true if all that the program has ask for it. Keeps errno.
inline bool goes_on_after_signal() {
  const int before = errno;
  bool all = true;
  for (int number = 1; number <= SIGRTMAX && all; ++number) {
    struct sigaction now;
    if (number == SIGSEGV || number == SIGBUS || number == SIGFPE || number == SIGILL || number == SIGTRAP) continue;  // of an instruction
    if (::sigaction(number, nullptr, &now) != 0) continue;  // the C library's own
    all = now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN || (now.sa_flags & SA_RESTART) != 0;
  }
  errno = before;
  return all;
}

}  // namespace vrdma::guest
