#include "vmkernel_svc/cm/ports.hpp"

#include <sys/socket.h>

#include <algorithm>

#include "vmkernel_svc/objects.hpp"

namespace vrdma::svc {

namespace {

// The ports of an HCA's GID, which any of AF_IB is, too, are neither another HCA's nor those of IP addresses.
bool has_gid(const CmIdentifier& one, const Gid& gid) { return one.source.family == AF_IB && one.guest->gids[0].gid == gid; }

bool overlap(const CmIdentifier& a, const CmIdentifier& b) {
  if (a.source.family == AF_IB || b.source.family == AF_IB) return a.source.family == b.source.family && has_gid(a, b.guest->gids[0].gid);
  if (a.source.is_any() || b.source.is_any()) {
    // Any of IPv6 is any of IPv4, too, unless it says otherwise.
    if (a.source.family == b.source.family) return true;
    const CmIdentifier& six = a.source.family == AF_INET6 ? a : b;
    return six.source.is_any() && !six.only_ipv6;
  }
  return a.source.same_host(b.source);
}

}  // namespace

bool CmPorts::is_free(const Key& key, const CmIdentifier& one) const {
  const auto found = taken_.find(key);
  if (found == taken_.end()) return true;
  return std::none_of(found->second.begin(), found->second.end(), [&](const CmIdentifier* other) {
    if (other == &one || !overlap(*other, one)) return false;
    return !(other->reuse_address && one.reuse_address) || other->state == CmState::listening;
  });
}

Status CmPorts::take(CmIdentifier& one) {
  Key key{one.network, one.space_of_port(), one.source.port};
  if (key.port != 0) {
    if (!is_free(key, one)) return Errno{EADDRINUSE};
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
  auto& holders = taken_[key];
  holders.push_back(&one);
  if (holders.size() == 1) mark(key, true);
  one.holds_port = true;
  return ok();
}

void CmPorts::give_back(CmIdentifier& one) {
  if (!one.holds_port) return;
  one.holds_port = false;
  const auto found = taken_.find({one.network, one.space_of_port(), one.source.port});
  if (found == taken_.end()) return;
  std::erase(found->second, &one);
  if (!found->second.empty()) return;
  const Key key = found->first;
  taken_.erase(found);
  mark(key, false);
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
  const auto found = taken_.find({one.network, one.space_of_port(), one.source.port});
  if (found == taken_.end()) return ok();
  for (const CmIdentifier* other : found->second)
    if (other != &one && other->state == CmState::listening && overlap(*other, one)) return Errno{EADDRINUSE};
  return ok();
}

CmIdentifier* CmPorts::listener(const CmNetwork& network, std::uint32_t port_space, const control::CmAddress& at) const {
  return this->at(network, port_space, at, true);
}

CmIdentifier* CmPorts::holder(const CmNetwork& network, std::uint32_t port_space, const control::CmAddress& at) const {
  CmIdentifier* const listener = this->listener(network, port_space, at);
  return listener != nullptr ? listener : this->at(network, port_space, at, false);
}

CmIdentifier* CmPorts::at(const CmNetwork& network, std::uint32_t port_space, const control::CmAddress& at, bool listening) const {
  const auto found = taken_.find({network, port_space, at.port});
  if (found == taken_.end()) return nullptr;
  CmIdentifier* any = nullptr;
  for (CmIdentifier* one : found->second) {
    if (listening && one->state != CmState::listening) continue;
    if (at.family == AF_IB) {
      if (has_gid(*one, at.ip)) return one;
      continue;
    }
    if (one->source.same_host(at)) return one;
    if (one->source.is_any() && (one->source.family == at.family || (one->source.family == AF_INET6 && !one->only_ipv6))) any = one;
  }
  return any;
}

}  // namespace vrdma::svc
