#include "guest_lib/control.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <utility>

#include "guest_lib/cancellation.hpp"
#include "vmci_channel/answer.hpp"
#include "vmci_channel/backoff.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

using control::Head;
using vmci::store_load_fence;

namespace {

constexpr std::uint32_t local_port = 1;        // one requester per guest
constexpr std::uint32_t control_member = 0;    // of the doorbell bitmap
constexpr std::uint32_t head_bytes_in_ring = sizeof(RecordHead);

Head make_head(control::Request request, std::uint32_t source_context, std::uint32_t sequence, std::size_t bytes) {
  Head head{};
  head.record.tag = control::address_of(control::host_context, control::control_port);
  head.record.word = static_cast<std::uint32_t>(bytes);
  head.record.control = static_cast<std::uint32_t>(request);
  head.source_context = source_context;
  head.source_port = local_port;
  head.sequence = sequence;
  return head;
}

bool answers(const Head& head, control::Request request, std::uint32_t sequence) {
  return (head.record.control & ((control::reply_bit << 1) - 1)) == (static_cast<std::uint32_t>(request) | control::reply_bit) &&
         head.sequence == sequence;
}

// The outcome that a reply states, its body copied to `reply`. A newer service may say more than we know.
Status take_reply(const Head& head, std::span<const std::byte> body, std::span<std::byte> reply) {
  if (head.status != 0) return Errno{head.status};
  if (head.record.word > body.size() || head.record.word < reply.size()) return Errno{EPROTO};
  std::copy_n(body.begin(), reply.size(), reply.begin());
  return ok();
}

}  // namespace

Result<std::vector<vmci::UniqueFd>> exchange_packet(const vmci::PacketSocket& socket, std::uint32_t source_context,
                                                    std::uint32_t sequence, control::Request request,
                                                    std::span<const std::byte> body, std::span<const int> descriptors,
                                                    std::span<std::byte> reply, int timeout_ms) {
  std::array<std::byte, sizeof(Head) + control::body_bytes_max> packet;
  Head head = make_head(request, source_context, sequence, body.size());
  std::memcpy(packet.data(), &head, sizeof(head));
  std::copy(body.begin(), body.end(), packet.begin() + sizeof(head));
  bool closed = false;  // by the service; its last word, as of whom it does not admit, is still to be read
  if (auto sent = socket.send(std::span(packet).first(sizeof(head) + body.size()), descriptors); !sent) {
    const int error = value(sent.error());
    if (error == ENOTCONN) return Errno{EIO};
    if (error != EPIPE && error != ECONNRESET) return Errno{error};
    closed = true;
  }
  VRDMA_CRASH_POINT("guest.control.packet_sent");
  for (;;) {
    auto received = timeout_ms < 0 ? socket.receive(packet) : vmci::receive_answer(socket, packet, timeout_ms);
    if (!received && value(received.error()) == ECONNRESET && !std::exchange(closed, true)) continue;  // said once, before what is there
    if (!received) return Errno{value(received.error()) == ECONNRESET ? EIO : value(received.error())};
    if (received->bytes == 0) return Errno{EIO};
    if (received->bytes < sizeof(head)) return Errno{EPROTO};
    std::memcpy(&head, packet.data(), sizeof(head));
    if (!answers(head, request, sequence)) continue;  // an answer that nobody waited for
    VRDMA_CRASH_POINT("guest.control.packet_answered");
    const auto content = std::span(packet).subspan(sizeof(head), received->bytes - sizeof(head));
    const Status outcome = take_reply(head, content, reply);
    if (!outcome) {
      // A refused attach says in its body which version the service speaks.
      std::copy_n(content.begin(), std::min(content.size(), reply.size()), reply.begin());
      return outcome.error();
    }
    return std::move(received->descriptors);
  }
}

namespace {

// A socket that stays its owner's.
class Lent {
 public:
  explicit Lent(const OwnFd& fd) : socket_(vmci::UniqueFd(fd.get())) {}
  ~Lent() { (void)socket_.release().release(); }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  operator const vmci::PacketSocket&() const { return socket_; }

 private:
  vmci::PacketSocket socket_;
};

}  // namespace

Result<std::vector<vmci::UniqueFd>> ControlChannel::exchange_on_socket(control::Request request,
                                                                       std::span<const std::byte> body,
                                                                       std::span<const int> descriptors,
                                                                       std::span<std::byte> reply) {
  if (liveness_.gone()) return Errno{EIO};
  CancellationOff cancellation_off;
  std::lock_guard lock(mutex_);
  if (!has_descriptors()) return liveness_.mark_dead(), Errno{EIO};
  requests_sent_.fetch_add(1, std::memory_order_relaxed);
  auto received = exchange_packet(Lent(socket_fd_), guest_, sequence_++, request, body, descriptors, reply);
  if (!received && value(received.error()) == EIO) liveness_.mark_dead();
  return received;
}

