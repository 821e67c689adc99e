// What this library itself asks of the kernel by names that other preloaded libraries stand in for: sockets, polls, files; and by names that it
// stands in for itself, with a lock to take (madvise, mremap: memory/interpose.cpp), which it may hold already. By --wrap of the
// linker every such call of the library's comes here, and goes to the kernel, as libibverbs makes none that others would see. librspreload,
// whose sockets are made of our verbs, would else give us one of its own, or wait for itself; libvma, tsocks and others do likewise.
// Not in sanitized builds, whose runtime follows descriptors by these names.
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <unwind.h>

#include <cstdarg>

namespace {

// Like libc's own: a thread that waits here can be cancelled, unless it has said that it may not be.
template <class... Arguments>
long wait_for(long which, Arguments... arguments) {
  int before;
  pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &before);
  const long result = ::syscall(which, arguments...);
  pthread_setcanceltype(before, nullptr);
  return result;
}

// The C library's unwinder, at a cancellation, asks ours (-static-libgcc) about frames with destructors; ours, up to gcc 12, calls abort(3)
// there unless it has looked at a stack before.
__attribute__((constructor)) void prepare_to_be_unwound() {
  ::_Unwind_Backtrace([](_Unwind_Context*, void*) { return _URC_NORMAL_STOP; }, nullptr);
}

}  // namespace

extern "C" {

ssize_t __wrap_read(int fd, void* to, std::size_t bytes) { return wait_for(SYS_read, fd, to, bytes); }
ssize_t __wrap_write(int fd, const void* from, std::size_t bytes) { return wait_for(SYS_write, fd, from, bytes); }
int __wrap_close(int fd) { return static_cast<int>(::syscall(SYS_close, fd)); }
int __wrap_dup3(int from, int to, int flags) { return static_cast<int>(::syscall(SYS_dup3, from, to, flags)); }
int __wrap_madvise(void* address, std::size_t bytes, int advice) { return static_cast<int>(::syscall(SYS_madvise, address, bytes, advice)); }
void* __wrap_mremap(void* address, std::size_t old_bytes, std::size_t new_bytes, int flags, ...) {
  std::va_list more;
  va_start(more, flags);
  void* const target = va_arg(more, void*);  // or none
  va_end(more);
  return reinterpret_cast<void*>(::syscall(SYS_mremap, address, old_bytes, new_bytes, flags, target));
}
int __wrap_fcntl(int fd, int command, ...) {
  std::va_list more;
  va_start(more, command);
  const long argument = va_arg(more, long);  // an int, a pointer, or none
  va_end(more);
  return static_cast<int>(::syscall(SYS_fcntl, fd, command, argument));
}

int __wrap_ioctl(int fd, unsigned long request, ...) {
  std::va_list more;
  va_start(more, request);
  const long argument = va_arg(more, long);
  va_end(more);
  return static_cast<int>(::syscall(SYS_ioctl, fd, request, argument));
}

int __wrap_poll(pollfd* descriptors, nfds_t count, int timeout_ms) {
#ifdef SYS_poll
  return static_cast<int>(wait_for(SYS_poll, descriptors, count, timeout_ms));
#else
  timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
  return static_cast<int>(wait_for(SYS_ppoll, descriptors, count, timeout_ms < 0 ? nullptr : &timeout, nullptr, std::size_t{_NSIG / 8}));
#endif
}
int __wrap_ppoll(pollfd* descriptors, nfds_t count, const timespec* timeout, const sigset_t* mask) {
  timespec rest{};  // the kernel writes to it
  if (timeout != nullptr) rest = *timeout;
  return static_cast<int>(wait_for(SYS_ppoll, descriptors, count, timeout != nullptr ? &rest : nullptr, mask, std::size_t{_NSIG / 8}));
}
int __wrap_epoll_create1(int flags) { return static_cast<int>(::syscall(SYS_epoll_create1, flags)); }
int __wrap_epoll_ctl(int epoll, int what, int fd, epoll_event* event) { return static_cast<int>(::syscall(SYS_epoll_ctl, epoll, what, fd, event)); }

int __wrap_socket(int family, int type, int protocol) { return static_cast<int>(::syscall(SYS_socket, family, type, protocol)); }
int __wrap_bind(int fd, const sockaddr* address, socklen_t bytes) { return static_cast<int>(::syscall(SYS_bind, fd, address, bytes)); }
int __wrap_listen(int fd, int backlog) { return static_cast<int>(::syscall(SYS_listen, fd, backlog)); }
int __wrap_connect(int fd, const sockaddr* address, socklen_t bytes) { return static_cast<int>(wait_for(SYS_connect, fd, address, bytes)); }
int __wrap_getsockname(int fd, sockaddr* address, socklen_t* bytes) { return static_cast<int>(::syscall(SYS_getsockname, fd, address, bytes)); }
int __wrap_getpeername(int fd, sockaddr* address, socklen_t* bytes) { return static_cast<int>(::syscall(SYS_getpeername, fd, address, bytes)); }
int __wrap_getsockopt(int fd, int level, int name, void* value, socklen_t* bytes) {
  return static_cast<int>(::syscall(SYS_getsockopt, fd, level, name, value, bytes));
}
int __wrap_setsockopt(int fd, int level, int name, const void* value, socklen_t bytes) {
  return static_cast<int>(::syscall(SYS_setsockopt, fd, level, name, value, bytes));
}
ssize_t __wrap_sendmsg(int fd, const msghdr* message, int flags) { return wait_for(SYS_sendmsg, fd, message, flags); }
ssize_t __wrap_recvmsg(int fd, msghdr* message, int flags) { return wait_for(SYS_recvmsg, fd, message, flags); }
}
