// Memory windows (IBA 10.6.7): keys to a part of a region, with rights of their own, that are given and taken back by work requests, in their
// turn (engine: OpcodeRule::local). Older guests have them carried out by a request of this channel before they post them.
#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/control/find.hpp"
#include "vrdma/access.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::svc {

using namespace control;

namespace {
constexpr std::uint32_t type_1 = 1, type_2 = 2;

// What is posted in another state is flushed, and does nothing.
bool may_bind(const QueuePair& qp) {
  using engine::QpState, engine::QpType;
  const bool posts = qp.core.type == QpType::rc || qp.core.type == QpType::uc || qp.core.type == QpType::xrc_send;
  return posts && (qp.core.state == QpState::rts || qp.core.state == QpState::sqd);
}
}  // namespace

template <>
Result<RegMrReply> ControlDesk::on<Request::alloc_mw>(Guest& guest, const AllocMwRequest& request) {
  ProtectionDomain* const pd = find(guest.pds, request.pd);
  if (pd == nullptr || (request.type != type_1 && request.type != type_2)) return Errno{EINVAL};
  if (guest.mws.size() >= limits::mw_max || !fabric_.regions.make_room()) return Errno{ENOMEM};
  if (!guest.tenant->take_object()) return Errno{EDQUOT};
  std::uint32_t slot;
  Region* const region = fabric_.regions.add_window(slot);
  if (region == nullptr) return --guest.tenant->objects, Errno{ENOMEM};
  region->pd = pd->number;
  region->guest = &guest;
  ++pd->users;
  const std::uint32_t handle = guest.new_handle();
  guest.mws.emplace(handle, std::make_unique<MemoryWindow>(MemoryWindow{{handle}, pd->context, pd, slot, request.type == type_2}));
  return RegMrReply{handle, region->key.value};
}

// A copy that somebody's worker has under way by this window ends before nobody may reach anything by it any more. Somebody else's memory may be
// slow: then it is called off.
bool ControlDesk::must_wait_for_worker(Guest& guest, std::uint32_t slot, std::uint64_t waiting_since_ns) {
  const RegionRef window{slot, fabric_.regions.slot(slot).generation};
  if (shard_.ports().is_reached_by(window)) {
    if (may_wait_on(waiting_since_ns)) return true;
    shard_.ports().cut_off(window);
  }
  return shard_.ports().last_step_ns(guest, window) != 0 && may_wait_on(waiting_since_ns, MediatedPorts::last_step_max_ns);
}

// Of whatever queue pair it was.
void ControlDesk::leave_queue_pair(const MemoryWindow& window) {
  if (const auto qp = fabric_.by_qpn.find(window.bound_to); qp != fabric_.by_qpn.end()) qp->second->bound_windows.erase(window.slot);
}

void ControlDesk::destroy(Guest& guest, MemoryWindow& window) {
  leave_queue_pair(window);
  fabric_.regions.remove(window.slot);
  --window.pd->users;
  --guest.tenant->objects;
  guest.mws.erase(window.handle.value);
}

template <>
Result<Empty> ControlDesk::on<Request::dealloc_mw>(Guest& guest, const HandleRequest& request) {
  MemoryWindow* const window = find(guest.mws, request.handle);
  if (window == nullptr) return Errno{EINVAL};
  if (must_wait_for_worker(guest, window->slot, guest.held_since_ns)) return Errno{EINPROGRESS};
  destroy(guest, *window);
  return Empty{};
}

