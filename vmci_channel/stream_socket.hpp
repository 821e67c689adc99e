// VMCI stream sockets: bytes in order, both ways, between (context, port) and (context, port), in the two queues of a queue pair.
//
//   connector                          service                      listener
//   connect(B, port)                                                listen(port, backlog)
//     REQUEST: queue_pair_alloc ─────►  port has room in its backlog?
//     ◄───── memory, doorbell end       OFFER: notice ────────────► fd() readable
//     connected: may send at once                                   accept()
//                                       ◄──────────────── ATTACH: queue_pair_attach
//   bytes ═══════════════════ queue pair in shared memory ═══════════════════ bytes
//     close() ────────────► hang-up, notice; what was sent can still be read, then the end
//
// As with AF_UNIX, connect() succeeds when the backlog has taken the connection: it never waits. A peer that dies or detaches
// without closing is ECONNRESET after its last byte; a closed one is the end of the stream.
//
// One thread may send while another receives; connecting, closing and shutting down are for one thread alone. A peer's bytes
// and positions are never trusted: impossible ones are EPROTO and end the connection.
// fd() is for poll(2): POLLIN when there is something to receive, the end included; POLLOUT unless send() said EAGAIN and the
// peer has not read everything since; POLLHUP when the peer is gone. It may be ready for nothing; it never fails to get ready.
#pragma once

#include <memory>

#include "vmci_channel/shared_queue_pair.hpp"

namespace vmci {

class StreamSocket {
 public:
  static constexpr std::uint64_t queue_bytes_default = 256 * 1024;  // each way

  // ECONNREFUSED, EAGAIN (backlog full), EACCES, EDQUOT, EIO (no service).
  static vrdma::Result<StreamSocket> connect(std::shared_ptr<Context> context, Address to,
                                             std::uint64_t queue_bytes = queue_bytes_default);
  explicit StreamSocket(QueuePair pair);
  StreamSocket(StreamSocket&&) noexcept;
  StreamSocket& operator=(StreamSocket&&) noexcept;
  ~StreamSocket();

  // Blocking: all of it, unless an error comes first and nothing was sent. Non-blocking: what fits, or EAGAIN.
  // EPIPE: the peer reads no more, or we have shut down; ECONNRESET: it is gone; EPROTO.
  vrdma::Result<std::size_t> send(std::span<const std::byte> from);
  // At least one byte; 0: the peer has sent its last. EAGAIN, ECONNRESET, EPROTO.
  vrdma::Result<std::size_t> receive(std::span<std::byte> to);

  void set_nonblocking(bool on);
  void shutdown_write();  // the peer reads what there is, then the end; we may go on to receive
  void close();

  int fd() const;
  Address peer() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

class StreamListener {
 public:
  static constexpr std::uint32_t backlog_default = 128;

  // port 0: any. EADDRINUSE.
  static vrdma::Result<StreamListener> listen(std::shared_ptr<Context> context, std::uint32_t port = 0,
                                              std::uint32_t backlog = backlog_default);
  StreamListener(StreamListener&&) noexcept = default;
  StreamListener& operator=(StreamListener&&) = delete;
  ~StreamListener();

  // timeout_ms 0: EAGAIN; -1: wait for ever; else ETIMEDOUT.
  vrdma::Result<StreamSocket> accept(int timeout_ms = -1);
  Address local() const { return {context_->id(), mailbox_->port()}; }
  int fd() const { return mailbox_->fd(); }

 private:
  StreamListener(std::shared_ptr<Context> context, std::shared_ptr<Mailbox> mailbox)
      : context_(std::move(context)), mailbox_(std::move(mailbox)) {}

  std::shared_ptr<Context> context_;
  std::shared_ptr<Mailbox> mailbox_;
};

}  // namespace vmci
