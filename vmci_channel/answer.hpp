// The wait for the service's answer to a request to attach, by who cannot know whether it is served at all.
#pragma once

#include <span>

#include "vmci_channel/packet_socket.hpp"

namespace vmci {

// As PacketSocket::receive, where the peer is who listened. ETIMEDOUT: it has said nothing for stopped_ms, and is stopped or cannot be
// seen; or nothing for running_ms, though it runs. One that runs is slow, as in an emulated machine whose host has other work.
vrdma::Result<Received> receive_answer(const PacketSocket& socket, std::span<std::byte> buffer, int stopped_ms = attach_within_ms,
                                       int running_ms = 60'000);

}  // namespace vmci