Result<Empty> ControlDesk::bind(Guest& guest, QueuePair& qp, const BindMwRequest& request, std::uint64_t waiting_since_ns) {
  MemoryWindow* const window = find(guest.mws, request.mw);
  if (window == nullptr || qp.pd != window->pd || !may_bind(qp)) return Errno{EINVAL};
  Region& bound = fabric_.regions.slot(window->slot);
  if (must_wait_for_worker(guest, window->slot, waiting_since_ns)) return Errno{EINPROGRESS};
  if (request.mr == 0 || request.bytes == 0) {
    if (window->of_queue_pair) return Errno{EINVAL};  // IBA o10-37.2.40
    fabric_.regions.unbind_window(bound);
    return Empty{};
  }
  if (window->of_queue_pair && bound.window_generation != 0) return Errno{EBUSY};  // IBA 10.6.7.2.2: it has to be invalidated first
  const auto mr = guest.mrs.find(request.mr);
  if (mr == guest.mrs.end()) return Errno{EINVAL};
  const Region& region = fabric_.regions.slot(mr->second);
  if (region.leaving) return Errno{EINVAL};
  if (region.pd != bound.pd || (region.access & access_mw_bind) == 0) return Errno{EACCES};
  const std::uint32_t rights = request.access & access_remote_any;
  if (!access_is_consistent(rights | (region.access & access_local_write))) return Errno{EACCES};
  if ((request.access & access_zero_based) != 0 && !window->of_queue_pair) return Errno{EINVAL};
  const std::uint64_t offset = request.address - region.iova;
  if (request.address < region.iova || offset > region.bytes || request.bytes > region.bytes - offset) return Errno{EFAULT};
  fabric_.regions.bind_window(window->slot, Key{request.key}, rights, (request.access & access_zero_based) != 0 ? 0 : request.address, request.bytes, mr->second,
                              offset, window->of_queue_pair ? qp.core.qpn.value : 0);
  if (!window->of_queue_pair) return Empty{};
  if (window->bound_to != qp.core.qpn.value) leave_queue_pair(*window);
  window->bound_to = qp.core.qpn.value;
  qp.bound_windows.insert(window->slot);
  return Empty{};
}

template <>
Result<Empty> ControlDesk::on<Request::bind_mw>(Guest& guest, const BindMwRequest& request) {
  QueuePair* const qp = find(guest.qps, request.qp);
  return qp != nullptr ? bind(guest, *qp, request, guest.held_since_ns) : Errno{EINVAL};
}

Result<Empty> ControlDesk::invalidate(Guest& guest, const QueuePair& qp, Key key, std::uint64_t waiting_since_ns) {
  if (!may_bind(qp)) return Errno{EINVAL};
  if (const auto slot = fabric_.regions.find(key); slot && fabric_.regions.slot(*slot).guest == &guest && must_wait_for_worker(guest, *slot, waiting_since_ns))
    return Errno{EINPROGRESS};
  if (!fabric_.regions.invalidate_window(key, qp.pd->number, qp.core.qpn.value)) return Errno{EINVAL};
  return Empty{};
}

template <>
Result<Empty> ControlDesk::on<Request::invalidate_mw>(Guest& guest, const InvalidateMwRequest& request) {
  const QueuePair* const qp = find(guest.qps, request.qp);
  return qp != nullptr ? invalidate(guest, *qp, Key{request.key}, guest.held_since_ns) : Errno{EINVAL};
}

std::optional<WcStatus> ControlDesk::change_window(QueuePair& qp) {
  const engine::Operation& op = qp.core.operation;
  const WindowOperand wanted = reinterpret_cast<const SendWqe*>(op.wqe)->window;
  std::uint64_t& since_ns = qp.core.port.window_since_ns;
  const auto changed = op.request.opcode == WrOpcode::local_inv
                           ? invalidate(*qp.guest, qp, Key{wanted.rkey}, since_ns)
                           : bind(*qp.guest, qp, {wanted.window, qp.handle.value, wanted.region, wanted.access, wanted.rkey, 0, wanted.address, wanted.bytes}, since_ns);
  if (!changed && value(changed.error()) == EINPROGRESS) {
    if (since_ns == 0) since_ns = vmci::monotonic_ns();
    return std::nullopt;
  }
  since_ns = 0;
  return changed ? WcStatus::success : WcStatus::mw_bind_err;
}

void ControlDesk::unbind_windows(QueuePair& qp) {
  for (const std::uint32_t slot : std::exchange(qp.bound_windows, {}))
    if (Region& region = fabric_.regions.slot(slot); region.window_qpn == qp.core.qpn.value) fabric_.regions.unbind_window(region);
}

}  // namespace vrdma::svc
