#include "vmkernel_svc/remote/far_cm.hpp"

#include <sys/socket.h>

#include <cstring>
#include <set>

#include "vmkernel_svc/addresses.hpp"
#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/remote/link_head.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

namespace {

// The connection manager's number of a host; 0 is this one.
constexpr std::uint32_t number_of(remote::HostId host) { return host + 1; }

bool is_sound(const control::CmAddress& address) { return address.family == AF_INET || address.family == AF_INET6 || address.family == AF_IB || address.family == 0; }

bool is_sound(const CmMessage& message) {
  return message.kind >= CmKind::req && message.kind <= CmKind::has && is_sound(message.source) && is_sound(message.destination) &&
         message.port.mtu <= 5;
}

// Whose answers say nothing of a guest.
bool has_port(CmKind kind) { return kind == CmKind::req || kind == CmKind::sidr_req || kind == CmKind::rep || kind == CmKind::sidr_rep; }

}  // namespace

FarCm::FarCm(FarDesk& desk, Shard& shard) : desk_(desk), shard_(shard) { shard.fabric().cm->use(this); }
FarCm::~FarCm() { shard_.fabric().cm->use(nullptr); }

void FarCm::new_session(remote::HostId host, std::uint64_t features) {
  if ((features & remote::link_knows_cm) != 0) features_[host] = features;
  else features_.erase(host);
  desk_.later([host](Shard& shard) { shard.fabric().cm->lost(number_of(host)); });
}

bool FarCm::arrived(remote::HostId host, engine::FarFrame& frame) {
  if (frame.record().payload_bytes != sizeof(CmMessage)) return false;
  CmMessage message;
  std::memcpy(&message, frame.payload(), sizeof(message));
  if (!is_sound(message)) return false;
  const bool refuses = message.kind == CmKind::sidr_rep && message.status != 0;
  if (has_port(message.kind) && !refuses && !desk_.is_of(host, message.port.guid, message.port.lid, message.port.link_layer)) return refuse(host, message), false;
  if (message.kind == CmKind::req || message.kind == CmKind::sidr_req)
    for (std::uint16_t& pkey : message.pkeys)
      if (pkey != 0) pkey = desk_.judged(host, pkey);
  message.is_local = message.was_kept = 0;
  desk_.later([host, message](Shard& shard) { shard.fabric().cm->arrived(number_of(host), message); });
  return true;
}

// Of a port that is not that host's by what is known here, with which nobody can be connected. Whoever waits for what comes next hears of it.
void FarCm::refuse(remote::HostId host, const CmMessage& message) {
  const bool datagrams = message.kind == CmKind::sidr_req || message.kind == CmKind::sidr_rep;
  CmMessage no{};
  no.kind = datagrams ? CmKind::sidr_rep : CmKind::rej;
  no.status = datagrams ? sidr_unsupported : rej_invalid_lid;
  no.to = message.from;
  if (message.kind != CmKind::sidr_rep) tell(number_of(host), no);  // who has said that is done with it
  if (message.kind == CmKind::req || message.kind == CmKind::sidr_req) return;
  no.from = message.from;
  no.to = message.to;
  desk_.later([host, no](Shard& shard) { shard.fabric().cm->arrived(number_of(host), no); });
}

void FarCm::tell(std::uint32_t host, const CmMessage& message) {
  auto frame = engine::FarFrame::make(sizeof(message));
  frame->record().kind = engine::FarKind::cm;
  frame->record().payload_bytes = sizeof(message);
  std::memcpy(frame->payload(), &message, sizeof(message));
  desk_.send_to(host - 1, std::move(frame));
}

std::uint64_t FarCm::silent_ns(std::uint32_t host) { return desk_.silent_ns(host - 1); }

std::vector<std::uint32_t> FarCm::who_may_have(const control::CmAddress& address) {
  const bool by_gid = address.family == AF_IB;
  const auto holder = by_gid ? desk_.directory().host_of(lid_of(address.ip.data())) : std::nullopt;
  const std::uint64_t needed = remote::link_knows_cm | (by_gid ? remote::link_knows_cm_by_gid : 0);
  std::set<remote::HostId> known;
  for (const auto& range : desk_.ranges()) known.insert(range.host);
  for (const auto& [host, features] : features_) known.insert(host);
  std::vector<std::uint32_t> hosts;
  for (const remote::HostId host : known) {
    if (by_gid && holder != host) continue;
    if (!desk_.is_connected(host) && !is_awaited(host)) continue;
    const auto features = features_.find(host);
    const bool understands = features != features_.end() ? (features->second & needed) == needed : desk_.session(host) == 0;  // who was never met may
    if (understands) hosts.push_back(number_of(host));
  }
  return hosts;
}

// Not connected, and so for a moment only: its service starts anew, or it has not been met since ours did.
bool FarCm::is_awaited(remote::HostId host) const {
  constexpr std::uint64_t awaited_ns = 5'000'000'000;
  const auto known = desk_.directory().host(host);
  return known && !known->expired && desk_.silent_ns(host) < awaited_ns;
}

}  // namespace vrdma::svc
