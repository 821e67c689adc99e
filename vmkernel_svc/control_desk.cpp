#include "vmkernel_svc/control_desk.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/guest_mail.hpp"
#include "vrdma/limits.hpp"
#include "vrdma/fault.hpp"

namespace vrdma::svc {

using namespace control;
using engine::QpState;
using engine::QpType;

namespace {

constexpr std::uint32_t guest_descriptors = 8;  // socket twice, pidfd twice, duplicate of the socket, arena, doorbell, pipe
constexpr std::uint32_t control_slots = 256;        // 16 KiB of requests: one of 4 KiB always fits
constexpr std::uint32_t control_reply_slots = 1024;  // of replies, notices and datagrams (guest_mail.hpp)

constexpr std::uint32_t power_of_two(std::uint32_t n) { return std::bit_ceil(std::max(n, 2u)); }

template <class T>
T* find(Table<T>& table, std::uint32_t handle) {
  const auto found = table.find(handle);
  return found == table.end() ? nullptr : found->second.get();
}
// Objects refer only to objects of their own context, so that closing one leaves nothing behind that points into it.
template <class T>
T* find_in(Table<T>& table, std::uint32_t handle, std::uint32_t context) {
  T* const found = find(table, handle);
  return found != nullptr && found->context == context ? found : nullptr;
}

// A pipe whose write end stays here. The read end blocks (its owner decides); ours does not.
Result<std::pair<vmci::UniqueFd, vmci::UniqueFd>> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return last_error();
  vmci::UniqueFd read_end(ends[0]), write_end(ends[1]);
  if (::fcntl(write_end.get(), F_SETFL, O_NONBLOCK) != 0) return last_error();
  return std::pair{std::move(read_end), std::move(write_end)};
}

}  // namespace

// --- guests ---------------------------------------------------------------------------------------------------

Result<AttachReply> ControlDesk::attach(const AttachRequest& request, AttachInfo info, int service_page_fd,
                                        std::vector<int>& descriptors, std::vector<vmci::UniqueFd>& keep) {
  if (request.link_layer > link_layer_ethernet) return Errno{EINVAL};
  auto& tenant = fabric_.tenants.try_emplace(info.credentials.uid, Tenant{info.credentials.uid, fabric_.config.quota}).first->second;
  if (tenant.guests >= tenant.quota.guests || tenant.descriptors + guest_descriptors > tenant.quota.descriptors) return Errno{EDQUOT};
  auto arena = Arena::create(fabric_.config.arena_bytes);
  if (!arena) return arena.error();
  auto wake = make_pipe();
  if (!wake) return wake.error();
  vmci::UniqueFd doorbell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!doorbell) return last_error();
  const std::uint16_t lid = fabric_.new_lid();
  if (lid == 0) return Errno{EADDRNOTAVAIL};
  if (const auto watched = shard_.watch(doorbell.get()); !watched) return fabric_.rest_lid(lid), watched.error();

  VRDMA_CRASH_POINT("service.attach.prepared");
  auto guest = std::make_unique<Guest>();
  static std::uint32_t next_context = host_context;
  guest->id = GuestId{++next_context};
  guest->tenant = &tenant;
  guest->credentials = info.credentials;
  guest->lid = lid;
  guest->arena = std::move(*arena);
  guest->wake_pipe = std::move(wake->second);
  guest->doorbell_fd = std::move(doorbell);
  guest->socket = std::move(info.socket);
  guest->link_layer = request.link_layer != link_layer_default ? request.link_layer
                      : fabric_.config.link_layer == "ethernet" ? link_layer_ethernet : link_layer_infiniband;
  guest->name.assign(request.name, ::strnlen(request.name, sizeof(request.name)));
  // It goes into logs, onto terminals and between blanks in the output of `vrdma show`.
  std::replace_if(guest->name.begin(), guest->name.end(), [](char c) { return c <= ' ' || c > '~'; }, '_');
  if (guest->name.empty()) guest->name = "guest" + std::to_string(guest->id.value);
  assign_addresses(*guest);

  const vmci::QueuePairGeometry geometry{control_slots, control_reply_slots, vmci::QueueKind::records, 0};
  const auto control_at = guest->arena.allocate(geometry.total_bytes());
  const auto doorbell_at = guest->arena.allocate(sizeof(vmci::ReadyWords));
  if (!control_at || !doorbell_at) return Errno{ENOMEM};
  guest->control = vmci::QueuePairView(guest->arena.segment().data() + *control_at, geometry);
  guest->requests = vmci::RecordReader(guest->control.produce(), control_slots);
  guest->replies = vmci::RecordWriter(guest->control.consume_records(), control_reply_slots);
  guest->control.header().attacher.needs_doorbell = 1;
  guest->doorbell = vmci::ReadyBitmap(guest->arena.segment().at<vmci::ReadyWords>(*doorbell_at));
  guest->by_doorbell.push_back(nullptr);  // 0: the control pair
  if (fabric_.config.process_memory != "guest") guest->process.open(info.credentials.pid, info.credentials.uid, info.pidfd, fabric_.sink);

  AttachReply reply{};
  reply.major = version_major;
  reply.minor = version_minor;
  reply.guest = guest->id.value;
  reply.arena_bytes = guest->arena.segment().bytes();
  reply.control_offset = *control_at;
  reply.control_geometry = geometry;
  reply.doorbell_offset = *doorbell_at;
  reply.service_pid = ::getpid();
  std::memcpy(reply.name, guest->name.data(), std::min(guest->name.size(), sizeof(reply.name) - 1));
  std::strncpy(reply.service_version, VRDMA_VERSION, sizeof(reply.service_version) - 1);
  descriptors = {guest->arena.segment().fd(), service_page_fd, guest->doorbell_fd.get(), wake->first.get()};
  keep.push_back(std::move(wake->first));

  ++tenant.guests;
  tenant.descriptors += guest_descriptors;
  shard_.add(*guest);
  fabric_.guests.emplace(guest->id.value, std::move(guest));
  VRDMA_CRASH_POINT("service.attach.added");
  return reply;
}

