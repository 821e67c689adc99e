// One end of the link of a virtual machine (vrdma/vm_link.hpp): frames in two byte queues. Used by one thread. Never blocks:
// what does not fit waits here and goes out with flush().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "vmci_channel/byte_queue.hpp"
#include "vrdma/vm_link.hpp"

namespace vmci {

class VmLinkEnd {
 public:
  enum class Who : bool { agent, service };
  // bar: bar_bytes of memory. Zeroes this side's cursor; the other side's is zero, or will be before anything is sent.
  VmLinkEnd(std::byte* bar, Who who);

  // body: at most frame_bytes_max bytes.
  void send(vrdma::vm::Frame kind, std::uint32_t connection, std::span<const std::byte> body, std::uint32_t item = 0, std::uint16_t flags = 0);
  template <class Body>
    requires(!std::is_convertible_v<const Body&, std::span<const std::byte>>)  // a span of mutable bytes is bytes, no record
  void send(vrdma::vm::Frame kind, std::uint32_t connection, const Body& body, std::uint32_t item = 0) {
    send(kind, connection, std::as_bytes(std::span(&body, 1)), item);
  }
  // True if something went into the queue: the other side is to be told.
  bool flush();
  std::size_t unsent_bytes() const { return out_.size() - out_sent_; }

  // Hands over the frames that have come in whole, at most `frames_max` of them. False: the other side breaks the protocol.
  using Handler = std::function<void(const vrdma::vm::FrameHead&, std::span<const std::byte> body)>;
  bool receive(const Handler& handler, int frames_max = 64);
  bool anything() { return reader_.available() != 0; }

 private:
  ByteWriter writer_;
  ByteReader reader_;
  std::vector<std::byte> out_;  // from out_sent_ on: not in the queue yet
  std::size_t out_sent_ = 0;
  std::vector<std::byte> in_;   // the beginning of a frame
  bool broken_ = false;
};

}  // namespace vmci
