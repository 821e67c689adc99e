#include "vmci_channel/stream_socket.hpp"

#include <poll.h>

#include "vmci_channel/backoff.hpp"

namespace vmci {

using vrdma::Errno;
using vrdma::Result;

struct StreamSocket::State {
  explicit State(QueuePair pair_in) : pair(std::move(pair_in)), side(pair.side()), writer(side), reader(side) {}

  std::uint32_t peer_closed() const { return ByteSide::load(side.theirs->closed, std::memory_order_acquire); }
  void close_for(std::uint32_t what) {
    closed |= what;
    ByteSide::store(side.mine->closed, closed, std::memory_order_release);
    // It stays in the peer's queue for ever: the end of the stream is always there to be read.
    if (what & closed_for_writing) pair.doorbell().ring(DoorbellEnd::closing_token);
  }

  // The queue was read empty: from now on the next byte rings, and tokens of the past and clogs go. The token of a byte that came
  // meanwhile stays, so that poll is right whoever was faster. Call with nothing left to read.
  void settle() {
    const std::uint32_t token = reader.arm();
    if (reader.available() != 0 || reader.broken()) return;
    const std::uint32_t wanted = reader.space_wanted();
    const auto drained = pair.doorbell().drain(token);
    reader.space_served(wanted);
    if (drained.hung_up) hung_up.store(true, std::memory_order_relaxed);
    // A closing token without the mark that goes before it would keep us awake for ever.
    if (drained.closing && (peer_closed() & closed_for_writing) == 0) cheated = true;
  }

