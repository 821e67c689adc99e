// The device and the other hosts.
#include "vmkernel_svc/remote/hca_desk.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

using engine::FarFrame;
using engine::FarKind;
using engine::FarRecord;
using engine::QpState;
using remote::HcaKind;
using remote::HcaMessage;
using remote::HostId;

namespace {
constexpr std::uint64_t look_ns = 250'000'000;           // whether the kernel still has the device
constexpr std::uint64_t retry_ns = 5'000'000'000;        // for a device
constexpr std::uint64_t stalled_min_ns = 5'000'000'000;  // without a completion
constexpr std::uint64_t announcement_ns = 1'000'000'000;  // how long a host may take to say that it has one
}  // namespace

HcaDesk::HcaDesk(Fabric& fabric, Shard& shard, MediatedPorts& ports, engine::Engine<MediatedPorts>& engine, FarDesk& far)
    : fabric_(fabric), shard_(shard), ports_(ports), engine_(engine), far_(far) {
  open_device();
}

HcaDesk::~HcaDesk() {
  for (auto& [id, host] : hosts_) end_trunk(id);
  while (!connections_.empty()) drop(*connections_.begin()->second);
  if (!device_) return;
  forget_all_registrations();
  shard_.unwatch(device_->completion_fd());
  shard_.unwatch(device_->event_fd());
}

// --- the device -----------------------------------------------------------------------------------------------

void HcaDesk::open_device() {
  const std::string before = why_;
  const auto news = [this] {
    shard_.submit([this](Shard&) {
      if (device_) look_at_registrations();
    });
  };
  device_ = remote::HcaDevice::open(*fabric_.config.hca, news, why_);
  const std::uint64_t now = vmci::monotonic_ns();
  check_ns_ = now + (device_ ? look_ns : retry_ns);
  if (!device_) {
    if (why_ != before) log::warn("no HCA: {}; connections to other hosts go over tcp", why_);
    return;
  }
  why_.clear();
  fatal_ = false;
  completion_event_ = device_event_ = false;
  if (!shard_.watch(device_->completion_fd(), &completion_event_) || !shard_.watch(device_->event_fd(), &device_event_)) log::warn("cannot watch {}", device_->name());
  log::info("HCA {} port {}: {}, GID {}", device_->name(), device_->port(), device_->gid_type(), device_->gid_index());
}

void HcaDesk::look_at_device() {
  const std::uint64_t now = vmci::monotonic_ns();
  if (now < check_ns_ && !fatal_) return;
  check_ns_ = now + look_ns;
  if (!device_) {
    open_device();
    if (device_)
      for (auto& [id, host] : hosts_) announce_device(id), call_trunk(id);
    return;
  }
  look_at_events();
  if (fatal_ || !device_->present()) return device_lost(fmt::format("{} has gone", device_->name()));
  look_at_progress();
  look_at_trunks();
}

