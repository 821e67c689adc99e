// A descriptor whose last close(2) waits for as long as its other end is there, for tests of those who must not wait for it: a TCP socket that
// lingers, with bytes that nobody reads.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "vmci_channel/given_descriptors.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace vmci::test {

class Lingering {
 public:
  // seconds: that it lingers at most.
  explicit Lingering(int seconds = 600) {
    const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int small = 4096;
    ::setsockopt(listener.get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(address);
    if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || ::listen(listener.get(), 1) != 0 ||
        ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &bytes) != 0)
      return;
    fd_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return;
    peer_.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const linger all{1, seconds};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &all, sizeof(all));
    ::fcntl(fd_.get(), F_SETFL, O_NONBLOCK);
    static constexpr std::array<std::byte, 65536> nothing{};
    while (::send(fd_.get(), nothing.data(), nothing.size(), MSG_NOSIGNAL) > 0) {
    }
  }

  explicit operator bool() const { return fd_ && peer_; }
  int get() const { return fd_.get(); }
  // The only copy of it.
  UniqueFd take() { return std::move(fd_); }
  // Passes it along with a packet: whoever receives it, or lets it lie, has the only copy, unless he has closed it before we could: then that
  // waits here, in a thread. As send_with_descriptors().
  vrdma::Status pass(int socket, std::span<const std::byte> packet) {
    auto sent = send_with_descriptors(socket, packet, std::array{fd_.get()});
    if (sent) std::make_shared<Closer>()->close(std::move(fd_));
    return sent;
  }
  // Likewise, while nobody receives there.
  vrdma::Status leave(int socket, std::span<const std::byte> packet) {
    auto sent = send_with_descriptors(socket, packet, std::array{fd_.get()});
    if (sent) fd_.reset();
    return sent;
  }
  void end() { peer_.reset(); }  // nobody waits for it any more

 private:
  UniqueFd fd_, peer_;  // the latter goes first
};

}  // namespace vmci::test
