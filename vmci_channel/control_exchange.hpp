// A control request to the host service and its reply (vrdma/control.hpp): the heads of both, which are the same in rings and in packets,
// and the exchange by packets, where descriptors go along, or the asker has no rings.
//
// Any thread; on one socket one exchange at a time. Between its two halves a test may end the process (guest_lib/control.cpp).
#pragma once

#include <cerrno>
#include <cstdint>
#include <span>
#include <vector>

#include "vmci_channel/packet_socket.hpp"
#include "vrdma/control.hpp"

namespace vmci {

constexpr std::uint32_t reply_port = 1;  // of every asker: where it waits for replies

inline vrdma::control::Head request_head(vrdma::control::Request kind, std::uint32_t source_context, std::uint32_t sequence, std::size_t body_bytes) {
  namespace control = vrdma::control;
  return {{control::address_of(control::host_context, control::control_port), static_cast<std::uint32_t>(kind), static_cast<std::uint32_t>(body_bytes)},
          source_context, reply_port, sequence, 0};
}

inline bool is_reply(const vrdma::control::Head& head, vrdma::control::Request kind, std::uint32_t sequence) {
  return head.sequence == sequence &&
         (head.record.control & vrdma::control_user_mask) == (static_cast<std::uint32_t>(kind) | vrdma::control::reply_bit);
}

// The outcome that a reply states, its body copied to `reply`: EPROTO where there is less of it. A newer service may say more than we know.
vrdma::Status take_reply(const vrdma::control::Head& head, std::span<const std::byte> body, std::span<std::byte> reply);

// --- by packets -------------------------------------------------------------------------------------------------

// Who asks has no answer where the service has said nothing for stopped_ms, and is stopped or cannot be seen; or nothing for running_ms, though
// it runs: one that runs is slow, as in an emulated machine whose host has other work.
struct Patience {
  int stopped_ms;  // -1: for ever
  int running_ms = 60'000;
};
constexpr Patience patience_to_attach{attach_within_ms};  // of who cannot know whether it is served at all
constexpr Patience patience_for_ever{-1};

// As PacketSocket::receive, where the peer is who listened; ETIMEDOUT as above.
vrdma::Result<Received> receive_answer(const PacketSocket& socket, std::span<std::byte> buffer, Patience patience);

struct PacketRequest {
  vrdma::control::Request kind{};
  std::uint32_t sequence = 0;
  std::span<const std::byte> body{};
  std::span<const int> descriptors{};
  std::uint32_t source_context = 0;  // of a guest
};
struct PacketReply {
  int status = 0;                     // or the errno value with which the service refuses
  std::vector<UniqueFd> descriptors;  // none where this process may not open all that came along; what the reply says counts
};
// What is wrong with a reply that should have brought others.
inline vrdma::Errno not_brought(std::span<const UniqueFd> descriptors) { return vrdma::Errno{descriptors.empty() ? EMFILE : EPROTO}; }

// Errors as sendmsg(2). One that has closed the connection is no error yet: its last word is still to be read.
vrdma::Status send_request(const PacketSocket& socket, const PacketRequest& request);
// The reply to that request, or to any that this socket might have brought: that the connection is not admitted. `reply` holds its body, also, as
// far as there is any, that of a refusal. Answers that nobody waits for any more are passed over.
// EIO: the service is gone; EPROTO: it says less than `reply` holds, or does not speak this protocol; ETIMEDOUT.
vrdma::Result<PacketReply> receive_reply(const PacketSocket& socket, const PacketRequest& request, std::span<std::byte> reply, Patience patience);

}  // namespace vmci
