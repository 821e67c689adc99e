// What programs say to a carrier's port that are no carrier of the subnet, or one that says what it should not.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <spdlog/sinks/ostream_sink.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/remote/peer_filter.hpp"
#include "vmkernel_svc/remote/test_ends.hpp"

using namespace vrdma;
using namespace vrdma::remote;

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds patience(60);

vmci::UniqueFd connected_to(const Subnet& subnet) {  // to its second host
  vmci::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in there{};
  there.sin_family = AF_INET;
  there.sin_port = htons(subnet.config.hosts[1].port);
  there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int done = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&there), sizeof(there));
  REQUIRE((done == 0 || errno == EINPROGRESS));
  pollfd writable{socket.get(), POLLOUT, 0};
  REQUIRE(::poll(&writable, 1, 60'000) == 1);
  return socket;
}

vmci::UniqueFd listening_at(std::uint16_t port) {
  vmci::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_port = htons(port);
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&here), sizeof(here)) == 0);
  REQUIRE(::listen(socket.get(), 8) == 0);
  return socket;
}

void say(int socket, const void* bytes, std::size_t count) {  // what the other end does not take is not said
  [[maybe_unused]] const auto said = ::send(socket, bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool hung_up(int socket, End& end) {
  for (const auto until = Clock::now() + patience; Clock::now() < until;) {
    end.carrier->turn();
    char bytes[4096];
    const ssize_t got = ::recv(socket, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
  }
  return false;
}

// The first host's part on a connection to the second, said by hand: with the right key, and then whatever is asked for.
class Forger {
 public:
  Forger(const Subnet& subnet, End& other)
      : directory_(subnet.seen_by(0)), context_("h0", false, [](std::string_view) { return nullptr; }), socket_(connected_to(subnet)),
        handshake_(context_, socket_.get(), directory_->host_named("h1")) {
    auto state = Handshake::State::wants_read;
    for (const auto until = Clock::now() + patience; state != Handshake::State::done && Clock::now() < until; state = handshake_.go_on()) {
      REQUIRE(state != Handshake::State::failed);
      other.carrier->turn();
    }
    REQUIRE(state == Handshake::State::done);
    seal_.emplace(handshake_.secrets()->ours, FrameSeal::Way::seal);
  }
  int socket() const { return socket_.get(); }

  // With a tag that is right, whatever the head says.
  std::vector<std::byte> frame(LinkHead head, const std::vector<std::byte>& body) {
    std::vector<std::byte> whole(sizeof(head) + body.size());
    const auto* const raw = reinterpret_cast<const std::byte*>(&head);
    head.tag = seal_->seal({raw, tagged_head_bytes}, body, nullptr);
    std::memcpy(whole.data(), &head, sizeof(head));
    std::memcpy(whole.data() + sizeof(head), body.data(), body.size());
    return whole;
  }
  void send(const std::vector<std::byte>& bytes) { say(socket_.get(), bytes.data(), bytes.size()); }
  void send(LinkKind kind, std::uint64_t number, FarKind record_kind = FarKind::request, std::uint64_t run = 0) {
    LinkHead head{};
    const auto body = record(record_kind, 0);
    head.kind = kind;
    head.number = number;
    head.run = run;
    head.bytes = static_cast<std::uint32_t>(body.size());
    send(frame(head, body));
  }
  void hello() { send(LinkKind::hello, 0, FarKind::request, 77); }
  static std::vector<std::byte> record(FarKind kind, std::uint32_t payload_bytes) {
    engine::FarRecord record{};
    record.kind = kind;
    record.payload_bytes = payload_bytes;
    std::vector<std::byte> body(sizeof(record));
    std::memcpy(body.data(), &record, sizeof(record));
    return body;
  }

 private:
  std::shared_ptr<ConfiguredSubnet> directory_;
  Handshake::Context context_;
  vmci::UniqueFd socket_;
  Handshake handshake_;
  std::optional<FrameSeal> seal_;
};

// A real host in the first one's place is served as if nothing had been.
void works(const Subnet& subnet, End& other) {
  while (other.carrier->receive()) {}
  End one(subnet, 0);
  one.await_session(other);
  other.await_session(one);
  CHECK(other.carrier->gauge(0)->unauthenticated.load() == 0);  // since this connection
  one.send(1, 5000, one.session), other.send(1, 5000, other.session);
  other.expect(1, one), one.expect(1, other);
}

}  // namespace

TEST_CASE("WhatAHostMayNotSayEndsItsConnectionAndNothingElse") {
  const Subnet subnet;
  End other(subnet, 1);
  enum class Is { malformed, strange };
  struct Case {
    const char* what;
    Is is;
    std::function<void(Forger&)> forge;
  };
  const auto sized = [](std::uint32_t bytes) {
    return [bytes](Forger& forger) {
      LinkHead head{};
      head.kind = LinkKind::alive;
      head.bytes = bytes;
      forger.hello();
      forger.send(forger.frame(head, std::vector<std::byte>(sizeof(engine::FarRecord))));
    };
  };
  const Case cases[] = {
      {"a record before hello", Is::malformed, [](Forger& f) { f.send(LinkKind::record, 1); }},
      {"hello of no run", Is::malformed, [](Forger& f) { f.send(LinkKind::hello, 0); }},
      {"hello twice", Is::malformed, [](Forger& f) { f.hello(), f.hello(); }},
      {"a record left out", Is::malformed, [](Forger& f) { f.hello(), f.send(LinkKind::record, 2); }},
      {"news, which are the carrier's own", Is::malformed, [](Forger& f) { f.hello(), f.send(LinkKind::record, 1, FarKind::news); }},
      {"a kind that there is not", Is::malformed, [](Forger& f) { f.hello(), f.send(static_cast<LinkKind>(77), 1); }},
      {"more payload than comes", Is::malformed,
       [](Forger& f) {
         LinkHead head{};
         head.kind = LinkKind::record;
         head.bytes = sizeof(engine::FarRecord);
         f.send(f.frame(head, Forger::record(FarKind::request, 1000)));
       }},
      {"a frame without a record", Is::strange, sized(0)},
      {"a frame of 4 GiB", Is::strange, sized(0xffffffff)},
      {"a frame that is longer than it was sealed", Is::strange,
       [&](Forger& f) {
         sized(sizeof(engine::FarRecord) + 8)(f);
         f.send(std::vector<std::byte>(100));
       }},
      {"another tag", Is::strange,
       [](Forger& f) {
         LinkHead head{};
         head.kind = LinkKind::alive;
         const auto body = Forger::record(FarKind::request, 0);
         head.bytes = static_cast<std::uint32_t>(body.size());
         auto whole = f.frame(head, body);
         whole[tagged_head_bytes] ^= std::byte{1};
         f.send(whole);
       }},
      {"the same frame again", Is::strange,
       [](Forger& f) {
         LinkHead head{};
         const auto body = Forger::record(FarKind::request, 0);
         head.kind = LinkKind::hello;
         head.run = 78;
         head.bytes = static_cast<std::uint32_t>(body.size());
         const auto whole = f.frame(head, body);
         f.send(whole), f.send(whole);
       }},
      {"noise", Is::strange,
       [](Forger& f) {
         std::mt19937 random(3);
         std::vector<std::byte> noise(100'000);
         for (auto& byte : noise) byte = static_cast<std::byte>(random());
         f.hello(), f.send(noise);
       }},
  };
  for (const Case& one : cases) {
    CAPTURE(one.what);
    const auto& counters = other.carrier->counters();
    const auto malformed = counters.malformed.load(), strange = counters.unauthenticated.load();
    Forger forger(subnet, other);
    one.forge(forger);
    CHECK(hung_up(forger.socket(), other));
    CHECK(counters.malformed.load() == malformed + (one.is == Is::malformed));
    CHECK(counters.unauthenticated.load() == strange + (one.is == Is::strange));
  }
  works(subnet, other);
}

// Of older services nothing is known of LIDs.
TEST_CASE("AHelloThatNamesNoLidsDisagreesWithNobody") {
  const Subnet subnet;
  End other(subnet, 1);
  Forger forger(subnet, other);
  forger.hello();
  FarFramePtr news;
  for (const auto until = Clock::now() + patience; !news && Clock::now() < until; news = other.carrier->receive()) other.carrier->turn();
  REQUIRE(news != nullptr);
  CHECK(news->record().kind == FarKind::news);
  CHECK(other.carrier->disagreement(0) == "");
}

// Nor does it get that far that a service which has just begun finds it waiting.
TEST_CASE("WhoIsNoHostDoesNotReachThePortEvenBeforeTheFirstTurn") {
  const Subnet subnet;
  End other(subnet, 1);
  const auto connects = [&](const char* from) {
    const vmci::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_in here{}, there{};
    here.sin_family = there.sin_family = AF_INET;
    there.sin_port = htons(subnet.config.hosts[1].port);
    there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(::inet_pton(AF_INET, from, &here.sin_addr) == 1);
    REQUIRE(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&here), sizeof(here)) == 0);
    const int done = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&there), sizeof(there));
    REQUIRE((done == 0 || errno == EINPROGRESS));
    pollfd writable{socket.get(), POLLOUT, 0};
    return ::poll(&writable, 1, 100) == 1;  // on one machine the answer is there when connect() returns
  };
  REQUIRE(connects("127.0.0.1"));
  const vmci::UniqueFd probe(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (accept_only(probe.get(), {"127.0.0.1"}) != 32) {
    MESSAGE("SKIP: this process may not filter its sockets");
    return;
  }
  CHECK_FALSE(connects("127.0.0.6"));
}

