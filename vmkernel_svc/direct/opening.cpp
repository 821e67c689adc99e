// What guests that were offered something in direct mode ask for, and get: descriptors of their peers' queues, keys, files and processes.
#include <fcntl.h>

#include "vmkernel_svc/control/find.hpp"
#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/direct/key_book.hpp"
#include "vmkernel_svc/direct/link.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

namespace {
vmci::UniqueFd copy_of(int fd) { return vmci::UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }
}  // namespace

Result<DirectLink*> DirectDesk::offered_link(Guest& guest, const control::OpenDirectRequest& request) {
  const QueuePair* const qp = find(guest.qps, request.qp);
  if (qp == nullptr) return Errno{EINVAL};
  DirectLink* const link = qp->core.port.link;
  if (link == nullptr || link->epoch != request.offer) return Errno{ESTALE};
  return link;
}

Result<control::OpenSharedReceivesReply> DirectDesk::open_shared_receives(Guest& guest, const control::OpenDirectRequest& request) {
  const auto offered = offered_link(guest, request);
  if (!offered) return offered.error();
  const DirectLink& link = **offered;
  const QueuePair* const peer = link.ends[1 - link.side(*find(guest.qps, request.qp))];
  if (peer == nullptr || peer->srq == nullptr) return Errno{ESTALE};
  return describe(*peer->srq);
}

control::OpenSharedReceivesReply DirectDesk::describe(const SharedReceiveQueue& srq) {
  return {{srq.offset, srq.view.geometry(), control::no_lane, srq.core.record_slots}, srq.turns_offset};
}

Result<control::OpenDirectReply> DirectDesk::open(Guest& guest, const control::OpenDirectRequest& request, std::vector<vmci::UniqueFd>& give) {
  const auto offered = offered_link(guest, request);
  if (!offered) return offered.error();
  DirectLink* const link = *offered;
  const QueuePair& qp = *find(guest.qps, request.qp);
  const int i = link->side(qp);
  const QueuePair* const peer = link->datagrams ? &qp : link->ends[1 - i];
  if (peer == nullptr) return Errno{ESTALE};
  auto reply = describe(qp, *peer, *link, i, give);
  link->opened[i] = reply.has_value();
  return reply;
}

// What `from` needs to run that direction, which ends at `peer`.
Result<control::OpenDirectReply> DirectDesk::describe(const QueuePair& from, const QueuePair& peer, const DirectLink& link, int i,
                                                      std::vector<vmci::UniqueFd>& give) {
  const Guest &guest = *from.guest, &far_guest = *peer.guest;
  for (const int fd : {link.room->segment.fd(), far_guest.arena.segment().fd(), guest.key_book->fd(), far_guest.key_book->fd()}) {
    give.push_back(copy_of(fd));
    if (!give.back()) return give.clear(), Errno{EMFILE};
  }
  control::OpenDirectReply reply{};
  reply.room = link.room->number;
  reply.peer = far_guest.id.value;
  reply.direction = link.index * 2 + static_cast<std::uint32_t>(i);
  reply.epoch = link.epoch;
  reply.pd = from.pd->number;
  reply.peer_pd = peer.pd->number;
  reply.peer_arena_bytes = far_guest.arena.segment().bytes();
  reply.peer_cq = peer.receive_cq->offset;
  reply.peer_receive = {peer.receive_offset, peer.receive_view.geometry(), peer.receive_lane, peer.core.receive_record_slots};
  reply.peer_qpn = peer.core.qpn.value;
  reply.peer_cq_handle = peer.receive_cq->handle.value;
  reply.taker = link.takers[i];
  reply.has_unmapped = guest.reached_by_service || far_guest.reached_by_service;
  if (const Channel* const channel = peer.receive_cq->channel) {
    give.push_back(copy_of(channel->peers.get()));
    if (!give.back()) return give.clear(), Errno{EMFILE};
    reply.peer_channel = channel->handle.value;
  }
  return reply;
}

Result<control::OpenPathReply> DirectDesk::open(Guest& guest, const control::OpenPathRequest& request, std::vector<vmci::UniqueFd>& give) {
  const auto offered = offered_link(guest, {request.qp, request.offer});
  if (!offered) return offered.error();
  if (!(*offered)->datagrams) return Errno{EINVAL};
  const QueuePair& qp = *find(guest.qps, request.qp);
  const auto* const to = shard_.ports().reachable(qp.core, request.address);
  const DirectLink* const link = to != nullptr ? to->port.link : nullptr;
  if (link == nullptr || !link->datagrams) return Errno{EHOSTUNREACH};
  const QueuePair& peer = *to->port.owner;
  std::string why;
  if (!trusts(guest, *peer.guest, why)) return Errno{EHOSTUNREACH};
  auto end = describe(qp, peer, *link, 1, give);
  if (!end) return end.error();
  control::OpenPathReply reply{};
  reply.end = *end;
  if (peer.srq != nullptr) reply.shared = describe(*peer.srq);
  reply.has_grh = MediatedPorts::has_grh(*to, request.address);
  reply.source = MediatedPorts::source(qp.core, request.address);
  reply.slid = guest.lid;
  ++counters_.paths;
  reply.poster = direct::poster_number(guest.id.value);
  note_poster(reply.poster, guest);
  return reply;
}

Result<control::OpenBackingReply> DirectDesk::open(Guest& guest, const control::OpenBackingRequest& request, std::vector<vmci::UniqueFd>& give) {
  const Guest* const owner = fabric_.guest(GuestId{request.guest});
  if (owner == nullptr || !together_.contains(key_of(guest, *owner))) {
    const bool own = request.guest == guest.id.value && guest.key_book;
    if (!own) return Errno{EPERM};
  }
  const auto backing = owner->backings.find(request.backing);
  if (backing == owner->backings.end() || backing->second.lendable_fd() < 0) return Errno{EINVAL};
  // One that no key names would be mapped after its peers have heard of that.
  if (!backing->second.in_use() && request.backing != owner->window_backing) return Errno{EINVAL};
  give.push_back(copy_of(backing->second.lendable_fd()));
  if (!give.back()) return give.clear(), Errno{EMFILE};
  constexpr std::size_t lent_max = 1 << 12;
  Lent& lent = lent_[owner->id.value];
  if (!lent.all) lent.backings.insert(request.backing);
  if (lent.backings.size() > lent_max) lent = {{}, true};
  return control::OpenBackingReply{backing->second.bytes()};
}

Result<control::OpenProcessReply> DirectDesk::open(Guest& guest, const control::OpenProcessRequest& request) {
  const Guest* const peer = fabric_.guest(GuestId{request.guest});
  if (peer == nullptr) return Errno{EPERM};
  const auto key = key_of(guest, *peer);
  const auto pids = together_.find(key);
  if (pids == together_.end()) return Errno{EPERM};
  const pid_t pid = pids->second[key.first == peer->id.value ? 0 : 1];
  if (!peer->reached_by_service || pid <= 0) return Errno{ENOENT};
  return control::OpenProcessReply{static_cast<std::uint32_t>(pid), 0, peer->probe.probe_address, peer->probe.probe_value};
}

}  // namespace vrdma::svc
