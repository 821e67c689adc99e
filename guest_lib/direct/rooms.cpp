#include "guest_lib/direct/rooms.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>

#include "guest_lib/objects.hpp"
#include "guest_lib/sparse_mapping.hpp"

namespace vrdma::guest {

namespace {

Result<vmci::Mapping> map_whole(const vmci::UniqueFd& fd, std::uint64_t bytes, vmci::Writable writable) {
  auto sealed = vmci::sealed_bytes(fd.get());
  if (!sealed) return sealed.error();
  if (bytes > *sealed) return Errno{EPROTO};
  const SparseMapping sparse;
  auto mapping = vmci::Mapping::map(fd.get(), 0, *sealed, writable);
  if (mapping && ::madvise(mapping->data(), *sealed, MADV_DONTFORK) != 0) return last_error();
  return mapping;
}

bool inside(const vmci::Mapping& arena, std::uint64_t offset, std::uint64_t bytes) {
  return offset <= arena.bytes() && bytes <= arena.bytes() - offset && offset % 128 == 0;
}

}  // namespace

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
  auto words = map_whole(descriptors[0], sizeof(direct::Room), vmci::Writable::yes);
  if (!words) return words.error();
  auto arena = map_whole(descriptors[1], reply.peer_arena_bytes, vmci::Writable::yes);
  if (!arena) return arena.error();
  auto own_keys = map_whole(descriptors[2], sizeof(direct::KeyTable), vmci::Writable::no);
  if (!own_keys) return own_keys.error();
  auto peer_keys = map_whole(descriptors[3], sizeof(direct::KeyTable), vmci::Writable::no);
  if (!peer_keys) return peer_keys.error();
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

std::shared_ptr<vmci::UniqueFd> DirectRooms::channel_of(DirectRoom& room, std::uint32_t channel, vmci::UniqueFd&& pipe) {
  std::lock_guard lock(mutex_);
  if (auto known = room.channels[channel].lock()) return known;
  auto kept = std::make_shared<vmci::UniqueFd>(std::move(pipe));
  std::erase_if(room.channels, [](const auto& entry) { return entry.second.expired(); });
  room.channels[channel] = kept;
  return kept;
}

namespace {

Status open_shared_receives(Attachment& attachment, const control::OpenDirectRequest& request, std::uint32_t taker, const vmci::Mapping& arena,
                            DirectConnection::Ends& ends) {
  auto answer = attachment.call_on_socket<control::Request::open_shared_receives>(request);
  if (!answer) return answer.error();
  const control::OpenSharedReceivesReply& reply = answer->body;
  const vmci::QueuePairGeometry& geometry = reply.queue.geometry;
  if (taker >= direct::takers_max || reply.queue.record_slots == 0 || reply.queue.record_slots > record_slots_max ||
      !std::has_single_bit(geometry.produce_slots) || !inside(arena, reply.queue.offset, geometry.total_bytes()) ||
      !inside(arena, reply.turns, sizeof(direct::Turns)))
    return Errno{EPROTO};
  ends.receive_records = vmci::QueuePairView(arena.data() + reply.queue.offset, geometry);
  ends.receive_record_slots = reply.queue.record_slots;
  ends.shared = {vmci::RecordTurns(reinterpret_cast<direct::Turns*>(arena.data() + reply.turns)), taker, &ends.claim.direction().taking,
                 &ends.receive_records.header().creator.produced_count};
  return ok();
}

}  // namespace

Result<std::unique_ptr<DirectEnd>> DirectRooms::open(Attachment& attachment, Qp& qp, std::uint32_t offer) {
  if (attachment.service_minor() < control::minor_of_direct) return Errno{EPROTO};
  auto answer = attachment.call_on_socket<control::Request::open_direct>({qp.base().handle, offer});
  if (!answer) return answer.error();
  VRDMA_CRASH_POINT("direct.guest.opened");
  const control::OpenDirectReply& reply = answer->body;
  const vmci::QueuePairGeometry& geometry = reply.peer_receive.geometry;
  if (answer->descriptors.size() != (reply.peer_channel != 0 ? 5 : 4) || reply.direction >= direct::room_links * 2 || reply.peer_receive.record_slots == 0 ||
      reply.peer_receive.record_slots > record_slots_max || geometry.consume_kind != vmci::QueueKind::completions ||
      !std::has_single_bit(geometry.produce_slots) || !std::has_single_bit(geometry.consume_entries))
    return Errno{EPROTO};
  auto room = room_of(reply, answer->descriptors);
  if (!room) return room.error();
  const vmci::Mapping& arena = (*room)->arena;
  if (!inside(arena, reply.peer_receive.offset, geometry.total_bytes()) || !inside(arena, reply.peer_cq, sizeof(control::CqShared))) return Errno{EPROTO};

  DirectConnection::Ends ends;
  auto* const words = reinterpret_cast<direct::Room*>((*room)->words.data());
  ends.claim = vmci::PosterClaim(&words->directions[reply.direction], reply.epoch);
  ends.own = {reinterpret_cast<const direct::KeyTable*>((*room)->own_keys.data()), &own_memory_, &own_process_, direct::pd_number(reply.pd)};
  ends.peer = {reinterpret_cast<const direct::KeyTable*>((*room)->peer_keys.data()), &(*room)->memory, &(*room)->process,
               direct::pd_number(reply.peer_pd)};
  ends.send = qp.send.view();
  ends.receive = vmci::QueuePairView(arena.data() + reply.peer_receive.offset, geometry);
  ends.receive_record_slots = reply.peer_receive.record_slots;
  ends.type = qp.base().qp_type == IBV_QPT_UC ? engine::QpType::uc : engine::QpType::rc;
  ends.qpn = qp.base().qp_num;
  ends.peer_qpn = reply.peer_qpn;
  ends.sent = {Cq::of(qp.base().send_cq).shared, qp.send_lane.number};
  ends.received = {reinterpret_cast<control::CqShared*>(arena.data() + reply.peer_cq), reply.peer_receive.lane};
  ends.receive_records = ends.receive;
  if (reply.taker != 0)
    if (const Status opened = open_shared_receives(attachment, {qp.base().handle, offer}, reply.taker, arena, ends); !opened) return opened.error();
  if (reply.has_unmapped != 0) reach(attachment, **room);
  ends.own_channel = qp.base().send_cq->channel != nullptr;
  std::shared_ptr<vmci::UniqueFd> channel;
  if (reply.peer_channel != 0) {
    channel = channel_of(**room, reply.peer_channel, std::move(answer->descriptors[4]));
    ends.peer_channel = {channel->get(), reply.peer_cq_handle};
  }
  return std::make_unique<DirectEnd>(std::move(*room), std::move(channel), ends);
}

void DirectRooms::map(Attachment& attachment, DirectEnd& end, const DirectPorts::Unmapped& unmapped) {
  constexpr std::uint32_t failures_max = 4;  // then that memory stays the service's
  if (unmapped.backing == control::backing_process) return reach(attachment, *end.room);
  std::uint32_t& failed = unmapped.needed ? end.failed_maps : end.failed_optional_maps;
  if (failed >= failures_max) return;
  PeerMemory& memory = unmapped.peers ? end.room->memory : own_memory_;
  auto answer = attachment.call_on_socket<control::Request::open_backing>({unmapped.peers ? end.room->peer : attachment.guest(), unmapped.backing});
  const bool added = answer && answer->descriptors.size() == 1 && memory.add(unmapped.backing, answer->descriptors[0].get(), unmapped.offset);
  VRDMA_CRASH_POINT("direct.guest.mapped");
  if (!added || !memory.has(unmapped.backing, unmapped.offset, unmapped.bytes)) ++failed;
}

// Both, because a message that needs one often needs the other, and each failure costs a way through the service.
void DirectRooms::reach(Attachment& attachment, DirectRoom& room) {
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
