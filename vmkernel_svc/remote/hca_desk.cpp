// The device, the other hosts, and connections from their beginning to their end.
#include "vmkernel_svc/remote/hca_desk.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstring>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/shard.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::svc {

using engine::FarFrame;
using engine::FarFramePtr;
using engine::FarKind;
using engine::FarRecord;
using engine::QpState;
using engine::QpType;
using remote::HcaKind;
using remote::HcaMessage;
using remote::HostId;

namespace {
constexpr std::uint64_t look_ns = 250'000'000;           // whether the kernel still has the device
constexpr std::uint64_t retry_ns = 5'000'000'000;        // for a device
constexpr std::uint64_t announcement_ns = 1'000'000'000;  // how long a host may take to say that it has one
constexpr std::uint64_t drain_ns = 1'000'000'000;        // of a physical QP in error; it takes microseconds
constexpr std::uint32_t send_wr_max = 128, receive_wr_max = 512, sge_max = 32, inline_max = 256;
constexpr std::size_t hellos_max = 65536;

template <std::size_t N>
void put_text(char (&to)[N], const std::string& text) {
  std::memset(to, 0, N);
  std::memcpy(to, text.data(), std::min(text.size(), N - 1));
}
std::string text_of(const char (&from)[96]) { return std::string(from, ::strnlen(from, sizeof(from))); }
}  // namespace

HcaDesk::HcaDesk(Fabric& fabric, Shard& shard, MediatedPorts& ports, engine::Engine<MediatedPorts>& engine, FarDesk& far)
    : fabric_(fabric), shard_(shard), ports_(ports), engine_(engine), far_(far) {
  open_device();
}

HcaDesk::~HcaDesk() {
  while (!connections_.empty()) drop(*connections_.begin()->second);
  for (auto& [slot, known] : registered_)
    for (auto& piece : known.pieces)
      if (piece.mr != nullptr) device_->deregister(piece.mr);
  if (!device_) return;
  shard_.unwatch(device_->completion_fd());
  shard_.unwatch(device_->event_fd());
}

// --- the device -----------------------------------------------------------------------------------------------

void HcaDesk::open_device() {
  const std::string before = why_;
  device_ = remote::HcaDevice::open(*fabric_.config.hca, why_);
  const std::uint64_t now = vmci::monotonic_ns();
  check_ns_ = now + (device_ ? look_ns : retry_ns);
  if (!device_) {
    if (why_ != before) spdlog::warn("no HCA: {}; connections to other hosts go over tcp", why_);
    return;
  }
  why_.clear();
  fatal_ = false;
  if (!shard_.watch(device_->completion_fd()) || !shard_.watch(device_->event_fd())) spdlog::warn("cannot watch {}", device_->name());
  spdlog::info("HCA {} port {}: {}, GID {}", device_->name(), device_->port(), device_->gid_type(), device_->gid_index());
}

void HcaDesk::look_at_device() {
  const std::uint64_t now = vmci::monotonic_ns();
  if (now < check_ns_ && !fatal_) return;
  check_ns_ = now + look_ns;
  if (!device_) {
    open_device();
    if (device_)
      for (auto& [id, host] : hosts_) announce_device(id);
    return;
  }
  look_at_events();
  if (fatal_ || !device_->present()) device_lost(fmt::format("{} has gone", device_->name()));
}

void HcaDesk::device_lost(const std::string& why) {
  spdlog::warn("HCA: {}; its connections go on over tcp", why);
  ++counters_.losses;
  why_ = why;
  std::vector<HcaConnection*> all;
  for (auto& [number, c] : connections_) all.push_back(c.get());
  for (HcaConnection* const c : all) {
    if (c->stage == Stage::bound) lose(*c);
    if (c->stage != Stage::calling) continue;
    Qp& qp = *c->qp;
    const HostId host = c->host;
    drop(*c);
    qp.port.no_hca = why;
    say_none(qp, host, why);
    shard_.make_runnable(qp);
  }
  for (auto& [slot, known] : registered_)
    for (auto& piece : known.pieces)
      if (piece.mr != nullptr) device_->deregister(piece.mr);
  registered_.clear();
  shard_.unwatch(device_->completion_fd());
  shard_.unwatch(device_->event_fd());
  device_.reset();
  fatal_ = false;
  check_ns_ = vmci::monotonic_ns() + retry_ns;
  for (auto& [id, host] : hosts_) announce_device(id);
}