void ControlDesk::detach(Guest& guest) {
  VRDMA_CRASH_POINT("service.detach.begun");
  while (!guest.contexts.empty()) close_context(guest, guest.contexts.begin()->first);
  VRDMA_CRASH_POINT("service.detach.contexts_closed");
  fabric_.vmci.leave(guest);
  shard_.remove(guest);
  shard_.unwatch(guest.doorbell_fd.get());
  guest.process.close();
  if (guest.copier) {
    guest.copier->close();
    guest.tenant->queue_bytes -= copying::segment_bytes;
    --guest.tenant->descriptors;
  }
  fabric_.departed.push_front(
      {guest.id, guest.name, guest.credentials, guest.lid, guest.requests_served, guest.totals});
  if (fabric_.departed.size() > 256) fabric_.departed.pop_back();
  --guest.tenant->guests;
  guest.tenant->descriptors -= guest_descriptors + static_cast<std::uint32_t>(guest.backings.size());
  fabric_.rest_lid(guest.lid);
  ++fabric_.topology_generation;
  fabric_.guests.erase(guest.id.value);
}

// --- the ring -------------------------------------------------------------------------------------------------

#define VRDMA_DECLARE(name, request, reply, socket) \
  template <>                                       \
  Result<reply> ControlDesk::on<Request::name>(Guest&, const request&);
VRDMA_CONTROL_REQUESTS(VRDMA_DECLARE)
#undef VRDMA_DECLARE

bool ControlDesk::serve(Guest& guest) {
  alignas(64) std::byte record[record_slots_max * slot_bytes];
  bool served = false;
  guest.control_held = false;
  for (int budget = 4; budget > 0 && !guest.broken; --budget) {
    std::uint32_t slots = 0;
    const auto peek = guest.requests.peek(record, record_slots_max, slots);
    if (peek == vmci::RecordReader::Peek::empty) return served;
    Head head;
    std::memcpy(&head, record, sizeof(head));
    if (peek == vmci::RecordReader::Peek::malformed || slots * slot_bytes < sizeof(Head) ||
        head.record.word > slots * slot_bytes - sizeof(Head)) {
      ++guest.protocol_errors;
      guest.broken = true;
      return true;
    }
    served = true;
    if (!answer(guest, head, {record + sizeof(Head), head.record.word})) {
      guest.control_held = true;  // it must wait: the request stays where it is
      return true;
    }
    guest.held_since_ns = 0;
    guest.requests.advance(slots);
    std::atomic_ref(guest.control.header().attacher.consumed).store(guest.requests.position(), std::memory_order_release);
    VRDMA_CRASH_POINT("service.control.consumed");
  }
  guest.control_held = true;  // there may be more: others first
  return served;
}

template <Request R>
bool ControlDesk::dispatch(Guest& guest, std::span<const std::byte> body, std::byte* reply, std::uint32_t& reply_bytes, int& status) {
  using M = Message<R>;
  if constexpr (M::on_socket) {
    status = EPROTO;
    return true;
  } else {
    typename M::RequestBody request{};
    if (!std::is_empty_v<typename M::RequestBody>) {
      if (body.size() < sizeof(request)) {
        status = EINVAL;
        return true;
      }
      std::memcpy(static_cast<void*>(&request), body.data(), sizeof(request));
    }
    Result<typename M::ReplyBody> result = on<R>(guest, request);
    if (!result) {
      status = value(result.error());
      return status != EINPROGRESS;
    }
    if (!std::is_empty_v<typename M::ReplyBody>) {
      std::memcpy(reply, &*result, sizeof(typename M::ReplyBody));
      reply_bytes = sizeof(typename M::ReplyBody);
    }
    return true;
  }
}

// False: the request must wait and be tried again.
bool ControlDesk::answer(Guest& guest, const Head& head, std::span<const std::byte> body) {
  if (head.record.tag != address_of(host_context, control_port)) {
    fabric_.vmci.forward(guest, head, body);
    return true;
  }
  alignas(64) std::byte reply[body_bytes_max] = {};
  std::uint32_t reply_bytes = 0;
  int status = 0;
  const std::uint32_t user = head.record.control & control_user_mask;
  bool done = true;
  switch (static_cast<Request>(user)) {
#define VRDMA_CASE(name, request, reply_type, socket)                        \
  case Request::name:                                                        \
    done = dispatch<Request::name>(guest, body, reply, reply_bytes, status); \
    break;
    VRDMA_CONTROL_REQUESTS(VRDMA_CASE)
#undef VRDMA_CASE
    default:
      status = EOPNOTSUPP;
  }
  if (!done) return false;
  VRDMA_CRASH_POINT("service.control.executed");
  ++guest.requests_served;

  Head out{};
  out.record.tag = address_of(guest.id.value, head.source_port);
  out.source_context = host_context;
  out.source_port = control_port;
  out.sequence = head.sequence;
  out.status = status;
  if (!put_datagram(guest, out, user | reply_bit, {reply, reply_bytes}, 0)) {  // it asks without reading the answers
    ++guest.protocol_errors;
    guest.broken = true;
  }
  return true;
}

// --- requests with descriptors --------------------------------------------------------------------------------

Result<AddBackingReply> ControlDesk::on(Guest& guest, const AddBackingRequest&, vmci::UniqueFd fd) {
  if (guest.backings.size() >= 65536) return Errno{EMFILE};
  auto backing = Backing::adopt(std::move(fd));
  if (!backing) return backing.error();
  if (!guest.tenant->take_descriptors(1)) return Errno{EDQUOT};
  const std::uint32_t handle = guest.next_handle++;
  guest.backings.emplace(handle, std::move(*backing));
  return AddBackingReply{handle, 0};
}

Status ControlDesk::on(Guest& guest, const RemoveBackingRequest& request) {
  const auto found = guest.backings.find(request.backing);
  if (found == guest.backings.end()) return Errno{EINVAL};
  if (found->second.in_use()) return Errno{EBUSY};
  guest.backings.erase(found);
  --guest.tenant->descriptors;
  return ok();
}

