// The doorbell of a queue pair on the process substrate: a pair of connected sockets, one end for each side. It is what a
// stream socket's fd() is, so that poll(2) tells the truth about both directions:
//
//   POLLIN    the other side has rung: a token (a packet with the number of the arming it answers) lies in our queue
//   POLLOUT   goes away when we have filled our way to the other side (clog), and comes back when that side drains it
//   POLLHUP   the other side closed its end or died, or the service hung up both
//
// Each side writes only through its own end and never blocks in it (a clogged peer is awake or does not care); what a hostile
// peer sends here wakes us for nothing, at worst. Descriptors it passes along are dropped by the kernel, since nobody asks for them.
//
// ring() and clog() may be called by one thread (the sender), drain() by another (the receiver).
#pragma once

#include <cstdint>
#include <utility>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vmci {

class DoorbellEnd {
 public:
  static constexpr std::uint32_t closing_token = 0xffffffff;  // stays in the queue for ever: the end of a stream remains readable

  DoorbellEnd() = default;
  explicit DoorbellEnd(UniqueFd fd) : fd_(std::move(fd)) {}

  void ring(std::uint32_t token) const;
  // Until drained by the other side, our end is not writable for poll. False: it hung up.
  bool clog() const;

  struct Drained {
    bool hung_up;
    bool closing;  // the closing token is at the front
  };
  // Takes what lies before the token `keep` or the closing one, which stay: poll goes on to say that there is something.
  Drained drain(std::uint32_t keep) const;

  // Until one of `events` (POLLIN, POLLOUT) or a hang-up; timeout_ms -1: for ever. Returns revents; 0: timeout or a signal.
  short wait(short events, int timeout_ms = -1) const;

  int fd() const { return fd_.get(); }
  void close() { fd_.reset(); }

 private:
  UniqueFd fd_;
};

vrdma::Result<std::pair<UniqueFd, UniqueFd>> make_doorbell_pair();

}  // namespace vmci
