#include "vmkernel_svc/vmci_switch.hpp"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>

#include "vmci_channel/doorbell_pair.hpp"
#include "vmci_channel/segment.hpp"
#include "vmkernel_svc/fabric.hpp"
#include "vmkernel_svc/guest_mail.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

using namespace control;

namespace {
// What a queue pair costs its creator's tenant: memory, the attacher's doorbell and the hangup; attached, not the first.
constexpr std::uint32_t offered_descriptors = 3, attached_descriptors = 2;
}  // namespace

Guest* VmciSwitch::find_guest(std::uint32_t context) const {
  return fabric_.guest(GuestId{context});
}

// --- datagrams ------------------------------------------------------------------------------------------------

void VmciSwitch::forward(Guest& from, const Head& head, std::span<const std::byte> body) {
  const auto context = static_cast<std::uint32_t>(head.record.tag >> 32);
  const auto port = static_cast<std::uint32_t>(head.record.tag);
  Guest* const to = find_guest(context);
  const auto bound = to != nullptr ? to->vmci.ports.find(port) : decltype(to->vmci.ports.find(port)){};
  if (to == nullptr || bound == to->vmci.ports.end() || bound->second.offers_max != 0 || !policy(from, *to)) {
    ++from.vmci.counters.datagrams_refused;
    return;
  }
  Head out{};
  out.record.tag = head.record.tag;
  out.source_context = from.id.value;
  out.source_port = head.source_port;
  out.sequence = head.sequence;
  const std::uint32_t user = datagram_bit | (head.record.control & kind_mask);
  // Notices that wait go first: a datagram may speak of what they announce.
  if (flush(*to) || !put_datagram(*to, out, user, body, slots_for_replies + slots_for_notices)) {
    ++to->vmci.counters.datagrams_dropped;
    return;
  }
  ++from.vmci.counters.datagrams_sent;
  ++to->vmci.counters.datagrams_received;
}

Result<PortReply> VmciSwitch::bind(Guest& guest, const BindPortRequest& request) {
  VmciEnd& end = guest.vmci;
  if (request.port > port_max || request.offers_max > offers_max) return Errno{EINVAL};
  if (end.ports.size() >= ports_max) return Errno{EMFILE};
  std::uint32_t port = request.port;
  if (port == 0) {
    do {
      port = end.next_port;
      end.next_port = end.next_port == 65535 ? dynamic_port_first : end.next_port + 1;
    } while (end.ports.contains(port));  // there are more of them than ports_max
  } else if (end.ports.contains(port)) {
    return Errno{EADDRINUSE};
  }
  end.ports.emplace(port, VmciPort{request.offers_max});
  return PortReply{port, 0};
}

Status VmciSwitch::unbind(Guest& guest, std::uint32_t port) {
  VmciEnd& end = guest.vmci;
  if (end.ports.erase(port) == 0) return Errno{EINVAL};
  std::erase_if(end.held, [port](const VmciNotice& notice) { return notice.port == port; });
  std::vector<Key> offered;
  for (const Key key : end.queue_pairs) {
    QueuePair& pair = queue_pairs_.at(key);
    if (pair.attacher == nullptr && pair.peer_context == guest.id.value && pair.peer_port == port) offered.push_back(key);
    // A port that is bound again is somebody else's: no old notices there.
    if (pair.creator == &guest && pair.creator_port == port) pair.creator_port = 0;
    if (pair.attacher == &guest && pair.attacher_port == port) pair.attacher_port = 0;
  }
  for (const Key key : offered) refuse(key);
  return ok();
}

// --- queue pairs ----------------------------------------------------------------------------------------------

