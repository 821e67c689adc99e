// Distinct types for the numbers that verbs hand around, so that a QPN is never passed for an rkey.
// Plain values; any thread; never allocates.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace vrdma {

template <class Tag, class Rep>
struct Id {
  Rep value{};
  constexpr auto operator<=>(const Id&) const = default;
};

using Qpn = Id<struct QpnTag, std::uint32_t>;        // 24 bits, unique on a host
using Lid = Id<struct LidTag, std::uint16_t>;        // unicast 0x0001–0xbfff
using Key = Id<struct KeyTag, std::uint32_t>;        // lkey and rkey of an MR (one value serves both)
using Psn = Id<struct PsnTag, std::uint32_t>;        // 24 bits
using Handle = Id<struct HandleTag, std::uint32_t>;  // an object of one guest: PD, MR, CQ, SRQ, QP, channel
using GuestId = Id<struct GuestTag, std::uint32_t>;  // the VMCI context id of a guest

using Gid = std::array<std::uint8_t, 16>;  // network byte order, as union ibv_gid

// ::ffff:a.b.c.d, as RoCE v2 has IPv4 addresses.
constexpr bool is_ipv4_mapped(const Gid& gid) {
  for (std::size_t i = 0; i < 10; ++i)
    if (gid[i] != 0) return false;
  return gid[10] == 0xff && gid[11] == 0xff;
}
// A group's, of IBA's and RoCE v1's form (IBA 4.1.1), or an IPv4 group's of RoCE v2 (annex A17), on both link layers: as the kernel's
// rdma_is_multicast_addr(), which ib_attach_mcast() asks. Nobody may ask otherwise: what is joined must be what is sent to.
constexpr bool is_multicast(const Gid& gid) { return gid[0] == 0xff || (is_ipv4_mapped(gid) && gid[12] >> 4 == 0xe); }

constexpr std::uint32_t psn_mask = 0xffffff;
constexpr Psn advance(Psn psn, std::uint32_t packets) { return {(psn.value + packets) & psn_mask}; }

constexpr Qpn multicast_qpn{0xffffff};
constexpr Handle no_handle{0};

}  // namespace vrdma

template <class Tag, class Rep>
struct std::hash<vrdma::Id<Tag, Rep>> {
  std::size_t operator()(const vrdma::Id<Tag, Rep>& id) const noexcept { return std::hash<Rep>{}(id.value); }
};
