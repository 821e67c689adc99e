// The engine's private state of a queue pair and of an SRQ. Nothing here lies in shared memory; the readers and writers only
// point there. One thread runs a queue pair at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "vmci_channel/lane.hpp"
#include "vmci_channel/record_ring.hpp"
#include "vmci_channel/record_turns.hpp"
#include "vmkernel_svc/engine/far_half.hpp"
#include "vmkernel_svc/engine/records.hpp"
#include "vmkernel_svc/engine/scatter_gather.hpp"
#include "vmkernel_svc/engine/types.hpp"
#include "vrdma/attributes.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::engine {

constexpr std::uint32_t receive_wqe_slots_max = receive_wqe_slots(receive_sge_max);
constexpr std::uint32_t grh_bytes = 40;

// A receive WQE that was taken from its queue for a message that is not complete yet.
struct Inbound {
  bool active = false;
  std::uint64_t wr_id = 0;
  std::uint64_t capacity_bytes = 0;  // of all its buffers; `buffers` ends before the first one with a bad key
  ScatterGather buffers;
};

// The send WQE that is being carried out.
struct Operation {
  // UD: gathering, then delivering to one receiver after the other. refused: it failed, and waits for those before it (FarHalf).
  enum class Stage : std::uint8_t { none, routing, moving, returning_value, gathering, delivering, refused } stage = Stage::none;
  bool copy_pending = false;    // the ports have the copy below; it must be repeated until they say how it ended
  bool grh = false;             // UD: the datagram under way carries one
  std::uint64_t wr_id;
  std::uint32_t next_position;  // in the send queue, after this WQE
  std::uint8_t flags;
  const OpcodeRule* rule;
  Request request;
  RemoteOperand remote;
  UdOperand ud;
  ScatterGather local;
  ScatterGather far;            // RDMA: the remote operand
  std::uint64_t moved_bytes;
  std::uint32_t retries = 0;    // ACK timeouts of this message
  std::uint32_t rnr_retries = 0;
  enum class Wait : std::uint8_t { none, ack, rnr, copy, penalty, busy } wait = Wait::none;
  std::uint64_t wait_since_ns = 0;
  std::uint64_t slice_ns = 0;     // of the patience with a copy that is under way
  std::uint32_t slices_left = 0;
  std::uint64_t deadline_ns = 0;  // of the wait that is under way; 0: none
  struct {
    Place to, from;
    std::uint64_t bytes;
  } pending;
  std::uint32_t receivers_from = 0;  // UD: queue pairs of this number and above have yet to get it
  std::uint64_t value;          // result of an atomic, on its way back
  alignas(64) std::byte wqe[send_wqe_slots_max * slot_bytes];  // the private copy; inline payload lies here
};

// How long messages that nobody answers (UC, UD) wait for a receive WQE before they are dropped. The specification gives no time (IBA
// 9.8.2.2, 9.8.3): hardware need not wait, because its receivers have a processor each; here they may be waiting for theirs. A dry spell
// uses patience up, messages received give it back: senders to who never posts are not held up, but once. Who sends datagrams has other
// receivers, too, which wait behind that one.
class Patience {
 public:
  static constexpr std::uint64_t connection_ns = 200'000'000, datagram_ns = 50'000'000;

  // A message found no receive WQE at a queue pair that has received so many: until when it may wait.
  std::uint64_t until(std::uint64_t now_ns, std::uint64_t received, QpType type) {
    if (!dry_ || received != received_) {
      constexpr std::uint64_t messages_for_the_whole = 16;
      const std::uint64_t whole_ns = type == QpType::ud ? datagram_ns : connection_ns;
      left_ns_ = std::min(whole_ns, left_ns_ + std::min(received - received_, messages_for_the_whole) * (whole_ns / messages_for_the_whole));
      dry_ = true;
      since_ns_ = now_ns;
      received_ = received;
    }
    return since_ns_ + left_ns_;
  }
  bool dry() const { return dry_; }
  void over(std::uint64_t now_ns) {
    left_ns_ -= std::min(left_ns_, now_ns - since_ns_);
    dry_ = false;
  }

 private:
  bool dry_ = false;
  std::uint64_t since_ns_ = 0, left_ns_ = connection_ns;
  std::uint64_t received_ = 0;  // messages, when the spell began
};

struct QpCounters {
  std::uint64_t sent_messages, sent_bytes, received_messages, received_bytes;
  std::uint64_t read_messages, read_bytes, atomics;
  std::uint64_t rnr_naks, rnr_retry_exceeded, ack_timeouts, retry_exceeded;
  std::uint64_t flushed, local_errors, remote_errors, dropped, malformed;

