// The other process of a test: barriers, exchanged values, and word of its failure.
//
//      role a                              role b
//        | ------- frame{barrier, n} ------> |      each side sends its n-th barrier and waits for the other's
//        | <------ frame{barrier, n} ------- |
//        | ------- frame{data, bytes} -----> |      in order, any number in flight
//        | <------ frame{ended} ------------ |      the other failed or skipped: this side stops waiting and ends quietly
//
// Frames are packets of a SOCK_SEQPACKET pair. One thread of each role (the test body) uses it, except check(), which any
// thread that waits for something calls so that nobody waits for a peer that has given up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <span>
#include <type_traits>
#include <vector>

#include "tests/conformance/where.hpp"

namespace vrdma::conformance {

class Peer {
 public:
  explicit Peer(int fd) : fd_(fd) {}

  void barrier(Where where = Where::current());

  void send_bytes(std::span<const std::byte> bytes);  // at most 60 KiB
  std::vector<std::byte> receive_bytes(Where where = Where::current());

  template <class T>
  void send(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    send_bytes(std::as_bytes(std::span(&value, 1)));
  }
  template <class T>
  T receive(Where where = Where::current()) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::vector<std::byte> bytes = receive_bytes(where);
    check_size(bytes.size(), sizeof(T), where);
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  template <class T>
  T exchange(const T& mine, Where where = Where::current()) {
    send(mine);
    return receive<T>(where);
  }

  // Ends this process quietly when the other one has reported a failure or died. Never blocks.
  void check();
  // Tells the other side that this one has ended its test early. Async-signal-safe enough for a forked child.
  void tell_ended() noexcept;

 private:
  enum class Kind : std::uint32_t { barrier = 1, data = 2, ended = 3 };
  struct Header {
    Kind kind;
    std::uint32_t number;
  };
  struct Frame {
    Header header;
    std::vector<std::byte> bytes;
  };

  static void check_size(std::size_t got, std::size_t wanted, Where where);
  void write(Header header, std::span<const std::byte> bytes);
  Frame next(const char* what, Where where);
  bool pull_locked();  // moves one frame from the socket to the inbox; false when there is none yet

  int fd_;
  std::uint32_t barriers_ = 0;
  std::mutex mutex_;
  std::deque<Frame> inbox_;
};

}  // namespace vrdma::conformance
