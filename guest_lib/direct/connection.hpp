// One direction of a connection that this process may run by itself: from a queue pair of its own to a peer's. The engine's state of
// the two ends, which counts only while the claim is held, and is thrown away where a message could not be carried out here.
//
// Under the queue pair's send lock, but for its construction.
#pragma once

#include <infiniband/verbs.h>

#include <memory>
#include <utility>

#include "guest_lib/direct/ports.hpp"
#include "guest_lib/single_thread.hpp"
#include "guest_lib/work_queue.hpp"
#include "vmci_channel/claim.hpp"
#include "vmci_channel/queue_pair.hpp"
#include "vrdma/control.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::guest {

struct DirectRoom;

// What memory a poster reaches through one room, beyond what the room itself has.
struct PeerReach {
  std::shared_ptr<DirectRoom> room;
  std::uint32_t failed_maps = 0, failed_optional_maps = 0;
};

class DirectConnection {
 public:
  struct Ends {
    vmci::PosterClaim claim;
    ReachedGuest own, peer;
    vmci::QueuePairView send, receive;  // this end's send queue, the peer's receive queue
    vmci::QueuePairView receive_records;  // of `receive`, or of the shared receive queue that it takes from
    std::uint32_t receive_record_slots = 1;
    SharedReceives shared;
    engine::QpType type = engine::QpType::rc;
    std::uint32_t qpn = 0, peer_qpn = 0;
    Told sent, received;
    bool own_channel = false;  // the send queue completes on a queue that has one
    PeerChannel peer_channel;
  };
  static constexpr int turns_lost_max = 16;  // for one message; who has less luck leaves it to the service
  explicit DirectConnection(const Ends& ends);
  DirectConnection(const DirectConnection&) = delete;
  DirectConnection& operator=(const DirectConnection&) = delete;

  // Takes the claim, which leave() gives back. False: the service has it, or there is none any more (alive).
  template <class Alive>
  bool enter(Alive&& alive) {
    if (!claim_.enter()) return false;
    VRDMA_CRASH_POINT("direct.guest.claimed");
    if (claim_.direction().handouts != handouts_seen_) take_over();
    if (!ports_.owes_turn() && alive()) return true;
    claim_.leave();
    return false;
  }
  // Carries out a request that `queue` has room for, past the ring: its WQE would be written only to be read here. It takes a slot all the
  // same. False: it has not been begun, and goes by the ring. flags: enum WrFlag.
  bool carry_out(SendQueue& queue, const ibv_send_wr& wr, std::uint8_t flags);
  // Whether nothing lies in the ring, by what this process knows itself.
  bool has_run(const SendQueue& queue) const { return near_.send_ring.position() == queue.position(); }
  // Carries out what lies in the ring. False: something is left there, for the service.
  bool run_queue();
  // False: the receiver's event is left to the service.
  bool leave() {
    // Whoever owes an event says so each time.
    const bool told = tell() && (peer_channel_.pipe < 0 || std::atomic_ref(claim_.direction().claimed_arm).load(std::memory_order_relaxed) == 0);
    VRDMA_CRASH_POINT("direct.guest.told");
    claim_.leave();
    VRDMA_CRASH_POINT("direct.guest.left");
    return told;
  }
  // Whether this end's own completion queue was armed for a completion that was told of since the last call. After leave().
  bool take_own_event_due() { return std::exchange(own_event_due_, false); }
  // What was not mapped when a message needed it; to be mapped while the claim is not held.
  bool has_unmapped() const { return ports_.has_unmapped(); }
  std::optional<DirectPorts::Unmapped> take_unmapped() { return ports_.take_unmapped(); }

 private:
  template <ibv_wr_opcode opcode>
  bool carry_out_as(SendQueue& queue, const ibv_send_wr& wr, std::uint8_t flags);
  void take_over();  // from the service, where it stands
  void record();     // a message is done
  void step_back();  // as if the last message had not been begun
  bool tell();       // those who have to be told of completions

  vmci::PosterClaim claim_;
  PeerChannel peer_channel_;
  bool own_channel_, own_event_due_ = false;
  DirectPorts::Qp near_, far_;
  DirectPorts ports_;
  engine::Engine<DirectPorts> engine_;
  std::uint32_t handouts_seen_ = 0;
  std::uint32_t receive_head_ = 0;  // of a shared receive queue, as Positions has it
};

[[gnu::always_inline]] inline void DirectConnection::record() {
  direct::Positions& at = claim_.next_positions();
  at.send_head = near_.send_ring.position();
  at.send_lane = near_.send_lane.position();
  at.receive_head = ports_.shares() ? receive_head_ = ports_.taken(receive_head_) : far_.receive_ring.position();
  at.receive_lane = far_.receive_lane.position();
  at.psn = near_.send_psn.value;
  at.sent_messages = near_.counters.sent_messages, at.sent_bytes = near_.counters.sent_bytes;
  at.read_messages = near_.counters.read_messages, at.read_bytes = near_.counters.read_bytes;
  at.atomics = near_.counters.atomics;
  // What has arrived is what was sent, so it is not counted a second time.
  at.received_messages = at.sent_messages + at.read_messages + at.atomics, at.received_bytes = at.sent_bytes;
  VRDMA_CRASH_POINT("direct.guest.before_record");
  claim_.publish_positions();
  VRDMA_CRASH_POINT("direct.guest.recorded");
}

[[gnu::always_inline]] inline bool DirectConnection::tell() {
  const bool sent = ports_.take_sent(), received = ports_.take_received(), solicited = ports_.take_solicited();
  if (!sent && !received) return true;
  // Pairs with H1 of guest_lib/lanes.cpp and A1 of poll.cpp: the poller's fences between naming a hot lane, or arming, and looking at the lanes once
  // more. Of the poster's own queue the poller is a thread of this process: where there is one only, this one.
  if (received || !single_threaded()) vmci::store_load_fence();
  if (const Told& own = ports_.sent_to(); sent && !own.is_hot()) vmci::ReadyBitmap(&own.cq->ready).set(own.lane);
  own_event_due_ |= sent && own_channel_;
  return !received || tell_peer(claim_, ports_.received_at(), peer_channel_, solicited);
}

}  // namespace vrdma::guest
