// closefrom(3), close_range(2), dup2(2) and dup3(2) in front of libc's, as close(2) is (character_interpose.cpp): programs, daemons above all, close
// what they do not know, and do not know what this library keeps. Its numbers (own_fd.hpp) are left out, as if nothing were open there:
// to close one is EBADF, to put a file there is what it is above the limit of descriptors. Marking them for exec takes nothing from it, as they
// are marked. Children between vfork(2) and exec have descriptors of their own, and close what they like.
#include <linux/close_range.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "guest_lib/own_fd.hpp"
#include "guest_lib/paths.hpp"

using namespace vrdma;

namespace {

using CloseRange = int(unsigned, unsigned, int);
using CloseFrom = void(int);
using Dup2 = int(int, int);
using Dup3 = int(int, int, int);

constinit NextFunction<CloseRange> next_close_range{"close_range"};
constinit NextFunction<CloseFrom> next_closefrom{"closefrom"};
constinit NextFunction<Dup2> next_dup2{"dup2"};
constinit NextFunction<Dup3> next_dup3{"dup3"};

__attribute__((constructor)) void look_up_all() {
  next_close_range.get();
  next_closefrom.get();
  next_dup2.get();
  next_dup3.get();
}

// Before glibc 2.34 there is no such function.
int really_close_range(unsigned first, unsigned last, int flags) {
  CloseRange* const next = next_close_range.get();
  return next != nullptr ? next(first, last, flags) : static_cast<int>(::syscall(SYS_close_range, first, last, flags));
}

// The first of our numbers from `from` on, up to `last`; -1: there is none.
int next_own(unsigned from, unsigned last) {
  const auto end = static_cast<unsigned>(OwnNumbers::end());
  for (unsigned fd = from; fd < end && fd <= last; ++fd)
    if (OwnNumbers::holds(static_cast<int>(fd))) return static_cast<int>(fd);
  return -1;
}

int close_others(unsigned first, unsigned last, int flags) {
  if (first > last || (flags & CLOSE_RANGE_CLOEXEC) != 0) return really_close_range(first, last, flags);
  bool called = false;
  for (unsigned from = first;;) {
    const int own = next_own(from, last);
    const unsigned until = own < 0 ? last : static_cast<unsigned>(own) - 1;
    if (own < 0 || static_cast<unsigned>(own) > from) {
      if (really_close_range(from, until, flags) != 0) return -1;
      called = true;
    }
    if (own < 0 || static_cast<unsigned>(own) == last) break;
    from = static_cast<unsigned>(own) + 1;
  }
  // Nothing but ours: the table of descriptors is to be one's own nevertheless, if that was asked for, and flags are looked at.
  return called ? 0 : really_close_range(UINT_MAX, UINT_MAX, flags);
}

// Where the kernel has no close_range(2), before Linux 5.9, or a filter of system calls knows none.
void close_one_by_one(unsigned first) {
  const auto end = static_cast<unsigned>(OwnNumbers::end());
  for (unsigned fd = first; fd < end; ++fd)
    if (!OwnNumbers::holds(static_cast<int>(fd))) ::syscall(SYS_close, fd);
  const unsigned rest = std::max(first, end);
  if (CloseFrom* const next = next_closefrom.get()) return next(static_cast<int>(rest));
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  for (unsigned fd = rest; fd < std::min<rlim_t>(limit.rlim_cur, INT_MAX); ++fd) ::syscall(SYS_close, fd);
}

bool is_taken(int from, int to) {
  if (!OwnNumbers::may_hold(to) || from == to || !OwnNumbers::holds(to)) [[likely]] return false;
  errno = EBADF;
  return true;
}

}  // namespace

VRDMA_INTERPOSE(int, close_range, unsigned first, unsigned last, int flags) { return close_others(first, last, flags); }

VRDMA_INTERPOSE(void, closefrom, int first) {
  const int before = errno;
  const auto from = static_cast<unsigned>(std::max(first, 0));
  CloseFrom* const next = next_closefrom.get();
  if (next != nullptr && next_own(from, UINT_MAX) < 0) return next(first);
  if (close_others(from, UINT_MAX, 0) != 0) close_one_by_one(from);
  errno = before;
}

VRDMA_INTERPOSE(int, dup2, int from, int to) {
  if (is_taken(from, to)) return -1;
  Dup2* const next = next_dup2.get();
  if (next != nullptr) return next(from, to);
  return from == to ? (::fcntl(from, F_GETFD) < 0 ? -1 : to) : static_cast<int>(::syscall(SYS_dup3, from, to, 0));
}

VRDMA_INTERPOSE(int, dup3, int from, int to, int flags) {
  if (is_taken(from, to)) return -1;
  Dup3* const next = next_dup3.get();
  return next != nullptr ? next(from, to, flags) : static_cast<int>(::syscall(SYS_dup3, from, to, flags));
}
