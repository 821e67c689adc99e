#include "vmkernel_svc/cm/ports.hpp"

#include <sys/socket.h>

#include <algorithm>

#include "vmkernel_svc/objects.hpp"

namespace vrdma::svc {

namespace {

constexpr std::uint16_t dynamic_first = 32768, dynamic_last = 60999;  // net.ipv4.ip_local_port_range

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
    constexpr std::uint32_t count = dynamic_last - dynamic_first + 1;
    std::uint32_t tried = 0;
    do {
      if (tried++ == count) return Errno{EADDRNOTAVAIL};
      key.port = static_cast<std::uint16_t>(dynamic_first + next_);
      next_ = static_cast<std::uint16_t>((next_ + 1) % count);
    } while (taken_.contains(key));
  }
  one.source.port = key.port;
  taken_[key].push_back(&one);
  one.holds_port = true;
  return ok();
}

void CmPorts::give_back(CmIdentifier& one) {
  if (!one.holds_port) return;
  one.holds_port = false;
  const auto found = taken_.find({one.network, one.space_of_port(), one.source.port});
  if (found == taken_.end()) return;
  std::erase(found->second, &one);
  if (found->second.empty()) taken_.erase(found);
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
