#include "vmkernel_svc/mad/management.hpp"

#include "vmci_channel/arch.hpp"
#include "vmkernel_svc/announced.hpp"
#include "vmkernel_svc/mad/subnet_management.hpp"

namespace vrdma::svc {

using namespace control;
using mad::Mad;

namespace {
constexpr std::size_t agents_max = 32;  // of a channel, as the kernel has it
// Of a channel: requests whose answer it has not read yet, each with room for one; what others have sent it, of which more is
// lost, as on a network; and tables, instead of which more are answered by an error. All of that is counted when it is opened.
constexpr std::size_t waiting_max = 1024, unasked_bytes_max = 512 << 10, tables_bytes_max = 1 << 20, channel_bytes = 2 << 20;
constexpr std::uint64_t patience_max_ns = 3'600'000'000'000;
constexpr int expired_per_turn = 256;
constexpr std::uint16_t permissive_lid = 0xffff;
constexpr std::uint32_t management_qkey = 0x80010000;

MadAddress address_of(std::uint64_t guid, std::uint16_t lid, std::uint32_t qpn) {
  MadAddress out{};
  out.gid = gids_of(guid, lid, link_layer_infiniband)[0].gid;
  out.qpn = qpn;
  out.qkey = qpn == 0 ? 0 : management_qkey;
  out.lid = lid;
  return out;
}

MadMessage head_of(const Guest& from, std::uint16_t to, std::uint32_t qpn) {
  MadMessage out{from.guid, from.lid, to, qpn, {}};
  std::copy(from.tenant->pkeys.begin(), from.tenant->pkeys.end(), out.pkeys);
  return out;
}
}  // namespace

struct Management::Agent {
  std::uint32_t number;
  Channel* channel;
  std::uint32_t index;  // in the channel
  std::uint32_t qpn;
  std::uint8_t management_class, class_version;
  std::uint32_t oui;
  std::array<std::uint64_t, 2> methods;

  bool takes(std::uint8_t method) const { return method < 128 && (methods[method / 64] >> (method % 64) & 1) != 0; }
  bool overlaps(const MadRegisterRequest& other) const { return (methods[0] & other.methods[0]) != 0 || (methods[1] & other.methods[1]) != 0; }
  bool is_of(std::uint8_t class_in, std::uint8_t version, std::uint32_t oui_in) const {
    return management_class == class_in && class_version == version && (!mad::has_oui(class_in) || oui == oui_in);
  }
};

struct Management::Arrived {
  std::uint32_t agent;
  std::uint32_t status;
  MadAddress from;
  std::vector<std::uint8_t> bytes;
  bool was_asked_for;
};

struct Management::Channel {
  std::uint32_t handle;
  Guest* guest;
  Announced pipe;
  std::array<std::unique_ptr<Agent>, agents_max> agents{};
  std::deque<Arrived> arrived{};
  std::size_t unasked_bytes = 0, tables_bytes = 0, waiting = 0;