// Hardware that neither ends a message nor gives it up is a lost one (rdma_rxe of Linux 6.1 does that when its timer runs out in the
// middle of a message). Who waits for a receive WQE may wait for ever: whether there is one is known at the other end.
void HcaDesk::look_at_progress() {
  for (auto& [number, one] : connections_) {
    HcaConnection& c = *one;
    if (c.stage != Stage::bound) continue;
    c.look.sends_unmoved = c.outstanding.empty() || c.completed != c.look.completed ? 0 : c.look.sends_unmoved + 1;
    c.look.receives_unmoved = (c.shared != nullptr ? c.shared->posted.empty() : c.posted.empty()) || c.received != c.look.received ? 0 : c.look.receives_unmoved + 1;
    c.look.completed = c.completed;
    c.look.received = c.received;
    const QpAttributes& attributes = c.qp->attributes;
    const std::uint64_t timeout = engine::ack_timeout_ns(c.closed_there ? static_cast<std::uint8_t>(attributes.timeout) : ack_timeout(attributes));
    std::uint64_t patience = timeout * (attributes.retry_cnt + 1u);
    if (!c.closed_there) patience = std::max(stalled_min_ns, 4 * patience);  // IBA 9.9.2.1: up to four times
    // The first look that saw it may have come right after the last move.
    if (timeout == 0 || c.look.sends_unmoved < 2 || (c.look.sends_unmoved - 1) * look_ns < patience) continue;
    c.look.sends_unmoved = 0;
    const HcaSend& first = c.outstanding.front();
    if (c.closed_there) {  // it is known that nobody answers, and for how long the guest wants to try all the same
      lose_soon(c);
    } else if (first.rule->takes_receive) {
      HcaMessage message{};
      message.count = first.ordinal + 1;
      say(c, HcaKind::stalled, message);
    } else {
      log::warn("HCA {} has had no answer of queue pair {} for {} s, and does not give up: it goes on over tcp", device_->name(), c.qp->qpn.value, patience / 1'000'000'000);
      ++counters_.stalled;
      lose_soon(c);
    }
  }
}

void HcaDesk::device_lost(const std::string& why) {
  log::warn("HCA: {}; its connections go on over tcp", why);
  ++counters_.losses;
  why_ = why;
  std::vector<HcaConnection*> all;
  for (auto& [number, c] : connections_) all.push_back(c.get());
  drain_until_ns_ = vmci::monotonic_ns() + drain_ns;
  for (HcaConnection* const c : all) {
    if (c->stage == Stage::bound) lose(*c);
    else if (c->stage == Stage::calling) go_by_records(*c, why);
  }
  drain_until_ns_ = 0;
  for (auto& [id, host] : hosts_) end_trunk(id);
  forget_all_registrations();
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
  if (device_) {
    if (std::exchange(device_event_, false)) look_at_events();
    worked |= poll();
    worked |= pump_all_shared();
    worked |= turn_trunks();
  }
  look_at_device();
  return worked;
}

void HcaDesk::prepare_to_sleep() {
  if (!device_) return;
  device_->arm(std::exchange(completion_event_, false));
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
  message.to_qpn = c.peer_qpn;  // its queue pair may have been reset
  message.to_epoch = c.their_epoch;
  say(c.host, c.qp->qpn.value, c.epoch, kind, message);
}

void HcaDesk::announce_device(HostId host) {
  if (far_.session(host) == 0) return;
  HcaMessage message{};
  if (device_) message.link_layer = device_->port_attributes().link_layer;
  put_text(message, device_ ? device_->name() : why_);
  say(host, 0, 0, HcaKind::host, message);
}

void HcaDesk::new_session(HostId id) {
  end_trunk(id);
  hosts_[id] = Host{};
  hosts_[id].since_ns = vmci::monotonic_ns();
  settle_revocations(id);  // who could say that it has forgotten has
  for (auto& [number, c] : connections_) {
    if (c->host != id) continue;
    c->closed_there = true;  // whoever was there is not any more
    wake(*c);
  }
  announce_device(id);
}

void HcaDesk::forget_host(HostId id) {
  end_trunk(id);
  settle_revocations(id);
}

void HcaDesk::settle_revocations(HostId id) {
  for (auto waiting = revoking_.begin(); waiting != revoking_.end();) {
    waiting->second.erase(id);
    waiting = waiting->second.empty() ? revoking_.erase(waiting) : std::next(waiting);
  }
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
  host.text = text_of(message);
  host.keys.clear();
  end_trunk(id);
  host.trunk.pause_ns = Trunk::first_pause_ns;
  if (!host.present || !device_) return;
  call_trunk(id);
  for (auto& [qpn, qp] : fabric_.by_qpn) {
    if (fabric_.shards.count() != 1 && !qp->guest->group->pinned) continue;  // another shard's, or of this host
    if (qp->core.state == QpState::rtr || qp->core.state == QpState::rts) consider(qp->core);
  }
}

std::string HcaDesk::fallen_back(HostId id) const {
  const auto host = hosts_.find(id);
  return host != hosts_.end() ? host->second.fallen_back : "";
}

std::string HcaDesk::why_not(HostId id) const {
  if (!device_) return "no HCA here: " + why_;
  const auto host = hosts_.find(id);
  if (host == hosts_.end() || !host->second.heard) return "it has not said that it has an HCA";
  if (!host->second.present) return "no HCA there: " + host->second.text;
  if (host->second.link_layer != device_->port_attributes().link_layer) return "its HCA is of the other link layer";
  if (far_.carrier().encrypts(id)) return "payload is to be encrypted, which an HCA does not do";
  return "";
}

}  // namespace vrdma::svc
