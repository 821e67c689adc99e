// Backings, memory regions, and how memory without a backing is reached.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/control/find.hpp"
#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vrdma/access.hpp"
#include "vrdma/limits.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::svc {

using namespace control;

namespace {
constexpr std::uint32_t backings_max = 65536;  // of a guest, at a time
}

// Not one that peers were ever lent a file by: who sends nothing has not let go of it yet.
std::uint32_t ControlDesk::new_backing(Guest& guest) {
  const auto is_taken = [&](std::uint32_t number) { return guest.backings.contains(number) || shard_.direct().is_lent(guest, number); };
  const std::uint32_t tries_max = shard_.direct().has_lent_all(guest) ? 1 : backings_max + 1;
  if (const auto number = guest.backing_numbers.take(tries_max, is_taken)) return *number;
  return guest.further_backing_numbers.take(backings_max + 1, [&](std::uint32_t number) { return guest.backings.contains(number); }).value();
}

Result<AddBackingReply> ControlDesk::on(Guest& guest, const AddBackingRequest& request, vmci::UniqueFd fd) {
  if (guest.backings.size() >= backings_max) return Errno{EMFILE};
  auto backing = Backing::adopt(std::move(fd));
  if (!backing) return backing.error();
  if (!guest.tenant->take_descriptors(1)) return Errno{EDQUOT};
  const std::uint32_t number = new_backing(guest);
  guest.backings.emplace(number, std::move(*backing));
  if ((request.flags & backing_window) != 0) guest.window_backing = number;
  return AddBackingReply{number, 0};
}

Result<AddBackingReply> ControlDesk::on(Guest& guest, const AddPinnedRequest& request, PinnedPages pages) {
  const std::uint64_t before = request.address % vm::page_bytes;
  if (request.bytes == 0 || request.bytes > pages.bytes() || before > pages.bytes() - request.bytes) return Errno{EINVAL};
  if (guest.backings.size() >= backings_max) return Errno{EMFILE};
  if (!guest.tenant->take_descriptors(1)) return Errno{EDQUOT};
  const std::uint32_t number = new_backing(guest);
  guest.backings.emplace(number, Backing::adopt(std::move(pages)));
  return AddBackingReply{number, 0};
}

Status ControlDesk::on(Guest& guest, const RemoveBackingRequest& request) {
  const auto found = guest.backings.find(request.backing);
  if (found == guest.backings.end()) return Errno{EINVAL};
  if (found->second.in_use()) return Errno{EBUSY};
  guest.backings.erase(found);
  if (request.backing == guest.window_backing) guest.window_backing = 0;
  --guest.tenant->descriptors;
  return ok();
}