Result<OpenContextReply> ControlDesk::on(Guest& guest, const OpenContextRequest&, std::vector<vmci::UniqueFd>& give) {
  if (guest.tenant->descriptors >= guest.tenant->quota.descriptors || !guest.tenant->take_object()) return Errno{EDQUOT};
  auto pipe = make_pipe();
  if (!pipe) return --guest.tenant->objects, pipe.error();
  ++guest.tenant->descriptors;
  const std::uint32_t handle = guest.next_handle++;
  guest.contexts.emplace(handle, std::make_unique<Context>(Context{handle, std::move(pipe->second), {}}));
  give.push_back(std::move(pipe->first));
  return OpenContextReply{handle, 0};
}

Result<HandleReply> ControlDesk::on(Guest& guest, const CreateChannelRequest& request, std::vector<vmci::UniqueFd>& give) {
  if (find(guest.contexts, request.context) == nullptr) return Errno{EINVAL};
  if (guest.tenant->descriptors >= guest.tenant->quota.descriptors || !guest.tenant->take_object()) return Errno{EDQUOT};
  auto pipe = make_pipe();
  if (!pipe) return --guest.tenant->objects, pipe.error();
  ++guest.tenant->descriptors;
  const std::uint32_t handle = guest.next_handle++;
  guest.channels.emplace(handle, std::make_unique<Channel>(Channel{{handle}, request.context, std::move(pipe->second), 0, {}}));
  give.push_back(std::move(pipe->first));
  return HandleReply{handle, 0};
}

Status ControlDesk::ask_how_reached(Guest& guest, const ReachProcessRequest& request, std::function<void(bool)> answer) {
  if (guest.asked_how_reached) return Errno{EALREADY};
  guest.asked_how_reached = true;
  const std::string& wish = fabric_.config.process_memory;
  if (wish == "direct") return answer(true), ok();
  // The guest's worker reads it: the page may be one that keeps the reader waiting.
  auto probe = std::make_unique<ProcessJob>();
  probe->kind = ProcessJob::Kind::read;
  probe->ranges.push_back({request.probe_address, sizeof(request.probe_value)});
  probe->buffer.resize(sizeof(request.probe_value));
  probe->then = [answer, expected = request.probe_value](const ProcessJob& job) {
    answer(job.ok && std::memcmp(job.buffer.data(), &expected, sizeof(expected)) == 0);
  };
  if (!guest.process.opened() || !guest.process.submit(std::move(probe))) answer(false);
  return ok();
}

Result<ReachProcessReply> ControlDesk::reach(Guest& guest, bool by_service, std::vector<vmci::UniqueFd>& give) {
  if (by_service) return ReachProcessReply{reach_by_service, 0};
  if (guest.tenant->queue_bytes + copying::segment_bytes > guest.tenant->quota.queue_bytes || !guest.tenant->take_descriptors(1))
    return guest.asked_how_reached = false, Errno{EDQUOT};
  const std::uint32_t doorbell = guest.take_doorbell();
  auto copier = GuestCopier::create(doorbell, fabric_.sink);
  vmci::UniqueFd fd(copier ? ::fcntl((*copier)->fd(), F_DUPFD_CLOEXEC, 0) : -1);
  if (!fd) {
    const Errno failed = copier ? last_error() : copier.error();
    --guest.tenant->descriptors;
    guest.free_doorbells.push_back(doorbell);
    guest.asked_how_reached = false;
    return failed;
  }
  guest.tenant->queue_bytes += copying::segment_bytes;
  guest.process.close();
  guest.copier = std::move(*copier);
  give.push_back(std::move(fd));
  return ReachProcessReply{reach_by_guest, guest.copier->doorbell()};
}

// --- device, contexts, protection domains ---------------------------------------------------------------------

template <>
Result<DeviceReply> ControlDesk::on<Request::query_device>(Guest& guest, const Empty&) {
  return device_reply(guest, fabric_.config);
}

template <>
Result<Empty> ControlDesk::on<Request::close_context>(Guest& guest, const HandleRequest& request) {
  const auto closed = close_context(guest, request.handle);
  if (!closed) return closed.error();
  return Empty{};
}

Status ControlDesk::close_context(Guest& guest, std::uint32_t context) {
  if (find(guest.contexts, context) == nullptr) return Errno{EINVAL};
  const auto of_context = [context](auto& table) {
    std::vector<std::uint32_t> handles;
    for (auto& [handle, object] : table)
      if (object->context == context) handles.push_back(handle);
    return handles;
  };
  for (const auto handle : of_context(guest.qps)) destroy(guest, *guest.qps[handle]);
  for (const auto handle : of_context(guest.srqs)) destroy(guest, *guest.srqs[handle]);
  for (const auto handle : of_context(guest.cqs)) destroy(guest, *guest.cqs[handle]);
  std::vector<std::uint32_t> regions;
  for (const auto& [handle, slot] : guest.mrs) {
    const std::uint64_t number = fabric_.regions.slot(slot).pd;
    for (auto& [pd_handle, pd] : guest.pds)
      if (pd->number == number && pd->context == context) regions.push_back(handle);
  }
  for (const auto handle : regions) destroy_region(guest, handle, true);
  for (const auto handle : of_context(guest.pds)) guest.pds.erase(handle), --guest.tenant->objects;
  for (const auto handle : of_context(guest.channels)) guest.channels.erase(handle), --guest.tenant->objects, --guest.tenant->descriptors;
  guest.contexts.erase(context);
  --guest.tenant->objects;
  --guest.tenant->descriptors;
  return ok();
}

template <>
Result<Empty> ControlDesk::on<Request::destroy_channel>(Guest& guest, const HandleRequest& request) {
  Channel* const channel = find(guest.channels, request.handle);
  if (channel == nullptr) return Errno{EINVAL};
  if (channel->users != 0) return Errno{EBUSY};
  guest.channels.erase(request.handle);
  --guest.tenant->objects;
  --guest.tenant->descriptors;
  return Empty{};
}

