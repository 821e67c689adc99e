// Connections by HCAs from their beginning to their end: who is asked, what is agreed on, and the physical queue pair that follows.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/hosts/partitions.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/remote/hca_desk.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

using engine::FarFramePtr;
using engine::FarRecord;
using engine::QpState;
using engine::QpType;
using remote::HcaKind;
using remote::HcaMessage;
using remote::HostId;

namespace {
constexpr std::uint32_t looks_before_lost = 4;  // at receive WQEs that nothing comes for
constexpr std::uint32_t send_wr_max = 128, receive_wr_max = 512, sge_max = 32, inline_max = 256;
constexpr std::size_t hellos_max = 65536;  // of one host
constexpr const char* another_partition = "the other end is in another partition";

void describe_guest(const MediatedPorts::Qp& qp, HcaMessage& message) {
  const Guest& guest = *qp.port.owner->guest;
  message.to_qpn = qp.attributes.dest_qp_num;
  message.guid = guest.guid;
  message.guest_lid = guest.lid;
  message.guest_link_layer = guest.link_layer;
}
}  // namespace

// To who has said hello in that epoch.
void HcaDesk::say_none(Qp& qp, HostId host, std::uint32_t to_epoch, const std::string& why) {
  HcaMessage message{};
  describe_guest(qp, message);
  message.to_epoch = to_epoch;
  put_text(message, why);
  say(host, qp.qpn.value, far_.new_epoch(), HcaKind::none, message);
}

std::string HcaDesk::refusal(const Qp& qp) const {
  if (qp.type != QpType::rc) return "UC, UD and XRC do not go in place";
  if (qp.srq != nullptr && !qp.srq->port.no_hca.empty()) return qp.srq->port.no_hca;
  if (qp.port.owner->guest->machine) return "its guest is in a virtual machine";
  if (!device_) return "no HCA here: " + why_;
  return "";
}

std::string HcaDesk::why_not(const Qp& qp) const {
  if (qp.port.hca != nullptr)
    return qp.port.hca->stage == Stage::bound     ? ""
           : qp.port.hca->stage == Stage::calling ? "the other end has not said yet that it uses its HCA"
                                                  : qp.port.hca->why;
  if (const auto why = refusal(qp); !why.empty()) return why;
  if (!qp.port.no_hca.empty()) return qp.port.no_hca;
  return qp.far != nullptr ? why_not(qp.far->host) : "";
}

void HcaDesk::consider(Qp& qp) {
  if (qp.port.owner == nullptr || qp.type != QpType::rc || (qp.state != QpState::rtr && qp.state != QpState::rts)) return;
  if (HcaConnection* const c = qp.port.hca) {
    if (c->stage == Stage::bound) bind(*c);
    return;
  }
  if (!qp.port.no_hca.empty() || ports_.peer(qp) != nullptr || qp.far == nullptr || qp.far->opened) return;
  const HostId host = qp.far->host;
  const auto there = hosts_.find(host);
  if (there == hosts_.end() || !there->second.present) return;
  std::uint32_t their_epoch = 0;
  auto& hellos = there->second.hellos;
  if (const auto hello = hellos.find(qp.attributes.dest_qp_num); hello != hellos.end() && hello->second.message.to_qpn == qp.qpn.value) {
    their_epoch = hello->second.epoch;
    hellos.erase(hello);
  }
  const auto give_up = [&](const std::string& why) {
    qp.port.no_hca = why;
    if (their_epoch != 0) say_none(qp, host, their_epoch, why);
  };
  if (const auto why = refusal(qp); !why.empty()) return give_up(why);
  if (const auto why = why_not(host); !why.empty()) return give_up(why);
  if (far_.has_stand_in(host, qp.attributes.dest_qp_num, qp.qpn.value)) return give_up("the other end uses tcp");
  auto made = std::make_unique<HcaConnection>();
  HcaConnection& c = *made;
  c.qp = &qp;
  c.host = host;
  c.peer_qpn = qp.attributes.dest_qp_num;
  c.number = next_number_++;
  c.epoch = far_.new_epoch();
  c.their_epoch = their_epoch;
  c.pd = qp.port.pd;
  if (!create(c)) return give_up("the HCA has no queue pair like it to give");
  connections_.emplace(c.number, std::move(made));
  qp.port.hca = &c;
  qp.far->given_one_by_one = true;
  say_hello(c);
}

