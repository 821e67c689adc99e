// Completion queues and shared receive queues.

#include <algorithm>
#include <utility>

#include "vmci_channel/arch.hpp"
#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/control/find.hpp"
#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::svc {

using namespace control;
using engine::QpState;

Result<std::uint64_t> ControlDesk::carve(Guest& guest, std::uint64_t bytes) {
  Tenant& tenant = *guest.tenant;
  if (tenant.queue_bytes + bytes > tenant.quota.queue_bytes) return Errno{EDQUOT};
  const std::uint64_t before = guest.arena.used_bytes();
  auto offset = guest.arena.allocate(bytes);
  if (offset) {
    tenant.queue_bytes += guest.arena.used_bytes() - before;
  } else if (!std::exchange(guest.arena_was_full, true)) {
    const std::uint64_t all = guest.arena.segment().bytes();
    const auto& machine = guest.machine;
    log::warn("{} ({}uid {}, pid {}): {} bytes more of queues do not fit into its {} KiB, of which {} KiB are in use; it is told ENOMEM: raise \"{}\" in "
                 "vrdmad.json, or have it make fewer or shallower queues",
                 guest.name, machine ? "machine " + machine->name + ", " : "", machine ? machine->uid : guest.credentials.uid,
                 machine ? machine->pid : static_cast<std::uint32_t>(guest.credentials.pid), bytes, all >> 10, before >> 10,
                 machine ? "machine_arena_bytes" : "arena_bytes");
  }
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
  cq->handle = Handle{guest.new_handle()};
  cq->context = request.context;
  cq->guest = &guest;
  cq->channel = channel;
  cq->offset = *offset;
  cq->shared = guest.arena.segment().at<CqShared>(*offset);
  std::fill(std::begin(cq->shared->hot), std::end(cq->shared->hot), no_lane);
  cq->ready = vmci::ReadyBitmap(&cq->shared->ready);
  cq->cqe = entries_for(request.cqe);
  if (channel != nullptr) ++channel->users;
  const CreateCqReply reply{cq->handle.value, cq->cqe, *offset};
  guest.cqs.emplace(cq->handle.value, std::move(cq));
  return reply;
}

template <>
Result<Empty> ControlDesk::on<Request::time_cq>(Guest& guest, const HandleRequest& request) {
  CompletionQueue* const cq = find(guest.cqs, request.handle);
  if (cq == nullptr) return Errno{EINVAL};
  if (!cq->users.empty()) return Errno{EBUSY};
  cq->timed = true;
  return Empty{};
}

template <>
Result<ClockReply> ControlDesk::on<Request::read_clock>(Guest& guest, const HandleRequest& request) {
  if (find(guest.contexts, request.handle) == nullptr) return Errno{EINVAL};
  return ClockReply{vmci::monotonic_ns()};
}

// Where completions may be written directly there must be room for those of the receive queue, too, which programs that only read and write
// remote memory leave out.
std::uint32_t ControlDesk::entries_for(std::uint32_t wanted) const {
  return fabric_.config.direct == "auto" ? std::min(limits::cqe_max, std::bit_ceil(wanted + 1)) : wanted;
}

template <>
Result<ResizeCqReply> ControlDesk::on<Request::resize_cq>(Guest& guest, const ResizeCqRequest& request) {
  CompletionQueue* const cq = find(guest.cqs, request.cq);
  if (cq == nullptr || request.cqe == 0 || request.cqe > limits::cqe_max) return Errno{EINVAL};
  if (!shard_.direct().take_back(*cq)) return Errno{EINPROGRESS};
  // Shrinking: what was posted before and is still under way (memory that a worker fetches) counts, if it ends soon.
  if (request.cqe < cq->cqe && may_wait(guest))
    for (const QueuePair* user : cq->users)
      if (user->core.state == QpState::rts && (shard_.engine().busy(user->core) || !user->core.send_ring.empty()))
        return Errno{EINPROGRESS};
  const std::uint32_t outstanding = cq->produced - std::atomic_ref(cq->shared->consumed).load(std::memory_order_acquire);
  if (outstanding <= limits::cqe_max && request.cqe < outstanding) return Errno{EINVAL};
  cq->cqe = entries_for(request.cqe);
  for (QueuePair* const user : cq->users) shard_.direct().consider(*user);  // there may be room for what may be direct, or no more
  return ResizeCqReply{cq->cqe, 0};
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
  const bool turns = fabric_.config.direct == "auto" && !fabric_.config.hca;  // an HCA holds records that it may give back in another order
  const auto turns_offset = turns ? carve(guest, sizeof(direct::Turns)) : Result<std::uint64_t>(0);
  if (!turns_offset) return uncarve(guest, *offset), --guest.tenant->objects, turns_offset.error();
  auto srq = std::make_unique<SharedReceiveQueue>();
  srq->handle = Handle{guest.new_handle()};
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
  if (turns) {
    srq->turns_offset = *turns_offset;
    srq->core.turns = vmci::RecordTurns(guest.arena.segment().at<direct::Turns>(*turns_offset));
    srq->core.turns.set_limit(request.srq_limit);
  }
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
    srq->core.taken = srq->core.taken_now();  // what is taken from here on counts
    if (srq->core.turns) srq->core.turns.set_limit(request.srq_limit);
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
  if (srq.core.turns) uncarve(guest, srq.turns_offset);
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

}  // namespace vrdma::svc
