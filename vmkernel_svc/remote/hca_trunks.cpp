// The way of records by the HCA: made where both hosts have one with the first records (it takes memory), and again some time after it was lost.
#include <fmt/format.h>

#include <algorithm>

#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/remote/hca_desk.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

using remote::HcaKind;
using remote::HcaMessage;
using remote::HcaTrunk;
using remote::HostId;

namespace {
constexpr std::uint64_t again_max_ns = 300'000'000'000;
constexpr std::uint32_t looks_before_stalled = 20;  // 5 s without a completion
constexpr std::uint64_t heard_ns = 1'000'000'000;   // so lately that its service runs
}  // namespace

bool HcaDesk::has_trunk(HostId id) const {
  const auto host = hosts_.find(id);
  return host != hosts_.end() && host->second.trunk.way && host->second.trunk.way->open();
}

std::string HcaDesk::why_no_trunk(HostId id) const {
  const auto host = hosts_.find(id);
  if (has_trunk(id) || host == hosts_.end() || !host->second.trunk.wanted) return "";
  if (const std::string why = why_not(id); !why.empty()) return why;
  return host->second.trunk.why;
}

void HcaDesk::want_trunk(HostId id) {
  if (!std::exchange(hosts_[id].trunk.wanted, true)) call_trunk(id);
}

bool HcaDesk::make_trunk(HostId id, std::uint32_t epoch) {
  Trunk& trunk = hosts_[id].trunk;
  trunk.epoch = epoch;
  trunk.looks_unmoved = 0;
  trunk.try_ns = vmci::monotonic_ns() + trunk.pause_ns;
  device_->refusal.clear();
  trunk.way = HcaTrunk::make(*device_, next_number_++, id);
  if (trunk.way) {
    trunks_.emplace(trunk.way->number(), trunk.way.get());
    return true;
  }
  const std::string why = fmt::format("{} has no queue pair for records to give{}{}", device_->name(), device_->refusal.empty() ? "" : ": ", device_->refusal);
  if (trunk.why != why) log::warn("{}", why);
  trunk.why = why;
  return false;
}

bool HcaDesk::connect_trunk(HostId id, const HcaMessage& theirs) {
  HcaTrunk& way = *hosts_[id].trunk.way;
  if (!way.connect(theirs)) return false;
  far_.carrier().set_bypass(id, &way);
  return true;
}

void HcaDesk::say_trunk(HostId id, HcaKind kind) {
  const Trunk& trunk = hosts_[id].trunk;
  HcaMessage message{};
  if (kind == HcaKind::trunk) trunk.way->describe(message);
  if (kind == HcaKind::trunk_gone) put_text(message, trunk.why);
  say(id, 0, trunk.epoch, kind, message);
}

// By the host that dials.
void HcaDesk::call_trunk(HostId id) {
  Trunk& trunk = hosts_[id].trunk;
  if (trunk.wanted && !trunk.way && far_.carrier().dials(id) && why_not(id).empty() && make_trunk(id, far_.new_epoch())) say_trunk(id, HcaKind::trunk);
}

void HcaDesk::on_trunk(HostId id, std::uint32_t epoch, HcaKind kind, const HcaMessage& message) {
  Trunk& trunk = hosts_[id].trunk;
  const std::uint8_t patience = fabric_.config.hca->ack_timeout;
  const bool called = kind == HcaKind::trunk && !far_.carrier().dials(id);
  if (called) {
    end_trunk(id);
    trunk.epoch = epoch;
    if (const std::string why = why_not(id); !why.empty()) return lose_trunk(id, why);
    if (!make_trunk(id, epoch)) return lose_trunk(id, trunk.why);
    if (!connect_trunk(id, message)) return lose_trunk(id, "the HCA does not connect the queue pair for records");
    return say_trunk(id, HcaKind::trunk);
  }
  if (!trunk.way || trunk.epoch != epoch) return;
  switch (kind) {
    case HcaKind::trunk:
      if (trunk.way->connected()) return;
      if (const std::string why = why_not(id); !why.empty()) return lose_trunk(id, why);
      if (!connect_trunk(id, message) || !trunk.way->start(patience)) return lose_trunk(id, "the HCA does not connect the queue pair for records");
      return say_trunk(id, HcaKind::trunk_ready);
    case HcaKind::trunk_ready:
      if (trunk.way->connected() && !trunk.way->start(patience)) lose_trunk(id, "the HCA does not connect the queue pair for records");
      return;
    default:
      trunk.why = "the other end: " + text_of(message);
      return end_trunk(id);
  }
}

// What it was given and nobody has acknowledged is sent over tcp.
void HcaDesk::end_trunk(HostId id) {
  const auto host = hosts_.find(id);
  if (host == hosts_.end() || !host->second.trunk.way) return;
  Trunk& trunk = host->second.trunk;
  far_.carrier().set_bypass(id, nullptr);
  trunks_.erase(trunk.way->number());
  // One that carried nothing, as where the network lets no RDMA pass, is tried less and less often: records wait for each to fail.
  trunk.pause_ns = trunk.way->sent() != 0 ? Trunk::first_pause_ns : std::min(2 * trunk.pause_ns, again_max_ns);
  trunk.way.reset();
  trunk.try_ns = vmci::monotonic_ns() + trunk.pause_ns;
}

void HcaDesk::lose_trunk(HostId id, const std::string& why) {
  Trunk& trunk = hosts_[id].trunk;
  if (trunk.way) log::warn("host {}: {}; records go over tcp", id, why);
  trunk.why = why;
  end_trunk(id);
  say_trunk(id, HcaKind::trunk_gone);
}

// Now and then. Who does not take what comes is waited for as long as its service is heard of, but for an HCA that does nothing any more.
void HcaDesk::look_at_trunks() {
  const std::uint64_t now = vmci::monotonic_ns();
  for (auto& [id, host] : hosts_) {
    Trunk& trunk = host.trunk;
    if (!trunk.way) {
      if (now >= trunk.try_ns) call_trunk(id);
      continue;
    }
    const bool moves = !trunk.way->sends_wait() || trunk.way->sent() != trunk.looked_at || far_.silent_ns(id) > heard_ns;
    trunk.looks_unmoved = moves ? 0 : trunk.looks_unmoved + 1;
    trunk.looked_at = trunk.way->sent();
    if (trunk.looks_unmoved < looks_before_stalled) continue;
    ++counters_.stalled;
    lose_trunk(id, "its HCA neither ends a message of records nor gives it up");
  }
}

bool HcaDesk::anything_waiting() const {
  return found_ || std::any_of(trunks_.begin(), trunks_.end(), [](const auto& one) { return one.second->anything_waiting(); });
}

bool HcaDesk::turn_trunks() {
  bool worked = false;
  for (auto next = trunks_.begin(); next != trunks_.end();) {
    HcaTrunk& trunk = *next++->second;
    if (trunk.has_new_room()) far_.carrier().bypass_has_room(trunk.host());
    worked |= trunk.deliver(far_.carrier());
    if (trunk.broken()) lose_trunk(trunk.host(), trunk.why());
  }
  return worked;
}

void HcaDesk::trunk_completed(const ibv_wc& wc) {
  if (const auto found = trunks_.find(wc.wr_id >> 1); found != trunks_.end()) found->second->completed(wc);
}

}  // namespace vrdma::svc
