// The VMCI switch: carries datagrams from guest to guest and brokers queue pairs between them.
//
//   datagram     A's ring ── (B, port) ──► switch: port bound? allowed? room? ── source := A ──► B's ring, B's wake pipe
//                anything else: dropped, and counted at the one whose doing it is
//
//   queue pair   creator                        switch                               attacher (has bound a port with offers)
//                queue_pair_alloc(B, port) ───► memory (sealed memfd), doorbell pair
//                ◄─── memory, doorbell end                          offer(handle) ──►
//                                                                  ◄── queue_pair_attach(handle)
//                ◄─── attached(handle)                       memory, doorbell end ──►
//                        ═══ bytes flow in the shared memory; the switch never looks at them ═══
//                queue_pair_detach, or death ─► detached(handle), and both doorbell ends hang up ──► the other side
//                A creator that leaves before the attacher came leaves what it wrote: the offer stands. An offer that is not
//                wanted, or whose port is unbound, is detached.
//
// Offers and the like are notices: datagrams of the switch's own that are held back, never dropped, when a ring is full; there
// are never more of them than the guest's queue pairs and the backlogs of its ports allow.
//
// Used by the shard's thread only. Nothing here blocks, and nothing writes to a description that a guest holds: hanging up is
// shutdown(2) on a duplicate.
#pragma once

#include <functional>
#include <span>
#include <unordered_map>
#include <vector>

#include "vmci_channel/given_descriptors.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vmkernel_svc/vmci_end.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

struct Guest;
struct Tenant;
class Fabric;

class VmciSwitch {
 public:
  static constexpr std::size_t ports_max = 4096;       // of one guest
  static constexpr std::uint32_t offers_max = 4096;    // of one port

  explicit VmciSwitch(Fabric& fabric) : fabric_(fabric) {}

  // Whether `from` may send to and connect to `to`. Replaceable; by default every guest may, since `to` has bound a port.
  std::function<bool(const Guest& from, const Guest& to)> policy = [](const Guest&, const Guest&) { return true; };

  // A datagram that is not for the control port.
  void forward(Guest& from, const control::Head& head, std::span<const std::byte> body);

  // EADDRINUSE, EMFILE (too many ports), EINVAL.
  Result<control::PortReply> bind(Guest& guest, const control::BindPortRequest& request);
  // Queue pairs that were offered there and not attached are detached. EINVAL.
  Status unbind(Guest& guest, std::uint32_t port);

  // ECONNREFUSED: nobody takes queue pairs there; EAGAIN: as many as may wait there do; EACCES: the policy; EDQUOT; EINVAL.
  Result<control::QueuePairReply> alloc(Guest& guest, const control::QueuePairAllocRequest& request, std::vector<vmci::UniqueFd>& give);
  // ENOENT: gone, attached already, or never offered to this guest.
  Result<control::QueuePairReply> attach(Guest& guest, const control::QueuePairAttachRequest& request, std::vector<vmci::UniqueFd>& give);
  // Either side. EINVAL: it has no side in it (any more).
  Status detach(Guest& guest, control::QueuePairHandle handle);

  // A guest goes.
  void leave(Guest& guest);
  // Delivers held notices. True while some are still held.
  bool flush(Guest& guest);

  struct QueuePair {
    control::QueuePairHandle handle;
    vmci::QueuePairGeometry geometry;
    Guest* creator;             // nullptr: left before anybody attached
    Guest* attacher = nullptr;  // nullptr: offered only
    std::uint32_t peer_context, peer_port;            // to whom it was offered, and at which port
    std::uint32_t creator_port, attacher_port = 0;    // for notices; 0: none
    Tenant* tenant;                                   // who pays
    vmci::UniqueFd memory;                            // until it is attached
    vmci::GivenFd attacher_doorbell, hangup;          // both ends: either side may have passed anything to the other, which is not to be closed here
  };
  std::size_t queue_pair_count() const { return queue_pairs_.size(); }

 private:
  using Key = std::uint64_t;
  static Key key_of(control::QueuePairHandle handle) { return Key{handle.context} << 32 | handle.resource; }
  Guest* find_guest(std::uint32_t context) const;
  void notify(Guest& guest, std::uint32_t port, control::Notice kind, const QueuePair& pair);
  void side_gone(Key key, Guest& side);
  void refuse(Key key);
  void remove(Key key);

  Fabric& fabric_;
  std::unordered_map<Key, QueuePair> queue_pairs_;
};

}  // namespace vrdma::svc
