// A management datagram on its way to another host (FarKind::mad): this, and its bytes.
#pragma once

#include <cstdint>

#include "vrdma/limits.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::svc {

struct MadMessage {
  std::uint64_t guid;      // of the sender's port
  std::uint16_t from, to;  // LIDs
  std::uint32_t qpn;       // that it is for
  std::uint16_t pkeys[limits::pkey_table];  // of the sender
};
static_assert(WireRecord<MadMessage> && sizeof(MadMessage) == 48);

}  // namespace vrdma::svc
