// Processes of a measuring program, each on a processor of its own.
#pragma once

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace bench {

// `body` in a child that ends with us.
template <class Body>
pid_t start(Body&& body) {
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) {
    std::fprintf(stderr, "%s: fork: %m\n", program_invocation_short_name);
    std::exit(1);
  }
  if (pid > 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() == parent) body();
  std::_Exit(0);
}

}  // namespace bench