template <>
Result<HandleReply> ControlDesk::on<Request::create_pd>(Guest& guest, const CreatePdRequest& request) {
  if (find(guest.contexts, request.context) == nullptr) return Errno{EINVAL};
  if (guest.pds.size() >= limits::pd_max) return Errno{ENOMEM};
  if (!guest.tenant->take_object()) return Errno{EDQUOT};
  const std::uint32_t handle = guest.next_handle++;
  guest.pds.emplace(handle, std::make_unique<ProtectionDomain>(ProtectionDomain{{handle}, request.context, fabric_.next_pd++, 0}));
  return HandleReply{handle, 0};
}

template <>
Result<Empty> ControlDesk::on<Request::destroy_pd>(Guest& guest, const HandleRequest& request) {
  ProtectionDomain* const pd = find(guest.pds, request.handle);
  if (pd == nullptr) return Errno{EINVAL};
  if (pd->users != 0) return Errno{EBUSY};
  guest.pds.erase(request.handle);
  --guest.tenant->objects;
  return Empty{};
}

// --- memory ---------------------------------------------------------------------------------------------------

template <>
Result<Empty> ControlDesk::on<Request::stage_extents>(Guest& guest, const StageExtentsRequest& request) {
  if (request.clear_first) guest.staged.clear();
  if (request.count > stage_extents_max || guest.staged.size() + request.count > (1u << 20)) return Errno{EINVAL};
  guest.staged.insert(guest.staged.end(), request.extents, request.extents + request.count);
  return Empty{};
}

// Turns what the guest staged into pieces that cover [address, address + bytes) without a gap, mapping what has a backing.
Result<std::vector<Piece>> ControlDesk::pieces_of(Guest& guest, std::uint64_t address, std::uint64_t bytes) {
  const std::vector<Extent> extents = std::exchange(guest.staged, {});
  std::vector<Piece> pieces;
  std::uint64_t at = address;
  Errno failed{0};
  const auto full = [&] { return guest.tenant->pieces + pieces.size() >= guest.tenant->quota.pieces; };
  for (const Extent& extent : extents) {
    if (extent.address != at || extent.bytes == 0 || extent.bytes > address + bytes - at) {
      failed = Errno{EINVAL};
      break;
    }
    if (full()) {
      failed = Errno{EDQUOT};
      break;
    }
    if (extent.backing == backing_process) {
      pieces.push_back({at - address, extent.bytes, nullptr, at, backing_process, 0});
      at += extent.bytes;
      continue;
    }
    const auto backing = guest.backings.find(extent.backing);
    if (backing == guest.backings.end() || extent.backing_offset + extent.bytes < extent.bytes) {
      failed = Errno{EINVAL};
      break;
    }
    for (std::uint64_t done = 0; done < extent.bytes && value(failed) == 0;) {
      const std::uint64_t offset = extent.backing_offset + done;
      const std::uint64_t part = std::min(extent.bytes - done, Backing::chunk_bytes - offset % Backing::chunk_bytes);
      const std::size_t mapped_before = backing->second.mapping_count();
      if (guest.tenant->mappings >= guest.tenant->quota.mappings || full()) {
        failed = Errno{EDQUOT};
        break;
      }
      auto host = backing->second.get(offset, part);
      if (!host) {
        failed = host.error();
        break;
      }
      guest.tenant->mappings += backing->second.mapping_count() - mapped_before;
      pieces.push_back({at - address, part, *host, at, extent.backing, offset});
      done += part, at += part;
    }
    if (value(failed) != 0) break;
  }
  if (value(failed) == 0 && at != address + bytes) failed = Errno{EINVAL};
  if (value(failed) != 0) {
    release_pieces(guest, pieces);
    return failed;
  }
  return pieces;
}

void ControlDesk::release_pieces(Guest& guest, std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    if (piece.host == nullptr) continue;
    const auto backing = guest.backings.find(piece.backing);
    if (backing == guest.backings.end()) continue;
    const std::size_t mapped_before = backing->second.mapping_count();
    backing->second.put(piece.backing_offset);
    guest.tenant->mappings -= mapped_before - backing->second.mapping_count();
  }
  pieces.clear();
}

namespace {
constexpr std::uint32_t reg_local_write = 1, reg_remote_write = 2, reg_remote_atomic = 8;
bool rights_ok(std::uint32_t access) {  // IBA 10.6.3.1: remote write and atomic need local write
  return (access & (reg_remote_write | reg_remote_atomic)) == 0 || (access & reg_local_write) != 0;
}
}  // namespace

template <>
Result<RegMrReply> ControlDesk::on<Request::reg_mr>(Guest& guest, const RegMrRequest& request) {
  ProtectionDomain* const pd = find(guest.pds, request.pd);
  if (pd == nullptr || request.bytes == 0 || request.bytes > limits::mr_bytes_max || !rights_ok(request.access) ||
      request.address + request.bytes < request.address || request.iova + request.bytes < request.iova)
    return guest.staged.clear(), Errno{EINVAL};
  Tenant& tenant = *guest.tenant;
  if (guest.mrs.size() >= limits::mr_max) return guest.staged.clear(), Errno{ENOMEM};
  if (request.bytes > tenant.quota.registered_bytes - std::min(tenant.registered_bytes, tenant.quota.registered_bytes) ||
      !tenant.take_object())
    return guest.staged.clear(), Errno{EDQUOT};
  auto pieces = pieces_of(guest, request.address, request.bytes);
  if (!pieces) return --tenant.objects, pieces.error();
  std::uint32_t slot;
  Region& region = fabric_.regions.add(slot);
  region.pd = pd->number;
  region.guest = &guest;
  region.access = request.access;
  region.iova = request.iova;
  region.bytes = request.bytes;
  region.address = request.address;
  region.pieces = std::move(*pieces);
  tenant.pieces += region.pieces.size();
  tenant.registered_bytes += request.bytes;
  ++pd->users;
  const std::uint32_t handle = guest.next_handle++;
  guest.mrs.emplace(handle, slot);
  return RegMrReply{handle, region.key.value};
}

