// Bytes with descriptors over a unix socket of any type (SCM_RIGHTS, unix(7)). Any thread; blocks where the socket does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vmci {

constexpr std::size_t packet_descriptors_max = 8;

struct Received {
  std::size_t bytes;  // 0: the other end is closed
  std::vector<UniqueFd> descriptors;
  bool descriptors_missing = false;  // there were some, and this process may not open all of them: it has none. What the bytes say counts
};

// EMSGSIZE: more descriptors than packet_descriptors_max; else as sendmsg(2), but for EINTR and without SIGPIPE.
vrdma::Status send_with_descriptors(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors);
// EMSGSIZE: there was more than fits, of either; nothing stays open then. Else as recvmsg(2), but for EINTR.
vrdma::Result<Received> receive_with_descriptors(int socket, std::span<std::byte> buffer);
// What was sent there and is unread, as the kernel counts it: with some 700 bytes a packet. 0 where there is no other end any more.
std::uint64_t unread_bytes(int socket);

}  // namespace vmci
