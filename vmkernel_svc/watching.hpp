// Descriptors that Asio watches, as this service uses them. The server's thread.
#pragma once

#include <fcntl.h>

#include <boost/asio/posix/stream_descriptor.hpp>

#include "vmci_channel/unique_fd.hpp"

namespace vrdma::svc {

// False: not watched (the limit of epoll watches, for one); the copy is closed.
inline bool watch_copy(boost::asio::posix::stream_descriptor& watched, int fd) {
  vmci::UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  boost::system::error_code error;
  if (!copy || watched.assign(copy.get(), error)) return false;
  copy.release();
  return true;
}

// Taken out of the reactor before it closes: close() leaves that to the kernel, which keeps the registration for as long as
// anything else has the same file open, and its events go to the next descriptor that Asio watches.
inline vmci::UniqueFd unwatched(boost::asio::posix::stream_descriptor& watched) { return vmci::UniqueFd(watched.is_open() ? watched.release() : -1); }
inline void stop_watching(boost::asio::posix::stream_descriptor& watched) { unwatched(watched).reset(); }

}  // namespace vrdma::svc