TEST_CASE("StrangersAreHungUpOnWhileRecordsGoOn") {
  const Subnet subnet;
  End one(subnet, 0), other(subnet, 1);
  one.await_session(other);
  other.await_session(one);
  std::mt19937 random(5);
  std::string noise(70'000, '\0');
  for (auto& byte : noise) byte = static_cast<char>(random());
  const std::vector<std::string> sayings{
      "GET / HTTP/1.1\r\n\r\n", std::string(4096, '\0'), noise.substr(0, 8), noise,
      std::string("\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00", 10),                   // of TLS: a hello that ends early
      std::string("\x16\x03\x01\xff\xff", 5) + noise, std::string("\x17\x03\x03\x00\x20", 5) + noise.substr(0, 32)};
  const auto& counters = other.carrier->counters();
  std::uint32_t number = 0;
  for (const auto& saying : sayings) {
    const auto before = counters.unauthenticated.load();
    const vmci::UniqueFd socket = connected_to(subnet);
    say(socket.get(), saying.data(), saying.size());
    ::shutdown(socket.get(), SHUT_WR);  // what ends early has ended
    CHECK(hung_up(socket.get(), other));
    CHECK(counters.unauthenticated.load() == before + 1);
    one.send(++number, 3000, one.session), other.send(number, 3000, other.session);
    other.expect(number, one), one.expect(number, other);
  }
  CHECK(one.carrier->gauge(0)->reconnects.load() == 0);
}

// TLS alone lets nobody in: neither a client without any key, nor one whose key is right for a name that is not its own.
TEST_CASE("TlsWithoutTheHostsKeyIsHungUpOn") {
  const Subnet subnet;
  End other(subnet, 1);
  const std::unique_ptr<SSL_CTX, SslFree> context(SSL_CTX_new(TLS_client_method()));
  for (const char* const ciphers : {"TLS_AES_128_GCM_SHA256", "TLS_CHACHA20_POLY1305_SHA256"}) {
    CAPTURE(ciphers);
    const auto before = other.carrier->counters().unauthenticated.load();
    const vmci::UniqueFd socket = connected_to(subnet);
    const std::unique_ptr<SSL, SslFree> ssl(SSL_new(context.get()));
    REQUIRE(SSL_set_ciphersuites(ssl.get(), ciphers) == 1);
    REQUIRE(SSL_set_fd(ssl.get(), socket.get()) == 1);
    int done = 0;
    for (const auto until = Clock::now() + patience; Clock::now() < until;) {
      done = SSL_connect(ssl.get());
      if (done == 1 || SSL_get_error(ssl.get(), done) != SSL_ERROR_WANT_READ) break;
      other.carrier->turn();
    }
    CHECK(done != 1);
    CHECK(hung_up(socket.get(), other));
    CHECK(other.carrier->counters().unauthenticated.load() == before + 1);
  }
  works(subnet, other);
}

// All that this process may have are taken, while this is there.
class NoDescriptors {
 public:
  NoDescriptors() {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before_) == 0);
    taken_.emplace_back(::dup(STDERR_FILENO));
    REQUIRE(taken_.back());
    rlimit few = before_;
    few.rlim_cur = static_cast<rlim_t>(taken_.back().get()) + 16;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
    for (;;) {
      vmci::UniqueFd one(::dup(STDERR_FILENO));
      if (!one) break;
      taken_.push_back(std::move(one));
    }
  }
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
  std::vector<vmci::UniqueFd> taken_;
};