bool HcaDesk::turn() {
  found_ = false;
  bool worked = false;
  if (device_ && std::exchange(armed_, false)) {
    device_->take_completion_events();
    look_at_events();
  }
  if (device_) worked |= poll();
  look_at_device();
  return worked;
}

void HcaDesk::prepare_to_sleep() {
  if (!device_) return;
  armed_ = true;
  device_->arm();
  found_ = poll();  // what came before the arm
}

// --- other hosts ----------------------------------------------------------------------------------------------

void HcaDesk::say(HostId host, std::uint32_t connection, std::uint32_t epoch, HcaKind kind, HcaMessage message) {
  auto frame = FarFrame::make(sizeof(message));
  FarRecord& record = frame->record();
  record.kind = FarKind::hca;
  record.opcode = static_cast<std::uint8_t>(kind);
  record.connection = connection;
  record.epoch = epoch;
  record.payload_bytes = sizeof(message);
  message.version = remote::hca_version;
  std::memcpy(frame->payload(), &message, sizeof(message));
  far_.send_to(host, std::move(frame));
}

void HcaDesk::say(HcaConnection& c, HcaKind kind, HcaMessage message) {
  message.to_qpn = c.qp->attributes.dest_qp_num;
  message.to_epoch = c.their_epoch;
  say(c.host, c.qp->qpn.value, c.epoch, kind, message);
}

namespace {
void describe_guest(const MediatedPorts::Qp& qp, HcaMessage& message) {
  const Guest& guest = *qp.port.owner->guest;
  message.to_qpn = qp.attributes.dest_qp_num;
  message.guid = guest.guid;
  message.guest_lid = guest.lid;
  message.guest_link_layer = guest.link_layer;
}
}  // namespace

void HcaDesk::say_none(Qp& qp, HostId host, const std::string& why) {
  HcaMessage message{};
  describe_guest(qp, message);
  put_text(message.text, why);
  say(host, qp.qpn.value, far_.new_epoch(), HcaKind::none, message);
}

void HcaDesk::announce_device(HostId host) {
  if (far_.session(host) == 0) return;
  HcaMessage message{};
  if (device_) message.link_layer = device_->port_attributes().link_layer;
  put_text(message.text, device_ ? device_->name() : why_);
  say(host, 0, 0, HcaKind::host, message);
}

void HcaDesk::new_session(HostId id) {
  hosts_[id] = Host{};
  hosts_[id].since_ns = vmci::monotonic_ns();
  revoking_.clear();  // who could say that it has forgotten has
  hellos_.erase(hellos_.lower_bound({id, 0}), hellos_.lower_bound({id + 1, 0}));
  for (auto& [number, c] : connections_) {
    if (c->host != id) continue;
    c->closed_there = true;  // whoever was there is not any more
    wake(*c);
  }
  announce_device(id);
}

bool HcaDesk::holds(HostId id) const {
  const auto host = hosts_.find(id);
  return device_ && host != hosts_.end() && !host->second.heard && vmci::monotonic_ns() - host->second.since_ns < announcement_ns;
}

void HcaDesk::on_host(HostId id, const HcaMessage& message) {
  Host& host = hosts_[id];
  host.heard = true;
  host.present = message.link_layer != 0;
  host.link_layer = message.link_layer;
  host.text = text_of(message.text);
  host.keys.clear();
  if (!host.present || !device_) return;
  for (auto& [qpn, qp] : fabric_.by_qpn)
    if (qp->core.state == QpState::rtr || qp->core.state == QpState::rts) consider(qp->core);
}

