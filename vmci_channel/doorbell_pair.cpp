#include "vmci_channel/doorbell_pair.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstddef>

namespace vmci {

namespace {
// A buffer that a few clogging packets fill to where poll says "not writable", with room left for tokens.
constexpr int send_buffer_bytes = 16384;
constexpr std::size_t clog_bytes = 2048;
constexpr int clog_packets_max = 64;  // a kernel that buffers more than this says POLLOUT too often; nothing is lost
}  // namespace

void DoorbellEnd::ring(std::uint32_t token) const {
  while (::send(fd_.get(), &token, sizeof(token), MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

bool DoorbellEnd::clog() const {
  static constexpr std::array<std::byte, clog_bytes> nothing{};
  for (int i = 0; i < clog_packets_max; ++i) {
    const short events = wait(POLLOUT, 0);
    if (events & (POLLHUP | POLLERR | POLLNVAL)) return false;
    if ((events & POLLOUT) == 0) return true;
    if (::send(fd_.get(), nothing.data(), nothing.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EINTR) return errno == EAGAIN;
  }
  return true;
}

DoorbellEnd::Drained DoorbellEnd::drain(std::uint32_t keep) const {
  for (;;) {
    std::uint32_t token = 0;
    const ssize_t seen = ::recv(fd_.get(), &token, sizeof(token), MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT);
    if (seen == 0) return {true, false};
    if (seen < 0) {
      if (errno == EINTR) continue;
      return {errno != EAGAIN, false};
    }
    if (seen == sizeof(token) && token == closing_token) return {false, true};
    if (seen == sizeof(token) && token == keep) return {false, false};
    while (::recv(fd_.get(), &token, sizeof(token), MSG_DONTWAIT) < 0 && errno == EINTR) {
    }
  }
}

short DoorbellEnd::wait(short events, int timeout_ms) const {
  pollfd end{fd_.get(), events, 0};
  return ::poll(&end, 1, timeout_ms) > 0 ? end.revents : short{0};
}

vrdma::Result<std::pair<UniqueFd, UniqueFd>> make_doorbell_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) return vrdma::last_error();
  std::pair pair{UniqueFd(ends[0]), UniqueFd(ends[1])};
  for (const int end : ends) ::setsockopt(end, SOL_SOCKET, SO_SNDBUF, &send_buffer_bytes, sizeof(send_buffer_bytes));
  return pair;
}

}  // namespace vmci