namespace {
ProtectionDomain* pd_by_number(Guest& guest, std::uint64_t number) {
  for (auto& [handle, pd] : guest.pds)
    if (pd->number == number) return pd.get();
  return nullptr;
}
}  // namespace

template <>
Result<RegMrReply> ControlDesk::on<Request::rereg_mr>(Guest& guest, const ReregMrRequest& request) {
  constexpr std::uint32_t change_translation = 1, change_pd = 2, change_access = 4;
  const auto found = guest.mrs.find(request.mr);
  if (found == guest.mrs.end()) return guest.staged.clear(), Errno{EINVAL};
  Region& region = fabric_.regions.slot(found->second);
  if (region.jobs != 0) return Errno{EINPROGRESS};
  ProtectionDomain* const pd = (request.flags & change_pd) ? find(guest.pds, request.pd) : nullptr;
  ProtectionDomain* const before = pd_by_number(guest, region.pd);
  if (((request.flags & change_pd) && (pd == nullptr || before == nullptr || pd->context != before->context)) || ((request.flags & change_access) && !rights_ok(request.access)))
    return guest.staged.clear(), Errno{EINVAL};
  if (request.flags & change_translation) {
    if (request.bytes == 0 || request.bytes > limits::mr_bytes_max || request.address + request.bytes < request.address ||
        request.iova + request.bytes < request.iova)
      return guest.staged.clear(), Errno{EINVAL};
    const Tenant& tenant = *guest.tenant;
    if (request.bytes > region.bytes && request.bytes - region.bytes > tenant.quota.registered_bytes - std::min(tenant.registered_bytes, tenant.quota.registered_bytes))
      return guest.staged.clear(), Errno{EDQUOT};
    auto pieces = pieces_of(guest, request.address, request.bytes);
    if (!pieces) return pieces.error();
    guest.tenant->pieces += pieces->size() - region.pieces.size();
    release_pieces(guest, region.pieces);
    region.pieces = std::move(*pieces);
    guest.tenant->registered_bytes += request.bytes - region.bytes;
    region.address = request.address;
    region.iova = request.iova;
    region.bytes = request.bytes;
  }
  if (request.flags & change_pd) {
    --before->users;
    ++pd->users;
    region.pd = pd->number;
  }
  if (request.flags & change_access) region.access = request.access;
  fabric_.regions.renew(found->second);
  return RegMrReply{request.mr, region.key.value};
}

// False: a worker has bytes of it under way. force: the guest itself goes; its worker's last writes hurt nobody else.
bool ControlDesk::destroy_region(Guest& guest, std::uint32_t handle, bool force) {
  const auto found = guest.mrs.find(handle);
  Region& region = fabric_.regions.slot(found->second);
  if (region.jobs != 0 && !force) return false;
  guest.tenant->pieces -= region.pieces.size();
  release_pieces(guest, region.pieces);
  if (ProtectionDomain* const pd = pd_by_number(guest, region.pd)) --pd->users;
  guest.tenant->registered_bytes -= region.bytes;
  --guest.tenant->objects;
  fabric_.regions.remove(found->second);
  guest.mrs.erase(found);
  return true;
}

template <>
Result<Empty> ControlDesk::on<Request::dereg_mr>(Guest& guest, const HandleRequest& request) {
  if (!guest.mrs.contains(request.handle)) return Errno{EINVAL};
  if (!destroy_region(guest, request.handle, false)) return Errno{EINPROGRESS};
  return Empty{};
}

Result<std::uint64_t> ControlDesk::carve(Guest& guest, std::uint64_t bytes) {
  Tenant& tenant = *guest.tenant;
  if (tenant.queue_bytes + bytes > tenant.quota.queue_bytes) return Errno{EDQUOT};
  const std::uint64_t before = guest.arena.used_bytes();
  auto offset = guest.arena.allocate(bytes);
  if (offset) tenant.queue_bytes += guest.arena.used_bytes() - before;
  return offset;
}

void ControlDesk::uncarve(Guest& guest, std::uint64_t offset) {
  const std::uint64_t before = guest.arena.used_bytes();
  guest.arena.release(offset);
  guest.tenant->queue_bytes -= before - guest.arena.used_bytes();
}

// --- completion queues ----------------------------------------------------------------------------------------

template <>
Result<CreateCqReply> ControlDesk::on<Request::create_cq>(Guest& guest, const CreateCqRequest& request) {
  if (find(guest.contexts, request.context) == nullptr || request.cqe == 0 || request.cqe > limits::cqe_max ||
      request.comp_vector >= limits::comp_vectors)
    return Errno{EINVAL};
  Channel* const channel = request.channel != 0 ? find_in(guest.channels, request.channel, request.context) : nullptr;
  if (request.channel != 0 && channel == nullptr) return Errno{EINVAL};
  if (guest.cqs.size() >= limits::cq_max) return Errno{ENOMEM};
  if (!guest.tenant->take_object()) return Errno{EDQUOT};
  const auto offset = carve(guest, sizeof(CqShared));
  if (!offset) return --guest.tenant->objects, offset.error();
  auto cq = std::make_unique<CompletionQueue>();
  cq->handle = Handle{guest.next_handle++};
  cq->context = request.context;
  cq->guest = &guest;
  cq->channel = channel;
  cq->offset = *offset;
  cq->shared = guest.arena.segment().at<CqShared>(*offset);
  std::fill(std::begin(cq->shared->hot), std::end(cq->shared->hot), no_lane);
  cq->ready = vmci::ReadyBitmap(&cq->shared->ready);
  cq->cqe = request.cqe;
  if (channel != nullptr) ++channel->users;
  const CreateCqReply reply{cq->handle.value, cq->cqe, *offset};
  guest.cqs.emplace(cq->handle.value, std::move(cq));
  return reply;
}