Result<QueuePairReply> VmciSwitch::alloc(Guest& guest, const QueuePairAllocRequest& request, std::vector<vmci::UniqueFd>& give) {
  const auto valid = [](std::uint64_t bytes) {
    return std::has_single_bit(bytes) && bytes >= queue_bytes_min && bytes <= queue_bytes_max;
  };
  if (!valid(request.produce_bytes) || !valid(request.consume_bytes)) return Errno{EINVAL};
  if (request.local_port != 0 && !guest.vmci.ports.contains(request.local_port)) return Errno{EINVAL};
  Guest* const peer = find_guest(request.peer_context);
  if (peer == nullptr) return Errno{ECONNREFUSED};
  const auto port = peer->vmci.ports.find(request.peer_port);
  if (port == peer->vmci.ports.end() || port->second.offers_max == 0) return Errno{ECONNREFUSED};
  if (!policy(guest, *peer)) return Errno{EACCES};
  if (port->second.offers >= port->second.offers_max) return Errno{EAGAIN};

  QueuePair pair{};
  pair.geometry = {static_cast<std::uint32_t>(request.produce_bytes / slot_bytes),
                   static_cast<std::uint32_t>(request.consume_bytes / slot_bytes), vmci::QueueKind::bytes, 0};
  const std::uint64_t bytes = pair.geometry.total_bytes();
  Tenant& tenant = *guest.tenant;
  if (bytes > tenant.quota.queue_bytes || tenant.queue_bytes > tenant.quota.queue_bytes - bytes) return Errno{EDQUOT};
  auto memory = vmci::create_sealed("vmci-queue-pair", bytes);
  if (!memory) return memory.error();
  auto doorbells = vmci::make_doorbell_pair();
  if (!doorbells) return doorbells.error();
  vmci::UniqueFd memory_copy(::fcntl(memory->get(), F_DUPFD_CLOEXEC, 0));
  vmci::UniqueFd hangup(::fcntl(doorbells->first.get(), F_DUPFD_CLOEXEC, 0));
  if (!memory_copy || !hangup) return last_error();
  for (const int end : {doorbells->first.get(), doorbells->second.get()}) vmci::let_descriptors_in(end, false);
  if (!tenant.take_object()) return Errno{EDQUOT};
  if (!tenant.take_descriptors(offered_descriptors)) return --tenant.objects, Errno{EDQUOT};
  tenant.queue_bytes += bytes;

  pair.handle = {guest.id.value, guest.vmci.next_resource++};
  pair.creator = &guest;
  pair.peer_context = request.peer_context;
  pair.peer_port = request.peer_port;
  pair.creator_port = request.local_port;
  pair.tenant = &tenant;
  pair.memory = std::move(*memory);
  pair.attacher_doorbell = vmci::GivenFd(std::move(doorbells->second), guest.socket.closer());
  pair.hangup = vmci::GivenFd(std::move(hangup), guest.socket.closer());
  give.push_back(std::move(memory_copy));
  give.push_back(std::move(doorbells->first));

  ++port->second.offers;
  const Key key = key_of(pair.handle);
  guest.vmci.queue_pairs.insert(key);
  peer->vmci.queue_pairs.insert(key);
  ++guest.vmci.counters.stream_pairs;
  const QueuePair& placed = queue_pairs_.emplace(key, std::move(pair)).first->second;
  notify(*peer, request.peer_port, notice_offer, placed);
  return QueuePairReply{placed.handle, placed.geometry, request.peer_context, request.peer_port};
}

Result<QueuePairReply> VmciSwitch::attach(Guest& guest, const QueuePairAttachRequest& request, std::vector<vmci::UniqueFd>& give) {
  const auto found = queue_pairs_.find(key_of(request.handle));
  if (found == queue_pairs_.end() || found->second.peer_context != guest.id.value || found->second.attacher != nullptr)
    return Errno{ENOENT};
  if (request.local_port != 0 && !guest.vmci.ports.contains(request.local_port)) return Errno{EINVAL};
  QueuePair& pair = found->second;
  vmci::UniqueFd doorbell(::fcntl(pair.attacher_doorbell.get(), F_DUPFD_CLOEXEC, 0));
  if (!doorbell) return last_error();
  pair.attacher = &guest;
  pair.attacher_port = request.local_port;
  pair.tenant->descriptors -= offered_descriptors - attached_descriptors;
  give.push_back(std::move(pair.memory));
  give.push_back(std::move(doorbell));
  --guest.vmci.ports.at(pair.peer_port).offers;  // the port is bound: unbinding detaches what waits there
  ++guest.vmci.counters.stream_pairs;
  const QueuePairReply reply{pair.handle, pair.geometry, pair.handle.context, pair.creator_port};
  if (pair.creator == nullptr)
    remove(found->first);  // nobody is left to tell, or to be told of, anything
  else if (pair.creator_port != 0)
    notify(*pair.creator, pair.creator_port, notice_attached, pair);
  return reply;
}