Status ControlDesk::ask_how_reached(Guest& guest, const ReachProcessRequest& request, std::function<void(bool)> answer) {
  // Who had no descriptor free for what was given, or no memory to map it, asks again.
  if (guest.copier) return answer(false), ok();
  if (guest.asked_how_reached) return Errno{EALREADY};
  guest.asked_how_reached = true;
  guest.probe = request;
  if (guest.machine) return answer(false), ok();
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

namespace {
Status make_copier(Guest& guest, JobSink& sink) {
  if (guest.machine && !guest.machine->copier_segment) return Errno{EINVAL};
  Tenant& tenant = *guest.tenant;
  if (tenant.queue_bytes + copying::segment_bytes > tenant.quota.queue_bytes || !tenant.take_descriptors(1)) return Errno{EDQUOT};
  const std::uint32_t doorbell = guest.take_doorbell();
  auto copier = guest.machine ? GuestCopier::over(std::exchange(guest.machine->copier_segment, {}), doorbell, sink) : GuestCopier::create(doorbell, sink);
  if (!copier) {
    --tenant.descriptors;
    guest.free_doorbells.push_back(doorbell);
    return copier.error();
  }
  tenant.queue_bytes += copying::segment_bytes;
  guest.process.close();
  guest.copier = std::move(*copier);
  return ok();
}

// The descriptor that the guest gets: of the segment, or in a machine of a pipe that wakes its thread, in place of the one before.
Result<vmci::UniqueFd> handle_of(GuestCopier& copier, bool in_machine) {
  if (!in_machine) {
    vmci::UniqueFd fd(::fcntl(copier.fd(), F_DUPFD_CLOEXEC, 0));
    if (!fd) return last_error();
    return fd;
  }
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return last_error();
  copier.wake_by(vmci::UniqueFd(ends[1]));
  return vmci::UniqueFd(ends[0]);
}
}  // namespace

Result<ReachProcessReply> ControlDesk::reach(Guest& guest, bool by_service, std::vector<vmci::UniqueFd>& give) {
  guest.reached_by_service = by_service;
  if (by_service) return ReachProcessReply{reach_by_service, 0};
  if (!guest.copier)
    if (const Status made = make_copier(guest, fabric_.shards); !made) return guest.asked_how_reached = false, made.error();
  auto handle = handle_of(*guest.copier, guest.machine != nullptr);
  if (!handle) return handle.error();
  give.push_back(std::move(*handle));
  return ReachProcessReply{reach_by_guest, guest.copier->doorbell()};
}

template <>
Result<Empty> ControlDesk::on<Request::stage_extents>(Guest& guest, const StageExtentsRequest& request) {
  Tenant& tenant = *guest.tenant;
  if (request.clear_first) guest.drop_staged(), guest.staged_too_many = false;
  if (request.count > stage_extents_max || guest.staged.size() + request.count > (1u << 20)) return Errno{EINVAL};
  if (guest.staged_too_many || request.count > tenant.quota.pieces - std::min<std::uint64_t>(tenant.pieces, tenant.quota.pieces))
    return guest.drop_staged(), guest.staged_too_many = true, Errno{EDQUOT};
  guest.staged.insert(guest.staged.end(), request.extents, request.extents + request.count);
  tenant.pieces += request.count;
  return Empty{};
}

// Turns what the guest staged into pieces that cover [address, address + bytes) without a gap, mapping what has a backing.
Result<std::vector<Piece>> ControlDesk::pieces_of(Guest& guest, std::uint64_t address, std::uint64_t bytes) {
  const std::vector<Extent> extents = guest.take_staged();
  if (std::exchange(guest.staged_too_many, false)) return Errno{EDQUOT};
  std::vector<Piece> pieces;
  pieces.reserve(std::min<std::size_t>(extents.size(), guest.tenant->quota.pieces));
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
      if (!guest.reached_by_service && !guest.copier) {  // it has not shown yet that the process is its own
        failed = Errno{EINVAL};
        break;
      }
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
      const std::uint64_t part = backing->second.contiguous_bytes(offset, extent.bytes - done);
      const std::size_t mapped_before = backing->second.mapping_count();
      if (guest.tenant->mappings >= guest.tenant->quota.mappings || fabric_.mappings >= fabric_.mappings_max || full()) {
        failed = Errno{EDQUOT};
        break;
      }
      auto host = backing->second.get(offset, part);
      if (!host) {
        failed = host.error();
        break;
      }
      const std::size_t more = backing->second.mapping_count() - mapped_before;
      guest.tenant->mappings += more;
      fabric_.mappings += more;
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

void ControlDesk::release_pieces(Guest& guest, const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    if (piece.host == nullptr) continue;
    const auto backing = guest.backings.find(piece.backing);
    if (backing == guest.backings.end()) continue;
    const std::size_t mapped_before = backing->second.mapping_count();
    backing->second.put(piece.backing_offset);
    const std::size_t fewer = mapped_before - backing->second.mapping_count();
    guest.tenant->mappings -= fewer;
    fabric_.mappings -= fewer;
  }
}

namespace {
std::uint64_t bytes_max(std::uint32_t access) { return Region::on_demand(access) ? limits::mr_bytes_on_demand_max : limits::mr_bytes_max; }
// On demand: of no file, which would be held.
bool staged_ok(const Guest& guest, std::uint32_t access) {
  return !Region::on_demand(access) || std::ranges::all_of(guest.staged, [](const Extent& extent) { return extent.backing == backing_process; });
}
bool rights_ok(std::uint32_t access) { return (access & ~access_known) == 0 && access_is_consistent(access); }
}  // namespace

template <>
Result<RegMrReply> ControlDesk::on<Request::reg_mr>(Guest& guest, const RegMrRequest& request) {
  ProtectionDomain* const pd = find(guest.pds, request.pd);
  if (pd == nullptr || request.bytes == 0 || request.bytes > bytes_max(request.access) || !rights_ok(request.access) || !staged_ok(guest, request.access) ||
      request.address + request.bytes < request.address || request.iova + request.bytes < request.iova)
    return guest.drop_staged(), Errno{EINVAL};
  Tenant& tenant = *guest.tenant;
  if (guest.mrs.size() >= limits::mr_max || !fabric_.regions.make_room()) return guest.drop_staged(), Errno{ENOMEM};
  const std::uint64_t held = Region::on_demand(request.access) ? 0 : request.bytes;
  if (held > tenant.quota.registered_bytes - std::min(tenant.registered_bytes, tenant.quota.registered_bytes) ||
      !tenant.take_object())
    return guest.drop_staged(), Errno{EDQUOT};
  auto pieces = pieces_of(guest, request.address, request.bytes);
  if (!pieces) return --tenant.objects, pieces.error();
  std::uint32_t slot;
  Region& region = fabric_.regions.add(slot);
  region.pd = pd->number;
  region.domain = pd;
  region.guest = &guest;
  region.access = request.access;
  region.iova = request.iova;
  region.bytes = request.bytes;
  region.address = request.address;
  region.pieces = std::move(*pieces);
  tenant.pieces += region.pieces.size();
  tenant.registered_bytes += held;
  ++pd->users;
  const std::uint32_t handle = guest.new_handle();
  guest.mrs.emplace(handle, slot);
  shard_.direct().registered(guest, region);
  return RegMrReply{handle, region.key.value};
}

namespace {
HcaDesk::Forgotten forget_at_hca(Fabric& fabric, std::uint32_t slot) {
  HcaDesk* const hca = fabric.far != nullptr ? fabric.far->hca() : nullptr;
  return hca != nullptr ? hca->forget_region(slot) : HcaDesk::Forgotten::yes;
}
}  // namespace

template <>
Result<RegMrReply> ControlDesk::on<Request::rereg_mr>(Guest& guest, const ReregMrRequest& request) {
  constexpr std::uint32_t change_translation = 1, change_pd = 2, change_access = 4;
  const auto found = guest.mrs.find(request.mr);
  if (found == guest.mrs.end()) return guest.drop_staged(), Errno{EINVAL};
  Region& region = fabric_.regions.slot(found->second);
  if (region.windows != 0) return guest.drop_staged(), Errno{EBUSY};
  const bool on_demand = Region::on_demand(region.access);
  if ((request.flags & change_access) && Region::on_demand(request.access) != on_demand) return guest.drop_staged(), Errno{EINVAL};
  region.leaving = region.jobs != 0;
  if (region.leaving || !shard_.direct().take_back(guest)) return Errno{EINPROGRESS};
  // Its key stays: other hosts have to ask anew which one the HCA has for it.
  if (const auto forgotten = forget_at_hca(fabric_, found->second); forgotten == HcaDesk::Forgotten::held || (forgotten == HcaDesk::Forgotten::known && may_wait(guest)))
    return Errno{EINPROGRESS};
  ProtectionDomain* const pd = (request.flags & change_pd) ? find(guest.pds, request.pd) : nullptr;
  if (((request.flags & change_pd) && (pd == nullptr || pd->context != region.domain->context)) || ((request.flags & change_access) && !rights_ok(request.access)))
    return guest.drop_staged(), Errno{EINVAL};
  if (request.flags & change_translation) {
    if (request.bytes == 0 || request.bytes > bytes_max(region.access) || !staged_ok(guest, region.access) || request.address + request.bytes < request.address ||
        request.iova + request.bytes < request.iova)
      return guest.drop_staged(), Errno{EINVAL};
    const Tenant& tenant = *guest.tenant;
    if (!on_demand && request.bytes > region.bytes && request.bytes - region.bytes > tenant.quota.registered_bytes - std::min(tenant.registered_bytes, tenant.quota.registered_bytes))
      return guest.drop_staged(), Errno{EDQUOT};
    auto pieces = pieces_of(guest, request.address, request.bytes);
    if (!pieces) return pieces.error();
    guest.tenant->pieces += pieces->size() - region.pieces.size();
    release_pieces(guest, region.pieces);
    shard_.direct().released(guest, region.pieces);
    region.pieces = std::move(*pieces);
    if (!on_demand) guest.tenant->registered_bytes += request.bytes - region.bytes;
    region.address = request.address;
    region.iova = request.iova;
    region.bytes = request.bytes;
  }
  if (request.flags & change_pd) {
    --region.domain->users;
    ++pd->users;
    region.domain = pd;
    region.pd = pd->number;
  }
  if (request.flags & change_access) region.access = request.access;
  fabric_.regions.renew(found->second);
  shard_.direct().deregistering(guest, region);
  shard_.direct().registered(guest, region);
  shard_.direct().hand_out(guest);
  return RegMrReply{request.mr, region.key.value};
}

// False: a worker has bytes of it under way, or an HCA has it. force: the guest itself goes; its worker's last writes hurt nobody else.
bool ControlDesk::destroy_region(Guest& guest, std::uint32_t handle, bool force) {
  const auto found = guest.mrs.find(handle);
  Region& region = fabric_.regions.slot(found->second);
  region.leaving = true;
  if (region.jobs != 0 && !force) return false;
  if (forget_at_hca(fabric_, found->second) == HcaDesk::Forgotten::held && !force) return false;
  shard_.direct().deregistering(guest, region);
  guest.tenant->pieces -= region.pieces.size();
  release_pieces(guest, region.pieces);
  if (!force) shard_.direct().released(guest, region.pieces);
  region.pieces.clear();
  --region.domain->users;
  guest.tenant->registered_bytes -= region.bytes_held();
  --guest.tenant->objects;
  fabric_.regions.remove(found->second);
  guest.mrs.erase(found);
  return true;
}

template <>
Result<Empty> ControlDesk::on<Request::dereg_mr>(Guest& guest, const HandleRequest& request) {
  const auto found = guest.mrs.find(request.handle);
  if (found == guest.mrs.end()) return Errno{EINVAL};
  if (fabric_.regions.slot(found->second).windows != 0) return Errno{EBUSY};
  if (!shard_.direct().take_back(guest) || !destroy_region(guest, request.handle, false)) return Errno{EINPROGRESS};
  shard_.direct().hand_out(guest);
  return Empty{};
}

}  // namespace vrdma::svc
