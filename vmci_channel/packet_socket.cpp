#include "vmci_channel/packet_socket.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "vmci_channel/arch.hpp"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace vmci {

using vrdma::Errno;
using vrdma::Result;
using vrdma::Status;

namespace {

Result<sockaddr_un> address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return Errno{ENAMETOOLONG};
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

}  // namespace

Result<PacketSocket> PacketSocket::connect(const std::string& path, int timeout_ms) {
  auto address = address_of(path);
  if (!address) return address.error();
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) return vrdma::last_error();
  const auto limit_waits = [&](int ms) {
    const timeval limit{ms / 1000, ms % 1000 * 1000};
    ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  };
  limit_waits(timeout_ms);
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0)
    if (errno != EINTR) return errno == EAGAIN ? Errno{ETIMEDOUT} : vrdma::last_error();
  limit_waits(0);  // 0: none
  return PacketSocket(std::move(fd));
}

Status PacketSocket::send(std::span<const std::byte> packet, std::span<const int> descriptors) const {
  return send_with_descriptors(fd_.get(), packet, descriptors);
}

Result<Received> PacketSocket::receive(std::span<std::byte> buffer, int timeout_ms) const {
  if (timeout_ms >= 0) {
    const std::uint64_t until_ns = monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * 1'000'000u;
    for (;;) {
      pollfd waiting{fd_.get(), POLLIN, 0};
      const int ready = ::poll(&waiting, 1, timeout_ms);
      if (ready > 0) break;
      if (ready == 0) return Errno{ETIMEDOUT};
      if (errno != EINTR) return vrdma::last_error();
      const std::uint64_t now_ns = monotonic_ns();
      timeout_ms = now_ns < until_ns ? static_cast<int>((until_ns - now_ns + 999'999) / 1'000'000) : 0;
    }
  }
  return receive_with_descriptors(fd_.get(), buffer);
}

Result<Credentials> PacketSocket::peer() const {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) return vrdma::last_error();
  return Credentials{credentials.pid, credentials.uid, credentials.gid};
}

Result<UniqueFd> PacketSocket::peer_pidfd() const {
  int pidfd = -1;
  socklen_t bytes = sizeof(pidfd);
  if (::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERPIDFD, &pidfd, &bytes) == 0) return UniqueFd(pidfd);
  auto credentials = peer();
  if (!credentials) return credentials.error();
  if (credentials->pid == 0) return Errno{ESRCH};
  pidfd = static_cast<int>(::syscall(SYS_pidfd_open, credentials->pid, 0));
  if (pidfd < 0) return vrdma::last_error();
  return UniqueFd(pidfd);
}

Result<UniqueFd> listen_packets(const std::string& path, mode_t mode) {
  auto address = address_of(path);
  if (!address) return address.error();
  if (auto someone = PacketSocket::connect(path, 1000)) return Errno{EADDRINUSE};
  else if (value(someone.error()) == ETIMEDOUT) return Errno{EADDRINUSE};  // its queue is full, so it is served
  else if (struct stat status; ::lstat(path.c_str(), &status) == 0) {
    // What connecting to any other file says is the same as for a socket that nobody serves, or that is somebody else's.
    if (!S_ISSOCK(status.st_mode)) return Errno{ENOTSOCK};
    if (value(someone.error()) == EACCES) return someone.error();
    if (value(someone.error()) == ECONNREFUSED) ::unlink(path.c_str());
  }
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return vrdma::last_error();
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0) return vrdma::last_error();
  if (::chmod(path.c_str(), mode) != 0) return vrdma::last_error();
  if (::listen(fd.get(), 128) != 0) return vrdma::last_error();
  return fd;
}

Result<InheritedListener> inherited_listener() {
  constexpr int first_fd = 3;  // SD_LISTEN_FDS_START
  const auto number = [](const char* variable) {
    const char* const text = std::getenv(variable);
    return text == nullptr ? 0 : std::strtol(text, nullptr, 10);
  };
  const bool ours = number("LISTEN_PID") == ::getpid();
  const long count = number("LISTEN_FDS");
  for (const char* variable : {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}) ::unsetenv(variable);
  if (!ours || count <= 0) return InheritedListener{};
  InheritedListener listener{UniqueFd(first_fd), ""};
  int type = 0, listens = 0;
  socklen_t bytes = sizeof(int), address_bytes = sizeof(sockaddr_un);
  sockaddr_un address{};
  if (count != 1 || ::getsockopt(first_fd, SOL_SOCKET, SO_TYPE, &type, &bytes) != 0 || type != SOCK_SEQPACKET ||
      ::getsockopt(first_fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) != 0 || listens == 0 ||
      ::getsockname(first_fd, reinterpret_cast<sockaddr*>(&address), &address_bytes) != 0 || address.sun_family != AF_UNIX || address.sun_path[0] != '/')
    return Errno{EINVAL};
  if (::fcntl(first_fd, F_SETFD, FD_CLOEXEC) != 0 || ::fcntl(first_fd, F_SETFL, O_NONBLOCK) != 0) return vrdma::last_error();
  listener.path.assign(address.sun_path, ::strnlen(address.sun_path, sizeof(address.sun_path)));
  return listener;
}

}  // namespace vmci
