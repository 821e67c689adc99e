#include "vmci_channel/answer.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <string>
#include <string_view>

#include "vmci_channel/arch.hpp"

namespace vmci {

namespace {

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

vrdma::Result<Received> receive_answer(const PacketSocket& socket, std::span<std::byte> buffer, int stopped_ms, int running_ms) {
  const std::uint64_t until_ns = monotonic_ns() + static_cast<std::uint64_t>(running_ms) * 1'000'000u;
  for (;;) {
    auto received = socket.receive(buffer, stopped_ms);
    if (received || value(received.error()) != ETIMEDOUT || monotonic_ns() >= until_ns || !runs(socket)) return received;
  }
}

}  // namespace vmci
