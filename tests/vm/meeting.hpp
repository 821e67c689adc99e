// Two verbs programs that meet by TCP before their first transfer. For programs of tests: what cannot be done ends the program, with 1
// and a line that says what.
#pragma once

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace vrdma::test {

template <class T>
T must(T value, const char* what) {
  if (value) return value;
  std::printf("cannot %s: %s\n", what, std::strerror(errno));
  std::fflush(stdout);
  std::_Exit(1);
}

class Meeting {
 public:
  // host: null for the side that listens.
  Meeting(const char* host, const char* port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = host == nullptr ? AI_PASSIVE : 0;
    must(::getaddrinfo(host, port, &hints, &found) == 0, "find that address");
    socket_ = must_descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "make a socket");
    if (host == nullptr) {
      const int yes = 1;
      ::setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
      must(::bind(socket_, found->ai_addr, found->ai_addrlen) == 0 && ::listen(socket_, 1) == 0, "listen");
      const int listener = socket_;
      socket_ = must_descriptor(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), "accept");
      ::close(listener);
    } else {
      must(::connect(socket_, found->ai_addr, found->ai_addrlen) == 0, "connect");
    }
    ::freeaddrinfo(found);
  }
  ~Meeting() { ::close(socket_); }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // The other side's.
  template <class T>
  T swap(const T& mine) const {
    T theirs{};
    must(::send(socket_, &mine, sizeof(mine), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(mine)), "tell the other side");
    must(::recv(socket_, &theirs, sizeof(theirs), MSG_WAITALL) == static_cast<ssize_t>(sizeof(theirs)), "hear the other side");
    return theirs;
  }
  // Returns when the other side is here, too.
  void wait() const { (void)swap('.'); }

 private:
  static int must_descriptor(int fd, const char* what) {
    must(fd >= 0, what);
    return fd;
  }
  int socket_ = -1;
};

}  // namespace vrdma::test
