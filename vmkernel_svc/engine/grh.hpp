// The 40 bytes that precede a datagram in the receiver's buffer: an IB or RoCE v1 GRH, or what RoCE v2 leaves there.
#pragma once

#include <cstring>

#include "vrdma/control.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::engine {

namespace grh {

constexpr std::uint32_t bth_bytes = 12, deth_bytes = 8, immdt_bytes = 4, icrc_bytes = 4, udp_bytes = 8;
constexpr std::uint32_t gid_type_infiniband = 0, gid_type_roce_v2 = 2;
constexpr std::uint8_t next_header_iba = 0x1b, next_header_udp = 17;
constexpr std::uint8_t v4_mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

inline void put16(std::byte* at, std::uint32_t value) {
  at[0] = static_cast<std::byte>(value >> 8);
  at[1] = static_cast<std::byte>(value);
}

inline bool over_ipv4(const control::GidEntry& source) {
  return source.type == gid_type_roce_v2 && std::memcmp(source.gid.data(), v4_mapped, sizeof(v4_mapped)) == 0;
}

inline void write_ipv4(const control::GidEntry& source, const UdOperand& ud, std::uint32_t bytes, std::byte* header) {
  std::memset(header, 0, 20);
  header[0] = std::byte{0x45};
  header[1] = std::byte{ud.traffic_class};
  put16(header + 2, 20 + udp_bytes + bytes);
  header[6] = std::byte{0x40};  // don't fragment
  header[8] = std::byte{ud.hop_limit};
  header[9] = std::byte{next_header_udp};
  std::memcpy(header + 12, source.gid.data() + 12, 4);
  std::memcpy(header + 16, ud.dgid + 12, 4);
  std::uint32_t sum = 0;
  for (int i = 0; i < 20; i += 2) sum += static_cast<std::uint32_t>(header[i]) << 8 | static_cast<std::uint32_t>(header[i + 1]);
  sum = (sum & 0xffff) + (sum >> 16);
  sum = (sum & 0xffff) + (sum >> 16);
  put16(header + 10, ~sum & 0xffff);
}

}  // namespace grh

// Of a datagram, from its BTH on: what a GRH says of its length (IBA 8.3). Payloads are padded to whole words.
constexpr std::uint32_t ud_packet_bytes(std::uint32_t payload_bytes, bool has_imm) {
  using namespace grh;
  return bth_bytes + deth_bytes + (has_imm ? immdt_bytes : 0) + (payload_bytes + 3) / 4 * 4 + icrc_bytes;
}

// bytes: 40. source: the sender's GID and its type. IBA 8.3; RoCE v2 annex A17.4.5 (an IPv4 header takes the last 20 bytes).
inline void write_grh_bytes(const control::GidEntry& source, const UdOperand& ud, std::uint32_t packet_bytes, std::byte* bytes) {
  using namespace grh;
  const std::uint32_t carried = packet_bytes, flow_label = flow_label_of(ud);
  std::memset(bytes, 0, 40);
  if (over_ipv4(source)) return write_ipv4(source, ud, carried, bytes + 20);
  const bool v2 = source.type == gid_type_roce_v2;
  bytes[0] = static_cast<std::byte>(0x60 | ud.traffic_class >> 4);
  bytes[1] = static_cast<std::byte>(ud.traffic_class << 4 | flow_label >> 16);
  put16(bytes + 2, flow_label & 0xffff);
  put16(bytes + 4, carried + (v2 ? udp_bytes : 0));
  bytes[6] = std::byte{v2 ? next_header_udp : next_header_iba};
  bytes[7] = std::byte{ud.hop_limit};
  std::memcpy(bytes + 8, source.gid.data(), 16);
  std::memcpy(bytes + 24, ud.dgid, 16);
}

// What the receiver's completion says as the SL. RoCE has none: as with mlx5, bit 3 is set where the packet came over UDP, and the
// others say over what that went, 1: IPv6, 2: IPv4. UCX drops what came over IPv4 and does not say so.
inline std::uint8_t sl_to_tell(const control::GidEntry& source, const UdOperand& ud) {
  if (source.type == grh::gid_type_infiniband) return sl_of(ud);
  if (source.type != grh::gid_type_roce_v2) return 0;
  return grh::over_ipv4(source) ? 8 | 2 : 8 | 1;
}

}  // namespace vrdma::engine