  std::uint64_t moved_bytes() const { return sent_bytes + read_bytes; }  // by its send queue
  // For sums and for showing: calls see(name, member) for each.
  template <class Counters, class See>
  static void for_each(Counters& c, See&& see) {
    see("sent_messages", c.sent_messages), see("sent_bytes", c.sent_bytes);
    see("received_messages", c.received_messages), see("received_bytes", c.received_bytes);
    see("read_messages", c.read_messages), see("read_bytes", c.read_bytes), see("atomics", c.atomics);
    see("rnr_naks", c.rnr_naks), see("rnr_retry_exceeded", c.rnr_retry_exceeded);
    see("ack_timeouts", c.ack_timeouts), see("retry_exceeded", c.retry_exceeded), see("flushed", c.flushed);
    see("local_errors", c.local_errors), see("remote_errors", c.remote_errors);
    see("dropped", c.dropped), see("malformed", c.malformed);
  }
  QpCounters& operator+=(const QpCounters& other) {
    const auto* from = reinterpret_cast<const std::uint64_t*>(&other);
    auto* to = reinterpret_cast<std::uint64_t*>(this);
    for (std::size_t i = 0; i < sizeof(QpCounters) / sizeof(std::uint64_t); ++i) to[i] += from[i];
    return *this;
  }
};

template <class P>
struct Srq {
  vmci::RecordReader ring;
  vmci::RecordTurns turns;  // where others take, too: says where the ring stands
  std::uint32_t record_slots = 1;
  std::uint32_t max_wr = 0;
  std::uint32_t taken = 0;  // WQEs, free-running
  std::uint32_t limit = 0;  // 0: not armed
  std::vector<Inbound> returned;  // taken by queue pairs that were reset or destroyed before they completed them: next in line
  typename P::SrqPort port{};

  std::uint32_t taken_now() const {
    return turns ? vmci::RecordTurns::next(turns.last()) - static_cast<std::uint32_t>(returned.size()) : taken;
  }
};

// Of a UD queue pair: its port's MTU, by ready to receive.
inline std::uint64_t datagram_bytes_max(const QpAttributes& attributes) {
  return attributes.path_mtu != 0 ? mtu_bytes(attributes.path_mtu) : limits::mtu_max_bytes;
}

template <class P>
struct Qp {
  Qpn qpn{};
  QpType type = QpType::rc;
  QpState state = QpState::reset;
  bool communication_established = false;
  bool drain_reported = false;
  bool last_wqe_reported = false;
  bool was_connected = false;    // it has been ready to receive, in this life or a former one
  bool send_queue_lost = false;  // a record at its head makes no sense: nothing more is taken until RESET
  QpAttributes attributes{};
  Psn send_psn{};     // of the next request
  Psn expected_psn{};  // of the next request from the peer

  vmci::RecordReader send_ring;
  vmci::RecordReader receive_ring;
  std::uint32_t receive_record_slots = 1;
  Srq<P>* srq = nullptr;
  vmci::LaneWriter send_lane, receive_lane;

  typename P::QpPort port{};
  QpCounters counters{};
  Operation operation;
  Inbound inbound;
  Patience patience;
  std::vector<Inbound> returned;  // receive WQEs that are only its, taken and not completed, which an HCA had; the next in line is the last
  // While a message is being moved its two ends know each other, so that whichever leaves first can say so. The requester of
  // the pair is the one whose `operation` it is.
  Qp* accepted_by = nullptr;  // whose responder half our operation is in the middle of
  Qp* serves = nullptr;       // whose message our responder half is in the middle of
  std::uint64_t flush_held_until_ns = 0;
  std::unique_ptr<FarHalf> far;           // the peer is on another host: the requester's half of the connection
  std::uint64_t blocked_until_ns = 0;     // UD: its memory did not come; until when no datagram is tried. 0: it comes
  std::unique_ptr<std::byte[]> datagram;  // UD: the message between sender and receiver, grh_bytes + MTU
};

// All copies of a queue pair pass here, so that one that is pending is repeated exactly.
template <class P>
MemoryStatus copy(P& ports, Qp<P>& qp, const Place& to, const Place& from, std::uint64_t bytes) {
  Operation& op = qp.operation;
  const MemoryStatus status = ports.copy(qp, to, from, bytes);
  op.copy_pending = status == MemoryStatus::pending;
  if (op.copy_pending) op.pending = {to, from, bytes};
  return status;
}

template <class P>
void engage(Qp<P>& requester, Qp<P>& responder) {
  requester.accepted_by = &responder;
  responder.serves = &requester;
}
template <class P>
void leave_responder(Qp<P>& requester) {
  if (Qp<P>* responder = std::exchange(requester.accepted_by, nullptr)) responder->serves = nullptr;
}
template <class P>
void dismiss_requester(Qp<P>& responder) {
  if (Qp<P>* requester = std::exchange(responder.serves, nullptr)) requester->accepted_by = nullptr;
}
template <class P>
bool receives(const Qp<P>& qp) {
  return qp.state == QpState::rtr || qp.state == QpState::rts || qp.state == QpState::sqd || qp.state == QpState::sqe;
}

}  // namespace vrdma::engine
