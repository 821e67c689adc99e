#include "vmkernel_svc/cm/ports.hpp"

#include <sys/socket.h>

#include <algorithm>

#include "vmkernel_svc/objects.hpp"

namespace vrdma::svc {

namespace {

CmHolding holding_of(const CmIdentifier& one) {
  CmHolding out{one.state == CmState::listening ? CmClaim::listens : one.reuse_address ? CmClaim::shared : CmClaim::alone, false, one.source};
  if (one.source.family == AF_IB) out.at.ip = one.guest->gids[0].gid;
  out.also_ipv4 = one.source.family == AF_INET6 && one.source.is_any() && !one.only_ipv6;
  return out;
}

constexpr std::array<std::uint8_t, 16> any{};

}  // namespace

const CmPorts::Holders* CmPorts::holders_of(const Key& key) const {
  const auto found = taken_.find(key);
  return found == taken_.end() ? nullptr : &found->second;
}

void CmPorts::enter(Holders& holders, CmIdentifier& one) {
  const CmHolding holding = holding_of(one);
  one.holding = holding;
  holders.emplace(std::tuple{holding.at.family, holding.claim, holding.at.ip, one.id}, &one);
  if (holding.also_ipv4) holders.emplace(std::tuple{std::uint16_t{AF_INET}, holding.claim, any, one.id}, &one);
}

void CmPorts::strike(Holders& holders, const CmIdentifier& one) {
  holders.erase({one.holding->at.family, one.holding->claim, one.holding->at.ip, one.id});
  if (one.holding->also_ipv4) holders.erase({AF_INET, one.holding->claim, any, one.id});
}

CmIdentifier* CmPorts::first(const Holders& holders, CmClaim claim, std::uint16_t family, const std::array<std::uint8_t, 16>& ip, const CmIdentifier* but) {
  auto at = holders.lower_bound({family, claim, ip, 0});
  if (but != nullptr && at != holders.end() && at->second == but) ++at;
  return at != holders.end() && std::tie(std::get<0>(at->first), std::get<1>(at->first), std::get<2>(at->first)) == std::tie(family, claim, ip) ? at->second : nullptr;
}

// Has somebody else with that claim an address that `one` has, too?
bool CmPorts::meets(const Holders& holders, CmClaim claim, const CmIdentifier& one) {
  const CmHolding holding = holding_of(one);
  const auto anywhere = [&](std::uint16_t family) {
    auto at = holders.lower_bound({family, claim, any, 0});
    if (at != holders.end() && at->second == &one) ++at;
    return at != holders.end() && std::get<0>(at->first) == family && std::get<1>(at->first) == claim;
  };
  const std::uint16_t family = holding.at.family;
  if (holding.at.is_any()) return anywhere(family) || (holding.also_ipv4 && anywhere(AF_INET));
  return first(holders, claim, family, holding.at.ip, &one) != nullptr || first(holders, claim, family, any) != nullptr;
}

// Both name it: any GID has the HCA's own, but does not.
bool CmPorts::meets_at_its_address(const Holders& holders, CmClaim claim, const CmIdentifier& one) {
  const control::CmAddress mine = holding_of(one).at;
  if (one.source.is_any()) return false;
  for (auto at = holders.lower_bound({mine.family, claim, mine.ip, 0}); at != holders.end(); ++at) {
    if (std::get<0>(at->first) != mine.family || std::get<1>(at->first) != claim || std::get<2>(at->first) != mine.ip) return false;
    if (at->second != &one && !at->second->source.is_any()) return true;
  }
  return false;
}

// The kernel's cma_check_port(), but that loopback addresses are addresses like others, and that only any of IPv6 may be IPv4's, too: the kernel
// takes each of IPv6 without AFONLY for that, and leaves none of them beside any of IPv4.
Status CmPorts::free_of(std::initializer_list<CmClaim> claims, const Key& key, const CmIdentifier& one) const {
  const Holders* const holders = holders_of(key);
  if (holders == nullptr) return ok();
  bool is_free = true;
  for (const CmClaim claim : claims) {
    if (!meets(*holders, claim, one)) continue;
    if (meets_at_its_address(*holders, claim, one)) return Errno{EADDRINUSE};
    is_free = false;
  }
  return is_free ? ok() : Status(Errno{EADDRNOTAVAIL});
}

Status CmPorts::take(CmIdentifier& one) {
  Key key = key_of(one);
  if (key.port != 0) {
    const Status free = one.reuse_address ? free_of({CmClaim::listens, CmClaim::alone}, key, one) : free_of({CmClaim::listens, CmClaim::alone, CmClaim::shared}, key, one);
    if (!free) return free;
  } else {
    const auto found = dynamic_.find({key.network, key.port_space});
    if (found != dynamic_.end() && found->second.count == dynamic_count) return Errno{EADDRNOTAVAIL};
    const auto* const picture = found != dynamic_.end() ? found->second.taken.get() : nullptr;
    bool is_taken;
    do {
      key.port = static_cast<std::uint16_t>(dynamic_first + next_);
      is_taken = picture != nullptr ? (*picture)[next_] : taken_.contains(key);
      next_ = static_cast<std::uint16_t>((next_ + 1) % dynamic_count);
    } while (is_taken);
  }
  one.source.port = key.port;
  Holders& holders = taken_[key];
  if (holders.empty()) mark(key, true);
  enter(holders, one);
  return ok();
}

void CmPorts::give_back(CmIdentifier& one) {
  if (!one.holding) return;
  const auto found = taken_.find(key_of(one));
  strike(found->second, one);
  one.holding.reset();
  if (!found->second.empty()) return;
  const Key key = found->first;
  taken_.erase(found);
  mark(key, false);
}

void CmPorts::update(CmIdentifier& one) {
  if (!one.holding) return;
  Holders& holders = taken_.at(key_of(one));
  strike(holders, one);
  enter(holders, one);
}

void CmPorts::mark(const Key& key, bool taken) {
  if (key.port < dynamic_first || key.port > dynamic_last) return;
  const auto space = dynamic_.try_emplace({key.network, key.port_space}).first;
  Dynamic& ports = space->second;
  ports.count += taken ? 1 : ~0u;
  if (ports.taken) ports.taken->set(key.port - dynamic_first, taken);
  if (ports.count == 0) {
    dynamic_.erase(space);
  } else if (ports.count < many / 2) {
    ports.taken.reset();
  } else if (ports.count > many && !ports.taken) {
    ports.taken = std::make_unique<std::bitset<dynamic_count>>();
    Key last = key;
    last.port = dynamic_last;
    Key first = key;
    first.port = dynamic_first;
    for (auto at = taken_.lower_bound(first); at != taken_.end() && !(last < at->first); ++at) ports.taken->set(at->first.port - dynamic_first);
  }
}

Status CmPorts::may_listen(const CmIdentifier& one) const {
  if (one.reuse_address) return free_of({CmClaim::listens, CmClaim::alone, CmClaim::shared}, key_of(one), one);
  return free_of({CmClaim::listens}, key_of(one), one);
}

CmIdentifier* CmPorts::listener(const CmNetwork& network, std::uint32_t port_space, const control::CmAddress& at) const {
  const Holders* const holders = holders_of({network, port_space, at.port});
  if (holders == nullptr) return nullptr;
  CmIdentifier* const named = first(*holders, CmClaim::listens, at.family, at.ip);
  return named != nullptr ? named : first(*holders, CmClaim::listens, at.family, any);
}

CmIdentifier* CmPorts::holder(const CmNetwork& network, std::uint32_t port_space, const control::CmAddress& at) const {
  if (CmIdentifier* const listener = this->listener(network, port_space, at)) return listener;
  const Holders* const holders = holders_of({network, port_space, at.port});
  if (holders == nullptr) return nullptr;
  for (const auto& ip : {at.ip, any})
    for (const CmClaim claim : {CmClaim::alone, CmClaim::shared})
      if (CmIdentifier* const found = first(*holders, claim, at.family, ip)) return found;
  return nullptr;
}

}  // namespace vrdma::svc
