// A connection that its guests may run by themselves, and the shared memory of two guests in which its words lie: what the desk of direct
// mode (direct_desk.hpp) keeps. Used by the shard's thread only.
#pragma once

#include <poll.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "vmci_channel/claim.hpp"
#include "vmci_channel/segment.hpp"
#include "vmkernel_svc/objects.hpp"
#include "vrdma/direct.hpp"

namespace vrdma::svc {

// Two guests that may be direct, the lower id first (twice the same: a process that talks to itself).
struct DirectRoom {
  std::uint32_t number;
  vmci::Segment segment;
  std::shared_ptr<const vmci::UniqueFd> pidfds[2];
  std::uint32_t guests[2];
  pid_t pids[2];
  std::vector<std::uint32_t> free;
  std::uint32_t used = 0;  // links ever made at a time

  direct::Direction& direction(std::uint32_t index) const { return segment.at<direct::Room>(0)->directions[index]; }
};

// Of a UD queue pair there is only one end: the first direction is its send queue, the second its inbox.
struct DirectLink {
  std::shared_ptr<DirectRoom> room;
  std::uint32_t index;      // of the first of its two directions, / 2
  std::uint32_t epoch;
  bool datagrams = false;
  bool to_be_given = false;  // its inbox: DirectDesk::taken_inboxes_ has it
  QueuePair* ends[2];       // nullptr: gone
  std::uint32_t guests[2];  // theirs
  vmci::ServiceClaim claims[2];       // of the direction that ends[i] posts to
  direct::Positions seen[2] = {};     // when the service last had it
  bool owned[2] = {true, true};
  bool opened[2] = {false, false};    // its guest has mapped what it takes
  // The poster stands still inside the claim, which was revoked: the receiving end is the service's, the sending one still the poster's.
  bool cut[2] = {false, false};
  bool revoked[2] = {false, false};            // its claim, since the service last had the direction
  // Its receiver may sleep on a channel, and asks for nothing if the poster stands still: where the direction stood when it was last looked
  // at, if the poster was inside then.
  bool watched[2] = {false, false};
  std::optional<std::uint64_t> inside_at[2];
  std::uint64_t refused_since_ns[2] = {0, 0};  // that the poster is inside, 0: it is not
  std::uint64_t stopped_since_ns[2] = {0, 0};  // seen so after it was revoked, 0: not
  std::uint64_t asked_ns[2] = {0, 0};          // when it was last looked whether it is
  std::uint32_t takers[2] = {0, 0};  // of the direction that ends[i] posts to: its number at the other end's SRQ; 0: that has none
  std::uint32_t unopened_posts = 0;
  std::uint32_t turns = 0;    // of a UD queue pair, since the service has its send queue
  std::uint32_t returns = 0;  // times in a row that a poster could not do what it was asked to
  // Where the send queue of ends[i] was, and what its queue pair had moved, when the service last found it empty, got it, or could not hand
  // it out.
  std::uint32_t rested_at[2] = {0, 0};
  std::uint64_t rested_bytes[2] = {0, 0};
  std::uint64_t waits_since_ns[2] = {0, 0};  // ends[i] at a message boundary, for the other end to come to one; 0: it does not
  std::uint32_t waits_in_vain = 0;           // of these, since it was last handed out
  bool left_work[2] = {false, false};       // it was not empty when it was handed out, and nobody has looked since what became of it

  void note_rest(int i, const QueuePair& qp) {
    rested_at[i] = qp.core.send_ring.position();
    rested_bytes[i] = qp.core.counters.moved_bytes();
  }
  int side(const QueuePair& qp) const { return ends[0] == &qp ? 0 : 1; }
  bool whole() const { return owned[0] && owned[1]; }
  int place_of_poster(int i) const { return room->guests[0] == guests[i] ? 0 : 1; }
  bool is_inbox(int i) const { return datagrams && i == 1; }
};

inline bool has_ended(const vmci::UniqueFd& pidfd) {
  pollfd exited{pidfd.get(), POLLIN, 0};
  return ::poll(&exited, 1, 0) > 0;
}

// The poster's last record.
inline direct::Positions& recorded(const vmci::ServiceClaim& claim) {
  direct::Direction& direction = claim.direction();
  // R2: pairs with R1 in vmci::PosterClaim::publish_positions.
  return direction.positions[std::atomic_ref(direction.current).load(std::memory_order_acquire) & 1];
}

inline std::pair<std::uint32_t, std::uint32_t> key_of(const Guest& a, const Guest& b) { return std::minmax({a.id.value, b.id.value}); }

// No completion queue that its work queues could overrun: a poster does not count what others complete there.
inline bool roomy(const CompletionQueue& cq) { return !cq.overrun && cq.depth <= cq.cqe; }
inline bool roomy(const QueuePair& qp) { return roomy(*qp.send_cq) && roomy(*qp.receive_cq); }

// Whether its peer's poster can raise the events of its channel, and this one's those of its own and of its peer's.
inline bool heard_directly(const CompletionQueue& cq) { return cq.channel == nullptr || cq.channel->peers; }

}  // namespace vrdma::svc