template <>
Result<ResizeCqReply> ControlDesk::on<Request::resize_cq>(Guest& guest, const ResizeCqRequest& request) {
  CompletionQueue* const cq = find(guest.cqs, request.cq);
  if (cq == nullptr || request.cqe == 0 || request.cqe > limits::cqe_max) return Errno{EINVAL};
  // Shrinking: what was posted before and is still under way (memory that a worker fetches) counts, if it ends soon.
  constexpr std::uint64_t patience_ns = 100'000'000;
  const std::uint64_t now = vmci::monotonic_ns();
  if (guest.held_since_ns == 0) guest.held_since_ns = now;
  if (request.cqe < cq->cqe && now - guest.held_since_ns < patience_ns)
    for (const QueuePair* user : cq->users)
      if (user->core.state == QpState::rts && (shard_.engine().busy(user->core) || !user->core.send_ring.empty()))
        return Errno{EINPROGRESS};
  const std::uint32_t outstanding = cq->produced - std::atomic_ref(cq->shared->consumed).load(std::memory_order_acquire);
  if (outstanding <= limits::cqe_max && request.cqe < outstanding) return Errno{EINVAL};
  cq->cqe = request.cqe;
  return ResizeCqReply{request.cqe, 0};
}

void ControlDesk::destroy(Guest& guest, CompletionQueue& cq) {
  shard_.forget(cq);
  if (cq.channel != nullptr) --cq.channel->users;
  uncarve(guest, cq.offset);
  --guest.tenant->objects;
  guest.cqs.erase(cq.handle.value);
}

template <>
Result<Empty> ControlDesk::on<Request::destroy_cq>(Guest& guest, const HandleRequest& request) {
  CompletionQueue* const cq = find(guest.cqs, request.handle);
  if (cq == nullptr) return Errno{EINVAL};
  if (!cq->users.empty()) return Errno{EBUSY};
  destroy(guest, *cq);
  return Empty{};
}

// --- shared receive queues ------------------------------------------------------------------------------------

template <>
Result<CreateSrqReply> ControlDesk::on<Request::create_srq>(Guest& guest, const CreateSrqRequest& request) {
  ProtectionDomain* const pd = find_in(guest.pds, request.pd, request.context);
  if (find(guest.contexts, request.context) == nullptr || pd == nullptr || request.max_wr == 0 || request.max_wr > limits::srq_wr_max ||
      request.max_sge > limits::sge_max)
    return Errno{EINVAL};
  if (guest.srqs.size() >= limits::srq_max) return Errno{ENOMEM};
  if (!guest.tenant->take_object()) return Errno{EDQUOT};
  const std::uint32_t record_slots = receive_wqe_slots(std::max(request.max_sge, 1u));
  const vmci::QueuePairGeometry geometry{power_of_two((request.max_wr + 1) * record_slots), 0, vmci::QueueKind::none, 0};
  const auto offset = carve(guest, geometry.total_bytes());
  if (!offset) return --guest.tenant->objects, offset.error();
  auto srq = std::make_unique<SharedReceiveQueue>();
  srq->handle = Handle{guest.next_handle++};
  srq->context = request.context;
  srq->guest = &guest;
  srq->pd = pd;
  srq->max_sge = std::max(request.max_sge, 1u);
  srq->offset = *offset;
  srq->view = vmci::QueuePairView(guest.arena.segment().data() + *offset, geometry);
  srq->core.ring = vmci::RecordReader(srq->view.produce(), geometry.produce_slots);
  srq->core.record_slots = record_slots;
  srq->core.max_wr = request.max_wr;
  srq->core.limit = request.srq_limit;
  srq->core.port.owner = srq.get();
  ++pd->users;
  CreateSrqReply reply{};
  reply.srq = srq->handle.value;
  reply.max_wr = request.max_wr;
  reply.max_sge = srq->max_sge;
  reply.srq_num = srq->handle.value;
  reply.queue = {*offset, geometry, no_lane, record_slots};
  guest.srqs.emplace(srq->handle.value, std::move(srq));
  return reply;
}

template <>
Result<Empty> ControlDesk::on<Request::modify_srq>(Guest& guest, const ModifySrqRequest& request) {
  constexpr std::uint32_t max_wr = 1, limit = 2;
  SharedReceiveQueue* const srq = find(guest.srqs, request.srq);
  if (srq == nullptr || (request.mask & max_wr) != 0) return Errno{EINVAL};  // resizing is not a capability we advertise
  if (request.mask & limit) {
    if (request.srq_limit > srq->core.max_wr) return Errno{EINVAL};
    srq->core.limit = request.srq_limit;
  }
  return Empty{};
}

template <>
Result<QuerySrqReply> ControlDesk::on<Request::query_srq>(Guest& guest, const HandleRequest& request) {
  SharedReceiveQueue* const srq = find(guest.srqs, request.handle);
  if (srq == nullptr) return Errno{EINVAL};
  return QuerySrqReply{srq->core.max_wr, srq->max_sge, srq->core.limit, 0};
}

void ControlDesk::destroy(Guest& guest, SharedReceiveQueue& srq) {
  --srq.pd->users;
  uncarve(guest, srq.offset);
  --guest.tenant->objects;
  guest.srqs.erase(srq.handle.value);
}

template <>
Result<Empty> ControlDesk::on<Request::destroy_srq>(Guest& guest, const HandleRequest& request) {
  SharedReceiveQueue* const srq = find(guest.srqs, request.handle);
  if (srq == nullptr) return Errno{EINVAL};
  if (srq->users != 0) return Errno{EBUSY};
  destroy(guest, *srq);
  return Empty{};
}

// --- queue pairs ----------------------------------------------------------------------------------------------

engine::PortLimits ControlDesk::limits_of(const Guest& guest) const {
  engine::PortLimits port{};
  port.pkey_count = limits::pkey_table;
  port.gid_count = limits::gid_table;
  port.max_mtu = 5;
  port.max_rd_atomic = limits::rd_atomic_max;
  port.ethernet = guest.link_layer == link_layer_ethernet;
  for (std::uint32_t i = 0; i < guest.gids.size(); ++i)
    if (guest.gids[i].gid != Gid{}) port.gids_present |= 1u << i;
  return port;
}

