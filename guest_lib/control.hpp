// Control requests from this process to the host service: datagrams in the control queue pair's rings, or packets on the
// socket where descriptors go along.
//
// Any thread; one request is under way at a time, the others wait for the lock. A thread that waits for its reply spins and
// yields, then sleeps; the service's death ends every wait with EIO. Calls are no cancellation points.
#pragma once

#include <cstring>
#include <mutex>
#include <span>
#include <type_traits>
#include <vector>

#include "guest_lib/doorbell.hpp"
#include "guest_lib/liveness.hpp"
#include "guest_lib/own_fd.hpp"
#include "vmci_channel/control_exchange.hpp"
#include "vmci_channel/packet_socket.hpp"
#include "vmci_channel/queue_pair.hpp"
#include "vmci_channel/record_ring.hpp"
#include "vrdma/control.hpp"

namespace vrdma::guest {

template <control::Request R>
using RequestBody = typename control::Message<R>::RequestBody;
template <control::Request R>
using ReplyBody = typename control::Message<R>::ReplyBody;

template <control::Request R>
struct SocketReply {
  ReplyBody<R> body;
  std::vector<vmci::UniqueFd> descriptors;  // none where this process may not open all that came along; what the answer says counts
};

template <class Body>
constexpr std::size_t body_bytes = std::is_empty_v<Body> ? 0 : sizeof(Body);

// One packet to the service and its answer, with its descriptors as in SocketReply; what attach and ControlChannel share. Errors are the service's, too,
// and those of the two halves (vmci_channel/control_exchange.hpp).
Result<std::vector<vmci::UniqueFd>> exchange_packet(const vmci::PacketSocket& socket, const vmci::PacketRequest& request,
                                                    std::span<std::byte> reply, vmci::Patience patience = vmci::patience_to_attach);

class ControlChannel {
 public:
  ControlChannel(vmci::PacketSocket socket, vmci::UniqueFd wake, vmci::QueuePairView rings, std::uint32_t guest,
                 Doorbell doorbell, Liveness& liveness)
      : socket_fd_(socket.release()),
        wake_(std::move(wake)),
        rings_(rings),
        requests_(rings.produce(), rings.geometry().produce_slots),
        replies_(rings.consume_records(), rings.geometry().consume_entries),
        guest_(guest),
        doorbell_(doorbell),
        liveness_(liveness) {}

  static constexpr int for_ever = -1;

  // ETIMEDOUT: no answer within timeout_ms of waiting; it is carried out nevertheless, perhaps later.
  template <control::Request R>
  Result<ReplyBody<R>> call(const RequestBody<R>& body, int timeout_ms = for_ever) {
    static_assert(!control::Message<R>::on_socket);
    ReplyBody<R> reply{};
    const Outgoing request[] = {{R, bytes_of(body)}};
    const Status status = exchange(request, std::as_writable_bytes(std::span(&reply, 1)).first(body_bytes<ReplyBody<R>>), timeout_ms);
    if (!status) return status.error();
    return reply;
  }

  // The same after a request whose answer says nothing that the other's does not: both travel at once, and the service wakes up once.
  template <control::Request R>
  Result<ReplyBody<R>> call_after(control::Request first, std::span<const std::byte> first_body, const RequestBody<R>& body) {
    static_assert(!control::Message<R>::on_socket);
    ReplyBody<R> reply{};
    const Outgoing requests[] = {{first, first_body}, {R, bytes_of(body)}};
    const Status status = exchange(requests, std::as_writable_bytes(std::span(&reply, 1)).first(body_bytes<ReplyBody<R>>));
    if (!status) return status.error();
    return reply;
  }

  template <control::Request R>
  Result<SocketReply<R>> call_on_socket(const RequestBody<R>& body, std::span<const int> descriptors = {}) {
    static_assert(control::Message<R>::on_socket);
    SocketReply<R> reply{};
    auto received = exchange_on_socket(R, bytes_of(body), descriptors,
                                       std::as_writable_bytes(std::span(&reply.body, 1)).first(body_bytes<ReplyBody<R>>));
    if (!received) return received.error();
    reply.descriptors = std::move(*received);
    return reply;
  }

  std::uint64_t requests_sent() const { return requests_sent_.load(std::memory_order_relaxed); }

  // In a fork's child: closes what was inherited. The mutex may be locked for ever; nobody takes it again.
  void abandon() {
    socket_fd_.reset();
    wake_.reset();
  }

 private:
  template <class Body>
  static std::span<const std::byte> bytes_of(const Body& body) {
    return std::as_bytes(std::span(&body, 1)).first(body_bytes<Body>);
  }

  struct Outgoing {
    control::Request request;
    std::span<const std::byte> body;
  };
  // Sends them in order and waits for the last one's reply.
  Status exchange(std::span<const Outgoing> requests, std::span<std::byte> reply, int timeout_ms = for_ever);
  Status send(const Outgoing& outgoing, std::uint32_t sequence);
  Result<std::vector<vmci::UniqueFd>> exchange_on_socket(control::Request request, std::span<const std::byte> body,
                                                         std::span<const int> descriptors, std::span<std::byte> reply);
  Status wait_for_room(std::uint32_t slots);
  Status wait_for_reply(control::Request request, std::uint32_t sequence, std::span<std::byte> reply, int timeout_ms);
  Status sleep_until_news(int timeout_ms);
  void publish_consumed();
  bool has_descriptors() const { return socket_fd_.intact() && wake_.intact(); }

  OwnFd socket_fd_;
  OwnFd wake_;
  vmci::QueuePairView rings_;
  vmci::RecordWriter requests_;
  vmci::RecordReader replies_;
  std::uint32_t guest_;
  Doorbell doorbell_;
  Liveness& liveness_;
  std::mutex mutex_;
  std::uint32_t sequence_ = 1;
  std::atomic<std::uint64_t> requests_sent_{0};
  alignas(8) std::byte record_[record_slots_max * slot_bytes];
};

}  // namespace vrdma::guest