std::string HcaDesk::why_not(HostId id) const {
  if (!device_) return "no HCA here: " + why_;
  const auto host = hosts_.find(id);
  if (host == hosts_.end() || !host->second.heard) return "it has not said that it has an HCA";
  if (!host->second.present) return "no HCA there: " + host->second.text;
  if (host->second.link_layer != device_->port_attributes().link_layer) return "its HCA is of the other link layer";
  return "";
}

// --- connections ----------------------------------------------------------------------------------------------

std::string HcaDesk::refusal(const Qp& qp) const {
  if (qp.type != QpType::rc) return "UC and UD go over tcp";
  if (qp.srq != nullptr) return "its receive queue is shared";
  if (qp.port.owner->guest->machine) return "its guest is in a virtual machine";
  if (!device_) return "no HCA here: " + why_;
  return "";
}

std::string HcaDesk::why_not(const Qp& qp) const {
  if (qp.port.hca != nullptr) return qp.port.hca->stage == Stage::bound ? "" : qp.port.hca->stage == Stage::calling ? "the other end has not said yet that it uses its HCA" : "its HCA was lost";
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
  const auto give_up = [&](const std::string& why) {
    qp.port.no_hca = why;
    say_none(qp, host, why);
  };
  if (const auto why = refusal(qp); !why.empty()) return give_up(why);
  if (const auto why = why_not(host); !why.empty()) return give_up(why);
  if (far_.has_stand_in(host, qp.attributes.dest_qp_num, qp.qpn.value)) return give_up("the other end uses tcp");
  auto made = std::make_unique<HcaConnection>();
  HcaConnection& c = *made;
  c.qp = &qp;
  c.host = host;
  c.number = next_number_++;
  c.epoch = far_.new_epoch();
  c.pd = qp.port.pd;
  if (!create(c)) return give_up("the HCA has no queue pair like it to give");
  connections_.emplace(c.number, std::move(made));
  qp.port.hca = &c;
  qp.far->given_one_by_one = true;
  say_hello(c);
  if (const auto hello = hellos_.find({host, qp.attributes.dest_qp_num}); hello != hellos_.end() && hello->second.message.to_qpn == qp.qpn.value) {
    const Hello known = hello->second;
    hellos_.erase(hello);
    heard(c, known);
  }
}

