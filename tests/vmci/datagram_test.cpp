// Datagrams between processes, through a real vrdmad.
#include <unistd.h>

#include <thread>

#include "tests/vmci/service.hpp"
#include "vmci_channel/datagram_socket.hpp"

using namespace vrdma;
using namespace vrdma::test;
using vmci::Address;
using vmci::DatagramSocket;

namespace {
std::vector<std::byte> pattern(std::size_t bytes, std::uint32_t seed) {
  std::vector<std::byte> out(bytes);
  for (std::size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(i * 31 + seed);
  return out;
}
}  // namespace

TEST_CASE("The control port answers a datagram socket: a device query through the generic interface") {
  Service service;
  const auto context = service.attach();
  auto socket = DatagramSocket::bind(context);
  REQUIRE(socket.has_value());
  constexpr auto request = static_cast<std::uint16_t>(control::Request::query_device);
  REQUIRE(socket->send_to({control::host_context, control::control_port}, {}, request, 4711).has_value());
  auto reply = socket->receive_from(watchdog_ms);
  REQUIRE(reply.has_value());
  CHECK(reply->from == Address{control::host_context, control::control_port});
  CHECK(reply->kind() == request);
  CHECK((reply->user_bits & control::reply_bit) != 0);
  CHECK(reply->sequence == 4711);
  CHECK(reply->status == 0);
  control::DeviceReply device;
  REQUIRE(reply->body.size() == sizeof(device));
  std::memcpy(&device, reply->body.data(), sizeof(device));
  auto direct = context->call<control::Request::query_device>({});
  REQUIRE(direct.has_value());
  CHECK(device.lid != 0);
  CHECK(std::memcmp(&device, &*direct, sizeof(device)) == 0);
}

TEST_CASE("Datagrams of every size go there and back between two processes, with the true source") {
  Service service;
  Child echo([&](const Child::Reporter& reporter) {
    auto socket = DatagramSocket::bind(service.attach("echo"), 7);
    if (!socket) return 1;
    reporter.report(socket->local().context);
    for (;;) {
      auto got = socket->receive_from(watchdog_ms);
      if (!got) return 2;
      if (!socket->send_to(got->from, got->body, got->kind(), got->sequence)) return 3;
      if (got->kind() == 99) return 0;
    }
  });
  const Address there{echo.next(), 7};
  const auto context = service.attach("asker");
  auto socket = DatagramSocket::bind(context, 0);
  REQUIRE(socket.has_value());
  CHECK(socket->local().port >= control::dynamic_port_first);
  std::uint32_t sequence = 0;
  for (const std::size_t bytes : {0u, 1u, 31u, 32u, 33u, 96u, 97u, 1000u, 4063u, 4064u}) {
    const auto body = pattern(bytes, ++sequence);
    REQUIRE(socket->send_to(there, body, 5, sequence).has_value());
    auto back = socket->receive_from(watchdog_ms);
    REQUIRE(back.has_value());
    CHECK(back->from == there);
    CHECK(back->kind() == 5);
    CHECK(back->sequence == sequence);
    CHECK(back->user_bits == (control::datagram_bit | 5u));  // never mistaken for an answer of the service
    CHECK(back->body == body);
  }
  CHECK(value(socket->send_to(there, pattern(4065, 0)).error()) == EMSGSIZE);
  REQUIRE(socket->send_to(there, {}, 99).has_value());
  REQUIRE(socket->receive_from(watchdog_ms).has_value());
  CHECK(echo.wait() == 0);
}

TEST_CASE("A datagram to nobody, to a port that is not bound, or to a listener is refused and counted at its sender") {
  Service service;
  const auto a = service.attach("a"), b = service.attach("b");
  auto socket = DatagramSocket::bind(a);
  REQUIRE(socket.has_value());
  auto listener = b->bind(10, 4, 0);
  REQUIRE(listener.has_value());
  REQUIRE(socket->send_to({0xdead, 1}, {}).has_value());
  REQUIRE(socket->send_to({b->id(), 9}, {}).has_value());
  REQUIRE(socket->send_to({b->id(), 10}, {}).has_value());
  REQUIRE(socket->send_to({control::host_context, 9}, {}).has_value());
  CHECK(eventually(*a, [&](const auto& all) { return guest_of(all, a->id())["vmci"]["datagrams_refused"] == 4; }));
  CHECK(guest_of(show(*a), b->id())["vmci"]["datagrams_received"] == 0);
  CHECK(value(socket->receive_from(0).error()) == EAGAIN);
  CHECK(value(socket->receive_from(20).error()) == ETIMEDOUT);
}

TEST_CASE("A port has one owner in a context, and may be bound again when it is free") {
  Service service;
  const auto context = service.attach();
  {
    auto first = DatagramSocket::bind(context, 4000);
    REQUIRE(first.has_value());
    CHECK(value(DatagramSocket::bind(context, 4000).error()) == EADDRINUSE);
    CHECK(DatagramSocket::bind(service.attach("other"), 4000).has_value());
  }
  CHECK(DatagramSocket::bind(context, 4000).has_value());
}

TEST_CASE("What a receiver does not read is dropped and counted, and neither replies nor the service suffer") {
  Service service;
  const auto a = service.attach("sender"), b = service.attach("receiver");
  auto from = DatagramSocket::bind(a);
  auto to = DatagramSocket::bind(b, 5, 10);
  REQUIRE(from.has_value());
  REQUIRE(to.has_value());
  constexpr std::uint32_t sent = 3000;
  for (std::uint32_t i = 0; i < sent; ++i) REQUIRE(from->send_to(to->local(), pattern(64, i), 0, i).has_value());
  CHECK(eventually(*a, [&](const auto& all) {
    return guest_of(all, b->id())["vmci"]["datagrams_received"].template get<std::uint32_t>() +
               guest_of(all, b->id())["vmci"]["datagrams_dropped"].template get<std::uint32_t>() == sent;
  }));
  const auto counters = guest_of(show(*a), b->id())["vmci"];
  const auto received = counters["datagrams_received"].get<std::uint64_t>();
  CHECK(counters["datagrams_dropped"] > 0);
  CHECK(received > 100);
  // The full ring still takes replies.
  CHECK(b->call<control::Request::query_device>({}).has_value());
  std::uint64_t got = 0;
  for (; auto datagram = to->receive_from(0); ++got) CHECK(datagram->sequence == got);  // in order, from the first
  CHECK(got == 10);
  CHECK(to->dropped() == received - got);
  // And once it is read, datagrams come again.
  REQUIRE(from->send_to(to->local(), {}, 0, 12345).has_value());
  auto after = to->receive_from(watchdog_ms);
  REQUIRE(after.has_value());
  CHECK(after->sequence == 12345);
}

TEST_CASE("A sleeper in poll wakes for its datagram, also while another thread of the process uses the context") {
  Service service;
  Child pinger([&](const Child::Reporter& reporter) {
    auto socket = DatagramSocket::bind(service.attach("pinger"), 1000);
    if (!socket) return 1;
    reporter.report(socket->local().context);
    for (int i = 0; i < 200; ++i) {
      auto got = socket->receive_from(watchdog_ms);
      if (!got || !socket->send_to(got->from, got->body, 0, got->sequence)) return 2;
    }
    return 0;
  });
  const Address there{pinger.next(), 1000};
  const auto context = service.attach();
  auto socket = DatagramSocket::bind(context);
  REQUIRE(socket.has_value());
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop.load(std::memory_order_relaxed))
      if (!context->call<control::Request::query_device>({})) return;
  });
  for (std::uint32_t i = 0; i < 200; ++i) {
    REQUIRE(socket->send_to(there, {}, 0, i).has_value());
    for (;;) {
      pollfd waiting{socket->fd(), POLLIN, 0};
      REQUIRE(::poll(&waiting, 1, watchdog_ms) == 1);
      auto got = socket->receive_from(0);
      if (!got) {
        REQUIRE(value(got.error()) == EAGAIN);
        continue;
      }
      REQUIRE(got->sequence == i);
      break;
    }
  }
  stop.store(true, std::memory_order_relaxed);
  busy.join();
  CHECK(pinger.wait() == 0);
}

TEST_CASE("The service's death is EIO to every waiter and wakes a poll") {
  Service service;
  const auto context = service.attach();
  auto socket = DatagramSocket::bind(context);
  REQUIRE(socket.has_value());
  std::thread killer([&] { service.kill(); });
  auto received = socket->receive_from(-1);
  REQUIRE(!received.has_value());
  CHECK(value(received.error()) == EIO);
  killer.join();
  pollfd waiting{socket->fd(), POLLIN, 0};
  CHECK(::poll(&waiting, 1, watchdog_ms) == 1);
  CHECK(context->gone());
  CHECK(value(context->call<control::Request::query_device>({}).error()) == EIO);
}