  void count(const Arrived& one, bool comes) {
    if (one.was_asked_for && !comes) --waiting;
    std::size_t& bytes = one.was_asked_for ? tables_bytes : unasked_bytes;
    const std::size_t so_many = one.was_asked_for && one.bytes.size() <= mad_bytes ? 0 : one.bytes.size();
    bytes = comes ? bytes + so_many : bytes - so_many;
  }
};

Management::Management(Fabric& fabric) : fabric_(fabric), subnet_(fabric), performance_(subnet_), administration_(subnet_) {}
Management::~Management() = default;

// --- channels and agents --------------------------------------------------------------------------------------

Management::Channel* Management::channel_of(Guest& guest, std::uint32_t handle) {
  const auto found = channels_.find(handle);
  return found == channels_.end() || found->second->guest != &guest ? nullptr : found->second.get();
}

std::vector<std::uint32_t> Management::channels_of(const Guest& guest) const {
  std::vector<std::uint32_t> handles;
  for (const auto& [handle, channel] : channels_)
    if (channel->guest == &guest) handles.push_back(handle);
  return handles;
}

Result<MadOpenReply> Management::open(Guest& guest, vmci::UniqueFd pipe) {
  if (guest.link_layer != link_layer_infiniband) return Errno{ENXIO};
  if (!guest.take_pipe()) return Errno{EDQUOT};
  if (guest.tenant->queue_bytes + channel_bytes > guest.tenant->quota.queue_bytes || !guest.tenant->take_object()) return guest.give_pipe(), Errno{EDQUOT};
  guest.tenant->queue_bytes += channel_bytes;
  do ++last_channel_;
  while (last_channel_ == 0 || channels_.contains(last_channel_));
  channels_.emplace(last_channel_, std::make_unique<Channel>(Channel{last_channel_, &guest, {std::move(pipe), last_channel_}}));
  return MadOpenReply{last_channel_, 0};
}

Status Management::close(Guest& guest, std::uint32_t handle) {
  Channel* const channel = channel_of(guest, handle);
  if (channel == nullptr) return Errno{EINVAL};
  for (const auto& agent : channel->agents)
    if (agent) forget(*agent);
  channels_.erase(handle);
  guest.tenant->queue_bytes -= channel_bytes;
  guest.give_pipe();
  --guest.tenant->objects;
  return ok();
}

// Before `agent` goes: nobody waits for its answers any more.
void Management::forget(Agent& agent) {
  for (auto at = waiting_.lower_bound({agent.number, 0}); at != waiting_.end() && at->first.first == agent.number; at = waiting_.erase(at)) {
    deadlines_.erase({at->second.deadline_ns, at->first});
    --agent.channel->waiting;
  }
  agents_.erase(agent.number);
}

Result<MadAgent> Management::add_agent(Guest& guest, const MadRegisterRequest& request) {
  Channel* const channel = channel_of(guest, request.channel);
  if (channel == nullptr) return Errno{EINVAL};
  if (request.qpn != (mad::is_subnet_management(request.management_class) ? 0u : 1u)) return Errno{EINVAL};
  if (mad::has_oui(request.management_class) && request.oui == 0) return Errno{EINVAL};
  // Class 0 only sends.
  if (request.management_class == 0 && (request.methods[0] | request.methods[1]) != 0) return Errno{EINVAL};
  for (const auto& [handle, other] : channels_)
    for (const auto& agent : other->agents)
      if (agent && other->guest == &guest && agent->is_of(request.management_class, request.class_version, request.oui) && agent->overlaps(request)) return Errno{EINVAL};
  const auto free = std::find(channel->agents.begin(), channel->agents.end(), nullptr);
  if (free == channel->agents.end()) return Errno{ENOMEM};
  const auto index = static_cast<std::uint32_t>(free - channel->agents.begin());
  do ++last_agent_;
  while (last_agent_ == 0 || agents_.contains(last_agent_));
  *free = std::make_unique<Agent>(Agent{last_agent_, channel, index, request.qpn, request.management_class, request.class_version, request.oui, {request.methods[0], request.methods[1]}});
  agents_[last_agent_] = free->get();
  return MadAgent{request.channel, index};
}

Status Management::remove_agent(Guest& guest, const MadAgent& which) {
  Channel* const channel = channel_of(guest, which.channel);
  if (channel == nullptr || which.agent >= agents_max || !channel->agents[which.agent]) return Errno{EINVAL};
  forget(*channel->agents[which.agent]);
  channel->agents[which.agent].reset();
  std::erase_if(channel->arrived, [&](const Arrived& one) {
    if (one.agent == which.agent) channel->count(one, false);
    return one.agent == which.agent;
  });
  return ok();  // the record, if it is in the pipe, leads to an empty channel, which says so
}

void Management::leave(Guest& guest) {
  for (auto at = channels_.begin(); at != channels_.end();) {
    const auto next = std::next(at);
    if (at->second->guest == &guest) (void)close(guest, at->first);
    at = next;
  }
  const bool is_shared = std::any_of(fabric_.guests.begin(), fabric_.guests.end(), [&](const auto& one) {
    return one.second.get() != &guest && one.second->lid == guest.lid && one.second->link_layer == guest.link_layer;
  });
  if (guest.link_layer != link_layer_infiniband || is_shared) return;
  administration_.leave(guest);
  subnet_.left(guest.lid);
}

// --- sending --------------------------------------------------------------------------------------------------

Status Management::send(Guest& guest, const MadSendRequest& request) {
  Channel* const channel = channel_of(guest, request.by.channel);
  if (channel == nullptr || request.by.agent >= agents_max) return Errno{EINVAL};
  if (!channel->agents[request.by.agent]) return Errno{EIO};  // nobody's: the kernel's ib_umad_write()
  if (request.bytes < mad_bytes || request.bytes > mad_bytes_max) return Errno{EINVAL};
  Agent& agent = *channel->agents[request.by.agent];
  Mad mad(std::span(request.data).first(request.bytes));
  if (!mad.is_response()) {
    mad.set_sender(agent.number);
    if (request.timeout_ms != 0) {
      const Transaction transaction{agent.number, mad.transaction()};
      if (channel->waiting >= waiting_max) return Errno{ENOMEM};
      if (waiting_.contains(transaction)) return Errno{EINVAL};
      const std::uint64_t patience_ns = std::min(std::uint64_t{request.timeout_ms} * 1'000'000 * (std::min(request.retries, 255u) + 1), patience_max_ns);
      const auto [at, is_new] = waiting_.emplace(transaction, Waiting{vmci::monotonic_ns() + patience_ns, request.to, {}});
      std::copy_n(mad.bytes.begin(), mad_head_bytes, at->second.head.begin());
      deadlines_.emplace(at->second.deadline_ns, transaction);
      ++channel->waiting;
      if (alarm_ && deadlines_.begin()->second == transaction) alarm_(at->second.deadline_ns);
    }
  }
  route(guest, request.to, mad);
  return ok();
}

void Management::route(Guest& from, const MadAddress& to, Mad& mad) {
  if (!mad.is_response() && answered_here(from, to, mad)) {
    MadAddress back = to;
    back.qkey = to.qpn == 0 ? 0 : management_qkey;
    return deliver_answer(back, mad);
  }
  if (to.qpn > 1 || mad.management_class() == mad::class_directed_route) return;
  if (!is_here(to.lid)) {
    const auto host = post_ != nullptr ? post_->host_of(to.lid) : std::nullopt;
    if (host) post_->tell(*host, head_of(from, to.lid, to.qpn), mad.bytes);
    return;
  }
  if (deliver_here(from, to.lid, address_of(from.guid, from.lid, to.qpn), mad)) return;
  // As the kernel of whoever has that LID says.
  MadAddress back = to;
  back.qkey = to.qpn == 0 ? 0 : management_qkey;
  mad.respond(mad::status_bad_attribute);
  deliver_answer(back, mad);
}

bool Management::is_here(std::uint16_t lid) const {
  return std::any_of(fabric_.guests.begin(), fabric_.guests.end(), [&](const auto& one) { return one.second->lid == lid; });
}

bool Management::deliver_here(const mad::Viewer& sender, std::uint16_t to, const MadAddress& from, const Mad& mad) {
  if (mad.is_response()) {
    const auto agent = agents_.find(mad.sender());
    if (agent != agents_.end() && agent->second->channel->guest->lid == to && subnet_.sees(sender, *agent->second->channel->guest)) deliver_answer(from, mad);
    return true;
  }
  bool is_there = false, is_taken = false;
  for (const auto& [id, guest] : fabric_.guests) {
    if (guest->lid != to || !subnet_.sees(sender, *guest)) continue;
    is_there = true;
    is_taken |= deliver_request(*guest, from, mad);
  }
  return is_taken || !is_there || (mad.method() != mad::method_get && mad.method() != mad::method_set);
}

void Management::arrived(std::uint32_t host, const MadMessage& head, Mad mad) {
  hosts::PkeyTable pkeys;
  std::copy(std::begin(head.pkeys), std::end(head.pkeys), pkeys.begin());
  const mad::Viewer sender(pkeys);
  const auto node = head.to == subnet_manager_lid ? std::nullopt : subnet_.at_lid(sender, head.to);
  if (!node) return;
  if (!mad.is_response() && post_ != nullptr) {
    if ((head.qpn == 0) != mad::is_subnet_management(mad.management_class())) return;
    const bool is_answer = mad.management_class() == mad::class_lid_routed      ? answer_subnet_management(subnet_, administration_.groups(), sender, *node, 1, mad)
                           : mad.management_class() == mad::class_performance ? performance_.answer(sender, *node, mad)
                                                                              : false;
    if (is_answer) return post_->tell(host, head_of(*node->guest, head.from, head.qpn), mad.bytes);
  }
  if (deliver_here(sender, head.to, address_of(head.guid, head.from, head.qpn), mad) || post_ == nullptr) return;
  mad.respond(mad::status_bad_attribute);
  post_->tell(host, head_of(*node->guest, head.from, head.qpn), mad.bytes);
}

// Whether the service answers it, as the node that it is for: `mad` is the answer then.
bool Management::answered_here(Guest& from, const MadAddress& to, Mad& mad) {
  if (to.qpn != (mad::is_subnet_management(mad.management_class()) ? 0u : 1u)) return false;
  const auto own = mad::Node{&from, subnet_.port_of(from.lid)};
  const auto node = to.lid == permissive_lid || to.lid == from.lid ? std::optional(own) : subnet_.at_lid(from, to.lid);
  if (!node) return false;
  switch (mad.management_class()) {
    case mad::class_lid_routed:
      return answer_subnet_management(subnet_, administration_.groups(), from, *node, node->is_switch() ? 0 : 1, mad);
    case mad::class_directed_route: {
      // Its first part may go by LID (IBA 14.2.2.1).
      const bool begins_here = mad::get(mad.bytes, {256, 16}) == permissive_lid;
      const auto arrival = follow_route(subnet_, from, begins_here ? own : *node, mad);
      return arrival && answer_subnet_management(subnet_, administration_.groups(), from, arrival->node, arrival->port, mad);
    }
    case mad::class_performance:
      return performance_.answer(from, *node, mad);
    case mad::class_administration:
      return node->is_switch() && administration_.answer(from, mad);
    default:
      return false;
  }
}

// --- receiving ------------------------------------------------------------------------------------------------

void Management::deliver(Channel& channel, Arrived arrived) {
  channel.count(arrived, true);
  channel.arrived.push_back(std::move(arrived));
  channel.pipe.announce();
}

void Management::deliver_answer(const MadAddress& from, Mad mad) {
  const Transaction transaction{mad.sender(), mad.transaction()};
  const auto waiting = waiting_.find(transaction);
  if (waiting == waiting_.end() || waiting->second.to.lid != from.lid) return;  // too late, or of somebody who was never asked
  deadlines_.erase({waiting->second.deadline_ns, transaction});
  waiting_.erase(waiting);
  Agent& agent = *agents_.at(transaction.first);
  if (mad.bytes.size() > mad_bytes && agent.channel->tables_bytes != 0 && agent.channel->tables_bytes + mad.bytes.size() > tables_bytes_max) {
    mad.bytes.resize(mad_bytes);
    mad.respond(mad::status_no_resources);
  }
  deliver(*agent.channel, {agent.index, 0, from, std::move(mad.bytes), true});
}

// False: nobody takes such requests.
bool Management::deliver_request(Guest& to, const MadAddress& from, const Mad& mad) {
  for (const auto& [handle, channel] : channels_) {
    if (channel->guest != &to) continue;
    for (const auto& agent : channel->agents)
      if (agent && agent->is_of(mad.management_class(), mad.class_version(), mad.oui()) && agent->takes(mad.method())) {
        if (channel->unasked_bytes + mad.bytes.size() <= unasked_bytes_max) deliver(*channel, {agent->index, 0, from, mad.bytes, false});
        return true;
      }
  }
  return false;
}

Result<MadTakeReply> Management::take(Guest& guest, const MadTakeRequest& request) {
  Channel* const channel = channel_of(guest, request.channel);
  if (channel == nullptr) return Errno{EINVAL};
  MadTakeReply reply{};
  if (!channel->arrived.empty()) {
    const Arrived& one = channel->arrived.front();
    if (request.offset > one.bytes.size()) return Errno{EINVAL};
    reply.found = 1;
    reply.agent = one.agent;
    reply.status = one.status;
    reply.total_bytes = static_cast<std::uint32_t>(one.bytes.size());
    reply.bytes = std::min(reply.total_bytes - request.offset, mad_piece_bytes);
    reply.from = one.from;
    std::copy_n(one.bytes.begin() + request.offset, reply.bytes, reply.data.begin());
    if (request.room >= reply.total_bytes && request.offset + reply.bytes == reply.total_bytes) {
      channel->count(one, false);
      channel->arrived.pop_front();
    }
  }
  if (channel->arrived.empty()) reply.last = channel->pipe.emptied();
  return reply;
}

void Management::expire(std::uint64_t now_ns) {
  for (int left = expired_per_turn; left > 0 && !deadlines_.empty() && deadlines_.begin()->first <= now_ns; --left) {
    const Transaction transaction = deadlines_.begin()->second;
    deadlines_.erase(deadlines_.begin());
    const auto waiting = waiting_.find(transaction);
    Agent& agent = *agents_.at(transaction.first);
    deliver(*agent.channel, {agent.index, ETIMEDOUT, waiting->second.to, {waiting->second.head.begin(), waiting->second.head.end()}, true});
    waiting_.erase(waiting);
  }
  if (alarm_ && !deadlines_.empty()) alarm_(deadlines_.begin()->first);
}

}  // namespace vrdma::svc
