// Which of the guests' memory the HCA has, and under which keys.
#include <fmt/format.h>

#include <algorithm>

#include "vmkernel_svc/fabric.hpp"
#include "vmkernel_svc/log.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/remote/hca_desk.hpp"

namespace vrdma::svc {

using remote::HcaKind;
using remote::HcaMessage;

namespace {
constexpr std::size_t keys_max = 65536;  // of one host
constexpr std::uint32_t said_by_records_max = 100;  // a guest can register as often as it likes
constexpr std::uint32_t remote_rights = engine::access_remote_write | engine::access_remote_read | engine::access_remote_atomic;
}  // namespace

HcaDesk::Registered& HcaDesk::registered(std::uint32_t slot, const Region& region) {
  Registered& known = registered_[slot];
  if (known.domain == nullptr) {
    known.generation = region.generation;
    known.pd = region.pd;
    known.domain = device_->domain(region.pd);
    if (known.domain == nullptr) known.refusal = device_->name() + " gives no protection domain";
    known.pieces.resize(region.pieces.size());
  }
  return known;
}

// A region in one piece gets its rights with it, so that its registration serves other hosts, too; pieces of others serve this host.
ibv_mr* HcaDesk::local(std::uint32_t slot, const Region& region, std::size_t index) {
  Registered& known = registered(slot, region);
  Registered::Piece& piece = known.pieces[index];
  if (region.pieces[index].host == nullptr) return nullptr;
  if (!known.refusal.empty()) refused_ = known.refusal;
  if (std::exchange(piece.tried, true) || known.domain == nullptr) return piece.mr;
  const Piece& from = region.pieces[index];
  std::uint32_t access = region.access & engine::access_local_write;
  if (region.pieces.size() == 1) access |= region.access & remote_rights;
  piece.mr = device_->register_memory(*known.domain, from.host, from.bytes, region.iova + from.offset, static_cast<int>(access));
  if (piece.mr != nullptr) return piece.mr;
  ++counters_.refused;
  log::warn("HCA: {}; connections that use it go over tcp", device_->refusal);
  refused_ = known.refusal = device_->refusal;
  return nullptr;
}

// 0: there is no such memory for that queue pair, or the HCA cannot have it: the operation comes by records, where its rights are checked.
std::uint32_t HcaDesk::remote_key(const Qp& qp, Key rkey, bool& known, remote::HostId asker) {
  known = false;
  const auto slot = fabric_.regions.find(rkey);
  if (!slot || revoking_.contains(rkey.value)) return 0;
  const Region& region = fabric_.regions.slot(*slot);
  if (region.pd != qp.port.pd || (region.access & remote_rights) == 0 || (region.access & Region::is_window) != 0) return 0;
  known = true;
  ibv_mr* const mr = region.pieces.size() == 1 ? local(*slot, region, 0) : nullptr;
  auto& askers = registered(*slot, region).askers;
  if (std::find(askers.begin(), askers.end(), asker) == askers.end()) {
    askers.push_back(asker);
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

bool HcaDesk::forget_region(std::uint32_t slot) {
  const Key key = fabric_.regions.slot(slot).key;
  if (const auto found = registered_.find(slot); found != registered_.end()) {
    const Registered known = std::move(found->second);
    registered_.erase(found);
    if (device_) {
      bool kept = false;
      for (const auto& piece : known.pieces) kept |= piece.mr != nullptr && !device_->deregister(piece.mr);
      if (known.domain != nullptr) device_->release(known.pd);
      // Not a byte may be written once the guest hears that it is gone; with the device goes all that it has.
      if (kept && device_->present()) device_lost(fmt::format("{} does not let go of memory", device_->name()));
    }
    for (const remote::HostId host : known.askers) {
      if (far_.session(host) == 0) continue;
      HcaMessage news{};
      news.rkey = key.value;
      say(host, 0, 0, HcaKind::revoke, news);
      revoking_[key.value].insert(host);
      ++counters_.revoked;
    }
  }
  return !revoking_.contains(key.value);
}

std::size_t HcaDesk::registration_count() const {
  std::size_t count = 0;
  for (const auto& [slot, known] : registered_)
    for (const auto& piece : known.pieces) count += piece.mr != nullptr;
  return count;
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
