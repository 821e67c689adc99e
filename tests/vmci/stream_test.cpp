// VMCI streams between processes, through a real vrdmad.
#include <sys/mman.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "tests/vmci/service.hpp"
#include "vmci_channel/stream_socket.hpp"

using namespace vrdma;
using namespace vrdma::test;
using vmci::Address;
using vmci::StreamListener;
using vmci::StreamSocket;

namespace {

constexpr std::uint32_t port = 5000;

std::byte byte_at(std::uint64_t position, std::uint32_t seed) {
  return static_cast<std::byte>((position * 2654435761u + seed * 97u) >> 13);
}
// Sends and checks a stream whose every byte is known from its position.
bool send_stream(StreamSocket& socket, std::uint64_t total, std::uint32_t seed) {
  std::vector<std::byte> chunk(50'000);
  std::mt19937 random(seed);
  for (std::uint64_t at = 0; at < total;) {
    const std::size_t bytes = std::min<std::uint64_t>(1 + random() % chunk.size(), total - at);
    for (std::size_t i = 0; i < bytes; ++i) chunk[i] = byte_at(at + i, seed);
    auto sent = socket.send(std::span(chunk).first(bytes));
    if (!sent || *sent != bytes) return false;
    at += bytes;
  }
  return true;
}
bool receive_stream(StreamSocket& socket, std::uint64_t total, std::uint32_t seed) {
  std::vector<std::byte> chunk(70'000);
  for (std::uint64_t at = 0; at < total;) {
    auto got = socket.receive(std::span(chunk).first(std::min<std::uint64_t>(chunk.size(), total - at)));
    if (!got || *got == 0) return false;
    for (std::size_t i = 0; i < *got; ++i)
      if (chunk[i] != byte_at(at + i, seed)) return false;
    at += *got;
  }
  return true;
}
// Accepts `connections` one after the other and echoes each to its end.
int echo_server(const Service& service, const Child::Reporter& reporter, int connections) {
  auto listener = StreamListener::listen(service.attach("echo"), port);
  if (!listener) return 1;
  reporter.report(listener->local().context);
  std::vector<std::byte> chunk(30'000);
  for (int i = 0; i < connections; ++i) {
    auto socket = listener->accept(watchdog_ms);
    if (!socket) return 2;
    for (;;) {
      auto got = socket->receive(chunk);
      if (!got) return 3;
      if (*got == 0) break;
      if (auto sent = socket->send(std::span(chunk).first(*got)); !sent) return 4;
    }
  }
  return 0;
}
std::span<const std::byte> text(const char* s) { return std::as_bytes(std::span(s, std::strlen(s))); }

}  // namespace

TEST_CASE("What is sent to an echo comes back, message by message, then the end") {
  Service service;
  Child server([&](const auto& reporter) { return echo_server(service, reporter, 1); });
  auto socket = StreamSocket::connect(service.attach(), {server.next(), port});
  REQUIRE(socket.has_value());
  std::vector<std::byte> back(64);
  for (int i = 0; i < 2000; ++i) {
    REQUIRE(socket->send(text("hello")).has_value());
    for (std::size_t got = 0; got < 5;) {
      auto part = socket->receive(std::span(back).subspan(got));
      REQUIRE(part.has_value());
      REQUIRE(*part != 0);
      got += *part;
    }
    REQUIRE(std::memcmp(back.data(), "hello", 5) == 0);
  }
  socket->shutdown_write();
  CHECK(value(socket->send(text("more")).error()) == EPIPE);
  auto end = socket->receive(back);
  REQUIRE(end.has_value());
  CHECK(*end == 0);
  CHECK(server.wait() == 0);
}

TEST_CASE("100 MiB go both ways at once, every byte in its place") {
  Service service;
  constexpr std::uint64_t total = std::uint64_t{100} << 20;
  const auto exchange = [](StreamSocket& socket, std::uint32_t mine, std::uint32_t theirs) {
    bool sent = false;
    std::thread sender([&] { sent = send_stream(socket, total, mine); });
    const bool received = receive_stream(socket, total, theirs);
    sender.join();
    return sent && received;
  };
  Child server([&](const Child::Reporter& reporter) {
    auto listener = StreamListener::listen(service.attach("server"), port);
    if (!listener) return 1;
    reporter.report(listener->local().context);
    auto socket = listener->accept(watchdog_ms);
    return socket && exchange(*socket, 1, 2) ? 0 : 2;
  });
  auto socket = StreamSocket::connect(service.attach("client"), {server.next(), port});
  REQUIRE(socket.has_value());
  CHECK(exchange(*socket, 2, 1));
  CHECK(server.wait() == 0);
}

TEST_CASE("A non-blocking client driven by poll alone moves every byte through a small queue") {
  Service service;
  Child server([&](const auto& reporter) { return echo_server(service, reporter, 1); });
  auto socket = StreamSocket::connect(service.attach(), {server.next(), port}, 8192);
  REQUIRE(socket.has_value());
  socket->set_nonblocking(true);
  constexpr std::uint64_t total = 6 << 20;
  std::uint64_t sent = 0, received = 0, not_now = 0;
  std::mt19937 random(5);
  std::vector<std::byte> chunk(20'000);
  while (received < total) {
    pollfd waiting{socket->fd(), static_cast<short>(POLLIN | (sent < total ? POLLOUT : 0)), 0};
    REQUIRE(::poll(&waiting, 1, watchdog_ms) == 1);
    REQUIRE((waiting.revents & (POLLHUP | POLLERR)) == 0);
    if (waiting.revents & POLLOUT) {
      const std::size_t bytes = std::min<std::uint64_t>(1 + random() % chunk.size(), total - sent);
      for (std::size_t i = 0; i < bytes; ++i) chunk[i] = byte_at(sent + i, 3);
      auto n = socket->send(std::span(chunk).first(bytes));
      if (n) {
        sent += *n;
      } else {
        REQUIRE(value(n.error()) == EAGAIN);
        ++not_now;
      }
    }
    if (waiting.revents & POLLIN) {  // once per poll, and often less than there is
      auto n = socket->receive(std::span(chunk).first(1 + random() % chunk.size()));
      if (!n) {
        REQUIRE(value(n.error()) == EAGAIN);
        continue;
      }
      for (std::size_t i = 0; i < *n; ++i) REQUIRE(chunk[i] == byte_at(received + i, 3));
      received += *n;
    }
  }
  CHECK(not_now > 0);  // the queue was full at times: POLLOUT had to go and to come back
  CHECK(sent == total);
  socket->close();
  CHECK(server.wait() == 0);
}

TEST_CASE("Many connections, one after the other and at once, and nothing stays behind in the service") {
  Service service;
  constexpr std::uint32_t at_once = 100, rounds = 5;
  Child server([&](const Child::Reporter& reporter) {
    auto listener = StreamListener::listen(service.attach("server"), port, at_once);
    if (!listener) return 1;
    reporter.report(listener->local().context);
    for (std::uint32_t round = 0; round < rounds; ++round) {
      std::vector<StreamSocket> sockets;
      while (sockets.size() < at_once) {
        auto socket = listener->accept(watchdog_ms);
        if (!socket) return 2;
        sockets.push_back(std::move(*socket));
      }
      std::byte number[4];
      for (auto& socket : sockets)
        if (!socket.receive(number) || !socket.send(number)) return 3;
      for (auto& socket : sockets)
        if (auto end = socket.receive(number); !end || *end != 0) return 4;
    }
    reporter.report(0);
    return 0;
  });
  const Address there{server.next(), port};
  const auto context = service.attach("client");
  const std::size_t descriptors = service.descriptors();
  for (std::uint32_t round = 0; round < rounds; ++round) {
    std::vector<StreamSocket> sockets;
    for (std::uint32_t i = 0; i < at_once; ++i) {
      auto socket = StreamSocket::connect(context, there, 4096);
      REQUIRE(socket.has_value());
      sockets.push_back(std::move(*socket));
      REQUIRE(sockets.back().send(std::as_bytes(std::span(&i, 1))).has_value());
    }
    for (std::uint32_t i = 0; i < at_once; ++i) {
      std::uint32_t back = ~0u;
      auto got = sockets[i].receive(std::as_writable_bytes(std::span(&back, 1)));
      REQUIRE(got.has_value());
      REQUIRE(back == i);
    }
    // The next round's backlog is empty only when this round's offers were taken: they were, they have answered.
  }
  CHECK(server.next() == 0);
  CHECK(server.wait() == 0);
  CHECK(eventually(*context, [&](const auto& all) { return all["guests"].size() == 1; }));
  const auto all = show(*context);
  CHECK(all["counters"]["vmci_queue_pairs"] == 0);
  CHECK(all["tenants"][0]["objects"] == 0);
  CHECK(all["tenants"][0]["queue_bytes"] == 0);
  CHECK(eventually(*context, [&](const auto&) { return service.descriptors() < descriptors; }));  // the server's own are gone, too
}

TEST_CASE("A peer killed in mid-stream is ECONNRESET to who receives and who sends, asleep or not, and leaves nothing") {
  Service service;
  const auto context = service.attach("survivor");
  const std::size_t descriptors = service.descriptors();
  for (const bool sending : {false, true})
    for (const bool polling : {false, true}) {
      Child victim([&](const Child::Reporter& reporter) {
        auto listener = StreamListener::listen(service.attach("victim"), port);
        if (!listener) return 1;
        reporter.report(listener->local().context);
        auto socket = listener->accept(watchdog_ms);
        if (!socket || !socket->send(text("start"))) return 2;
        reporter.report(1);
        for (;;) ::pause();
      });
      auto socket = StreamSocket::connect(context, {victim.next(), port}, 65536);
      REQUIRE(socket.has_value());
      REQUIRE(victim.next() == 1);
      socket->set_nonblocking(polling);
      std::thread killer([&] { victim.kill(); });
      std::vector<std::byte> chunk(10'000);
      int error = 0;
      std::size_t received = 0;
      while (error == 0) {
        if (polling) {
          pollfd waiting{socket->fd(), static_cast<short>(sending ? POLLOUT : POLLIN), 0};
          REQUIRE(::poll(&waiting, 1, watchdog_ms) == 1);
        }
        auto n = sending ? socket->send(chunk) : socket->receive(chunk);
        if (n && !sending) received += *n;
        if (!n && value(n.error()) != EAGAIN) error = value(n.error());
      }
      CHECK(error == ECONNRESET);
      if (!sending) CHECK(received == 5);  // what it sent before it died
      killer.join();
    }
  CHECK(eventually(*context, [&](const auto& all) { return all["guests"].size() == 1; }));
  const auto all = show(*context);
  CHECK(all["counters"]["vmci_queue_pairs"] == 0);
  CHECK(all["tenants"][0]["objects"] == 0);
  CHECK(all["tenants"][0]["queue_bytes"] == 0);
  CHECK(eventually(*context, [&](const auto&) { return service.descriptors() <= descriptors; }));  // when they were counted it may have had some on their way to somebody
}

TEST_CASE("A peer whose child holds copies of everything still hangs up when it dies") {
  Service service;
  const auto context = service.attach("survivor");
  Child victim([&](const Child::Reporter& reporter) {
    auto listener = StreamListener::listen(service.attach("victim"), port);
    if (!listener) return 1;
    reporter.report(listener->local().context);
    auto socket = listener->accept(watchdog_ms);
    if (!socket) return 2;
    const pid_t heir = ::fork();
    if (heir == 0)
      for (;;) ::pause();
    reporter.report(static_cast<std::uint32_t>(heir));
    for (;;) ::pause();
  });
  auto socket = StreamSocket::connect(context, {victim.next(), port});
  REQUIRE(socket.has_value());
  const auto heir = static_cast<pid_t>(victim.next());
  std::thread killer([&] { victim.kill(); });
  std::byte one[1];
  auto got = socket->receive(one);
  CHECK(!got.has_value());
  CHECK(value(got.error()) == ECONNRESET);
  killer.join();
  ::kill(heir, SIGKILL);
}

TEST_CASE("Refusals say why: nobody there, no listener, backlog full, listener gone") {
  Service service;
  const auto a = service.attach("a"), b = service.attach("b");
  CHECK(value(StreamSocket::connect(a, {0xdead, port}).error()) == ECONNREFUSED);
  CHECK(value(StreamSocket::connect(a, {b->id(), port}).error()) == ECONNREFUSED);
  auto mailbox = b->bind(port, 0, 10);
  REQUIRE(mailbox.has_value());
  CHECK(value(StreamSocket::connect(a, {b->id(), port}).error()) == ECONNREFUSED);  // a datagram port
  b->unbind(**mailbox);
  {
    auto listener = StreamListener::listen(b, port, 2);
    REQUIRE(listener.has_value());
    CHECK(value(StreamSocket::connect(a, listener->local(), 5000).error()) == EINVAL);
    auto one = StreamSocket::connect(a, listener->local()), two = StreamSocket::connect(a, listener->local());
    REQUIRE(one.has_value());
    REQUIRE(two.has_value());
    CHECK(value(StreamSocket::connect(a, listener->local()).error()) == EAGAIN);
    auto accepted = listener->accept(watchdog_ms);
    REQUIRE(accepted.has_value());
    CHECK(StreamSocket::connect(a, listener->local()).has_value());  // room again
  }
  auto listener = std::make_unique<StreamListener>(*StreamListener::listen(b, port, 2));
  auto waiting = StreamSocket::connect(a, listener->local());
  REQUIRE(waiting.has_value());
  listener.reset();
  std::byte one[1];
  CHECK(value(waiting->receive(one).error()) == ECONNRESET);
  CHECK(eventually(*a, [](const auto& all) { return all["counters"]["vmci_queue_pairs"] == 0; }));
}

TEST_CASE("Who sends and closes before it is accepted is still read to its end") {
  Service service;
  const auto b = service.attach("b");
  auto listener = StreamListener::listen(b, port);
  REQUIRE(listener.has_value());
  const Address there = listener->local();
  Child sender([&](const Child::Reporter&) {
    auto socket = StreamSocket::connect(service.attach("short-lived"), there);
    return socket && socket->send(text("farewell")) ? 0 : 1;
  });
  CHECK(sender.wait() == 0);
  CHECK(eventually(*b, [](const auto& all) { return all["guests"].size() == 1; }));
  auto socket = listener->accept(watchdog_ms);
  REQUIRE(socket.has_value());
  std::vector<std::byte> got(100);
  auto bytes = socket->receive(got);
  REQUIRE(bytes.has_value());
  CHECK(*bytes == 8);
  CHECK(std::memcmp(got.data(), "farewell", 8) == 0);
  auto end = socket->receive(got);
  REQUIRE(end.has_value());
  CHECK(*end == 0);
  CHECK(show(*b)["counters"]["vmci_queue_pairs"] == 0);
  CHECK(show(*b)["tenants"][0]["objects"] == 0);
}

TEST_CASE("A queue pair's owner hears of attach, and of detach by will or by death, and none attaches twice or unasked") {
  Service service;
  const auto a = service.attach("creator"), stranger = service.attach("stranger");
  auto notices = a->bind(0, 0, 16);
  REQUIRE(notices.has_value());
  for (const bool dies : {false, true}) {
    Child peer([&](const Child::Reporter& reporter) {
      const auto b = service.attach("attacher");
      auto offers = b->bind(port, 4, 0);
      if (!offers) return 1;
      reporter.report(b->id());
      auto offer = b->receive(**offers, watchdog_ms);
      control::QueuePairNotice notice;
      if (!offer || offer->kind() != control::notice_offer) return 2;
      std::memcpy(&notice, offer->body.data(), sizeof(notice));
      auto pair = vmci::QueuePair::attach(b, notice.handle);
      if (!pair || value(vmci::QueuePair::attach(b, notice.handle).error()) != ENOENT) return 3;
      if (dies) ::raise(SIGKILL);
      return 0;
    });
    auto pair = vmci::QueuePair::alloc(a, {peer.next(), port}, 4096, 8192, (*notices)->port());
    REQUIRE(pair.has_value());
    CHECK(value(vmci::QueuePair::attach(stranger, pair->handle()).error()) == ENOENT);
    CHECK(value(stranger->call<control::Request::queue_pair_detach>(pair->handle()).error()) == EINVAL);
    for (const auto expected : {control::notice_attached, control::notice_detached}) {
      auto got = a->receive(**notices, watchdog_ms);
      REQUIRE(got.has_value());
      CHECK(got->kind() == expected);
      CHECK(got->from == Address{control::host_context, control::control_port});
      control::QueuePairNotice notice;
      REQUIRE(got->body.size() == sizeof(notice));
      std::memcpy(&notice, got->body.data(), sizeof(notice));
      CHECK(notice.handle == pair->handle());
      CHECK(notice.peer_port == port);
    }
    CHECK(peer.wait() == (dies ? 1000 + SIGKILL : 0));
    CHECK((pair->doorbell().wait(POLLIN, watchdog_ms) & POLLHUP) != 0);
  }
}

TEST_CASE("A peer that scribbles over the queue pair and its doorbell ends the connection, or sends rubbish, but never more") {
  Service service;
  const auto honest = service.attach("honest"), hostile = service.attach("hostile");
  auto listener = StreamListener::listen(honest, port);
  REQUIRE(listener.has_value());
  std::uint32_t broken = 0;
  for (std::uint32_t seed = 1; seed <= 150; ++seed) {
    auto pair = vmci::QueuePair::alloc(hostile, listener->local(), 4096, 4096);
    REQUIRE(pair.has_value());
    auto socket = listener->accept(watchdog_ms);
    REQUIRE(socket.has_value());
    socket->set_nonblocking(true);
    std::mt19937 random(seed);
    std::vector<std::byte> chunk(9000);
    bool ended = false;
    for (int step = 0; step < 200 && !ended; ++step) {
      auto* const words = reinterpret_cast<std::uint32_t*>(pair->memory());
      const std::size_t word = random() % 5 + (random() % 8 == 0 ? 32 : 0);
      if (seed % 3 == 0)
        words[word] += static_cast<std::uint32_t>(random() % 3000);  // often possible, so that it goes on for a while
      else
        words[random() % (pair->geometry().total_bytes() / 4)] = static_cast<std::uint32_t>(random());
      if (random() % 4 == 0) words[word] = static_cast<std::uint32_t>(random());
      if (random() % 3 == 0) pair->doorbell().ring(static_cast<std::uint32_t>(random() % 3 == 0 ? ~0u : random()));
      auto got = socket->receive(std::span(chunk).first(1 + random() % chunk.size()));
      auto sent = socket->send(std::span(chunk).first(1 + random() % chunk.size()));
      for (const int error : {got ? 0 : value(got.error()), sent ? 0 : value(sent.error())}) {
        REQUIRE((error == 0 || error == EAGAIN || error == EPROTO || error == EPIPE || error == ECONNRESET));
        ended |= error == EPROTO;
      }
    }
    broken += ended;
  }
  CHECK(broken > 50);
  CHECK(honest->call<control::Request::query_device>({}).has_value());
  CHECK(eventually(*honest, [](const auto& all) { return all["counters"]["vmci_queue_pairs"] == 0; }));
}

TEST_CASE("The memory of a queue pair can be made neither smaller nor larger by anybody") {
  Service service;
  const auto a = service.attach("a"), b = service.attach("b");
  auto mailbox = b->bind(port, 1, 0);
  REQUIRE(mailbox.has_value());
  auto reply = a->call_on_socket<control::Request::queue_pair_alloc>({b->id(), port, 0, 0, 4096, 4096});
  REQUIRE(reply.has_value());
  REQUIRE(reply->descriptors.size() == 2);
  CHECK(::ftruncate(reply->descriptors[0].get(), 0) != 0);
  CHECK(::ftruncate(reply->descriptors[0].get(), 1 << 20) != 0);
}

TEST_CASE("Streams outlive the service; new ones need it") {
  Service service;
  const auto a = service.attach("a"), b = service.attach("b");
  auto listener = StreamListener::listen(b, port);
  REQUIRE(listener.has_value());
  auto near = StreamSocket::connect(a, listener->local());
  REQUIRE(near.has_value());
  auto far = listener->accept(watchdog_ms);
  REQUIRE(far.has_value());
  service.kill();
  REQUIRE(near->send(text("still")).has_value());
  std::vector<std::byte> got(10);
  auto bytes = far->receive(got);
  REQUIRE(bytes.has_value());
  CHECK(*bytes == 5);
  near->close();
  bytes = far->receive(got);
  REQUIRE(bytes.has_value());
  CHECK(*bytes == 0);
  CHECK(value(StreamSocket::connect(a, {b->id(), port}).error()) == EIO);
}
