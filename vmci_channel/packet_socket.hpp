// The socket of the process substrate: packets with descriptors between a guest and the service (SOCK_SEQPACKET, AF_UNIX),
// and who is at the other end. It carries what rings cannot: descriptors, and the news that a side is gone.
//
// One object may be used by one thread at a time. Nothing here raises SIGPIPE.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string>

#include "vmci_channel/descriptor_passing.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vmci {

constexpr int attach_within_ms = 5000;  // how long who wants to attach waits for a service that does not answer

struct Credentials {
  pid_t pid;  // 0: not visible in our pid namespace
  uid_t uid;
  gid_t gid;
};

class PacketSocket {
 public:
  PacketSocket() = default;
  explicit PacketSocket(UniqueFd fd) : fd_(std::move(fd)) {}

  // ENOENT, ECONNREFUSED (nobody listens any more), EACCES, ENAMETOOLONG; ETIMEDOUT: who listens has taken nobody from its full
  // queue for so long.
  static vrdma::Result<PacketSocket> connect(const std::string& path, int timeout_ms = attach_within_ms);

  // Whole packets. Descriptors are duplicated to the peer; ours stay ours. EAGAIN when the socket is non-blocking and full.
  vrdma::Status send(std::span<const std::byte> packet, std::span<const int> descriptors = {}) const;
  // EMSGSIZE: the packet was longer than the buffer, or carried too many descriptors (all of them closed). More than this process may open
  // is no error (Received::descriptors_missing): a request is to be refused, and what an answer has made is to be given back.
  // timeout_ms -1: wait for ever; ETIMEDOUT.
  vrdma::Result<Received> receive(std::span<std::byte> buffer, int timeout_ms = -1) const;

  vrdma::Result<Credentials> peer() const;
  // A pidfd of the peer as it was at connect time, where the kernel can tell (SO_PEERPIDFD), else by its pid.
  vrdma::Result<UniqueFd> peer_pidfd() const;

  int fd() const { return fd_.get(); }
  UniqueFd release() { return std::move(fd_); }
  explicit operator bool() const { return static_cast<bool>(fd_); }

 private:
  UniqueFd fd_;
};

// Listens at `path` with the given permission bits. A socket file that nobody listens at any more is replaced; one that
// somebody serves is EADDRINUSE; any other file is left alone: ENOTSOCK.
vrdma::Result<UniqueFd> listen_packets(const std::string& path, mode_t mode);

// The socket that a service manager listens at, and started this process with (sd_listen_fds(3), Sockets of systemd.socket(5)). It outlives the process,
// so who connects meanwhile waits for the next one, and its file is not ours to remove. Not for children of ours: asked once.
struct InheritedListener {
  UniqueFd fd;  // none: -1
  std::string path;
};
// EINVAL: what was passed is not one SOCK_SEQPACKET socket of AF_UNIX that listens at a path.
vrdma::Result<InheritedListener> inherited_listener();

}  // namespace vmci
