// Guests come and go; their contexts, channels and protection domains; their VMCI ports.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/mad/management.hpp"
#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/control/find.hpp"
#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/eventfd_signal.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/pkeys.hpp"
#include "vmkernel_svc/users.hpp"
#include "vrdma/fault.hpp"
#include "vrdma/limits.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::svc {

using namespace control;

namespace {

// Socket twice, pidfd twice, duplicate of the socket, arena, doorbell, pipe; and another pidfd for direct mode.
std::uint32_t guest_descriptors(const Config& config) { return config.direct == "auto" ? 9 : 8; }
constexpr std::uint32_t control_slots = 256;        // 16 KiB of requests: one of 4 KiB always fits
constexpr std::uint32_t control_reply_slots = 1024;  // of replies, notices and datagrams (guest_mail.hpp)

// Whose programs hold up nobody else: he has this service to himself, or its memory is that of a machine, of which we are the reader.
bool is_trusted(const Tenant& tenant, bool in_machine) { return in_machine || (tenant.uid == ::geteuid() && !tenant.several_users); }

// What is written to the second is read from the first. The reading end blocks (its owner decides); ours does not. For strangers a socket pair, which
// costs half a microsecond a record more: in a pipe its reader, who may be reading into memory that never comes (FUSE, userfaultfd), holds what a
// writer waits for, O_NONBLOCK or not, and who closes. Nobody can send anything to our end, no descriptors either.
Result<std::pair<vmci::UniqueFd, vmci::UniqueFd>> make_pipe(bool trusted) {
  int ends[2];
  if ((trusted ? ::pipe2(ends, O_CLOEXEC) : ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) != 0) return last_error();
  vmci::UniqueFd read_end(ends[0]), write_end(ends[1]);
  if (!trusted && ::shutdown(write_end.get(), SHUT_RD) != 0) return last_error();
  if (::fcntl(write_end.get(), F_SETFL, O_NONBLOCK) != 0) return last_error();
  return std::pair{std::move(read_end), std::move(write_end)};
}
Result<std::pair<vmci::UniqueFd, vmci::UniqueFd>> make_pipe(const Guest& guest) { return make_pipe(is_trusted(*guest.tenant, guest.machine != nullptr)); }

// For a context or a channel of a guest, which is then charged for it.
Result<std::pair<vmci::UniqueFd, vmci::UniqueFd>> take_pipe(Guest& guest) {
  if (!guest.take_pipe()) return Errno{EDQUOT};
  if (!guest.tenant->take_object()) return guest.give_pipe(), Errno{EDQUOT};
  auto pipe = make_pipe(guest);
  if (!pipe) guest.give_pipe(), --guest.tenant->objects;
  return pipe;
}

// A pipe that whoever has it reads and writes, and that never ends. Empty where it cannot be had.
vmci::UniqueFd make_endless_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return {};
  const vmci::UniqueFd read_end(ends[0]), write_end(ends[1]);
  return vmci::UniqueFd(::open(fmt::format("/proc/self/fd/{}", read_end.get()).c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
}

}  // namespace

Result<AttachReply> ControlDesk::attach(const AttachRequest& request, AttachInfo info, int service_page_fd,
                                        std::vector<int>& descriptors, std::vector<vmci::UniqueFd>& keep) {
  if (request.link_layer > link_layer_ethernet) return Errno{EINVAL};
  const auto [known, is_new] = fabric_.tenants.try_emplace(info.credentials.uid, Tenant{info.credentials.uid, fabric_.config.quota});
  auto& tenant = known->second;
  if (is_new) {
    give_pkeys(fabric_, tenant);
    tenant.several_users = may_be_several(tenant.uid);
    if (tenant.several_users)
      log::warn("uid {} may be several users, whom this service's user namespace does not map: they share one quota and its partitions, and none sees "
                "guests of another process; map them (newuidmap, the engine's --userns), or run vrdmad outside of the namespace", tenant.uid);
  }
  if (!tenant.has_room_for_guest() || tenant.descriptors + guest_descriptors(fabric_.config) > tenant.quota.descriptors) return Errno{EDQUOT};
  if (info.machine && !fabric_.has_room_for_arena(tenant, info.machine->arena_parts)) {
    log::warn("machine {}: the queues of a program lie in {} pieces of its RAM, and the service maps no more (sysctl vm.max_map_count)", info.machine->name, info.machine->arena_parts);
    return Errno{EDQUOT};
  }
  auto arena = info.machine ? Result<Arena>(Arena::over(std::move(info.arena))) : Arena::create(fabric_.config.arena_bytes);
  if (!arena) return arena.error();
  auto wake = make_pipe(is_trusted(tenant, info.machine != nullptr));
  if (!wake) return wake.error();
  // A machine's doorbell is one for all its processes: its port has the shard watch that.
  vmci::UniqueFd doorbell(info.machine ? -1 : ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!doorbell && !info.machine) return last_error();
  const auto number = fabric_.guest_numbers.take(static_cast<std::uint32_t>(fabric_.guests.size()) + 1, [&](std::uint32_t taken) { return fabric_.guests.contains(taken); });
  if (!number) return Errno{EDQUOT};
  const std::uint16_t lid = fabric_.new_lid(tenant.uid);
  if (lid == 0) return Errno{EADDRNOTAVAIL};

  VRDMA_CRASH_POINT("service.attach.prepared");
  auto guest = std::make_unique<Guest>();
  guest->id = GuestId{*number};
  guest->tenant = &tenant;
  guest->credentials = info.credentials;
  guest->machine = std::move(info.machine);
  guest->lid = lid;
  guest->arena = std::move(*arena);
  guest->wake_pipe = std::move(wake->second);
  guest->doorbell_fd = std::move(doorbell);
  guest->socket = std::move(info.socket);
  guest->minor = request.minor;
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
  if (!control_at || !doorbell_at) return fabric_.lids.give_back(lid), Errno{ENOMEM};
  guest->control = vmci::QueuePairView(guest->arena.segment().data() + *control_at, geometry);
  guest->requests = vmci::RecordReader(guest->control.produce(), control_slots);
  guest->replies = vmci::RecordWriter(guest->control.consume_records(), control_reply_slots);
  guest->control.header().attacher.needs_doorbell = 1;
  guest->doorbell = vmci::ReadyBitmap(guest->arena.segment().at<vmci::ReadyWords>(*doorbell_at));
  guest->by_doorbell.push_back(nullptr);  // 0: the control pair
  if (fabric_.config.process_memory != "guest" && !guest->machine) guest->process.open(info.credentials, info.pidfd, fabric_.shards, tenant.workers);
  if (fabric_.config.direct == "auto") guest->pidfd = std::make_shared<vmci::UniqueFd>(std::move(info.pidfd));

  fabric_.shards.place(*guest);
  if (const auto added = guest->group->shard->add(*guest); !added) return fabric_.shards.remove(*guest), fabric_.lids.give_back(lid), added.error();

  AttachReply reply{};
  reply.major = version_major;
  reply.minor = version_minor;
  reply.guest = guest->id.value;
  reply.shard = static_cast<std::uint16_t>(guest->line);
  reply.arena_bytes = guest->arena.segment().bytes();
  reply.control_offset = *control_at;
  reply.control_geometry = geometry;
  reply.doorbell_offset = *doorbell_at;
  reply.service_pid = ::getpid();
  std::memcpy(reply.name, guest->name.data(), std::min(guest->name.size(), sizeof(reply.name) - 1));
  std::strncpy(reply.service_version, VRDMA_VERSION, sizeof(reply.service_version) - 1);
  if (guest->machine)  // the rest, its agent has made itself
    descriptors = {wake->first.get()};
  else
    descriptors = {guest->arena.segment().fd(), service_page_fd, guest->doorbell_fd.get(), wake->first.get()};
  keep.push_back(std::move(wake->first));

  if (guest->machine) tenant.arena_parts += guest->machine->arena_parts, fabric_.mappings += guest->machine->arena_parts;
  ++tenant.guests;
  tenant.descriptors += guest_descriptors(fabric_.config);
  fabric_.guests.emplace(guest->id.value, std::move(guest));
  VRDMA_CRASH_POINT("service.attach.added");
  return reply;
}

void ControlDesk::end(Guest& guest) {
  if (std::exchange(guest.ended, true)) return;
  VRDMA_CRASH_POINT("service.detach.begun");
  vmci::UniqueFd(guest.socket.release()).reset();  // the server has another copy
  // At once, whatever else it leaves: its ports, listeners and connections.
  fabric_.vmci.leave(guest);
  fabric_.cm->leave(guest);
  fabric_.management->leave(guest);
}

bool ControlDesk::detach(Guest& guest, std::uint64_t for_ns) {
  end(guest);
  if (!clear_out(guest, std::nullopt, for_ns)) return false;
  while (!guest.contexts.empty()) forget_context(guest, guest.contexts.begin()->first);
  VRDMA_CRASH_POINT("service.detach.contexts_closed");
  shard_.direct().forget(guest);
  guest.group->shard->remove(guest);
  fabric_.shards.remove(guest);
  guest.process.close();
  if (guest.copier) {
    guest.copier->close();
    guest.tenant->queue_bytes -= copying::segment_bytes;
    --guest.tenant->descriptors;
  }
  guest.drop_staged();
  fabric_.departed.push_front(
      {guest.id, guest.name, guest.credentials, guest.lid, guest.requests_served, guest.totals});
  if (fabric_.departed.size() > 256) fabric_.departed.pop_back();
  if (guest.machine) guest.tenant->arena_parts -= guest.machine->arena_parts, fabric_.mappings -= guest.machine->arena_parts;
  --guest.tenant->guests;
  guest.tenant->descriptors -= guest_descriptors(fabric_.config) + static_cast<std::uint32_t>(guest.backings.size());
  fabric_.lids.give_back(guest.lid);
  ++fabric_.topology_generation;
  fabric_.guests.erase(guest.id.value);
  return true;
}

// --- contexts, channels, protection domains -------------------------------------------------------------------

Result<OpenContextReply> ControlDesk::on(Guest& guest, const OpenContextRequest&, std::vector<vmci::UniqueFd>& give) {
  auto pipe = take_pipe(guest);
  if (!pipe) return pipe.error();
  const std::uint32_t handle = guest.new_handle();
  guest.contexts.emplace(handle, std::make_unique<Context>(Context{handle, std::move(pipe->second), {}}));
  give.push_back(std::move(pipe->first));
  return OpenContextReply{handle, 0};
}

Result<ChannelReply> ControlDesk::on(Guest& guest, const CreateChannelRequest& request, std::vector<vmci::UniqueFd>& give) {
  if (find(guest.contexts, request.context) == nullptr) return Errno{EINVAL};
  const Interrupts* const interrupts = guest.machine ? guest.machine->interrupts.get() : nullptr;
  const std::uint32_t vector = interrupts != nullptr ? request.interrupt : 0;
  if (vector != 0 && (vector < vm::fixed_vectors || vector >= interrupts->size())) return Errno{EINVAL};
  auto pipe = take_pipe(guest);
  if (!pipe) return pipe.error();
  const std::uint32_t handle = guest.new_handle();
  auto channel = std::make_unique<Channel>(Channel{{handle}, request.context, std::move(pipe->second), 0, {}});
  // Where it finds no room, the pipe does.
  if (const auto offset = vector != 0 && can_signal_eventfds() ? carve(guest, sizeof(EventRing)) : Result<std::uint64_t>(Errno{ENOTSUP})) {
    channel->ring = vmci::EventRingWriter(guest.arena.segment().at<EventRing>(*offset));
    channel->ring_offset = *offset;
    channel->interrupt = (*interrupts)[vector].get();
  }
  const ChannelReply reply{handle, static_cast<std::uint32_t>(channel->ring_offset / ring_unit_bytes)};
  give.push_back(std::move(pipe->first));
  if (fabric_.config.direct == "auto" && !guest.machine && guest.minor >= minor_of_direct && guest.take_pipe()) {
    channel->peers = vmci::GivenFd(make_endless_pipe(), guest.socket.closer());
    vmci::UniqueFd copy(channel->peers ? ::fcntl(channel->peers.get(), F_DUPFD_CLOEXEC, 0) : -1);
    if (copy) give.push_back(std::move(copy));
    else channel->peers.reset(), guest.give_pipe();
  }
  guest.channels.emplace(handle, std::move(channel));
  return reply;
}

namespace {
// open(end to write to): whose channel it is to be; then the guest gets the other end.
template <class Open>
auto open_by_pipe(const Guest& guest, std::vector<vmci::UniqueFd>& give, const Open& open) -> decltype(open(vmci::UniqueFd())) {
  auto pipe = make_pipe(guest);
  if (!pipe) return pipe.error();
  auto opened = open(std::move(pipe->second));
  if (opened) give.push_back(std::move(pipe->first));
  return opened;
}
}  // namespace

Result<CmOpenReply> ControlDesk::on_cm_open(Guest& guest, std::vector<vmci::UniqueFd>& give) {
  return open_by_pipe(guest, give, [&](vmci::UniqueFd pipe) { return fabric_.cm->open(guest, std::move(pipe)); });
}

Result<MadOpenReply> ControlDesk::on_mad_open(Guest& guest, std::vector<vmci::UniqueFd>& give) {
  return open_by_pipe(guest, give, [&](vmci::UniqueFd pipe) { return fabric_.management->open(guest, std::move(pipe)); });
}

void ControlDesk::forget_channel(Guest& guest, std::uint32_t handle) {
  const Channel& channel = *guest.channels[handle];
  if (channel.ring) uncarve(guest, channel.ring_offset);
  if (channel.peers) guest.give_pipe();
  guest.channels.erase(handle);
  --guest.tenant->objects;
  guest.give_pipe();
}

template <>
Result<DeviceReply> ControlDesk::on<Request::query_device>(Guest& guest, const Empty&) {
  return device_reply(guest, fabric_.config, fabric_.device_generation);
}

template <>
Result<Empty> ControlDesk::on<Request::share_address>(Guest& guest, const ShareAddressRequest& request) {
  if (request.secret == std::array<std::uint8_t, 16>{}) return Errno{EINVAL};
  const auto has_channel = [&](const auto& one) { return one.second->guest == &guest; };
  if (!guest.contexts.empty() || std::ranges::any_of(fabric_.cm->channels(), has_channel) || !fabric_.management->channels_of(guest).empty())
    return Errno{EBUSY};  // its address is in use
  const auto shared = fabric_.lids.share(request.secret, guest.lid, {guest.guid, guest.link_layer, guest.credentials.uid}, fabric_.may_give_lids());
  if (!shared) return Empty{};
  guest.lid = shared->lid;
  guest.guid = shared->guid;
  guest.gids = gids_of(guest.guid, guest.lid, guest.link_layer);
  static constinit log::Sparing sparing{log::Sparing::lines_of_ordinary_life};
  sparing.info("{} (context {}) has the address of LID {}, as the process that it was forked from", guest.name, guest.id.value, guest.lid);
  return Empty{};
}

template <>
Result<Empty> ControlDesk::on<Request::close_context>(Guest& guest, const HandleRequest& request) {
  for (auto& [handle, qp] : guest.qps)
    if (qp->context == request.handle && !shard_.direct().take_back(*qp)) return Errno{EINPROGRESS};
  if (find(guest.contexts, request.handle) == nullptr) return Errno{EINVAL};
  if (!clear_out(guest, request.handle, slice_ns)) return Errno{EINPROGRESS};
  forget_context(guest, request.handle);
  return Empty{};
}

bool ControlDesk::clear_out(Guest& guest, std::optional<std::uint32_t> context, std::uint64_t for_ns) {
  const auto drop = [&](auto& table, const auto& context_of, const auto& destroy) {
    constexpr std::size_t looked_for_at_once = 4096;  // those of other contexts are passed each time
    for (;;) {
      std::vector<std::uint32_t> handles;
      for (auto at = table.begin(); at != table.end() && handles.size() < looked_for_at_once; ++at)
        if (!context || context_of(at->second) == *context) handles.push_back(at->first);
      if (handles.empty()) return true;
      const std::uint64_t since_ns = vmci::monotonic_ns();
      for (const std::uint32_t handle : handles) {
        if (const auto found = table.find(handle); found != table.end()) destroy(found);  // else what was destroyed has taken it along
        if (vmci::monotonic_ns() - since_ns >= for_ns) return false;
      }
    }
  };
  const auto its_own = [](const auto& object) { return object->context; };
  const auto object = [&](const auto& found) { destroy(guest, *found->second); };
  const auto region = [&](const auto& found) { destroy_region(guest, found->first, true); };
  const auto domain = [&](const auto& found) { guest.pds.erase(found), --guest.tenant->objects; };
  const auto channel = [&](const auto& found) { forget_channel(guest, found->first); };
  const auto of_domain = [&](std::uint32_t slot) { return fabric_.regions.slot(slot).domain->context; };
  return drop(guest.qps, its_own, object) && drop(guest.srqs, its_own, object) && drop(guest.xrcds, its_own, object) && drop(guest.cqs, its_own, object) &&
         drop(guest.mws, its_own, object) && drop(guest.mrs, of_domain, region) && drop(guest.pds, its_own, domain) && drop(guest.channels, its_own, channel);
}

void ControlDesk::forget_context(Guest& guest, std::uint32_t context) {
  guest.contexts.erase(context);
  --guest.tenant->objects;
  guest.give_pipe();
}

template <>
Result<Empty> ControlDesk::on<Request::destroy_channel>(Guest& guest, const HandleRequest& request) {
  Channel* const channel = find(guest.channels, request.handle);
  if (channel == nullptr) return Errno{EINVAL};
  if (channel->users != 0) return Errno{EBUSY};
  forget_channel(guest, request.handle);
  return Empty{};
}

template <>
Result<HandleReply> ControlDesk::on<Request::create_pd>(Guest& guest, const CreatePdRequest& request) {
  if (find(guest.contexts, request.context) == nullptr) return Errno{EINVAL};
  if (guest.pds.size() >= limits::pd_max) return Errno{ENOMEM};
  if (!guest.tenant->take_object()) return Errno{EDQUOT};
  const std::uint32_t handle = guest.new_handle();
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
