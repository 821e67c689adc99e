#include "cli/query.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <stdexcept>

#include "vrdma/control.hpp"

namespace vrdma::cli {

nlohmann::json query(const Service& service) {
  constexpr int answer_timeout_ms = 5000;
  const auto refuse = [&](int error) -> std::runtime_error {
    return std::runtime_error(fmt::format("the service at {} did not answer ({}): is it of this version?", service.path,
                                          std::strerror(error)));
  };
  control::Head head{};
  head.record.control = static_cast<std::uint32_t>(control::Request::show);
  head.sequence = 1;
  if (const auto sent = service.socket.send(std::as_bytes(std::span(&head, 1))); !sent) throw refuse(value(sent.error()));
  std::array<std::byte, 4096> packet;
  auto received = service.socket.receive(packet, answer_timeout_ms);
  if (!received) throw refuse(value(received.error()));
  if (received->bytes < sizeof(head)) throw refuse(EPROTO);
  std::memcpy(&head, packet.data(), sizeof(head));
  if (head.status != 0 || received->descriptors.size() != 1) throw refuse(head.status != 0 ? head.status : EPROTO);
  std::string text;
  std::array<char, 65536> part;
  const int fd = received->descriptors.front().get();
  for (off_t at = 0;;) {
    const ssize_t got = ::pread(fd, part.data(), part.size(), at);
    if (got <= 0) break;
    text.append(part.data(), static_cast<std::size_t>(got));
    at += got;
  }
  return nlohmann::json::parse(text);
}

}  // namespace vrdma::cli
