// XRC domains, and what makes queue pairs and SRQs members of one. IBA annex A14.
//
//     initiator (XRC_SEND) ── connected ──▶ target (XRC_RECV) ─┐ each request names an SRQ of the target's domain by its number:
//     initiator            ── connected ──▶ target            ─┴▶ its receive WQEs, its protection domain, its completion queue
//
// A target's receive half is the engine's (Responder::receive_by); what completes there goes to the SRQ's `completions`.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>

#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/control/find.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::svc {

using namespace control;
using engine::QpType;

Result<HandleReply> ControlDesk::on(Guest& guest, const OpenXrcdRequest& request, std::span<vmci::GivenFd> file) {
  if (find(guest.contexts, request.context) == nullptr || file.size() > 1) return Errno{EINVAL};
  std::shared_ptr<XrcDomain> domain;
  const bool named = !file.empty() || (guest.machine && (request.flags & xrcd_file) != 0);
  XrcFile name{guest.tenant->uid, guest.machine ? guest.machine->name : "", guest.machine ? guest.machine->uid : 0, request.device, request.inode};
  if (named && !guest.machine) {
    struct statx status;  // as far as it is known: a file system that is a process (FUSE) is not asked
    if (::statx(file.front().get(), "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_INO, &status) != 0) return last_error();
    name.device = makedev(status.stx_dev_major, status.stx_dev_minor), name.inode = status.stx_ino;
  }
  if (named) {
    const auto found = fabric_.xrc_domains.find(name);
    if (found != fabric_.xrc_domains.end()) domain = found->second.lock();
    if (domain == nullptr && (request.flags & xrcd_create) == 0) return Errno{EAGAIN};
    if (domain != nullptr && (request.flags & xrcd_exclusive) != 0) return Errno{EINVAL};
  }
  if (guest.xrcds.size() >= limits::pd_max) return Errno{ENOMEM};
  if (!guest.tenant->take_object()) return Errno{EDQUOT};
  if (domain == nullptr) {
    const bool keeps_file = named && !guest.machine;
    if (keeps_file && !guest.tenant->take_descriptors(1)) return --guest.tenant->objects, Errno{EDQUOT};
    domain = std::make_shared<XrcDomain>();
    if (keeps_file) domain->file = std::move(file.front());
  }
  if (named) {
    std::erase_if(fabric_.xrc_domains, [](const auto& known) { return known.second.expired(); });
    fabric_.xrc_domains[name] = domain;
  }
  for (const auto& member : domain->guests) fabric_.shards.bring_together(guest, *member);
  domain->guests.push_back(&guest);
  const std::uint32_t handle = guest.new_handle();
  guest.xrcds.emplace(handle, std::make_unique<Xrcd>(Xrcd{{handle}, request.context, std::move(domain)}));
  return HandleReply{handle, 0};
}

void ControlDesk::destroy(Guest& guest, Xrcd& xrcd) {
  auto& guests = xrcd.domain->guests;
  guests.erase(std::find(guests.begin(), guests.end(), &guest));
  if (guests.empty() && xrcd.domain->file) --guest.tenant->descriptors;
  --guest.tenant->objects;
  guest.xrcds.erase(xrcd.handle.value);
}

template <>
Result<Empty> ControlDesk::on<Request::close_xrcd>(Guest& guest, const HandleRequest& request) {
  Xrcd* const xrcd = find(guest.xrcds, request.handle);
  if (xrcd == nullptr) return Errno{EINVAL};
  if (xrcd->users != 0) return Errno{EBUSY};
  destroy(guest, *xrcd);
  return Empty{};
}

template <>
Result<CreateQpReply> ControlDesk::on<Request::create_xrc_qp>(Guest& guest, const CreateXrcQpRequest& request) {
  const std::uint32_t type = request.qp.type;
  if (type == static_cast<std::uint32_t>(QpType::xrc_send))
    return request.xrcd != 0 || request.qp.srq != 0 ? Errno{EINVAL} : create(guest, request.qp, QpType::xrc_send, nullptr);
  Xrcd* const xrcd = find_in(guest.xrcds, request.xrcd, request.qp.context);
  const bool target = type == static_cast<std::uint32_t>(QpType::xrc_recv);
  if (xrcd == nullptr || (!target && type != xrc_srq) || target == (request.qp.srq != 0)) return Errno{EINVAL};
  SharedReceiveQueue* const srq = target ? nullptr : find_in(guest.srqs, request.qp.srq, request.qp.context);
  if (!target && (srq == nullptr || srq->completions != nullptr || srq->users != 0)) return Errno{EINVAL};
  QueuePair* open = nullptr;
  if (request.target != 0) {
    const auto found = fabric_.by_qpn.find(request.target);
    open = target && found != fabric_.by_qpn.end() ? found->second : nullptr;
    if (open == nullptr || open->core.type != QpType::xrc_recv || open->xrcd->domain != xrcd->domain || open->stands_for != nullptr) return Errno{EINVAL};
  }
  auto reply = create(guest, request.qp, target ? QpType::xrc_recv : QpType::rc, xrcd);
  if (!reply) return reply;
  QueuePair& made = *guest.qps[reply->qp];
  ++xrcd->users;
  if (target) xrcd->domain->targets.push_back(&made);
  else srq->completions = &made;
  if (open != nullptr) {
    made.stands_for = open;
    open->stand_bys.push_back(&made);
    reply->qpn = request.target;
  }
  return reply;
}

bool ControlDesk::written_by_targets(const QueuePair& completions) const {
  if (!completions.completes_for_srq()) return false;
  return std::ranges::any_of(completions.xrcd->domain->targets, [&](const QueuePair* target) {
    return target->core.srq == &completions.srq->core && shard_.engine().copies_under_way(target->core);
  });
}

// The target's number and all that makes it what it is to its initiator, whose message goes on.
void ControlDesk::hand_over(QueuePair& from, QueuePair& heir) {
  shard_.engine().hand_over(from.core, heir.core);
  fabric_.by_qpn[from.core.qpn.value] = &from;
  fabric_.by_qpn[heir.core.qpn.value] = &heir;
  heir.core.port.pkey = from.core.port.pkey;
  heir.core.port.mark = from.core.port.mark;
  heir.inherited = from.inherited ? from.inherited : QueuePair::Address{from.guest->lid, from.guest->gids};
  heir.stands_for = nullptr;
  heir.stand_bys = std::move(from.stand_bys);
  from.stand_bys.clear();
  std::erase(heir.stand_bys, &heir);
  for (QueuePair* const other : heir.stand_bys) other->stands_for = &heir;
}

void ControlDesk::leave_domain(QueuePair& qp) {
  if (qp.xrcd == nullptr) return;
  if (qp.completes_for_srq()) {
    for (QueuePair* const target : qp.xrcd->domain->targets) shard_.engine().leave_srq(target->core, qp.srq->core);
    qp.srq->completions = nullptr;
  } else {
    std::erase(qp.xrcd->domain->targets, &qp);
    if (qp.stands_for != nullptr) std::erase(qp.stands_for->stand_bys, &qp);
    else if (!qp.stand_bys.empty()) hand_over(qp, *qp.stand_bys.front());
  }
  --qp.xrcd->users;
}

}  // namespace vrdma::svc
