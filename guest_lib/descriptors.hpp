// Descriptors that applications see: an epoll descriptor over a pipe that only the service writes to. POLLIN on it means
// that there is an event, or that the service is gone. The application may set O_NONBLOCK on it; that says how the verbs
// that read events behave, and touches no pipe.
#pragma once

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::guest {

// A new epoll descriptor that watches the pipe, whose reads never block from now on. Closed by OwnNumbers::close_marked: the program may
// have done so, and have a file of its own there.
Result<vmci::UniqueFd> make_event_fd(int pipe);
Status watch_pipe(int event_fd, int pipe);
void unwatch_pipe(int event_fd, int pipe);

}  // namespace vrdma::guest
