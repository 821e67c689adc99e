// Puts datagrams into a guest's control queue pair and wakes who sleeps for them: replies, forwarded datagrams, notices.
// Used by the shard's thread only; never blocks.
#pragma once

#include <cstdint>
#include <span>

#include "vmkernel_svc/objects.hpp"

namespace vrdma::svc {

// Slots that stay free for what must not be dropped: datagrams leave both, notices the replies'.
constexpr std::uint32_t slots_for_replies = 256;
constexpr std::uint32_t slots_for_notices = 128;

// False: the guest has not read enough of what it has. head.record.word is set to the body's size; tag and user bits are the caller's.
bool put_datagram(Guest& guest, control::Head head, std::uint32_t user_bits, std::span<const std::byte> body,
                  std::uint32_t keep_free_slots);

}  // namespace vrdma::svc
