// A VMCI context: this process as a guest of the host service, with its id, its control requests and its datagrams. What tools
// and guest libraries stand on; sockets (stream_socket.hpp, datagram_socket.hpp) are built from it.
//
//   attach ─► socket (descriptors, the news of a death) + control queue pair (everything else), both ways:
//             requests and datagrams ─► service          replies, datagrams, notices ─► the mailbox of their port
//
// Any thread. Nobody reads in the background: whoever waits for something takes what arrives and sorts it into the mailboxes of
// all; of several sleepers one watches the descriptors for the rest. A forked child must not use its parent's context.
// Errors of every call: EIO once the service is gone or has broken the protocol.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "vmci_channel/packet_socket.hpp"
#include "vmci_channel/queue_pair.hpp"
#include "vmci_channel/ready_bitmap.hpp"
#include "vmci_channel/record_ring.hpp"
#include "vmci_channel/segment.hpp"
#include "vrdma/control.hpp"

namespace vmci {

struct Address {
  std::uint32_t context;
  std::uint32_t port;
  bool operator==(const Address&) const = default;
};

struct Datagram {
  Address from;             // the context is the service's word; the port is the sender's
  std::uint32_t user_bits;  // kind (16 bits) | control::reply_bit | control::datagram_bit
  std::uint32_t sequence;   // the sender's
  std::int32_t status;      // of a reply
  std::vector<std::byte> body;
  std::uint16_t kind() const { return static_cast<std::uint16_t>(user_bits & vrdma::control::kind_mask); }
};

class Context;

// A bound port. Lives as long as somebody holds it; unbound by Context::unbind().
class Mailbox {
 public:
  std::uint32_t port() const { return port_; }
  // POLLIN when there may be something to take, or the service is gone. Sending never needs to be waited for.
  int fd() const { return poll_fd_.get(); }

 private:
  friend class Context;
  std::uint32_t port_ = 0;
  std::size_t datagrams_max_ = 0;
  std::deque<Datagram> queue_;   // under the context's mutex
  std::uint64_t dropped_ = 0;
  UniqueFd news_;     // eventfd of this process: the queue is not empty
  UniqueFd poll_fd_;  // epoll: news, the wake pipe, the socket's hang-up
};

class Context {
 public:
  struct Options {
    std::string socket;  // where the service listens
    std::string name;
    std::uint32_t link_layer = vrdma::control::link_layer_default;
  };
  // Errors as connect(2); EPROTONOSUPPORT: another major version; EDQUOT; EPROTO.
  static vrdma::Result<std::shared_ptr<Context>> attach(const Options& options);
  ~Context();

  std::uint32_t id() const { return reply_.guest; }
  const vrdma::control::AttachReply& attach_reply() const { return reply_; }
  const Mapping& arena() const { return arena_; }
  const vrdma::control::ServicePage& service_page() const { return *reinterpret_cast<const vrdma::control::ServicePage*>(page_.data()); }
  bool gone();

  template <vrdma::control::Request R>
  using Body = typename vrdma::control::Message<R>::RequestBody;
  template <vrdma::control::Request R>
  using Reply = typename vrdma::control::Message<R>::ReplyBody;
  template <vrdma::control::Request R>
  struct SocketReply {
    Reply<R> body;
    std::vector<UniqueFd> descriptors;  // none where this process may not open all that came along
  };

  // One control request and its answer, in the control queue pair or on the socket, as the table says.
  template <vrdma::control::Request R>
  vrdma::Result<Reply<R>> call(const Body<R>& body) {
    static_assert(!vrdma::control::Message<R>::on_socket);
    Reply<R> reply{};
    const auto status = exchange(R, bytes_of(body), writable_bytes_of(reply));
    if (!status) return status.error();
    return reply;
  }
  template <vrdma::control::Request R>
  vrdma::Result<SocketReply<R>> call_on_socket(const Body<R>& body, std::span<const int> descriptors = {}) {
    static_assert(vrdma::control::Message<R>::on_socket);
    SocketReply<R> reply{};
    auto received = exchange_on_socket(R, bytes_of(body), descriptors, writable_bytes_of(reply.body));
    if (!received) return received.error();
    reply.descriptors = std::move(*received);
    return reply;
  }

  // port 0: any. offers_max: queue pairs that may wait there (a listener). Beyond datagrams_max unread ones the newest are dropped.
  vrdma::Result<std::shared_ptr<Mailbox>> bind(std::uint32_t port, std::uint32_t offers_max, std::size_t datagrams_max);
  void unbind(Mailbox& mailbox);

  // At most control::body_bytes_max bytes (EMSGSIZE). To another guest unreliable, as datagrams are.
  vrdma::Status send(Address to, std::uint32_t from_port, std::uint16_t kind, std::uint32_t sequence, std::span<const std::byte> body);
  // timeout_ms 0: EAGAIN at once; -1: wait for ever; else ETIMEDOUT.
  vrdma::Result<Datagram> receive(Mailbox& mailbox, int timeout_ms);
  std::uint64_t dropped(const Mailbox& mailbox);

  // Tells the shard that the member of this guest's doorbell bitmap has news (0: the control pair).
  void ring_doorbell(std::uint32_t member);

 private:
  struct Pending {
    vrdma::control::Request request;
    std::span<std::byte> reply;
    std::int32_t status;
    bool done;
  };
  Context() = default;

  template <class T>
  static std::span<const std::byte> bytes_of(const T& body) {
    return std::as_bytes(std::span(&body, std::is_empty_v<T> ? 0 : 1));
  }
  template <class T>
  static std::span<std::byte> writable_bytes_of(T& body) {
    return std::as_writable_bytes(std::span(&body, std::is_empty_v<T> ? 0 : 1));
  }
  vrdma::Status exchange(vrdma::control::Request request, std::span<const std::byte> body, std::span<std::byte> reply);
  vrdma::Result<std::vector<UniqueFd>> exchange_on_socket(vrdma::control::Request request, std::span<const std::byte> body,
                                                          std::span<const int> descriptors, std::span<std::byte> reply);

  // All with mutex_ held.
  using Lock = std::unique_lock<std::mutex>;
  vrdma::Status put(Lock& lock, const vrdma::control::Head& head, std::uint32_t user_bits, std::span<const std::byte> body);
  void pump();
  void sort(const vrdma::control::Head& head, std::span<const std::byte> body);
  void drain_wake_pipe();
  void set_waiting();
  void sleep(Lock& lock, int timeout_ms);
  template <class Done>
  vrdma::Status wait(Lock& lock, int timeout_ms, Done&& done);

  PacketSocket socket_;
  UniqueFd doorbell_fd_, wake_;
  Mapping arena_, page_;
  vrdma::control::AttachReply reply_{};
  QueuePairView rings_;
  ReadyBitmap doorbell_;

  std::mutex mutex_;
  std::condition_variable sorted_;
  RecordWriter requests_;
  RecordReader replies_;
  std::unordered_map<std::uint32_t, Pending*> pending_;           // by sequence
  std::unordered_map<std::uint32_t, std::shared_ptr<Mailbox>> mailboxes_;  // by port
  std::uint32_t binding_ = 0;      // binds under way
  std::uint32_t sequence_ = 1;
  bool watched_ = false;           // somebody sleeps in poll for all
  bool dead_ = false;
  alignas(64) std::byte record_[vrdma::record_slots_max * vrdma::slot_bytes];

  std::mutex socket_mutex_;        // one exchange on the socket at a time
  std::uint32_t socket_sequence_ = 1;
};

}  // namespace vmci