bool HcaDesk::create(HcaConnection& c) {
  const Qp& qp = *c.qp;
  const auto& limits = device_->attributes();
  const auto wr_max = static_cast<std::uint32_t>(limits.max_qp_wr), most_sges = std::min(sge_max, static_cast<std::uint32_t>(limits.max_sge));
  if (qp.attributes.max_send_sge > most_sges || qp.attributes.max_recv_sge > most_sges) return false;
  c.wish = {std::clamp(qp.attributes.max_send_wr, 1u, std::min(send_wr_max, wr_max)),
            std::clamp(qp.attributes.max_recv_wr, 1u, std::min(receive_wr_max, wr_max)),
            std::min(most_sges, 3 * std::max({qp.attributes.max_send_sge, qp.attributes.max_recv_sge, 1u})), inline_max};
  if (qp.srq != nullptr) c.wish.receive_wr = 0;
  c.domain = device_->domain(c.pd);
  if (c.domain == nullptr) return false;
  if (qp.srq != nullptr && !join_shared(c)) return free_physical(c), false;
  const auto* const shared = c.shared != nullptr ? &c.shared->physical : nullptr;
  c.physical = device_->create(*c.domain, c.wish, shared, c.cq);
  if (c.physical == nullptr) c.wish.inline_bytes = 0, c.physical = device_->create(*c.domain, c.wish, shared, c.cq);
  if (c.physical != nullptr && shared != nullptr) c.shared->users.emplace(c.physical->qp_num, &c);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device_->port();
  attributes.qp_access_flags = c.access_flags = qp.attributes.access_flags;
  if (c.physical != nullptr && device_->modify(c.physical, attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
    return true;
  log::warn("HCA {} gives no queue pair of {} sends and {} receives of {} SGEs ({})", device_->name(), c.wish.send_wr, c.wish.receive_wr, c.wish.sge,
               std::strerror(device_->error()));
  free_physical(c);
  return false;
}

void HcaDesk::say_hello(HcaConnection& c) {
  HcaMessage message{};
  describe_guest(*c.qp, message);
  message.to_epoch = c.told_epoch = c.their_epoch;
  device_->describe(message);
  message.qpn = c.physical->qp_num;
  message.pkey = c.qp->port.pkey;
  message.atomics_with_cpu = device_->attributes().atomic_cap == IBV_ATOMIC_GLOB ? 1 : 0;
  message.max_dest_rd_atomic = static_cast<std::uint8_t>(std::min<int>(c.qp->attributes.max_dest_rd_atomic, device_->attributes().max_qp_rd_atom));
  say(c.host, c.qp->qpn.value, c.epoch, HcaKind::hello, message);
}

void HcaDesk::on_hello(HostId host, std::uint32_t connection, Hello hello) {
  const HcaMessage& said = hello.message;
  if (!far_.is_of(host, said.guid, said.guest_lid, said.guest_link_layer)) return far_.count_malformed();
  const auto found = fabric_.by_qpn.find(said.to_qpn);
  Qp* const qp = found != fabric_.by_qpn.end() && found->second->core.attributes.dest_qp_num == connection ? &found->second->core : nullptr;
  HcaConnection* const c = qp != nullptr && qp->port.hca != nullptr && qp->port.hca->host == host ? qp->port.hca : nullptr;
  if (hello.none) {
    if (c != nullptr && c->epoch == said.to_epoch && (c->stage == Stage::calling || (c->stage == Stage::bound && !c->allowed)))
      go_by_records(*c, "the other end: " + text_of(said));
    return;
  }
  if (c != nullptr && c->stage == Stage::calling) return heard(*c, hello);
  if (c != nullptr && c->stage == Stage::bound && c->their_epoch == hello.epoch) return;
  const bool used = c != nullptr && (c->sent != 0 || c->received != 0 || c->completed != 0 || !c->outstanding.empty() || engine_.busy(*qp));
  // It is not connected yet, or its connection is over: who is connected anew finds it.
  auto& hellos = hosts_[host].hellos;
  if (hellos.size() >= hellos_max) return far_.count_malformed();
  hellos[connection] = hello;
  if (c != nullptr && c->stage == Stage::bound && !used) {  // the other end was reset, and is connected again to one that has not been used
    unbind(*c);
    return consider(*qp);
  }
  if (qp == nullptr || c != nullptr || (qp->state != QpState::rtr && qp->state != QpState::rts) || qp->far == nullptr || qp->far->host != host)
    return;
  if (qp->port.no_hca.empty() && !qp->far->opened) return;
  hosts_[host].hellos.erase(connection);
  say_none(*qp, host, hello.epoch, qp->port.no_hca.empty() ? "it uses tcp" : qp->port.no_hca);
}

// Bound are two ends each of which has said hello to what the other one is now: who was reset meanwhile says so by another epoch.
void HcaDesk::heard(HcaConnection& c, const Hello& hello) {
  Qp& qp = *c.qp;
  const auto& path = qp.attributes.path;
  const HcaMessage& said = hello.message;
  if (!Fabric::leads_to(said.guest_lid, gids_of(said.guid, said.guest_lid, said.guest_link_layer), qp.port.owner->guest->link_layer, path.dlid,
                        path.is_global != 0, path.dgid))
    return;  // it is not whom this queue pair is connected to
  c.theirs = said;
  c.their_epoch = hello.epoch;
  if (!may_speak(c)) return go_by_records(c, another_partition);
  if (c.told_epoch != c.their_epoch) say_hello(c);
  if (said.to_epoch != c.epoch) return;  // it is still to hear of this one
  c.heard = true;
  c.stage = Stage::bound;
  qp.port.psn_from_records = true;
  bind(c);
}

// Nothing has gone either way.
void HcaDesk::unbind(HcaConnection& c) {
  c.closed_there = true;  // it need not be told
  stop(c);
  drop(c);
}

void HcaDesk::go_by_records(HcaConnection& c, const std::string& why) {
  Qp& qp = *c.qp;
  const HostId host = c.host;
  const std::uint32_t their_epoch = c.their_epoch;
  unbind(c);
  qp.port.no_hca = why;
  if (their_epoch != 0) say_none(qp, host, their_epoch, why);
  shard_.make_runnable(qp);
}

bool HcaDesk::may_speak(HcaConnection& c) { return hosts::pkeys_match(c.qp->port.pkey, far_.judged(c.host, c.theirs.pkey)); }

void HcaDesk::pkey_changed(Qp& qp) {
  HcaConnection* const c = qp.port.hca;
  if (c == nullptr) return;
  if (c->stage == Stage::bound) return lose(*c);
  if (c->stage == Stage::calling) go_by_records(*c, another_partition);
}

void HcaDesk::look_at_partitions() {
  for (auto& [number, c] : connections_)
    if (c->stage == Stage::bound && !may_speak(*c)) lose(*c);
}

// Both ends know each other: the physical queue pair follows the virtual one.
void HcaDesk::bind(HcaConnection& c) {
  Qp& qp = *c.qp;
  if (c.physical != nullptr && c.physical->state == IBV_QPS_INIT) {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTR;
    device_->lead_to(c.theirs, a);  // its path MTU, too, is the hosts' own affair, whatever the guests' is
    a.rq_psn = qp.attributes.rq_psn & psn_mask;
    a.max_dest_rd_atomic = static_cast<std::uint8_t>(std::min<int>(qp.attributes.max_dest_rd_atomic, device_->attributes().max_qp_rd_atom));
    c.min_rnr_timer = a.min_rnr_timer = static_cast<std::uint8_t>(qp.attributes.min_rnr_timer);
    a.ah_attr.sl = qp.attributes.path.sl & 15;
    if (!device_->modify(c.physical, a,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                             IBV_QP_MIN_RNR_TIMER)) {
      log::warn("HCA {} does not connect a queue pair ({})", device_->name(), std::strerror(device_->error()));
      return lose(c);
    }
    pump_receives(c);
    if (c.stage == Stage::bound) say(c, HcaKind::ready);
  } else if (c.sending && (c.access_flags != qp.attributes.access_flags || c.min_rnr_timer != qp.attributes.min_rnr_timer)) {
    ibv_qp_attr a{};
    a.qp_access_flags = c.access_flags = qp.attributes.access_flags;
    c.min_rnr_timer = a.min_rnr_timer = static_cast<std::uint8_t>(qp.attributes.min_rnr_timer);
    if (!device_->modify(c.physical, a, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER)) return lose(c, "the HCA does not change what others may do");
  }
  wake(c);
}

// As the guest wishes, but not less than the configuration says; 0 is for ever.
std::uint8_t HcaDesk::ack_timeout(const QpAttributes& attributes) const {
  return attributes.timeout == 0 ? 0 : std::max<std::uint8_t>(static_cast<std::uint8_t>(attributes.timeout), fabric_.config.hca->ack_timeout);
}

bool HcaDesk::to_rts(HcaConnection& c) {
  const QpAttributes& from = c.qp->attributes;
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_RTS;
  a.timeout = ack_timeout(from);
  a.retry_cnt = from.retry_cnt;
  a.rnr_retry = from.rnr_retry;
  a.sq_psn = from.sq_psn & psn_mask;
  a.qp_access_flags = c.access_flags = from.access_flags;
  c.min_rnr_timer = a.min_rnr_timer = static_cast<std::uint8_t>(from.min_rnr_timer);
  a.max_rd_atomic =
      static_cast<std::uint8_t>(std::min<int>({from.max_rd_atomic, c.theirs.max_dest_rd_atomic, device_->attributes().max_qp_init_rd_atom}));
  return c.sending = device_->modify(c.physical, a,
                                     IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC |
                                         IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER);
}

HcaConnection* HcaDesk::bound_to(HostId host, std::uint32_t connection, std::uint32_t epoch, const HcaMessage& message) {
  const auto found = fabric_.by_qpn.find(message.to_qpn);
  if (found == fabric_.by_qpn.end()) return nullptr;
  HcaConnection* const c = found->second->core.port.hca;
  if (c == nullptr || !c->heard || c->host != host || c->peer_qpn != connection || c->their_epoch != epoch || c->epoch != message.to_epoch)
    return nullptr;
  return c;
}

void HcaDesk::arrived(FarFramePtr frame) {
  const FarRecord& record = frame->record();
  if (record.payload_bytes != sizeof(HcaMessage)) return far_.count_malformed();
  HcaMessage message;
  std::memcpy(&message, frame->payload(), sizeof(message));
  if (message.version != remote::hca_version) return;  // by records
  const auto kind = static_cast<HcaKind>(record.opcode);
  const HostId host = frame->host;
  switch (kind) {
    case HcaKind::host: return on_host(host, message);
    case HcaKind::trunk:
    case HcaKind::trunk_ready:
    case HcaKind::trunk_gone: return on_trunk(host, record.epoch, kind, message);
    case HcaKind::hello:
    case HcaKind::none: return on_hello(host, record.connection, {message, record.epoch, kind == HcaKind::none});
    case HcaKind::want_key:
    case HcaKind::key:
    case HcaKind::revoke:
    case HcaKind::revoked: return on_key(host, record.connection, record.epoch, kind, message);
    default: break;
  }
  HcaConnection* const c = bound_to(host, record.connection, record.epoch, message);
  if (c == nullptr) {
    // Who has lost its HCA waits for a word of a connection that is over here.
    if (kind == HcaKind::lost) {
      HcaMessage bye{};
      bye.to_qpn = record.connection;
      bye.to_epoch = record.epoch;
      say(host, message.to_qpn, message.to_epoch, HcaKind::bye, bye);
    }
    return;
  }
  switch (kind) {
    case HcaKind::ready:
      c->allowed = true;
      return wake(*c);
    case HcaKind::ordinal:
      if (c->told_bytes.size() < receive_wr_max && message.count >= c->received) c->told_bytes[message.count] = message.bytes;
      return;
    case HcaKind::stalled:
      if (c->stage != Stage::bound || message.count <= c->received || c->look.receives_unmoved < looks_before_lost) return;
      log::warn("HCA {}: queue pair {} waits for messages that its peer has sent: they go on over tcp", device_->name(), c->qp->qpn.value);
      ++counters_.stalled;
      return lose(*c);
    case HcaKind::lost:
      if (c->stage == Stage::bound) lose(*c, text_of(message).empty() ? c->why : "the other end: " + text_of(message));
      // Who began with a wrong PSN was not answered by the HCA, and is not by records.
      c->qp->port.psn_from_records = message.bytes == (c->qp->attributes.rq_psn & psn_mask);
      if (c->stage == Stage::stopped) resolve(*c, message.count);
      return;
    case HcaKind::bye:
      c->closed_there = true;
      if (c->stage == Stage::stopped) resolve(*c, 0);
      return wake(*c);
    default: return far_.count_malformed();
  }
}

void HcaDesk::peer_goes_by_records(HostId host, std::uint32_t qpn) {
  const auto found = fabric_.by_qpn.find(qpn);
  if (found == fabric_.by_qpn.end()) return;
  HcaConnection* const c = found->second->core.port.hca;
  if (c != nullptr && c->host == host && (c->stage == Stage::calling || (c->stage == Stage::bound && !c->allowed)))
    go_by_records(*c, "the other end uses tcp");
}

void HcaDesk::leave(Qp& qp) {
  if (qp.port.hca != nullptr) drop(*qp.port.hca);
  qp.port.no_hca.clear();
  qp.port.psn_from_records = false;
}

std::size_t HcaDesk::connection_count() const {
  return static_cast<std::size_t>(
      std::count_if(connections_.begin(), connections_.end(), [](const auto& one) { return one.second->stage == Stage::bound; }));
}

}  // namespace vrdma::svc
