#include "cli/query.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <stdexcept>

#include "vmci_channel/control_exchange.hpp"

namespace vrdma::cli {

namespace {

std::runtime_error no_answer(const Service& service, int error) {
  if (error == ETIMEDOUT)
    return std::runtime_error(fmt::format("the service at {} did not answer in time: it is stopped, this machine is overloaded, or it is of another version", service.path));
  if (error == EMFILE || error == ENFILE)
    return std::runtime_error(fmt::format("what the service at {} answers cannot be taken ({}): raise the limit of open files (ulimit -n)", service.path, std::strerror(error)));
  return std::runtime_error(fmt::format("the service at {} did not answer ({}): is it of this version?", service.path, error == EIO ? "it has closed the connection" : std::strerror(error)));
}

// reply: where the body goes. The status is the service's own word.
vmci::PacketReply ask(const Service& service, control::Request kind, std::span<const std::byte> body, std::span<std::byte> reply, int patience_ms = 5000) {
  static std::uint32_t last_sequence = 0;
  const vmci::PacketRequest request{.kind = kind, .sequence = ++last_sequence, .body = body};
  if (const auto sent = vmci::send_request(service.socket, request); !sent) throw no_answer(service, value(sent.error()));
  auto answer = vmci::receive_reply(service.socket, request, reply, {patience_ms, 0});  // a person waits no longer for one that runs
  if (!answer) throw no_answer(service, value(answer.error()));
  return std::move(*answer);
}

}  // namespace

nlohmann::json query(const Service& service) {
  const auto answer = ask(service, control::Request::show, {}, {});
  if (answer.status != 0) throw no_answer(service, answer.status);
  if (answer.descriptors.size() != 1) throw no_answer(service, value(vmci::not_brought(answer.descriptors)));
  std::string text;
  std::array<char, 65536> part;
  const int fd = answer.descriptors.front().get();
  for (off_t at = 0;;) {
    const ssize_t got = ::pread(fd, part.data(), part.size(), at);
    if (got <= 0) break;
    text.append(part.data(), static_cast<std::size_t>(got));
    at += got;
  }
  return nlohmann::json::parse(text);
}

std::string link_layer_of(const Service& service) try {
  constexpr int patience_ms = 1000;  // a program is about to start, and a service that stands still is its to wait for
  control::LinkLayerReply reply{};
  if (ask(service, control::Request::query_link_layer, {}, std::as_writable_bytes(std::span(&reply, 1)), patience_ms).status != 0) return "";
  return reply.link_layer == control::link_layer_ethernet ? "ethernet" : "ib";
} catch (const std::runtime_error&) {
  return "";
}

bool knows_user(const nlohmann::json& state) { return state.at("service").value("knows_caller", true); }

Result<control::SetDirectReply> set_direct(const Service& service, const control::SetDirectRequest& request) {
  control::SetDirectReply reply{};
  const auto answer = ask(service, control::Request::set_direct, std::as_bytes(std::span(&request, 1)), std::as_writable_bytes(std::span(&reply, 1)));
  if (answer.status != 0) return Errno{answer.status};
  return reply;
}

}  // namespace vrdma::cli
