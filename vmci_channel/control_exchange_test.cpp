#include "vmci_channel/control_exchange.hpp"

#include <doctest/doctest.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <vector>

using namespace vrdma::control;
using vmci::PacketSocket;
using vmci::UniqueFd;
using vrdma::Result;

namespace {

// The asker's end and the service's. What is in the socket is there at once: the service's part is played beforehand.
struct Channel {
  Channel() {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    asker = PacketSocket(UniqueFd(ends[0]));
    service = PacketSocket(UniqueFd(ends[1]));
  }
  void say(Request kind, std::uint32_t sequence, int status, std::uint32_t word, std::span<const std::byte> body, std::span<const int> descriptors = {}) {
    Head head{};
    head.record = {0, static_cast<std::uint32_t>(kind) | reply_bit, word};
    head.sequence = sequence;
    head.status = status;
    std::vector<std::byte> packet(sizeof(head) + body.size());
    std::memcpy(packet.data(), &head, sizeof(head));
    if (!body.empty()) std::memcpy(packet.data() + sizeof(head), body.data(), body.size());
    REQUIRE(service.send(packet, descriptors).has_value());
  }
  void say(Request kind, std::uint32_t sequence, int status = 0, const LinkLayerReply& body = {}) {
    say(kind, sequence, status, sizeof(body), std::as_bytes(std::span(&body, 1)));
  }
  Result<vmci::PacketReply> hear() { return receive_reply(asker, request, std::as_writable_bytes(std::span(&reply, 1)), {10'000, 0}); }
  int error_heard() {
    auto heard = hear();
    REQUIRE(!heard);
    return value(heard.error());
  }

  PacketSocket asker, service;
  vmci::PacketRequest request{.kind = Request::query_link_layer, .sequence = 7};
  LinkLayerReply reply{};
};

}  // namespace

TEST_CASE("A request arrives with its head, its body and its descriptors") {
  Channel channel;
  const std::array body{std::byte{1}, std::byte{2}, std::byte{3}};
  const std::array descriptors{channel.asker.fd()};
  REQUIRE(vmci::send_request(channel.asker, {Request::add_backing, 9, body, descriptors, 42}).has_value());
  std::array<std::byte, 64> packet;
  const auto received = channel.service.receive(packet);
  REQUIRE(received.has_value());
  REQUIRE(received->bytes == sizeof(Head) + body.size());
  CHECK(received->descriptors.size() == 1);
  Head head;
  std::memcpy(&head, packet.data(), sizeof(head));
  CHECK(head.record.tag == address_of(host_context, control_port));
  CHECK(head.record.control == static_cast<std::uint32_t>(Request::add_backing));
  CHECK(head.record.word == body.size());
  CHECK(head.source_context == 42);
  CHECK(head.source_port == vmci::reply_port);
  CHECK(head.sequence == 9);
  CHECK(head.status == 0);
  CHECK(std::memcmp(packet.data() + sizeof(head), body.data(), body.size()) == 0);
}

TEST_CASE("Answers that nobody waits for are passed over") {
  Channel channel;
  channel.say(Request::query_link_layer, 6);  // of a question that was given up
  channel.say(Request::show, 7);
  channel.say(Request::attach, 0);  // which is not a refusal
  channel.say(Request::query_link_layer, 7, 0, {link_layer_ethernet, 0});
  const auto heard = channel.hear();
  REQUIRE(heard.has_value());
  CHECK(heard->status == 0);
  CHECK(channel.reply.link_layer == link_layer_ethernet);
}

TEST_CASE("A reply brings its descriptors; one that refuses says why in its body") {
  Channel channel;
  const LinkLayerReply body{link_layer_infiniband, 0};
  const std::array descriptors{channel.service.fd(), channel.service.fd()};
  channel.say(Request::query_link_layer, 7, 0, sizeof(body), std::as_bytes(std::span(&body, 1)), descriptors);
  const auto heard = channel.hear();
  REQUIRE(heard.has_value());
  CHECK(heard->descriptors.size() == 2);
  channel.say(Request::query_link_layer, 7, EPROTONOSUPPORT, {link_layer_ethernet, 0});
  const auto refused = channel.hear();
  REQUIRE(refused.has_value());
  CHECK(refused->status == EPROTONOSUPPORT);
  CHECK(channel.reply.link_layer == link_layer_ethernet);
  channel.say(Request::query_link_layer, 7, EPERM, 0, {});
  CHECK(channel.hear()->status == EPERM);
}

// A Context that attaches, and the library's own questions, said EIO of it; a command, whose question came too late, that the pipe was broken.
TEST_CASE("Who is not admitted learns why, also where the service has closed before it asked") {
  Channel channel;
  channel.say(Request::attach, 0, EDQUOT, 0, {});
  channel.service = {};
  REQUIRE(vmci::send_request(channel.asker, channel.request).has_value());
  const auto heard = channel.hear();
  REQUIRE(heard.has_value());
  CHECK(heard->status == EDQUOT);
  CHECK(channel.error_heard() == EIO);
}

TEST_CASE("A last word counts where the service has closed without reading the question") {
  Channel channel;
  REQUIRE(vmci::send_request(channel.asker, channel.request).has_value());
  channel.say(Request::attach, 0, EMFILE, 0, {});
  channel.service = {};  // the kernel says first that the connection was reset
  const auto heard = channel.hear();
  REQUIRE(heard.has_value());
  CHECK(heard->status == EMFILE);
}

TEST_CASE("Errors tell a service that is gone from one that speaks otherwise and from one that says nothing") {
  Channel channel;
  channel.say(Request::query_link_layer, 7, 0, sizeof(LinkLayerReply), {});  // less than it says
  CHECK(channel.error_heard() == EPROTO);
  channel.say(Request::query_link_layer, 7, 0, 0, std::as_bytes(std::span(&channel.reply, 1)));  // less than is wanted
  CHECK(channel.error_heard() == EPROTO);
  REQUIRE(channel.service.send(std::as_bytes(std::span("x", 1))).has_value());
  CHECK(channel.error_heard() == EPROTO);
  auto silent = receive_reply(channel.asker, channel.request, {}, {0, 0});
  REQUIRE(!silent);
  CHECK(value(silent.error()) == ETIMEDOUT);
  channel.service = {};
  CHECK(channel.error_heard() == EIO);
}

TEST_CASE("A reply may say more than we know") {
  Channel channel;
  std::array<std::byte, 24> longer{};
  longer[0] = std::byte{link_layer_ethernet};
  channel.say(Request::query_link_layer, 7, 0, longer.size(), longer);
  REQUIRE(channel.hear().has_value());
  CHECK(channel.reply.link_layer == link_layer_ethernet);
}