template <>
Result<CreateQpReply> ControlDesk::on<Request::create_qp>(Guest& guest, const CreateQpRequest& request) {
  ProtectionDomain* const pd = find_in(guest.pds, request.pd, request.context);
  CompletionQueue* const send_cq = find_in(guest.cqs, request.send_cq, request.context);
  CompletionQueue* const receive_cq = find_in(guest.cqs, request.recv_cq, request.context);
  SharedReceiveQueue* const srq = request.srq != 0 ? find_in(guest.srqs, request.srq, request.context) : nullptr;
  if (find(guest.contexts, request.context) == nullptr || pd == nullptr || send_cq == nullptr || receive_cq == nullptr ||
      (request.srq != 0 && srq == nullptr))
    return Errno{EINVAL};
  if (request.type < 2 || request.type > 4) return Errno{EOPNOTSUPP};
  if (request.max_send_wr > limits::qp_wr_max || request.max_send_sge > limits::sge_max ||
      request.max_inline_data > limits::inline_max)
    return Errno{EINVAL};
  if (srq == nullptr && (request.max_recv_wr > limits::qp_wr_max || request.max_recv_sge > limits::sge_max)) return Errno{EINVAL};
  if (guest.qps.size() >= limits::qp_max || fabric_.by_qpn.size() >= 0x800000) return Errno{ENOMEM};
  if (!guest.tenant->take_object()) return Errno{EDQUOT};

  const std::uint32_t receive_wr = srq != nullptr ? 0 : request.max_recv_wr;
  const std::uint32_t receive_sge = srq != nullptr ? 0 : std::max(request.max_recv_sge, 1u);
  const std::uint32_t send_record_slots = std::max(send_wqe_slots(std::max(request.max_send_sge, 1u) * sizeof(Sge)),
                                                   send_wqe_slots(request.max_inline_data));
  const std::uint32_t receive_record_slots = receive_wqe_slots(std::max(receive_sge, 1u));
  const std::uint32_t receive_depth = srq != nullptr ? srq->core.max_wr : std::max(receive_wr, 1u);
  const vmci::QueuePairGeometry send_geometry{power_of_two((std::max(request.max_send_wr, 1u) + 1) * send_record_slots),
                                              power_of_two(std::max(request.max_send_wr, 1u)), vmci::QueueKind::completions, 0};
  const vmci::QueuePairGeometry receive_geometry{
      srq != nullptr ? 2 : power_of_two((std::max(receive_wr, 1u) + 1) * receive_record_slots), power_of_two(receive_depth),
      vmci::QueueKind::completions, 0};
  const auto send_offset = carve(guest, send_geometry.total_bytes());
  if (!send_offset) return --guest.tenant->objects, send_offset.error();
  const auto receive_offset = carve(guest, receive_geometry.total_bytes());
  if (!receive_offset) return uncarve(guest, *send_offset), --guest.tenant->objects, receive_offset.error();

  auto qp = std::make_unique<QueuePair>();
  std::byte* const base = guest.arena.segment().data();
  qp->send_view = vmci::QueuePairView(base + *send_offset, send_geometry);
  qp->receive_view = vmci::QueuePairView(base + *receive_offset, receive_geometry);
  qp->handle = Handle{guest.next_handle++};
  qp->context = request.context;
  qp->guest = &guest;
  qp->pd = pd;
  qp->send_cq = send_cq;
  qp->receive_cq = receive_cq;
  qp->srq = srq;
  qp->send_offset = *send_offset;
  qp->receive_offset = *receive_offset;
  qp->send_lane = send_cq->take_lane();
  qp->receive_lane = receive_cq->take_lane();
  qp->doorbell = guest.take_doorbell();
  guest.by_doorbell[qp->doorbell] = qp.get();

  auto& core = qp->core;
  core.qpn = Qpn{fabric_.new_qpn()};
  core.type = static_cast<QpType>(request.type);
  core.send_ring = vmci::RecordReader(qp->send_view.produce(), send_geometry.produce_slots);
  core.send_lane = vmci::LaneWriter(qp->send_view.consume_completions(), send_geometry.consume_entries);
  core.receive_lane = vmci::LaneWriter(qp->receive_view.consume_completions(), receive_geometry.consume_entries);
  core.receive_record_slots = receive_record_slots;
  if (srq != nullptr) {
    core.srq = &srq->core;
    ++srq->users;
  } else {
    core.receive_ring = vmci::RecordReader(qp->receive_view.produce(), receive_geometry.produce_slots);
  }
  if (core.type == QpType::ud) core.datagram = std::make_unique<std::byte[]>(engine::grh_bytes + limits::mtu_max_bytes);
  core.attributes.max_send_wr = request.max_send_wr;
  core.attributes.max_recv_wr = receive_wr;
  core.attributes.max_send_sge = request.max_send_sge;
  core.attributes.max_recv_sge = srq != nullptr ? 0 : request.max_recv_sge;
  core.attributes.max_inline_data = request.max_inline_data;
  core.port.owner = qp.get();
  core.port.pd = pd->number;
  qp->watch_sends(true);
  ++pd->users;
  send_cq->users.push_back(qp.get());
  receive_cq->users.push_back(qp.get());
  fabric_.by_qpn.emplace(core.qpn.value, qp.get());
  connected_elsewhere();

  CreateQpReply reply{};
  reply.qp = qp->handle.value;
  reply.qpn = core.qpn.value;
  reply.doorbell = qp->doorbell;
  reply.max_send_wr = request.max_send_wr;
  reply.max_recv_wr = receive_wr;
  reply.max_send_sge = request.max_send_sge;
  reply.max_recv_sge = core.attributes.max_recv_sge;
  reply.max_inline_data = request.max_inline_data;
  reply.send = {*send_offset, send_geometry, qp->send_lane, send_record_slots};
  reply.receive = {*receive_offset, receive_geometry, qp->receive_lane, receive_record_slots};
  guest.qps.emplace(qp->handle.value, std::move(qp));
  return reply;
}

