#include "cli/query.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <stdexcept>

namespace vrdma::cli {

namespace {

std::runtime_error no_answer(const Service& service, int error) {
  if (error == ETIMEDOUT)
    return std::runtime_error(fmt::format("the service at {} did not answer in time: it is stopped, this machine is overloaded, or it is of another version", service.path));
  return std::runtime_error(fmt::format("the service at {} did not answer ({}): is it of this version?", service.path, std::strerror(error)));
}

struct Answer {
  int status;
  std::vector<std::byte> body;
  std::vector<vmci::UniqueFd> descriptors;
};

Answer ask(const Service& service, control::Request request, std::span<const std::byte> body = {}, int answer_timeout_ms = 5000) {
  static std::uint32_t last_sequence = 0;
  control::Head head{};
  head.record.control = static_cast<std::uint32_t>(request);
  head.record.word = static_cast<std::uint32_t>(body.size());
  head.sequence = ++last_sequence;
  std::vector<std::byte> packet(sizeof(head) + body.size());
  std::memcpy(packet.data(), &head, sizeof(head));
  if (!body.empty()) std::memcpy(packet.data() + sizeof(head), body.data(), body.size());
  if (const auto sent = service.socket.send(packet); !sent) throw no_answer(service, value(sent.error()));
  packet.resize(4096);
  for (;;) {
    auto received = service.socket.receive(packet, answer_timeout_ms);
    if (!received) throw no_answer(service, value(received.error()));
    if (received->descriptors_missing) throw no_answer(service, EMFILE);
    if (received->bytes < sizeof(head)) throw no_answer(service, EPROTO);
    std::memcpy(&head, packet.data(), sizeof(head));
    if (head.sequence != last_sequence && head.sequence != 0) continue;  // of a question that was given up; 0: the connection is refused
    return {head.status, {packet.begin() + sizeof(head), packet.begin() + static_cast<std::ptrdiff_t>(received->bytes)}, std::move(received->descriptors)};
  }
}

}  // namespace

nlohmann::json query(const Service& service) {
  const Answer answer = ask(service, control::Request::show);
  if (answer.status != 0 || answer.descriptors.size() != 1) throw no_answer(service, answer.status != 0 ? answer.status : EPROTO);
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
  const Answer answer = ask(service, control::Request::query_link_layer, {}, patience_ms);
  control::LinkLayerReply reply{};
  if (answer.status != 0 || answer.body.size() < sizeof(reply)) return "";
  std::memcpy(&reply, answer.body.data(), sizeof(reply));
  return reply.link_layer == control::link_layer_ethernet ? "ethernet" : "ib";
} catch (const std::runtime_error&) {
  return "";
}

bool knows_user(const nlohmann::json& state) { return state.at("service").value("knows_caller", true); }

Result<control::SetDirectReply> set_direct(const Service& service, const control::SetDirectRequest& request) {
  const Answer answer = ask(service, control::Request::set_direct, std::as_bytes(std::span(&request, 1)));
  if (answer.status != 0) return Errno{answer.status};
  control::SetDirectReply reply{};
  if (answer.body.size() < sizeof(reply)) throw no_answer(service, EPROTO);
  std::memcpy(&reply, answer.body.data(), sizeof(reply));
  return reply;
}

}  // namespace vrdma::cli
