// A VMCI datagram socket: bound to a port of this context, sends to and receives from (context, port) of any other, the
// service's control port included. Unreliable: what the receiver has no room for is dropped and counted.
// Any thread; fd() says POLLIN when receive_from() is worth a try (it may still say EAGAIN); sending never blocks for the receiver.
#pragma once

#include <algorithm>

#include "vmci_channel/context.hpp"

namespace vmci {

class DatagramSocket {
 public:
  static constexpr std::size_t datagrams_max_default = 256;

  // port 0: any. EADDRINUSE, EMFILE, EIO.
  static vrdma::Result<DatagramSocket> bind(std::shared_ptr<Context> context, std::uint32_t port = 0,
                                            std::size_t datagrams_max = datagrams_max_default) {
    auto mailbox = context->bind(port, 0, datagrams_max);
    if (!mailbox) return mailbox.error();
    return DatagramSocket(std::move(context), std::move(*mailbox));
  }
  DatagramSocket(DatagramSocket&&) noexcept = default;
  DatagramSocket& operator=(DatagramSocket&& other) noexcept {
    close();
    context_ = std::move(other.context_);
    mailbox_ = std::move(other.mailbox_);
    return *this;
  }
  ~DatagramSocket() { close(); }

  Address local() const { return {context_->id(), mailbox_->port()}; }
  int fd() const { return mailbox_->fd(); }

  // EMSGSIZE beyond control::body_bytes_max. Kind and sequence are the application's; at the control port they name the request.
  vrdma::Status send_to(Address to, std::span<const std::byte> body, std::uint16_t kind = 0, std::uint32_t sequence = 0) {
    return context_->send(to, mailbox_->port(), kind, sequence, body);
  }
  // timeout_ms 0: EAGAIN; -1: wait for ever; else ETIMEDOUT.
  vrdma::Result<Datagram> receive_from(int timeout_ms = -1) { return context_->receive(*mailbox_, timeout_ms); }
  // Dropped here because nobody received; the service counts what it dropped before (vrdma show).
  std::uint64_t dropped() const { return context_->dropped(*mailbox_); }

  void close() {
    if (mailbox_) context_->unbind(*mailbox_);
    mailbox_.reset();
    context_.reset();
  }

 private:
  DatagramSocket(std::shared_ptr<Context> context, std::shared_ptr<Mailbox> mailbox)
      : context_(std::move(context)), mailbox_(std::move(mailbox)) {}

  std::shared_ptr<Context> context_;
  std::shared_ptr<Mailbox> mailbox_;
};

}  // namespace vmci
