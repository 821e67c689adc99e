// Channels, their events, and what time brings.
#include <algorithm>

#include "vmci_channel/arch.hpp"
#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/fabric.hpp"

namespace vrdma::svc {

using namespace control;
using engine::QpType;

namespace {
// Events that a guest has written for itself, in all its channels: of the others, each identifier has a few, a listener as many as it may be called.
constexpr std::uint32_t written_max = 4096;

// 1: there were events, and there are none now.
std::uint32_t emptied(CmChannel& channel) { return channel.events.empty() ? channel.pipe.emptied() : 0; }

}  // namespace

CmChannel* ConnectionManager::channel_of(Guest& guest, std::uint32_t handle) {
  const auto found = channels_.find(handle);
  return found == channels_.end() || found->second->guest != &guest ? nullptr : found->second.get();
}

Result<CmOpenReply> ConnectionManager::open(Guest& guest, vmci::UniqueFd pipe) {
  if (!guest.take_pipe()) return Errno{EDQUOT};
  if (!guest.tenant->take_object()) return guest.give_pipe(), Errno{EDQUOT};
  const std::uint32_t handle = new_number();
  channels_.emplace(handle, std::make_unique<CmChannel>(CmChannel{handle, &guest, {std::move(pipe), handle}, CmEventQueue(guest.cm_written)}));
  return CmOpenReply{handle, 0};
}

Status ConnectionManager::close(Guest& guest, std::uint32_t handle) {
  CmChannel* const channel = channel_of(guest, handle);
  if (channel == nullptr) return Errno{EINVAL};
  channel->events.clear();
  while (!channel->identifiers.empty()) remove(*identifiers_.at(*channel->identifiers.begin()));
  channels_.erase(handle);
  guest.give_pipe();
  --guest.tenant->objects;
  return ok();
}

std::set<std::uint32_t> ConnectionManager::with_its_own(const CmIdentifier& one) const {
  std::set<std::uint32_t> numbers = one.memberships;
  numbers.insert(one.id);
  one.channel->events.each_of(one.id, [&](const CmEventQueue::Waiting& waiting) {
    if (waiting.event.event != cm_connect_request) return;
    // Unless its guest has guessed the number, and has done with it what it liked.
    const auto made = identifiers_.find(waiting.event.id);
    if (made == identifiers_.end() || made->second->channel != one.channel) return;
    numbers.insert(made->first);
    numbers.insert(made->second->memberships.begin(), made->second->memberships.end());
  });
  return numbers;
}

std::uint32_t ConnectionManager::drop_events(CmChannel& channel, const std::set<std::uint32_t>& counted_at) {
  for (const std::uint32_t number : counted_at) channel.events.drop(number);
  return emptied(channel);
}

void ConnectionManager::raise_on(CmChannel& channel, std::uint32_t counted_at, const CmEvent& event) {
  channel.events.push(++last_event_, {counted_at, event});
  if (const auto of = identifiers_.find(counted_at); of != identifiers_.end()) ++of->second->unread;
  channel.pipe.announce();
}

CmParameters ConnectionManager::as_received(CmParameters parameters, std::uint32_t private_bytes) {
  // What is behind the sender's data is zeroes, and given, too: a message always has room for the most there can be.
  std::fill(parameters.private_data.begin() + parameters.private_bytes, parameters.private_data.end(), 0);
  parameters.private_bytes = static_cast<std::uint8_t>(private_bytes);
  std::swap(parameters.responder_resources, parameters.initiator_depth);  // what is one's the other one may use
  return parameters;
}

void ConnectionManager::raise(CmIdentifier& one, std::uint32_t event, std::int32_t status, const CmMessage* with, std::uint32_t private_bytes) {
  if (one.uid == 0) return;  // it has not been accepted, and nobody knows it: accepting it will fail
  CmEvent out{};
  out.uid = one.uid;
  out.id = one.id;
  out.event = event;
  out.status = status;
  if (with != nullptr) {
    out.parameters = as_received(with->parameters, private_bytes);
  }
  if (one.type == QpType::ud) {
    out.is_datagram = 1;
    if (with != nullptr && status == 0) out.address = address_vector(one);
  }
  raise_on(*one.channel, one.id, out);
}

Status ConnectionManager::write_event(Guest& guest, const CmWriteEventRequest& request) {
  const auto found = find(guest, request.id);
  if (!found) return found.error();
  CmIdentifier& one = **found;
  if ((request.event != cm_user && request.event != cm_internal) || one.uid == 0) return Errno{EINVAL};
  if (guest.cm_written >= written_max) return Errno{ENOBUFS};
  CmEvent event{};
  event.uid = one.uid;
  event.id = one.id;
  event.event = request.event;
  event.status = request.status;
  std::copy(request.argument.begin(), request.argument.end(), event.parameters.private_data.begin());
  event.parameters.private_bytes = static_cast<std::uint8_t>(request.argument.size());
  raise_on(*one.channel, one.id, event);
  return ok();
}

Result<CmTakeReply> ConnectionManager::take_event(Guest& guest, std::uint32_t handle) {
  CmChannel* const channel = channel_of(guest, handle);
  if (channel == nullptr) return Errno{EINVAL};
  CmTakeReply reply{};
  if (channel->events.empty()) return reply;
  const auto waiting = channel->events.pop();
  if (const auto of = identifiers_.find(waiting.counted_at); of != identifiers_.end()) --of->second->unread;
  reply.found = 1;
  reply.event = waiting.event;
  reply.counted_at = waiting.counted_at;
  reply.last = emptied(*channel);
  return reply;
}

Result<CmGone> ConnectionManager::migrate(Guest& guest, const CmMigrateRequest& request) {
  const auto found = find(guest, request.id);
  CmChannel* const to = channel_of(guest, request.to);
  if (!found) return found.error();
  if (to == nullptr) return Errno{EINVAL};
  CmIdentifier& one = **found;
  CmChannel& from = *one.channel;
  CmGone reply{};
  if (&from == to) return reply;
  const auto moving = with_its_own(one);
  for (const std::uint32_t number : moving) {
    from.events.move(number, to->events);
    if (from.identifiers.erase(number) == 0) continue;  // a membership
    to->identifiers.insert(number);
    identifiers_.at(number)->channel = to;
  }
  reply.last = emptied(from);
  if (!to->events.empty()) to->pipe.announce();
  return reply;
}

// --- time -----------------------------------------------------------------------------------------------------

void ConnectionManager::set_deadline(CmIdentifier& one, std::uint64_t after_ns) {
  clear_deadline(one);
  one.deadline_ns = vmci::monotonic_ns() + after_ns;
  deadlines_.emplace(one.deadline_ns, one.id);
  if (alarm_ && deadlines_.begin()->second == one.id) alarm_(one.deadline_ns);
}

void ConnectionManager::clear_deadline(CmIdentifier& one) {
  if (one.deadline_ns != 0) deadlines_.erase({std::exchange(one.deadline_ns, 0), one.id});
}

void ConnectionManager::await_answer(CmIdentifier& one, std::uint64_t patience_ns) {
  one.answer_until_ns = vmci::monotonic_ns() + patience_ns;
  set_deadline(one, one.peer.host == 0 ? patience_ns : unheard_patience_ns);
}

bool ConnectionManager::may_still_answer(CmIdentifier& one, std::uint64_t now_ns) {
  const std::uint64_t silent_ns = post_ != nullptr && one.peer.host != 0 ? post_->silent_ns(one.peer.host) : 0;
  if (now_ns >= one.answer_until_ns || silent_ns >= unheard_patience_ns) return false;
  clear_deadline(one);
  one.deadline_ns = now_ns + std::min(one.answer_until_ns - now_ns, unheard_patience_ns - silent_ns);
  deadlines_.emplace(one.deadline_ns, one.id);
  return true;
}

void ConnectionManager::end(CmIdentifier& one, std::uint32_t event, std::int32_t status, const CmMessage* with, std::uint32_t private_bytes) {
  const bool left = one.state == CmState::disconnecting;
  one.state = CmState::ended;
  clear_deadline(one);
  raise(one, event, status, with, private_bytes);
  if (event != cm_disconnected) return;
  if (left) set_deadline(one, timewait_ns);
  else one.was_left = true;
}

void ConnectionManager::expire(std::uint64_t now_ns) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now_ns) {
    CmIdentifier& one = *identifiers_.at(deadlines_.begin()->second);
    const bool datagrams = one.type == QpType::ud;
    switch (one.state) {
      case CmState::resolving:
        address_unknown(one, ETIMEDOUT);
        break;
      case CmState::connecting:
      case CmState::accepted: {
        if (!datagrams && may_still_answer(one, now_ns)) break;
        const CmPeer peer = one.peer;
        CmMessage no = message(CmKind::rej, one);
        no.status = rej_timeout;
        end(one, cm_unreachable, -ETIMEDOUT);
        if (!datagrams) send(peer, no);
        break;
      }
      case CmState::disconnecting:
        end(one, cm_disconnected, -ETIMEDOUT);
        break;
      default:
        clear_deadline(one);
        if (one.state == CmState::ended) raise(one, cm_timewait_exit);
    }
  }
  while (!kept_.empty() && kept_.oldest().until_ns <= now_ns) {
    const CmKept::Kept late = kept_.take_oldest();
    deliver_request(late.host, late.request);
  }
  if (alarm_ && !deadlines_.empty()) alarm_(deadlines_.begin()->first);
  if (alarm_ && !kept_.empty()) alarm_(kept_.oldest().until_ns);
}

}  // namespace vrdma::svc
