// The 40 bytes that precede a datagram in the receiver's buffer: an IB or RoCE v1 GRH, or what RoCE v2 leaves there.
#pragma once

#include "vrdma/control.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::svc {

// bytes: 40. source: the sender's GID and its type. IBA 8.3; RoCE v2 annex A17.4.5 (an IPv4 header takes the last 20 bytes).
void write_grh_bytes(const control::GidEntry& source, const UdOperand& ud, std::uint32_t payload_bytes, std::byte* bytes);

}  // namespace vrdma::svc
