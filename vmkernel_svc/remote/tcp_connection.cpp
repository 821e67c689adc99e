#include "vmkernel_svc/remote/tcp_connection.hpp"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "vmkernel_svc/log/log.hpp"

namespace vrdma::remote {

using engine::FarFrame;
using engine::FarFramePtr;

namespace {
constexpr std::size_t body_min = sizeof(engine::FarRecord), body_max = body_min + 64 * 1024;

bool try_again(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }
}  // namespace

TcpConnection::TcpConnection(Handshake::Context& context, vmci::UniqueFd socket, std::shared_ptr<const PeerHost> peer, std::uint64_t now_ns)
    : socket_(std::move(socket)), peer_(peer), since_ns_(now_ns), state_(peer ? State::connecting : State::shaking_hands) {
  const int on = 1;
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  try_to([&] { handshake_.emplace(context, socket_.get(), std::move(peer)); });
}

// What may throw of the handshake and of sealing: nothing of it comes out of here. False: the connection is over.
template <class Step>
bool TcpConnection::try_to(Step&& step) try {
  step();
  return true;
} catch (const std::exception& error) {
  static constinit log::Sparing sparing;
  sparing.warn("a connection with another host ends ({}), and is made anew", error.what());
  break_off(Why::failed);
  return false;
}

void TcpConnection::break_off(Why why) {
  if (state_ == State::broken) return;
  state_ = State::broken;
  why_ = why;
}

void TcpConnection::go_on() {
  if (state_ == State::connecting) {
    int error = 0;
    socklen_t bytes = sizeof(error);
    if (::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) != 0 || error != 0) return connect_error_ = error, break_off(Why::hung_up);
    sockaddr_storage address;
    bytes = sizeof(address);
    if (::getpeername(socket_.get(), reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return;  // not yet
    state_ = State::shaking_hands;
  }
  if (state_ == State::shaking_hands) shake();
}

// What the first byte says of who has connected to us; it stays where it is.
void TcpConnection::note_protocol() {
  constexpr unsigned char tls_handshake = 22;
  unsigned char first = 0;
  if (peer_ != nullptr || is_noted_ || ::recv(socket_.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT) != 1) return;
  is_noted_ = true;
  is_tls_ = first == tls_handshake;
}

void TcpConnection::shake() {
  note_protocol();
  const auto state = handshake_->go_on();
  wants_write_ = state == Handshake::State::wants_write;
  if (state == Handshake::State::failed || state == Handshake::State::hung_up) {
    peer_ = handshake_->peer();
    return break_off(state == Handshake::State::failed ? Why::strange : Why::hung_up);
  }
  if (state != Handshake::State::done) return;
  const auto secrets = handshake_->secrets();
  if (!secrets) return break_off(Why::strange);
  peer_ = handshake_->peer();
  encrypts_ = handshake_->encrypts();
  const bool keyed = try_to([&] {
    opening_.emplace(secrets->theirs, FrameSeal::Way::open);
    sealing_.emplace(secrets->ours, FrameSeal::Way::seal);
  });
  if (!keyed) return;
  handshake_.reset();
  buffer_ = std::make_unique<std::byte[]>(buffer_bytes);
  state_ = State::open;
}

// --- sending --------------------------------------------------------------------------------------------------

void TcpConnection::send(LinkHead head, std::shared_ptr<FarFrame> frame) {
  if (state_ != State::open) return;
  const std::size_t body = frame->whole_bytes() - sizeof(head);
  head.bytes = static_cast<std::uint32_t>(body);
  const FrameSeal::Bytes tagged(reinterpret_cast<const std::byte*>(&head), tagged_head_bytes), record(frame->whole() + sizeof(head), body);
  // What was given stays as it is: it may have to be sent again.
  std::shared_ptr<FarFrame> encrypted = encrypts_ ? FarFrame::make(frame->record().payload_bytes) : nullptr;
  if (!try_to([&] { head.tag = sealing_->seal(tagged, record, encrypted ? encrypted->whole() + sizeof(head) : nullptr); })) return;
  if (encrypted) frame = std::move(encrypted);
  std::memcpy(frame->whole(), &head, sizeof(head));
  outgoing_bytes_ += sizeof(head) + body;
  outgoing_.push_back(std::move(frame));
}

bool TcpConnection::flush() {
  constexpr std::size_t at_once = 32;
  bool worked = false;
  while (!outgoing_.empty() && state_ == State::open) {
    iovec pieces[at_once];
    std::size_t count = 0, skip = written_, bytes = 0;
    for (auto frame = outgoing_.begin(); frame != outgoing_.end() && count < at_once; ++frame, skip = 0) {
      LinkHead head;
      std::memcpy(&head, (*frame)->whole(), sizeof(head));  // the record may be encrypted: its own length says nothing
      const std::size_t whole = sizeof(head) + head.bytes;
      pieces[count++] = {(*frame)->whole() + skip, whole - skip};
      bytes += whole - skip;
    }
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (!try_again(errno)) break_off(Why::hung_up);
      break;
    }
    worked = true;
    sent_bytes_ += static_cast<std::uint64_t>(sent);
    outgoing_bytes_ -= static_cast<std::size_t>(sent);
    std::size_t left = static_cast<std::size_t>(sent);
    for (std::size_t i = 0; i < count && left >= pieces[i].iov_len; ++i) {
      left -= pieces[i].iov_len;
      outgoing_.pop_front();
      written_ = 0;
    }
    written_ += left;
    if (static_cast<std::size_t>(sent) < bytes) break;
  }
  return worked;
}

std::uint64_t TcpConnection::delivered_bytes() const {
  int under_way = 0;
  if (::ioctl(socket_.get(), SIOCOUTQ, &under_way) != 0 || under_way < 0) return 0;
  return sent_bytes_ - std::min(sent_bytes_, static_cast<std::uint64_t>(under_way));
}

// --- receiving ------------------------------------------------------------------------------------------------

bool TcpConnection::has_unread() const {
  int bytes = 0;
  return ::ioctl(socket_.get(), FIONREAD, &bytes) == 0 && bytes > 0;
}

// With a whole head in the buffer: what follows it goes to a frame. False: it makes no sense.
bool TcpConnection::begin_frame() {
  LinkHead head;
  std::memcpy(&head, buffer_.get() + begin_, sizeof(head));
  if (head.bytes < body_min || head.bytes > body_max) return false;
  frame_ = FarFrame::make(head.bytes - static_cast<std::uint32_t>(body_min));
  whole_ = sizeof(head) + head.bytes;
  filled_ = std::min(whole_, end_ - begin_);
  std::memcpy(frame_->whole(), buffer_.get() + begin_, filled_);
  begin_ += filled_;
  return true;
}

// The buffer holds less than a head, or, while a frame is being filled, nothing.
bool TcpConnection::read(std::int64_t& budget) {
  if (begin_ != 0) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  // A large frame's bytes go where they belong, and not much more with them, which would have to be copied.
  const std::size_t rest = frame_ ? whole_ - filled_ : 0;
  iovec pieces[2] = {{frame_ ? frame_->whole() + filled_ : nullptr, rest},
                     {buffer_.get() + end_, rest >= large_bytes ? read_ahead_bytes : buffer_bytes - end_}};
  const ssize_t got = ::readv(socket_.get(), rest != 0 ? pieces : pieces + 1, rest != 0 ? 2 : 1);
  if (got <= 0) {
    if (got == 0 || !try_again(errno)) break_off(Why::hung_up);
    return false;
  }
  const auto bytes = static_cast<std::size_t>(got);
  budget -= got;
  received_bytes_ += bytes;
  drained_ = bytes < pieces[1].iov_len + rest;
  filled_ += std::min(bytes, rest);
  end_ += bytes - std::min(bytes, rest);
  return true;
}

FarFramePtr TcpConnection::receive(LinkHead& head, std::int64_t& budget) {
  while (state_ == State::open) {
    if (!frame_ && end_ - begin_ >= sizeof(LinkHead) && !begin_frame()) {
      break_off(Why::strange);
      return nullptr;
    }
    if (!frame_ || filled_ < whole_) {
      // What was read last was all that there was: who asks again soon need not ask the kernel twice.
      if (budget <= 0 || std::exchange(drained_, false) || !read(budget)) return nullptr;
      continue;
    }
    FarFramePtr frame = std::move(frame_);
    std::memcpy(&head, frame->whole(), sizeof(head));
    if (!opening_->open({frame->whole(), tagged_head_bytes}, {frame->whole() + sizeof(head), whole_ - sizeof(head)}, encrypts_, head.tag)) {
      break_off(Why::strange);
      return nullptr;
    }
    if (frame->record().payload_bytes == frame->capacity()) return frame;
    break_off(Why::malformed);
  }
  return nullptr;
}

}  // namespace vrdma::remote
