#include "guest_lib/port_interface.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "guest_lib/synthetic_tree.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace vrdma::guest {

namespace {

constinit std::atomic<std::uint32_t> interface_found{0};  // alone

// The IPv4 address that a GID is mapped from (RFC 4291 2.5.5.2); 0: none.
in_addr_t mapped_address(const Gid& gid) {
  constexpr std::uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  in_addr_t address = 0;
  if (std::equal(std::begin(prefix), std::end(prefix), gid.begin())) std::memcpy(&address, gid.data() + sizeof(prefix), sizeof(address));
  return address;
}

// The address from which this namespace would send there; 0: it has no way.
in_addr_t source_towards(in_addr_t there) {
  const vmci::UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(1);
  address.sin_addr.s_addr = there;
  if (!socket || ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return 0;
  socklen_t bytes = sizeof(address);
  return ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &bytes) == 0 ? address.sin_addr.s_addr : 0;
}

std::uint32_t interface_with(in_addr_t own) {
  ifaddrs* all = nullptr;
  if (own == 0 || ::getifaddrs(&all) != 0) return 0;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> freed(all, ::freeifaddrs);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET) continue;
    sockaddr_in address;
    std::memcpy(&address, one->ifa_addr, sizeof(address));
    if (address.sin_addr.s_addr == own) return ::if_nametoindex(one->ifa_name);
  }
  return 0;
}

}  // namespace

std::uint32_t find_port_interface(const control::DeviceReply& reply) {
  std::uint32_t index = 0;
  if (reply.link_layer == control::link_layer_ethernet) {
    const auto mapped = std::ranges::find_if(reply.gids, [](const control::GidEntry& entry) { return mapped_address(entry.gid) != 0; });
    if (mapped != std::end(reply.gids)) index = interface_with(source_towards(mapped_address(mapped->gid)));
    if (index == 0) index = synthetic_netdev_index;
  }
  interface_found.store(index, std::memory_order_relaxed);
  return index;
}

std::uint32_t port_interface() { return interface_found.load(std::memory_order_relaxed); }

}  // namespace vrdma::guest
