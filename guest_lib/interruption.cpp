#include "guest_lib/interruption.hpp"

#include <sys/signalfd.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "guest_lib/never_destroyed.hpp"
#include "guest_lib/own_fd.hpp"
#include "vmci_channel/arch.hpp"

namespace vrdma::guest {

namespace {

// The signals that the program handles.
struct Handled {
  sigset_t restarting, interrupting;
  bool any_restarting = false, any_interrupting = false;

  static Handled now() {
    Handled found;
    sigemptyset(&found.restarting);
    sigemptyset(&found.interrupting);
    for (int number = 1; number <= SIGRTMAX; ++number) {
      struct sigaction action;
      if (number == SIGSEGV || number == SIGBUS || number == SIGFPE || number == SIGILL || number == SIGTRAP) continue;  // of an instruction
      if (::sigaction(number, nullptr, &action) != 0) continue;  // the C library's own
      if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) continue;
      const bool restarts = (action.sa_flags & SA_RESTART) != 0;
      sigaddset(restarts ? &found.restarting : &found.interrupting, number);
      (restarts ? found.any_restarting : found.any_interrupting) = true;
    }
    return found;
  }
  bool mixed() const { return any_restarting && any_interrupting; }
};

// Whether there are handlers of both kinds; then also by which descriptor one sleeps until a signal of the first kind is pending: poll(2) asks
// after signals of the thread that calls it. Not looked at more often than every 100 ms: some 60 system calls.
class Handlers {
 public:
  bool mixed() {
    const std::uint64_t now = vmci::monotonic_ns();
    if (now - looked_ns_.load(std::memory_order_relaxed) < 100'000'000) return mixed_.load(std::memory_order_relaxed);
    looked_ns_.store(now, std::memory_order_relaxed);
    return look().mixed();
  }
  Handled look() {
    const std::lock_guard lock(mutex_);
    handled_ = Handled::now();
    mixed_.store(handled_.mixed(), std::memory_order_relaxed);
    return handled_;
  }
  // -1: there is none to be had.
  int pending_fd(Handled& handled) {
    const std::lock_guard lock(mutex_);
    handled = handled_;
    const bool known = pending_ && pending_.intact();
    const int fd = ::signalfd(known ? pending_.get() : -1, &handled_.restarting, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd >= 0 && !known) pending_.reset(vmci::UniqueFd(fd));
    return fd >= 0 ? pending_.get() : -1;
  }
  // In a fork's child: a thread of the parent's may have been in here.
  void forget() {
    std::construct_at(&mutex_);
    std::construct_at(this);
  }

 private:
  std::atomic<std::uint64_t> looked_ns_{0};  // hints, both
  std::atomic<bool> mixed_{false};
  static inline constinit std::mutex mutex_;  // of what follows; static as Process::mutex
  Handled handled_{};
  OwnFd pending_;
};

constinit NeverDestroyed<Handlers> handlers;

// Which handler has run is not known: it goes on if all that there are ask for it.
int sleep_and_guess(pollfd& one, const sigset_t* mask) {
  for (;;) {
    const int ready = mask != nullptr ? ::ppoll(&one, 1, nullptr, mask) : ::poll(&one, 1, -1);
    if (ready >= 0 || errno != EINTR) return ready;
    if (handlers.it.look().any_interrupting) return errno = EINTR, -1;
  }
}

// Signals whose handlers have SA_RESTART wait while it sleeps, and wake it up; the others interrupt it.
int sleep_and_tell(pollfd& one, const sigset_t& before) {
  Handled handled;
  const int pending_fd = handlers.it.pending_fd(handled);
  if (pending_fd < 0) return sleep_and_guess(one, &before);
  sigset_t asleep, run;
  sigorset(&asleep, &before, &handled.restarting);
  sigorset(&run, &before, &handled.interrupting);
  for (;;) {
    pollfd both[2] = {one, {pending_fd, POLLIN, 0}};
    if (::ppoll(both, 2, nullptr, &asleep) < 0) return -1;
    one.revents = both[0].revents;
    if (one.revents != 0) return 1;
    sigset_t pending, kept;
    sigpending(&pending);
    sigandset(&kept, &pending, &before);
    // One that the program blocks would never cease to be pending, nor would a descriptor that it has closed all the same cease to be ready.
    if (sigisemptyset(&kept) == 0 || (both[1].revents & ~POLLIN) != 0) return sleep_and_guess(one, &before);
    constexpr timespec at_once{};
    ::ppoll(nullptr, 0, &at_once, &run);  // what is pending is handled, but for those that interrupt: these end the next sleep
  }
}

}  // namespace

int wait_for_ever(bool blocks) {
  pollfd nothing{-1, 0, 0};
  if (blocks) return sleep_as_read(nothing);
  errno = EBADF;
  return -1;
}

void forget_sleepers() { handlers.it.forget(); }

int sleep_as_read(pollfd& one) {
  if (!handlers.it.mixed()) return sleep_and_guess(one, nullptr);
  const Deafness deaf;
  return sleep_and_tell(one, deaf.before);
}

int sleep_as_read(pollfd& one, const Deafness& deaf) {
  return handlers.it.mixed() ? sleep_and_tell(one, deaf.before) : sleep_and_guess(one, &deaf.before);
}

}  // namespace vrdma::guest
