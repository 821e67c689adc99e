#include "guest_lib/descriptors.hpp"

#include <fcntl.h>
#include <sys/epoll.h>

#include "guest_lib/own_fd.hpp"

namespace vrdma::guest {

Status watch_pipe(int event_fd, int pipe) {
  epoll_event interest{};
  interest.events = EPOLLIN;
  if (::epoll_ctl(event_fd, EPOLL_CTL_ADD, pipe, &interest) != 0 && errno != EEXIST) return last_error();
  return ok();
}

void unwatch_pipe(int event_fd, int pipe) { ::epoll_ctl(event_fd, EPOLL_CTL_DEL, pipe, nullptr); }

Result<vmci::UniqueFd> make_event_fd(int pipe) {
  const int flags = ::fcntl(pipe, F_GETFL);
  if (flags < 0 || ::fcntl(pipe, F_SETFL, flags | O_NONBLOCK) != 0) return last_error();
  vmci::UniqueFd event_fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!event_fd) return last_error();
  OwnNumbers::mark(event_fd.get());
  if (Status watched = watch_pipe(event_fd.get(), pipe); !watched) return watched.error();
  return event_fd;
}

}  // namespace vrdma::guest
