#include "guest_lib/control.hpp"

#include <poll.h>

#include "guest_lib/cancellation.hpp"
#include "vmci_channel/backoff.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

using control::Head;
using vmci::store_load_fence;

namespace {

constexpr std::uint32_t control_member = 0;  // of the doorbell bitmap
constexpr std::uint32_t head_bytes_in_ring = sizeof(RecordHead);

}  // namespace

Result<std::vector<vmci::UniqueFd>> exchange_packet(const vmci::PacketSocket& socket, const vmci::PacketRequest& request,
                                                    std::span<std::byte> reply, vmci::Patience patience) {
  if (const Status sent = vmci::send_request(socket, request); !sent) return sent.error();
  VRDMA_CRASH_POINT("guest.control.packet_sent");
  auto answer = vmci::receive_reply(socket, request, reply, patience);
  if (!answer) return answer.error();
  VRDMA_CRASH_POINT("guest.control.packet_answered");
  if (answer->status != 0) return Errno{answer->status};
  return std::move(answer->descriptors);
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
  auto received = exchange_packet(Lent(socket_fd_), {request, sequence_++, body, descriptors, guest_}, reply, vmci::patience_for_ever);
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

  const Head head = vmci::request_head(request, guest_, sequence, body.size());
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
    if (!vmci::is_reply(head, request, sequence)) continue;
    return vmci::take_reply(head, std::span(record_).subspan(sizeof(head), slots * slot_bytes - sizeof(head)), reply);
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
