// What a virtual HCA has: the values device and port queries report, and the bounds everything else checks against.
#pragma once

#include <cstdint>

namespace vrdma::limits {

constexpr std::uint32_t qp_max = 8191;  // per guest; queue index 0 of the doorbell bitmap is the control pair
constexpr std::uint32_t cq_max = 8192;
constexpr std::uint32_t srq_max = 4096;
constexpr std::uint32_t mr_max = 1u << 20;
constexpr std::uint32_t mw_max = 1u << 16;  // per guest; of all, there are 2^24 less one for each other key
constexpr std::uint32_t pd_max = 8192;
constexpr std::uint32_t ah_max = 1u << 20;
constexpr std::uint32_t qp_wr_max = 16384;
constexpr std::uint32_t srq_wr_max = 32768;
constexpr std::uint32_t cqe_max = 4194303;
constexpr std::uint32_t sge_max = 30;
constexpr std::uint32_t rd_atomic_max = 128;
constexpr std::uint32_t inline_max = 512;
constexpr std::uint32_t comp_vectors = 4;
constexpr std::uint64_t mr_bytes_max = std::uint64_t{1} << 46;
constexpr std::uint64_t mr_bytes_on_demand_max = std::uint64_t{1} << 56;  // addresses, of which nothing need be there
constexpr std::uint32_t message_bytes_max = 1u << 31;
constexpr std::uint32_t mtu_max_bytes = 4096;
constexpr std::uint32_t pkey_table = 16;
constexpr std::uint32_t gid_table = 16;
// Of PortInfo (IBA 14.2.5.6), as enum ibv_port_cap_flags: a system image GUID, speeds above QDR, a connection manager; on Ethernet, GIDs of IP addresses.
constexpr std::uint32_t port_capabilities = 1u << 11 | 1u << 14 | 1u << 16;
constexpr std::uint32_t ethernet_port_capabilities = port_capabilities | 1u << 26;
constexpr std::uint32_t mcast_groups_max = 8192;
constexpr std::uint32_t mcast_qp_attach_max = 256;

}  // namespace vrdma::limits