// Who cannot be accepted is looked at now and then, not all the time.
TEST_CASE("AServiceWithoutDescriptorsLeavesItsPortAloneAndAcceptsWhenItHasSome") {
  const Subnet subnet;
  End other(subnet, 1);
  const vmci::UniqueFd waiting = connected_to(subnet);
  say(waiting.get(), "x", 1);
  {
    const NoDescriptors none;
    pollfd carrier{other.carrier->descriptor(), POLLIN, 0};
    REQUIRE(::poll(&carrier, 1, 60'000) == 1);
    for (const auto until = Clock::now() + patience; ::poll(&carrier, 1, 0) == 1 && Clock::now() < until;) other.carrier->turn();
    CHECK(::poll(&carrier, 1, 0) == 0);
    CHECK(other.carrier->next_wake_ns() != ~std::uint64_t{0});
  }
  ::shutdown(waiting.get(), SHUT_WR);
  CHECK(hung_up(waiting.get(), other));
  works(subnet, other);
}

// Connections that nothing is said on, more than are kept: who is a host gets in among them.
TEST_CASE("ManyHalfOpenConnectionsKeepNoHostOut") {
  const Subnet subnet;
  End other(subnet, 1);
  std::vector<vmci::UniqueFd> silent;
  for (int i = 0; i < 150; ++i) {
    silent.push_back(connected_to(subnet));
    other.carrier->turn();
  }
  works(subnet, other);
  CHECK(other.carrier->counters().refused_connections.load() > 0);
}

// Who was ended just then has no other secret for that.
TEST_CASE("AHostThatIsEndedWhileItShakesHandsIsNoStranger") {
  const Subnet subnet;
  for (const bool says_all : {false, true}) {  // that has read what came, or not: a reset
    CAPTURE(says_all);
    const auto listener = listening_at(subnet.config.hosts[1].port);
    End one(subnet, 0);
    for (int times = 0; times < 3; ++times) {  // with the third the two before it have been seen
      pollfd came{listener.get(), POLLIN, 0};
      for (const auto until = Clock::now() + patience; ::poll(&came, 1, 0) == 0; one.carrier->turn()) REQUIRE(Clock::now() < until);
      const vmci::UniqueFd dialed(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      REQUIRE(dialed);
      pollfd said{dialed.get(), POLLIN, 0};
      for (const auto until = Clock::now() + patience; ::poll(&said, 1, 0) == 0; one.carrier->turn()) REQUIRE(Clock::now() < until);
      char bytes[4096];
      if (says_all) REQUIRE(::recv(dialed.get(), bytes, sizeof(bytes), 0) > 0);
    }
    CHECK(one.carrier->gauge(0)->unauthenticated.load() == 0);
    CHECK(one.carrier->counters().unauthenticated.load() == 0);
  }
  End other(subnet, 1);
  const auto directory = subnet.seen_by(0);
  Handshake::Context context("h0", false, [](std::string_view) { return nullptr; });
  {
    const vmci::UniqueFd socket = connected_to(subnet);
    Handshake begun(context, socket.get(), directory->host_named("h1"));
    REQUIRE(begun.go_on() == Handshake::State::wants_read);
  }
  pollfd carrier{other.carrier->descriptor(), POLLIN, 0};
  for (const auto until = Clock::now() + patience; ::poll(&carrier, 1, 0) != 0; other.carrier->turn()) REQUIRE(Clock::now() < until);
  CHECK(other.carrier->gauge(0)->unauthenticated.load() == 0);
  CHECK(other.carrier->counters().unauthenticated.load() == 0);
  works(subnet, other);
}

// What is logged while this is there.
class Logged {
 public:
  Logged() : before_(spdlog::default_logger()) {
    spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_st>(text_)));
  }
  ~Logged() { spdlog::set_default_logger(before_); }
  std::size_t count(const std::string& what) const {
    const std::string text = text_.str();
    std::size_t found = 0;
    for (auto at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++found;
    return found;
  }

 private:
  std::ostringstream text_;
  std::shared_ptr<spdlog::logger> before_;
};

// One of two hosts whose key has changed knows of it before the other, for a moment.
TEST_CASE("ThatTheKeysDifferIsSaidOnceWhenItLasts") {
  const Logged logged;
  const Subnet subnet;
  const std::string line = "no connection with host h1: the two do not have the same secret or key";  // the other end has its own
  const auto first_known = subnet.seen_by(0);
  subnet.write_secret('t');
  End one(subnet, 0, first_known), other(subnet, 1);
  const Gauge& gauge = *one.carrier->gauge(0);
  const auto drive_until = [&](auto&& done) {
    for (const auto until = Clock::now() + patience; !done(); one.carrier->turn(), other.carrier->turn()) REQUIRE(Clock::now() < until);
  };
  drive_until([&] { return gauge.unauthenticated.load() != 0; });
  CHECK(logged.count(line) == 0);
  drive_until([&] { return logged.count(line) != 0; });
  const auto failed = gauge.unauthenticated.load();
  drive_until([&] { return gauge.unauthenticated.load() >= failed + 2; });
  CHECK(logged.count(line) == 1);
}

TEST_CASE("AHostThatSpeaksAnOlderProtocolIsNamedUntilItsConnectionStands") {
  const Logged logged;
  const Subnet subnet;
  End other(subnet, 1);
  const Gauge& gauge = *other.carrier->gauge(0);
  for (const char* saying : {"vrdma-records-of-old", "GET / HTTP/1.1\r\n\r\n"}) {
    const vmci::UniqueFd socket = connected_to(subnet);
    say(socket.get(), saying, std::strlen(saying));
    ::shutdown(socket.get(), SHUT_WR);
    CHECK(hung_up(socket.get(), other));
    CHECK(gauge.other_protocol.load());
  }
  CHECK(logged.count("host h0 (127.0.0.1) connects and does not speak our protocol: an older vrdmad?") == 1);
  works(subnet, other);
  CHECK_FALSE(gauge.other_protocol.load());
}
