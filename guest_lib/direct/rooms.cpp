#include "guest_lib/direct/rooms.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>

#include "guest_lib/objects.hpp"
#include "guest_lib/segment_mapping.hpp"
#include "vmci_channel/attached_parts.hpp"
#include "vmci_channel/memcheck.hpp"

namespace vrdma::guest {

void DirectRoom::abandon() {
  for (vmci::Mapping* mapping : {&words, &arena, &own_keys, &peer_keys}) mapping->abandon();
  memory.abandon();
  process.close();
  for (auto& [number, weak] : channels)
    if (const auto pipe = weak.lock()) pipe->reset();
}

Result<std::shared_ptr<DirectRoom>> DirectRooms::room_of(const control::OpenDirectReply& reply, std::span<vmci::UniqueFd> descriptors) {
  std::lock_guard lock(mutex_);
  if (auto known = rooms_[reply.room].lock()) return known;
  auto words = map_segment(descriptors[0], sizeof(direct::Room), vmci::Writable::yes);
  if (!words) return words.error();
  auto arena = map_segment(descriptors[1], reply.peer_arena_bytes, vmci::Writable::yes);
  if (!arena) return arena.error();
  auto own_keys = map_segment(descriptors[2], offsetof(direct::KeyTable, let_go), vmci::Writable::no);
  if (!own_keys) return own_keys.error();
  auto peer_keys = map_segment(descriptors[3], offsetof(direct::KeyTable, let_go), vmci::Writable::no);
  if (!peer_keys) return peer_keys.error();
  vmci::memcheck::hide(arena->data(), arena->bytes());
  auto room = std::make_shared<DirectRoom>();
  room->peer = reply.peer;
  room->words = std::move(*words);
  room->arena = std::move(*arena);
  room->own_keys = std::move(*own_keys);
  room->peer_keys = std::move(*peer_keys);
  std::erase_if(rooms_, [](const auto& entry) { return entry.second.expired(); });
  rooms_[reply.room] = room;
  return room;
}

std::shared_ptr<OwnFd> DirectRooms::channel_of(DirectRoom& room, std::uint32_t channel, vmci::UniqueFd&& pipe) {
  std::lock_guard lock(mutex_);
  if (auto known = room.channels[channel].lock()) return known;
  auto kept = std::make_shared<OwnFd>(std::move(pipe));
  std::erase_if(room.channels, [](const auto& entry) { return entry.second.expired(); });
  room.channels[channel] = kept;
  return kept;
}

namespace {

// What peers share of their shared receive queue; a direction of `taker` takes from it.
Status add_shared_receives(const control::OpenSharedReceivesReply& reply, std::uint32_t taker, const vmci::Mapping& arena, DirectConnection::Ends& ends) {
  const vmci::QueuePairGeometry& geometry = reply.queue.geometry;
  if (taker >= direct::takers_max || reply.queue.record_slots == 0 || reply.queue.record_slots > record_slots_max ||
      !std::has_single_bit(geometry.produce_slots) || !vmci::lies_inside(arena.bytes(), reply.queue.offset, geometry.total_bytes()) ||
      !vmci::lies_inside(arena.bytes(), reply.turns, sizeof(direct::Turns)))
    return Errno{EPROTO};
  vmci::memcheck::show(arena.data() + reply.queue.offset, geometry.total_bytes());
  vmci::memcheck::show(arena.data() + reply.turns, sizeof(direct::Turns));
  ends.receive_records = vmci::QueuePairView(arena.data() + reply.queue.offset, geometry);
  ends.receive_record_slots = reply.queue.record_slots;
  ends.shared = {vmci::RecordTurns(reinterpret_cast<direct::Turns*>(arena.data() + reply.turns)), taker, &ends.claim.direction().taking,
                 &ends.receive_records.header().creator.produced_count};
  return ok();
}

}  // namespace

// But for a shared receive queue.
Result<DirectRooms::Opened> DirectRooms::opened(Qp& qp, const control::OpenDirectReply& reply, std::span<vmci::UniqueFd> descriptors, std::uint32_t poster) {
  VRDMA_CRASH_POINT("direct.guest.opened");
  const vmci::QueuePairGeometry& geometry = reply.peer_receive.geometry;
  if (descriptors.size() != (reply.peer_channel != 0 ? 5 : 4) || reply.direction >= direct::room_links * 2 || reply.peer_receive.record_slots == 0 ||
      reply.peer_receive.record_slots > record_slots_max || geometry.consume_kind != vmci::QueueKind::completions ||
      !std::has_single_bit(geometry.produce_slots) || !std::has_single_bit(geometry.consume_entries))
    return Errno{EPROTO};
  auto room = room_of(reply, descriptors);
  if (!room) return room.error();
  const vmci::Mapping& arena = (*room)->arena;
  if (!vmci::lies_inside(arena.bytes(), reply.peer_receive.offset, geometry.total_bytes()) || !vmci::lies_inside(arena.bytes(), reply.peer_cq, sizeof(control::CqShared))) return Errno{EPROTO};
  vmci::memcheck::show(arena.data() + reply.peer_receive.offset, geometry.total_bytes());
  vmci::memcheck::show(arena.data() + reply.peer_cq, sizeof(control::CqShared));

  Opened all{std::move(*room), nullptr, {}};
  DirectConnection::Ends& ends = all.ends;
  auto* const words = reinterpret_cast<direct::Room*>(all.room->words.data());
  ends.claim = vmci::PosterClaim(&words->directions[reply.direction], reply.epoch, poster);
  const auto* const peer_keys = reinterpret_cast<const direct::KeyTable*>(all.room->peer_keys.data());
  PeerMemory& peer_memory = memory_of(*qp.attachment, *all.room);
  const bool catches_up = &peer_memory != &own_memory_ && all.room->peer_keys.bytes() >= sizeof(direct::KeyTable);
  ends.own = {reinterpret_cast<const direct::KeyTable*>(all.room->own_keys.data()), &own_memory_, &own_process_, direct::pd_number(reply.pd)};
  ends.peer = {peer_keys, &peer_memory, &all.room->process, direct::pd_number(reply.peer_pd), catches_up ? &peer_keys->let_go : nullptr};
  ends.send = qp.send.view();
  ends.receive = vmci::QueuePairView(arena.data() + reply.peer_receive.offset, geometry);
  ends.receive_record_slots = reply.peer_receive.record_slots;
  ends.type = qp.base().qp_type == IBV_QPT_UC ? engine::QpType::uc : engine::QpType::rc;
  ends.qpn = qp.base().qp_num;
  ends.peer_qpn = reply.peer_qpn;
  ends.sent = {Cq::of(qp.base().send_cq).shared, qp.send_lane.number};
  ends.received = {reinterpret_cast<control::CqShared*>(arena.data() + reply.peer_cq), reply.peer_receive.lane};
  ends.receive_records = ends.receive;
  ends.own_channel = qp.base().send_cq->channel != nullptr;
  if (reply.peer_channel != 0) {
    all.channel = channel_of(*all.room, reply.peer_channel, std::move(descriptors[4]));
    ends.peer_channel = {all.channel->get(), reply.peer_cq_handle};
  }
  return all;
}

Result<std::unique_ptr<DirectEnd>> DirectRooms::open(Attachment& attachment, Qp& qp, std::uint32_t offer) {
  if (attachment.service_minor() < control::minor_of_direct) return Errno{EPROTO};
  auto answer = attachment.call_on_socket<control::Request::open_direct>({qp.base().handle, offer});
  if (!answer) return answer.error();
  auto all = opened(qp, answer->body, answer->descriptors, 0);
  if (!all) return all.error();
  if (answer->body.taker != 0) {
    auto shared = attachment.call_on_socket<control::Request::open_shared_receives>({qp.base().handle, offer});
    if (!shared) return shared.error();
    if (const Status added = add_shared_receives(shared->body, answer->body.taker, all->room->arena, all->ends); !added) return added.error();
  }
  if (answer->body.has_unmapped != 0) reach(attachment, *all->room);
  return std::make_unique<DirectEnd>(std::move(all->room), std::move(all->channel), all->ends);
}

Result<std::unique_ptr<DatagramSender>> DirectRooms::open_datagrams(Attachment& attachment, Qp& qp, std::uint32_t offer) {
  auto answer = attachment.call_on_socket<control::Request::open_direct>({qp.base().handle, offer});
  if (!answer) return answer.error();
  auto all = opened(qp, answer->body, answer->descriptors, 0);
  if (!all) return all.error();
  return std::make_unique<DatagramSender>(std::move(all->room), all->ends);
}

void DirectRooms::open_path(Attachment& attachment, Qp& qp, DatagramSender& sender, const UdOperand& address) {
  auto answer = attachment.call_on_socket<control::Request::open_path>({qp.base().handle, qp.direct_offer, address});
  if (!answer) return sender.add(address, nullptr);
  const control::OpenPathReply& reply = answer->body;
  auto all = opened(qp, reply.end, answer->descriptors, reply.poster);
  if (!all || (reply.end.taker != 0 && !add_shared_receives(reply.shared, reply.end.taker, all->room->arena, all->ends)))
    return sender.add(address, nullptr);
  if (reply.end.has_unmapped != 0) reach(attachment, *all->room);
  const DatagramSource source{reply.has_grh != 0, reply.source, reply.slid};
  sender.add(address, std::make_unique<DatagramPath>(std::move(all->room), std::move(all->channel), all->ends, source));
}

bool DirectRooms::map(Attachment& attachment, PeerReach& peer, const DirectPorts::Unmapped& unmapped) {
  constexpr std::uint32_t failures_max = 4;  // then that memory stays the service's
  if (unmapped.backing == control::backing_process) return reach(attachment, *peer.room);
  std::uint32_t& failed = unmapped.needed ? peer.failed_maps : peer.failed_optional_maps;
  if (failed >= failures_max) return false;
  PeerMemory& memory = unmapped.peers ? memory_of(attachment, *peer.room) : own_memory_;
  const std::uint32_t changes = memory.changes();
  auto answer = attachment.call_on_socket<control::Request::open_backing>({unmapped.peers ? peer.room->peer : attachment.guest(), unmapped.backing});
  const Status added = answer && answer->descriptors.size() == 1 ? memory.add(unmapped.backing, answer->descriptors[0].get(), unmapped.offset, changes)
                                                                 : Status(Errno{EINVAL});
  VRDMA_CRASH_POINT("direct.guest.mapped");
  if (added && memory.has(unmapped.backing, unmapped.offset, unmapped.bytes)) return true;
  failed += added || added.error() != Errno{EAGAIN};
  return false;
}

PeerMemory& DirectRooms::memory_of(const Attachment& attachment, DirectRoom& room) { return room.peer == attachment.guest() ? own_memory_ : room.memory; }

// Both, because a message that needs one often needs the other, and each failure costs a way through the service.
bool DirectRooms::reach(Attachment& attachment, DirectRoom& room) {
  std::lock_guard lock(mutex_);
  if (own_process_.state() == ReachedProcess::State::unknown) {
    std::uint64_t probe = reinterpret_cast<std::uintptr_t>(&probe);
    own_process_.open(::getpid(), reinterpret_cast<std::uintptr_t>(&probe), probe);
  }
  if (room.process.state() == ReachedProcess::State::unknown) {
    const auto peer = attachment.call_on_socket<control::Request::open_process>({room.peer, 0});
    if (peer) room.process.open(static_cast<pid_t>(peer->body.pid), peer->body.probe_address, peer->body.probe_value);
  }
  VRDMA_CRASH_POINT("direct.guest.process_opened");
  return own_process_.state() == ReachedProcess::State::opened && room.process.state() == ReachedProcess::State::opened;
}

void DirectRooms::abandon() {
  // Held: by a thread that was opening a room when the process forked, and is not in this one. What it left cannot be walked; nothing
  // here uses it, or frees it before this process ends.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  own_memory_.abandon();
  own_process_.close();
  for (auto& [number, weak] : rooms_)
    if (const auto room = weak.lock()) room->abandon();
}

}  // namespace vrdma::guest