bool HcaDesk::create(HcaConnection& c) {
  const Qp& qp = *c.qp;
  const auto& limits = device_->attributes();
  const auto wr_max = static_cast<std::uint32_t>(limits.max_qp_wr), most_sges = std::min(sge_max, static_cast<std::uint32_t>(limits.max_sge));
  if (qp.attributes.max_send_sge > most_sges || qp.attributes.max_recv_sge > most_sges) return false;
  c.wish = {std::clamp(qp.attributes.max_send_wr, 1u, std::min(send_wr_max, wr_max)), std::clamp(qp.attributes.max_recv_wr, 1u, std::min(receive_wr_max, wr_max)),
            std::min(most_sges, 3 * std::max({qp.attributes.max_send_sge, qp.attributes.max_recv_sge, 1u})), inline_max};
  c.domain = device_->domain(c.pd);
  if (c.domain == nullptr) return false;
  c.physical = device_->create(*c.domain, c.wish, c.cq);
  if (c.physical == nullptr) c.wish.inline_bytes = 0, c.physical = device_->create(*c.domain, c.wish, c.cq);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device_->port();
  attributes.qp_access_flags = qp.attributes.access_flags;
  if (c.physical != nullptr && device_->modify(c.physical, attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) return true;
  spdlog::warn("HCA {} gives no queue pair of {} sends and {} receives of {} SGEs ({})", device_->name(), c.wish.send_wr, c.wish.receive_wr, c.wish.sge,
               std::strerror(device_->error()));
  free_physical(c);
  return false;
}

void HcaDesk::say_hello(HcaConnection& c) {
  HcaMessage message{};
  describe_guest(*c.qp, message);
  message.qpn = c.physical->qp_num;
  message.link_layer = device_->port_attributes().link_layer;
  message.lid = device_->port_attributes().lid;
  message.mtu = static_cast<std::uint8_t>(std::min<std::uint32_t>(c.qp->attributes.path_mtu, static_cast<std::uint32_t>(device_->port_attributes().active_mtu)));
  message.max_dest_rd_atomic = static_cast<std::uint8_t>(std::min<int>(c.qp->attributes.max_dest_rd_atomic, device_->attributes().max_qp_rd_atom));
  std::memcpy(message.gid, device_->gid().raw, sizeof(message.gid));
  say(c.host, c.qp->qpn.value, c.epoch, HcaKind::hello, message);
}

void HcaDesk::on_hello(HostId host, std::uint32_t connection, Hello hello) {
  const HcaMessage& said = hello.message;
  if (!far_.is_of(host, said.guid, said.guest_lid, said.guest_link_layer)) return far_.count_malformed();
  const auto found = fabric_.by_qpn.find(said.to_qpn);
  Qp* const qp = found != fabric_.by_qpn.end() ? &found->second->core : nullptr;
  if (qp != nullptr && qp->port.hca != nullptr && qp->port.hca->host == host && qp->attributes.dest_qp_num == connection && !qp->port.hca->heard)
    return heard(*qp->port.hca, hello);
  // The other end was reset, and is connected again to one that has not been used.
  if (qp != nullptr && qp->port.hca != nullptr && qp->port.hca->host == host && qp->attributes.dest_qp_num == connection &&
      qp->port.hca->stage == Stage::bound && qp->port.hca->sent == 0 && qp->port.hca->received == 0 && qp->port.hca->outstanding.empty() &&
      !engine_.busy(*qp)) {
    HcaConnection& c = *qp->port.hca;
    c.closed_there = true;
    stop(c);
    for (; !c.posted.empty(); c.posted.pop_back()) qp->returned.push_back(c.posted.back().inbound);
    drop(c);
    hellos_[{host, connection}] = std::move(hello);
    return consider(*qp);
  }
  // It is not connected yet, or to somebody else, or its connection is over: who is connected anew finds it.
  if (hellos_.size() >= hellos_max) return far_.count_malformed();
  const bool goes_by_records = qp != nullptr && !qp->port.no_hca.empty() && qp->attributes.dest_qp_num == connection;
  if (goes_by_records && !hello.none) say_none(*qp, host, qp->port.no_hca);
  hellos_[{host, connection}] = std::move(hello);
}

void HcaDesk::heard(HcaConnection& c, const Hello& hello) {
  Qp& qp = *c.qp;
  const auto& path = qp.attributes.path;
  const HcaMessage& said = hello.message;
  if (!Fabric::leads_to(said.guest_lid, gids_of(said.guid, said.guest_lid, said.guest_link_layer), qp.port.owner->guest->link_layer, path.dlid, path.is_global != 0, path.dgid))
    return;  // it is not whom this queue pair is connected to
  if (hello.none) {
    const std::string why = "the other end: " + text_of(said.text);
    drop(c);
    qp.port.no_hca = why;
    return shard_.make_runnable(qp);
  }
  c.theirs = said;
  c.their_epoch = hello.epoch;
  c.heard = true;
  c.stage = Stage::bound;
  qp.port.psn_from_records = true;
  bind(c);
}

// Both ends know each other: the physical queue pair follows the virtual one.
void HcaDesk::bind(HcaConnection& c) {
  Qp& qp = *c.qp;
  if (c.physical != nullptr && c.physical->state == IBV_QPS_INIT) {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = static_cast<ibv_mtu>(std::clamp<int>(std::min<int>({static_cast<int>(qp.attributes.path_mtu), device_->port_attributes().active_mtu, c.theirs.mtu}), 1, 5));
    a.dest_qp_num = c.theirs.qpn;
    a.rq_psn = qp.attributes.rq_psn & psn_mask;
    a.max_dest_rd_atomic = static_cast<std::uint8_t>(std::min<int>(qp.attributes.max_dest_rd_atomic, device_->attributes().max_qp_rd_atom));
    a.min_rnr_timer = qp.attributes.min_rnr_timer;
    a.ah_attr.port_num = device_->port();
    a.ah_attr.dlid = c.theirs.lid;
    a.ah_attr.sl = qp.attributes.path.sl & 15;
    if (c.theirs.link_layer == IBV_LINK_LAYER_ETHERNET) {
      a.ah_attr.is_global = 1;
      std::memcpy(a.ah_attr.grh.dgid.raw, c.theirs.gid, sizeof(c.theirs.gid));
      a.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(device_->gid_index());
      a.ah_attr.grh.hop_limit = 64;
    }
    if (!device_->modify(c.physical, a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)) {
      spdlog::warn("HCA {} does not connect a queue pair ({})", device_->name(), std::strerror(device_->error()));
      return lose(c);
    }
    pump_receives(c);
    if (c.stage == Stage::bound) say(c, HcaKind::ready);
  }
  wake(c);
}

bool HcaDesk::to_rts(HcaConnection& c) {
  const QpAttributes& from = c.qp->attributes;
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_RTS;
  a.timeout = from.timeout;
  a.retry_cnt = from.retry_cnt;
  a.rnr_retry = from.rnr_retry;
  a.sq_psn = from.sq_psn & psn_mask;
  a.max_rd_atomic = static_cast<std::uint8_t>(std::min<int>({from.max_rd_atomic, c.theirs.max_dest_rd_atomic, device_->attributes().max_qp_init_rd_atom}));
  return c.sending = device_->modify(c.physical, a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

HcaConnection* HcaDesk::bound_to(HostId host, std::uint32_t connection, std::uint32_t epoch, const HcaMessage& message) {
  const auto found = fabric_.by_qpn.find(message.to_qpn);
  if (found == fabric_.by_qpn.end()) return nullptr;
  HcaConnection* const c = found->second->core.port.hca;
  if (c == nullptr || !c->heard || c->host != host || c->qp->attributes.dest_qp_num != connection || c->their_epoch != epoch || c->epoch != message.to_epoch) return nullptr;
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
    case HcaKind::lost:
      if (c->stage == Stage::bound) lose(*c);
      if (c->stage == Stage::stopped) resolve(*c, message.count);
      return;
    case HcaKind::bye: {
      c->closed_there = true;
      const auto status = static_cast<WcStatus>(message.status);
      if (c->stage == Stage::stopped) resolve(*c, 0);
      else if (status == WcStatus::rem_access_err) engine_.fail(*c->qp, engine::AsyncEvent::qp_access_err);
      else if (status == WcStatus::rem_inv_req_err) engine_.fail(*c->qp, engine::AsyncEvent::qp_req_err);
      return wake(*c);
    }
    default: return far_.count_malformed();
  }
}

void HcaDesk::peer_goes_by_records(HostId host, std::uint32_t qpn) {
  const auto found = fabric_.by_qpn.find(qpn);
  if (found == fabric_.by_qpn.end()) return;
  HcaConnection* const c = found->second->core.port.hca;
  if (c == nullptr || c->host != host || c->stage != Stage::calling) return;
  Qp& qp = *c->qp;
  drop(*c);
  qp.port.no_hca = "the other end uses tcp";
  shard_.make_runnable(qp);
}

// --- their end ------------------------------------------------------------------------------------------------

void HcaDesk::free_physical(HcaConnection& c) {
  if (c.physical != nullptr) device_->destroy(std::exchange(c.physical, nullptr), *c.cq, c.wish);
  if (std::exchange(c.domain, nullptr) != nullptr) device_->release(c.pd);
}

void HcaDesk::free_bounces(HcaConnection& c, std::vector<remote::Bounce>& bounces) {
  for (auto& bounce : bounces) device_->give_bounce(*c.domain, std::move(bounce));
  bounces.clear();
}

// The hardware touches nothing of it any more, and what had come is taken.
void HcaDesk::stop(HcaConnection& c) {
  if (c.physical == nullptr) return;
  c.stage = Stage::stopped;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  if (device_->modify(c.physical, attributes, IBV_QP_STATE)) {
    const std::uint64_t until = vmci::monotonic_ns() + drain_ns;
    while (c.flushed < c.outstanding.size() + c.posted.size() && vmci::monotonic_ns() < until) poll(*c.cq);
  }
  poll(*c.cq);
  for (auto& send : c.outstanding) free_bounces(c, send.bounces);
  if (c.preparing) free_bounces(c, c.preparing->send.bounces);
  for (auto& receive : c.posted) {
    for (auto& part : receive.parts) device_->give_bounce(*c.domain, std::move(part.bounce));
    receive.parts.clear();
  }
  for (auto& receive : c.arrived)  // what came stays to be copied, by memory that the HCA does not have any more
    for (auto& part : receive.parts)
      if (part.bounce.mr != nullptr) device_->deregister(std::exchange(part.bounce.mr, nullptr));
  free_physical(c);
}

void HcaDesk::lose(HcaConnection& c) {
  Qp& qp = *c.qp;
  stop(c);
  c.stage = Stage::stopped;
  c.waiting_since_ns = 0;
  for (; !c.posted.empty(); c.posted.pop_back()) qp.returned.push_back(c.posted.back().inbound);
  // What was not posted yet comes after what was.
  if (c.preparing || (engine_.busy(qp) && !c.by_records && qp.operation.stage == engine::Operation::Stage::routing)) {
    if (!c.copy_of_receive) ports_.abandon(qp), qp.operation.copy_pending = false;
    c.outstanding.push_back(c.preparing ? std::move(c.preparing->send) : describe(qp));
    c.preparing.reset();
    qp.operation.stage = engine::Operation::Stage::none;
  }
  if (c.after_records) c.outstanding.push_back(std::move(*std::exchange(c.after_records, nullptr)));
  qp.far->under_way = 0;
  qp.port.psn_from_records = true;
  HcaMessage message{};
  message.count = c.received;
  say(c, HcaKind::lost, message);
  wake(c);
}

// The other end has taken `count` messages that take a receive WQE.
void HcaDesk::resolve(HcaConnection& c, std::uint64_t count) {
  std::size_t done = 0;
  for (std::size_t i = 0; i < c.outstanding.size(); ++i)
    if (c.outstanding[i].rule->takes_receive && c.outstanding[i].ordinal < count) done = i + 1;
  for (std::size_t i = 0; i < c.outstanding.size(); ++i) {
    HcaSend& send = c.outstanding[i];
    const bool repeatable = (send.rule->takes_receive && send.rule->moves_to_receive) || (send.rule->reads && !send.rule->atomic);
    if (i < done && !send.rule->reads) send.fate = HcaSend::Fate::done;
    else if (!send.posted || repeatable || (c.refused_there && i >= done)) send.fate = HcaSend::Fate::again;
    else send.fate = HcaSend::Fate::unknown;
    if (c.closed_there && send.fate == HcaSend::Fate::again) send.fate = HcaSend::Fate::unknown;
  }
  c.stage = Stage::resuming;
  c.waiting_since_ns = 0;
  c.qp->port.no_hca = "its HCA was lost";
  wake(c);
}

void HcaDesk::drop(HcaConnection& c) {
  Qp& qp = *c.qp;
  const bool tell = c.heard && !c.closed_there && c.stage == Stage::bound;
  if (c.physical != nullptr) {
    const auto before = c.stage;
    stop(c);
    c.stage = before;
  }
  if (tell) {
    HcaMessage message{};
    message.status = static_cast<std::uint8_t>(c.ended_with);
    say(c, HcaKind::bye, message);
  }
  if (qp.far != nullptr) {
    qp.far->given_one_by_one = false;
    qp.far->under_way = 0;
    qp.far->blocked = false;
  }
  qp.port.hca = nullptr;
  connections_.erase(c.number);
}

void HcaDesk::leave(Qp& qp) {
  if (qp.port.hca != nullptr) drop(*qp.port.hca);
  qp.port.no_hca.clear();
  qp.port.psn_from_records = false;
}

std::size_t HcaDesk::connection_count() const {
  return static_cast<std::size_t>(std::count_if(connections_.begin(), connections_.end(), [](const auto& one) { return one.second->stage == Stage::bound; }));
}

}  // namespace vrdma::svc
