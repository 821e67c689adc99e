// Under which keys of the HCA other hosts reach guests' memory: they ask once, and are told when a key is no more.
#include <fmt/format.h>

#include <algorithm>

#include "vmkernel_svc/fabric.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/remote/hca_desk.hpp"

namespace vrdma::svc {

using remote::HcaKind;
using remote::HcaMessage;
using remote::HcaRegistration;

namespace {
constexpr std::size_t keys_max = 65536;  // of one host
constexpr std::uint32_t said_by_records_max = 100;  // a guest can register as often as it likes
}  // namespace

// 0: there is no such memory for that queue pair, or the HCA does not have it, or not yet: the operation comes by records, where its
// rights are checked. known: that is so until it hears otherwise.
std::uint32_t HcaDesk::remote_key(const Qp& qp, Key rkey, bool& known, remote::HostId asker) {
  known = false;
  const auto slot = fabric_.regions.find(rkey);
  if (!slot || revoking_.contains(rkey.value) || leaves(rkey)) return 0;
  const Region& region = fabric_.regions.slot(*slot);
  if (region.pd != qp.port.pd || (region.access & engine::access_remote_any) == 0 || (region.access & Region::is_window) != 0) return 0;
  Registered& registration = registered(*slot, region);
  const HcaRegistration* const all = whole(registration, region);
  if (!registration.refusal.empty()) refused_ = registration.refusal;
  if (all != nullptr && all->state() == HcaRegistration::State::asked) return 0;
  known = true;
  ibv_mr* const mr = all != nullptr ? all->mr() : nullptr;
  if (std::ranges::find(registration.askers, asker) == registration.askers.end()) {
    registration.askers.push_back(asker);
    if (mr == nullptr && refused_.empty() && said_by_records_++ < said_by_records_max)
      log::info("{}: the HCA cannot have {} bytes at {:#x} of {}, {}: what other hosts write or read there goes by records", device_->name(), region.bytes, region.address,
                region.guest->name, region.pieces.size() != 1 ? fmt::format("which lie in {} pieces", region.pieces.size()) : "which are reached through the process");
  }
  return mr != nullptr ? mr->rkey : 0;
}

std::optional<std::uint32_t> HcaDesk::key_of(HcaConnection& c, Key rkey) {
  Host& host = hosts_[c.host];
  if (rkey.value == 0 || c.answered == rkey) return 0;  // 0 is nobody's
  if (const auto known = host.keys.find(rkey.value); known != host.keys.end()) {
    ++ports_.key_counters().hits;
    return known->second;
  }
  if (c.asked == rkey) return std::nullopt;
  ++ports_.key_counters().misses;
  ++counters_.keys_asked;
  c.asked = rkey;
  HcaMessage question{};
  question.rkey = rkey.value;
  say(c, HcaKind::want_key, question);
  return std::nullopt;
}

void HcaDesk::on_key(remote::HostId host, std::uint32_t connection, std::uint32_t epoch, HcaKind kind, const HcaMessage& message) {
  switch (kind) {
    case HcaKind::want_key: {
      HcaConnection* const c = bound_to(host, connection, epoch, message);
      if (c == nullptr) return;
      HcaMessage reply{};
      bool known = false;
      refused_.clear();
      reply.rkey = message.rkey;
      reply.physical_rkey = c->physical != nullptr ? remote_key(*c->qp, Key{message.rkey}, known, host) : 0;
      if (!refused_.empty() && c->stage == Stage::bound) return lose(*c, std::string(refused_));
      reply.known = known ? 1 : 0;
      return say(*c, HcaKind::key, reply);
    }
    case HcaKind::key: {
      HcaConnection* const c = bound_to(host, connection, epoch, message);
      if (c == nullptr || c->asked.value != message.rkey) return;
      auto& keys = hosts_[host].keys;
      if (keys.size() >= keys_max) keys.clear();
      if (message.known != 0) keys[message.rkey] = message.physical_rkey;
      c->answered = message.known != 0 ? Key{} : c->asked;
      c->asked = Key{};
      return wake(*c);
    }
    case HcaKind::revoke: {
      hosts_[host].keys.erase(message.rkey);
      HcaMessage reply{};
      reply.rkey = message.rkey;
      return say(host, 0, 0, HcaKind::revoked, reply);
    }
    default:
      if (const auto waiting = revoking_.find(message.rkey); waiting != revoking_.end() && waiting->second.erase(host) != 0 && waiting->second.empty())
        revoking_.erase(waiting);
  }
}

}  // namespace vrdma::svc