Status VmciSwitch::detach(Guest& guest, QueuePairHandle handle) {
  const auto found = queue_pairs_.find(key_of(handle));
  if (found == queue_pairs_.end()) return Errno{EINVAL};
  const QueuePair& pair = found->second;
  if (pair.creator == &guest || pair.attacher == &guest)
    side_gone(found->first, guest);
  else if (pair.attacher == nullptr && pair.peer_context == guest.id.value)
    refuse(found->first);
  else
    return Errno{EINVAL};
  return ok();
}

void VmciSwitch::side_gone(Key key, Guest& side) {
  QueuePair& pair = queue_pairs_.at(key);
  ::shutdown(pair.hangup.get(), SHUT_RDWR);  // whoever sleeps at either end wakes, also where others hold copies of the ends
  if (pair.attacher == nullptr) {            // the creator's side: the offer stands
    pair.creator = nullptr;
    if (pair.peer_context != side.id.value) side.vmci.queue_pairs.erase(key);
    return;
  }
  if (pair.attacher != &side && pair.attacher_port != 0) notify(*pair.attacher, pair.attacher_port, notice_detached, pair);
  if (pair.creator != &side && pair.creator_port != 0) notify(*pair.creator, pair.creator_port, notice_detached, pair);
  remove(key);
}

// By the guest that it was offered to.
void VmciSwitch::refuse(Key key) {
  QueuePair& pair = queue_pairs_.at(key);
  ::shutdown(pair.hangup.get(), SHUT_RDWR);
  if (Guest* const peer = find_guest(pair.peer_context)) {
    if (const auto port = peer->vmci.ports.find(pair.peer_port); port != peer->vmci.ports.end()) --port->second.offers;
    std::erase_if(peer->vmci.held, [&](const VmciNotice& notice) { return notice.body.handle == pair.handle; });
  }
  if (pair.creator != nullptr && pair.creator_port != 0) notify(*pair.creator, pair.creator_port, notice_detached, pair);
  remove(key);
}

void VmciSwitch::remove(Key key) {
  const auto node = queue_pairs_.extract(key);
  const QueuePair& pair = node.mapped();
  if (pair.creator != nullptr) pair.creator->vmci.queue_pairs.erase(key);
  if (Guest* const peer = find_guest(pair.peer_context)) peer->vmci.queue_pairs.erase(key);
  --pair.tenant->objects;
  pair.tenant->descriptors -= pair.attacher == nullptr ? offered_descriptors : attached_descriptors;
  pair.tenant->queue_bytes -= pair.geometry.total_bytes();
}

// --- notices --------------------------------------------------------------------------------------------------

void VmciSwitch::notify(Guest& guest, std::uint32_t port, Notice kind, const QueuePair& pair) {
  if (!guest.vmci.ports.contains(port)) return;
  QueuePairNotice body{pair.handle, pair.geometry, pair.handle.context, pair.creator_port};
  if (port == pair.creator_port && &guest == pair.creator && kind != notice_offer)
    body.peer_context = pair.peer_context, body.peer_port = pair.peer_port;
  guest.vmci.held.push_back({port, kind, body});
  if (flush(guest)) guest.group->shard->wake();  // it tries again, also if it has been asleep
}

bool VmciSwitch::flush(Guest& guest) {
  auto& held = guest.vmci.held;
  while (!held.empty()) {
    const VmciNotice& notice = held.front();
    Head head{};
    head.record.tag = address_of(guest.id.value, notice.port);
    head.source_context = host_context;
    head.source_port = control_port;
    if (!put_datagram(guest, head, datagram_bit | notice.kind, std::as_bytes(std::span(&notice.body, 1)), slots_for_replies))
      return guest.notices_held = true;
    held.pop_front();
  }
  return guest.notices_held = false;
}

void VmciSwitch::leave(Guest& guest) {
  while (!guest.vmci.ports.empty()) (void)unbind(guest, guest.vmci.ports.begin()->first);
  while (!guest.vmci.queue_pairs.empty()) side_gone(*guest.vmci.queue_pairs.begin(), guest);
}

}  // namespace vrdma::svc
