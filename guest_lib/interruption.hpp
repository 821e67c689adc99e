// Sleeping until a descriptor is readable, and being interrupted as reading from a device is (signal(7)): ppoll(2) ends with every handler that
// runs; read(2) goes on after one with SA_RESTART, and ends with EINTR after any other. Any thread; a cancellation point.
#pragma once

#include <poll.h>
#include <pthread.h>
#include <signal.h>

#include <cerrno>
#include <initializer_list>

namespace vrdma::guest {

// No signal is handled, but those of an instruction or a filter of system calls. Ends also where the thread is cancelled, so that its
// clean-up handlers run as they would. Keeps errno.
struct Deafness {
  sigset_t before;
  Deafness() {
    sigset_t all;
    sigfillset(&all);
    for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&all, number);
    pthread_sigmask(SIG_SETMASK, &all, &before);
  }
  Deafness(const Deafness&) = delete;
  ~Deafness() {
    const int error = errno;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    errno = error;
  }
};

// 1: readable. -1 with errno. A negative descriptor never is.
int sleep_as_read(pollfd& one);
// The same within `deaf`: signals are handled while it sleeps.
int sleep_as_read(pollfd& one, const Deafness& deaf);

// Another thread has closed the file that is read. Who waits in the kernel keeps it, and nothing will ever happen there; rping, whose thread is
// still there when its channel goes, counts on that. -1 with EINTR; with EBADF, if the reader does not want to wait.
int wait_for_ever(bool blocks);

// In a fork's child, whose parent's threads may have been asleep.
void forget_sleepers();

}  // namespace vrdma::guest