Status ControlChannel::exchange(std::span<const Outgoing> requests, std::span<std::byte> reply, int timeout_ms) {
  if (liveness_.gone()) return Errno{EIO};
  CancellationOff cancellation_off;
  std::lock_guard lock(mutex_);
  // Before the doorbell, which will have been closed along with it.
  if (!socket_fd_.intact()) return liveness_.mark_dead(), Errno{EIO};
  for (const Outgoing& outgoing : requests) {
    if (Status sent = send(outgoing, sequence_++); !sent) return sent;
    if (&outgoing != &requests.back()) VRDMA_CRASH_POINT("guest.reg_mr.staged");
  }
  return wait_for_reply(requests.back().request, sequence_ - 1, reply, timeout_ms);
}

Status ControlChannel::send(const Outgoing& outgoing, std::uint32_t sequence) {
  const auto& [request, body] = outgoing;
  const auto slots = static_cast<std::uint32_t>((sizeof(Head) + body.size() + slot_bytes - 1) / slot_bytes);
  if (slots > record_slots_max || slots >= requests_.slot_count()) return Errno{EMSGSIZE};
  if (Status room = wait_for_room(slots); !room) return room;

  const Head head = make_head(request, guest_, sequence, body.size());
  requests_.write(head_bytes_in_ring, std::as_bytes(std::span(&head, 1)).subspan(head_bytes_in_ring));
  requests_.write(sizeof(Head), body);
  VRDMA_CRASH_POINT("guest.control.before_publish");
  requests_.publish(head.record.tag, head.record.word, head.record.control, slots);
  requests_sent_.fetch_add(1, std::memory_order_relaxed);
  VRDMA_CRASH_POINT("guest.control.published");
  // C1: pairs with the service's fence between its store of needs_doorbell and its last look at the ring.
  store_load_fence();
  if (std::atomic_ref(rings_.header().attacher.needs_doorbell).load(std::memory_order_relaxed) != 0)
    doorbell_.ring(control_member);
  return ok();
}

Status ControlChannel::wait_for_room(std::uint32_t slots) {
  for (vmci::Backoff backoff; !requests_.has_room(slots); backoff.idle()) {
    // C2: pairs with the service's release of its cursor: it has read the slots before it.
    const std::uint32_t consumed = std::atomic_ref(rings_.header().attacher.consumed).load(std::memory_order_acquire);
    if (requests_.position() - consumed <= requests_.slot_count()) requests_.set_freed(consumed);
    if (liveness_.gone()) return Errno{EIO};
  }
  return ok();
}

Status ControlChannel::wait_for_reply(control::Request request, std::uint32_t sequence, std::span<std::byte> reply, int timeout_ms) {
  for (vmci::Backoff backoff;;) {
    std::uint32_t slots = 0;
    switch (replies_.peek(record_, record_slots_max, slots)) {
      case vmci::RecordReader::Peek::malformed:
        liveness_.mark_dead();
        return Errno{EIO};
      case vmci::RecordReader::Peek::empty:
        if (liveness_.gone()) return Errno{EIO};
        if (!backoff.tired()) {
          backoff.idle();
        } else if (Status slept = sleep_until_news(timeout_ms); !slept) {
          return slept;
        }
        continue;
      case vmci::RecordReader::Peek::ready:
        break;
    }
    VRDMA_CRASH_POINT("guest.control.before_consume");
    replies_.advance(slots);
    publish_consumed();
    VRDMA_CRASH_POINT("guest.control.consumed");
    Head head;
    std::memcpy(&head, record_, sizeof(head));
    if (!answers(head, request, sequence)) continue;
    return take_reply(head, std::span(record_).subspan(sizeof(head), slots * slot_bytes - sizeof(head)), reply);
  }
}

void ControlChannel::publish_consumed() {
  // C3: pairs with the service's acquire before it writes over these slots.
  std::atomic_ref(rings_.header().creator.consumed).store(replies_.position(), std::memory_order_release);
}

Status ControlChannel::sleep_until_news(int timeout_ms) {
  auto waiting = std::atomic_ref(rings_.header().creator.waiting);
  waiting.store(1, std::memory_order_relaxed);
  // C4: pairs with the service's fence between a reply and its look at `waiting`.
  store_load_fence();
  if (replies_.empty()) {
    if (!has_descriptors()) {
      liveness_.mark_dead();
      return Errno{EIO};
    }
    // The socket's hang-up is the service's death; packets on it belong to nobody now and are left alone.
    pollfd sources[] = {{wake_.get(), POLLIN, 0}, {socket_fd_.get(), 0, 0}};
    if (::poll(sources, std::size(sources), timeout_ms) == 0) {
      waiting.store(0, std::memory_order_relaxed);
      return Errno{ETIMEDOUT};
    }
    if (sources[0].revents & POLLIN) {
      std::byte stale[64];
      [[maybe_unused]] const ssize_t drained = ::read(wake_.get(), stale, sizeof(stale));
    }
    if ((sources[1].revents | sources[0].revents) & (POLLHUP | POLLERR | POLLNVAL)) {
      // What it answered before it died still counts.
      if (replies_.empty()) {
        liveness_.mark_dead();
        return Errno{EIO};
      }
    }
  }
  waiting.store(0, std::memory_order_relaxed);
  return ok();
}

}  // namespace vrdma::guest