  QueuePair pair;
  ByteSide side;
  ByteWriter writer;
  ByteReader reader;
  std::uint32_t closed = 0;  // by us
  bool cheated = false;      // the receiver's
  std::atomic<bool> hung_up{false};
  std::atomic<bool> nonblocking{false};
};

Result<StreamSocket> StreamSocket::connect(std::shared_ptr<Context> context, Address to, std::uint64_t queue_bytes) {
  auto pair = QueuePair::alloc(std::move(context), to, queue_bytes, queue_bytes);
  if (!pair) return pair.error();
  return StreamSocket(std::move(*pair));
}

StreamSocket::StreamSocket(QueuePair pair) : state_(std::make_unique<State>(std::move(pair))) {}
StreamSocket::StreamSocket(StreamSocket&&) noexcept = default;
StreamSocket& StreamSocket::operator=(StreamSocket&& other) noexcept {
  close();
  state_ = std::move(other.state_);
  return *this;
}
StreamSocket::~StreamSocket() { close(); }

int StreamSocket::fd() const { return state_->pair.doorbell().fd(); }
Address StreamSocket::peer() const { return state_->pair.peer(); }
void StreamSocket::set_nonblocking(bool on) { state_->nonblocking.store(on, std::memory_order_relaxed); }

Result<std::size_t> StreamSocket::send(std::span<const std::byte> from) {
  State& s = *state_;
  std::size_t sent = 0;
  const auto fail = [&](int error) -> Result<std::size_t> {
    if (sent != 0) return sent;
    return Errno{error};
  };
  for (Backoff backoff;;) {
    if (s.closed & closed_for_writing) return fail(EPIPE);
    if (s.peer_closed() & closed_for_reading) return fail(EPIPE);
    if (s.hung_up.load(std::memory_order_relaxed)) return fail(ECONNRESET);
    const std::size_t bytes = s.writer.write(from.subspan(sent));
    if (s.writer.broken()) return fail(EPROTO);
    if (bytes != 0) {
      std::uint32_t token;
      if (s.writer.wants_ring(token)) s.pair.doorbell().ring(token);
      sent += bytes;
      backoff.reset();
    }
    if (sent == from.size()) return sent;
    if (bytes != 0) continue;
    const bool nonblocking = s.nonblocking.load(std::memory_order_relaxed);
    if (nonblocking && sent != 0) return sent;
    if (!nonblocking && !backoff.tired()) {
      backoff.idle();
      continue;
    }
    // Without room: not writable until the peer has read what there is.
    s.writer.want_space();
    const bool there = s.pair.doorbell().clog();
    store_load_fence();  // pairs with the fence between the reader's `consumed` and its look at space_wanted
    if (s.writer.room()) continue;
    if (!there) {
      s.hung_up.store(true, std::memory_order_relaxed);
      continue;
    }
    if (nonblocking) return Errno{EAGAIN};
    if (s.pair.doorbell().wait(POLLOUT) & (POLLHUP | POLLERR)) s.hung_up.store(true, std::memory_order_relaxed);
  }
}

Result<std::size_t> StreamSocket::receive(std::span<std::byte> to) {
  State& s = *state_;
  if (to.empty()) return std::size_t{0};
  for (Backoff backoff;;) {
    const bool hung_up = s.hung_up.load(std::memory_order_relaxed);  // before looking: it wrote nothing after hanging up
    const bool ended = (s.peer_closed() & closed_for_writing) != 0;  // likewise
    const std::size_t bytes = s.reader.read(to);
    const bool nonblocking = s.nonblocking.load(std::memory_order_relaxed);
    if (bytes != 0) {
      if (bytes < to.size() || s.reader.available() == 0) {
        store_load_fence();  // pairs with the fence after the writer's clog: we see that it wants space or it sees the space
        if (nonblocking || s.reader.space_to_serve()) s.settle();
      }
      return bytes;
    }
    if (s.reader.broken() || s.cheated) return Errno{EPROTO};
    if (ended || (s.closed & closed_for_reading)) return std::size_t{0};
    if (hung_up) return Errno{ECONNRESET};
    if (!nonblocking && !backoff.tired()) {
      backoff.idle();
      continue;
    }
    s.settle();
    if (s.reader.available() != 0 || s.reader.broken() || s.cheated || s.hung_up.load(std::memory_order_relaxed) ||
        (s.peer_closed() & closed_for_writing) != 0)
      continue;
    if (nonblocking) return Errno{EAGAIN};
    (void)s.pair.doorbell().wait(POLLIN);
  }
}

void StreamSocket::shutdown_write() {
  if ((state_->closed & closed_for_writing) == 0) state_->close_for(closed_for_writing);
}

void StreamSocket::close() {
  if (!state_) return;
  const std::uint32_t open = (closed_for_reading | closed_for_writing) & ~state_->closed;
  if (open != 0) state_->close_for(open);
  state_.reset();
}

// --- listener -------------------------------------------------------------------------------------------------

Result<StreamListener> StreamListener::listen(std::shared_ptr<Context> context, std::uint32_t port, std::uint32_t backlog) {
  if (backlog == 0) return Errno{EINVAL};
  auto mailbox = context->bind(port, backlog, 0);
  if (!mailbox) return mailbox.error();
  return StreamListener(std::move(context), std::move(*mailbox));
}

StreamListener::~StreamListener() {
  if (mailbox_) context_->unbind(*mailbox_);
}

Result<StreamSocket> StreamListener::accept(int timeout_ms) {
  using namespace vrdma::control;
  for (;;) {
    auto offer = context_->receive(*mailbox_, timeout_ms);
    if (!offer) return offer.error();
    QueuePairNotice notice;
    if (offer->from != Address{host_context, control_port} || offer->kind() != notice_offer || offer->body.size() < sizeof(notice)) continue;
    std::memcpy(&notice, offer->body.data(), sizeof(notice));
    auto pair = QueuePair::attach(context_, notice.handle);
    if (!pair && value(pair.error()) == ENOENT) continue;  // gone meanwhile
    if (!pair) {  // we cannot have it (descriptors, memory): the connector is to know
      (void)context_->call<Request::queue_pair_detach>(notice.handle);
      return pair.error();
    }
    return StreamSocket(std::move(*pair));
  }
}

}  // namespace vmci
