#include "vmci_channel/descriptor_passing.hpp"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace vmci {

using vrdma::Errno;
using vrdma::Result;
using vrdma::Status;

Status send_with_descriptors(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors) {
  if (descriptors.size() > packet_descriptors_max) return Errno{EMSGSIZE};
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(packet_descriptors_max * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  }
  for (;;) {
    if (::sendmsg(socket, &message, MSG_NOSIGNAL) >= 0) return vrdma::ok();
    if (errno != EINTR) return vrdma::last_error();
  }
}

Result<Received> receive_with_descriptors(int socket, std::span<std::byte> buffer) {
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(packet_descriptors_max * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  Received received{};
  received.descriptors.reserve(packet_descriptors_max);  // before any is there, which would stay open
  ssize_t got;
  do {
    got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return vrdma::last_error();
  received.bytes = static_cast<std::size_t>(got);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      received.descriptors.emplace_back(fd);
    }
  }
  // Fewer than there was room for: this process may open no more.
  received.descriptors_missing = (message.msg_flags & MSG_CTRUNC) != 0 && received.descriptors.size() < packet_descriptors_max;
  if ((message.msg_flags & MSG_TRUNC) != 0 || ((message.msg_flags & MSG_CTRUNC) != 0 && !received.descriptors_missing)) return Errno{EMSGSIZE};
  if (received.descriptors_missing) received.descriptors.clear();
  return received;
}

std::uint64_t unread_bytes(int socket) {
  int bytes = 0;
  return ::ioctl(socket, SIOCOUTQ, &bytes) == 0 && bytes > 0 ? static_cast<std::uint64_t>(bytes) : 0;
}

}  // namespace vmci
