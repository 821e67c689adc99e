// One TCP connection to another host: a handshake, and then sealed frames both ways. Never blocks; who owns it watches its socket.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "vmci_channel/packet_socket.hpp"
#include "vmkernel_svc/remote/handshake.hpp"
#include "vmkernel_svc/remote/link_head.hpp"

namespace vrdma::remote {

class TcpConnection {
 public:
  enum class State { connecting, shaking_hands, open, broken };
  // strange: not from who it should be. failed: OpenSSL has no memory, most likely, which ends this connection and nothing else.
  enum class Why { none, hung_up, strange, malformed, failed };

  // `peer`: whom the socket is about to reach; nullptr: who has connected to us.
  TcpConnection(Handshake::Context& context, vmci::UniqueFd socket, std::shared_ptr<const PeerHost> peer, std::uint64_t now_ns);

  int socket() const { return socket_.get(); }
  State state() const { return state_; }
  Why why() const { return why_; }
  int connect_error() const { return connect_error_; }  // why it did not come about; 0: it did, or may yet
  std::uint64_t since_ns() const { return since_ns_; }                            // of its beginning
  const std::shared_ptr<const PeerHost>& peer() const { return peer_; }  // of who is dialed; else once open; of a handshake that failed: who it was to be, if it came so far
  bool encrypts() const { return encrypts_; }
  bool is_tls() const { return is_tls_; }  // what who has connected to us said first
  void break_off(Why why);

  // The socket can be read or written: connecting and shaking hands go on.
  void go_on();

  // Puts head before the frame's record, seals both, and has them written in their turn.
  void send(LinkHead head, std::shared_ptr<engine::FarFrame> frame);
  bool flush();  // false: nothing could be written
  bool wants_to_write() const { return state_ == State::connecting || wants_write_ || !outgoing_.empty(); }
  std::size_t outgoing_bytes() const { return outgoing_bytes_; }
  // Of frames, in whole or in part: those that have come, and those of which the other host has said that they have, which may be its kernel.
  std::uint64_t received_bytes() const { return received_bytes_; }
  std::uint64_t delivered_bytes() const;
  bool worn() const { return sealing_ && (sealing_->sealed_bytes() > FrameSeal::sealed_bytes_max || opening_->sealed_bytes() > FrameSeal::sealed_bytes_max); }

  bool has_unread() const;  // something has come that receive() has not read
  // The next frame that has come, its head checked and in `head`; nullptr: no whole one, for now. Reads at most what `budget` allows.
  engine::FarFramePtr receive(LinkHead& head, std::int64_t& budget);

 private:
  static constexpr std::size_t buffer_bytes = 64 * 1024, read_ahead_bytes = 4096, large_bytes = 8192;

  template <class Step>
  bool try_to(Step&& step);
  void shake();
  void note_protocol();
  bool begin_frame();
  bool read(std::int64_t& budget);

  vmci::UniqueFd socket_;
  std::optional<Handshake> handshake_;
  std::shared_ptr<const PeerHost> peer_;
  std::uint64_t since_ns_;
  State state_;
  Why why_ = Why::none;
  int connect_error_ = 0;
  bool encrypts_ = false, wants_write_ = false, drained_ = false, is_tls_ = true, is_noted_ = false;
  std::optional<FrameSeal> sealing_, opening_;
  std::deque<std::shared_ptr<engine::FarFrame>> outgoing_;
  std::size_t outgoing_bytes_ = 0, written_ = 0;  // written_: of the first one
  std::uint64_t sent_bytes_ = 0, received_bytes_ = 0;
  std::unique_ptr<std::byte[]> buffer_;           // what was read and is no frame yet
  std::size_t begin_ = 0, end_ = 0;
  engine::FarFramePtr frame_;  // being filled
  std::size_t filled_ = 0, whole_ = 0;
};

}  // namespace vrdma::remote