template <>
Result<ModifyQpReply> ControlDesk::on<Request::modify_qp>(Guest& guest, const ModifyQpRequest& request) {
  QueuePair* const qp = find(guest.qps, request.qp);
  if (qp == nullptr) return Errno{EINVAL};
  auto& core = qp->core;
  core.attributes.state = static_cast<std::uint32_t>(core.state);
  const QpState before = core.state;
  const auto modified = engine::modify(core.type, core.attributes, request.attributes, request.mask, limits_of(guest));
  if (!modified) return modified.error();
  core.state = static_cast<QpState>(core.attributes.state);
  if (core.state == QpState::reset) {
    shard_.engine().reset(core, request.send_position, request.receive_position);
    qp->watch_sends(true);
    qp->watch_receives(false);
  } else {
    shard_.engine().entered(core, before);
  }
  connected_elsewhere();
  if (core.state != QpState::reset) shard_.make_runnable(core);
  return ModifyQpReply{static_cast<std::uint32_t>(core.state), 0};
}

template <>
Result<QueryQpReply> ControlDesk::on<Request::query_qp>(Guest& guest, const HandleRequest& request) {
  QueuePair* const qp = find(guest.qps, request.handle);
  if (qp == nullptr) return Errno{EINVAL};
  QueryQpReply reply{qp->core.attributes};
  reply.attributes.state = reply.attributes.cur_state = static_cast<std::uint32_t>(qp->core.state);
  if (qp->core.state >= QpState::rtr && qp->core.type != QpType::ud) reply.attributes.rq_psn = qp->core.expected_psn.value;
  if (qp->core.state >= QpState::rts) reply.attributes.sq_psn = qp->core.send_psn.value;
  reply.attributes.sq_draining = qp->core.state == QpState::sqd && !qp->core.drain_reported ? 1 : 0;
  return reply;
}

void ControlDesk::destroy(Guest& guest, QueuePair& qp) {
  shard_.engine().abandon(qp.core);
  shard_.forget(qp.core);
  guest.totals += qp.core.counters;
  fabric_.by_qpn.erase(qp.core.qpn.value);
  for (auto group = fabric_.multicast.begin(); qp.mcast_groups != 0 && group != fabric_.multicast.end();) {
    auto& members = group->second;
    members.erase(std::remove(members.begin(), members.end(), &qp), members.end());
    group = members.empty() ? fabric_.multicast.erase(group) : std::next(group);
  }
  connected_elsewhere();
  const auto leave = [&qp](CompletionQueue& cq, std::uint32_t lane) {
    cq.users.erase(std::find(cq.users.begin(), cq.users.end(), &qp));
    cq.free_lanes.push_back(lane);
  };
  leave(*qp.send_cq, qp.send_lane);
  leave(*qp.receive_cq, qp.receive_lane);
  if (qp.srq != nullptr) --qp.srq->users;
  --qp.pd->users;
  guest.by_doorbell[qp.doorbell] = nullptr;
  guest.free_doorbells.push_back(qp.doorbell);
  uncarve(guest, qp.send_offset);
  uncarve(guest, qp.receive_offset);
  --guest.tenant->objects;
  guest.qps.erase(qp.handle.value);
}

template <>
Result<Empty> ControlDesk::on<Request::destroy_qp>(Guest& guest, const HandleRequest& request) {
  QueuePair* const qp = find(guest.qps, request.handle);
  if (qp == nullptr) return Errno{EINVAL};
  if (qp->mcast_groups != 0) return Errno{EBUSY};
  destroy(guest, *qp);
  return Empty{};
}

// --- multicast ------------------------------------------------------------------------------------------------

template <>
Result<Empty> ControlDesk::on<Request::attach_mcast>(Guest& guest, const McastRequest& request) {
  QueuePair* const qp = find(guest.qps, request.qp);
  if (qp == nullptr || qp->core.type != QpType::ud || request.gid[0] != 0xff) return Errno{EINVAL};
  const auto existing = fabric_.multicast.find(request.gid);
  if (existing == fabric_.multicast.end() && fabric_.multicast.size() >= limits::mcast_groups_max) return Errno{ENOMEM};
  auto& members = fabric_.multicast[request.gid];
  if (std::find(members.begin(), members.end(), qp) != members.end()) return Empty{};
  if (members.size() >= limits::mcast_qp_attach_max) return Errno{ENOMEM};
  members.push_back(qp);
  ++qp->mcast_groups;
  return Empty{};
}

template <>
Result<Empty> ControlDesk::on<Request::detach_mcast>(Guest& guest, const McastRequest& request) {
  QueuePair* const qp = find(guest.qps, request.qp);
  const auto group = fabric_.multicast.find(request.gid);
  if (qp == nullptr || group == fabric_.multicast.end()) return Errno{EINVAL};
  auto& members = group->second;
  const auto member = std::find(members.begin(), members.end(), qp);
  if (member == members.end()) return Errno{EINVAL};
  members.erase(member);
  --qp->mcast_groups;
  if (members.empty()) fabric_.multicast.erase(group);
  return Empty{};
}

// --- VMCI between guests --------------------------------------------------------------------------------------

template <>
Result<PortReply> ControlDesk::on<Request::bind_port>(Guest& guest, const BindPortRequest& request) {
  return fabric_.vmci.bind(guest, request);
}

template <>
Result<Empty> ControlDesk::on<Request::unbind_port>(Guest& guest, const PortRequest& request) {
  const auto unbound = fabric_.vmci.unbind(guest, request.port);
  if (!unbound) return unbound.error();
  return Empty{};
}

template <>
Result<Empty> ControlDesk::on<Request::queue_pair_detach>(Guest& guest, const QueuePairHandle& handle) {
  const auto detached = fabric_.vmci.detach(guest, handle);
  if (!detached) return detached.error();
  return Empty{};
}

}  // namespace vrdma::svc
