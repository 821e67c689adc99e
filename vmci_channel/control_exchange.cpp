#include "vmci_channel/control_exchange.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "vmci_channel/arch.hpp"

namespace vmci {

using namespace vrdma::control;
using vrdma::Errno;
using vrdma::Result;
using vrdma::Status;

namespace {

using Packet = std::array<std::byte, sizeof(Head) + body_bytes_max>;

// Sent before anything was read, and so with no sequence number but this.
bool is_not_admitted(const Head& head) { return head.status != 0 && is_reply(head, Request::attach, 0); }

// False where that cannot be seen: in another namespace, or without /proc.
bool runs(const PacketSocket& peer_of) {
  const auto peer = peer_of.peer();
  if (!peer || peer->pid == 0) return false;
  const UniqueFd file(::open(("/proc/" + std::to_string(peer->pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 128> text;  // "pid (name) state …", the name of 64 characters at most
  const ssize_t got = file ? ::read(file.get(), text.data(), text.size()) : 0;
  const std::string_view said(text.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  const auto state = said.rfind(") ");
  return state != said.npos && state + 2 < said.size() && std::strchr("RSDI", said[state + 2]) != nullptr;
}

}  // namespace

Status take_reply(const Head& head, std::span<const std::byte> body, std::span<std::byte> reply) {
  if (head.status != 0) return Errno{head.status};
  if (head.record.word > body.size() || head.record.word < reply.size()) return Errno{EPROTO};
  std::copy_n(body.begin(), reply.size(), reply.begin());
  return vrdma::ok();
}

Result<Received> receive_answer(const PacketSocket& socket, std::span<std::byte> buffer, Patience patience) {
  const std::uint64_t until_ns = monotonic_ns() + static_cast<std::uint64_t>(patience.running_ms) * 1'000'000u;
  for (;;) {
    auto received = socket.receive(buffer, patience.stopped_ms);
    if (received || value(received.error()) != ETIMEDOUT || monotonic_ns() >= until_ns || !runs(socket)) return received;
  }
}

Status send_request(const PacketSocket& socket, const PacketRequest& request) {
  assert(request.body.size() <= body_bytes_max);
  Packet packet;
  const Head head = request_head(request.kind, request.source_context, request.sequence, request.body.size());
  std::memcpy(packet.data(), &head, sizeof(head));
  std::copy(request.body.begin(), request.body.end(), packet.begin() + sizeof(head));
  const Status sent = socket.send(std::span(packet).first(sizeof(head) + request.body.size()), request.descriptors);
  switch (sent ? 0 : value(sent.error())) {
    case EPIPE:
    case ECONNRESET: return vrdma::ok();
    case ENOTCONN: return Errno{EIO};
    default: return sent;
  }
}

Result<PacketReply> receive_reply(const PacketSocket& socket, const PacketRequest& request, std::span<std::byte> reply, Patience patience) {
  Packet packet;
  bool was_reset = false;
  for (;;) {
    auto received = receive_answer(socket, packet, patience);
    if (!received && value(received.error()) == ECONNRESET) {
      if (std::exchange(was_reset, true)) return Errno{EIO};
      continue;  // said once, before what is there
    }
    if (!received) return received.error();
    if (received->bytes == 0) return Errno{EIO};
    Head head;
    if (received->bytes < sizeof(head)) return Errno{EPROTO};
    std::memcpy(&head, packet.data(), sizeof(head));
    if (!is_reply(head, request.kind, request.sequence) && !is_not_admitted(head)) continue;
    const auto body = std::span(packet).first(received->bytes).subspan(sizeof(head));
    if (head.status != 0) {
      std::copy_n(body.begin(), std::min(body.size(), reply.size()), reply.begin());
      return PacketReply{head.status, {}};
    }
    if (const Status taken = take_reply(head, body, reply); !taken) return taken.error();
    return PacketReply{0, std::move(received->descriptors)};
  }
}

}  // namespace vmci
