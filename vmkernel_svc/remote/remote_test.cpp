#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/evp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "vmkernel_svc/remote/test_ends.hpp"

using namespace vrdma;
using namespace vrdma::remote;

TEST_CASE("WhatWasSealedIsOpenedOnceAndUnchanged") {
  std::array<std::byte, FrameSeal::secret_bytes> secret;
  for (std::size_t i = 0; i < secret.size(); ++i) secret[i] = static_cast<std::byte>(i * 7);
  std::vector<std::byte> head(48, std::byte{1}), body(1000);
  for (std::size_t i = 0; i < body.size(); ++i) body[i] = static_cast<std::byte>(i);
  for (const bool encrypt : {false, true}) {
    FrameSeal sealing(secret, FrameSeal::Way::seal);
    std::vector<std::byte> sent = body;
    const auto first = sealing.seal(head, body, encrypt ? sent.data() : nullptr);
    CHECK((sent == body) == !encrypt);
    {
      FrameSeal opening(secret, FrameSeal::Way::open);
      std::vector<std::byte> came = sent;
      REQUIRE(opening.open(head, came, encrypt, first));
      CHECK(came == body);
      came = sent;
      CHECK_FALSE(opening.open(head, came, encrypt, first));  // a second time
    }
    for (const std::size_t changed : {std::size_t{0}, std::size_t{500}, std::size_t{999}}) {
      FrameSeal opening(secret, FrameSeal::Way::open);
      std::vector<std::byte> came = sent;
      came[changed] ^= std::byte{4};
      CHECK_FALSE(opening.open(head, came, encrypt, first));
    }
    FrameSeal opening(secret, FrameSeal::Way::open);
    std::vector<std::byte> other_head = head, came = sent;
    other_head[0] ^= std::byte{1};
    CHECK_FALSE(opening.open(other_head, came, encrypt, first));
  }
}

// Hosts whose builds have found another library understand each other, so what every library makes is compared with OpenSSL's.
TEST_CASE("TheSealIsAes128Gcm") {
  std::array<std::byte, FrameSeal::secret_bytes> secret;
  for (std::size_t i = 0; i < secret.size(); ++i) secret[i] = static_cast<std::byte>(i * 5 + 1);
  const auto raw = [](auto* bytes) { return reinterpret_cast<unsigned char*>(const_cast<std::byte*>(bytes)); };
  std::mt19937 random(7);
  for (const bool encrypt : {false, true}) {
    FrameSeal sealing(secret, FrameSeal::Way::seal), opening(secret, FrameSeal::Way::open);
    for (std::uint8_t count = 0; count < 100; ++count) {
      std::vector<std::byte> head(random() % 130), body(count < 50 ? random() % 300 : random() % 70'000);
      for (auto* const bytes : {&head, &body})
        for (auto& byte : *bytes) byte = static_cast<std::byte>(random());
      std::vector<std::byte> sent = body, expected = body;
      const auto tag = sealing.seal(head, body, encrypt ? sent.data() : nullptr);

      std::array<std::byte, FrameSeal::nonce_bytes> nonce;
      std::copy_n(secret.begin() + FrameSeal::key_bytes, nonce.size(), nonce.begin());
      nonce.back() ^= std::byte{count};
      FrameSeal::Tag expected_tag;
      int done = 0;
      const std::unique_ptr<EVP_CIPHER_CTX, void (*)(EVP_CIPHER_CTX*)> context(EVP_CIPHER_CTX_new(), EVP_CIPHER_CTX_free);
      REQUIRE(EVP_EncryptInit_ex(context.get(), EVP_aes_128_gcm(), nullptr, raw(secret.data()), raw(nonce.data())) == 1);
      if (!head.empty()) REQUIRE(EVP_EncryptUpdate(context.get(), nullptr, &done, raw(head.data()), static_cast<int>(head.size())) == 1);
      if (!body.empty()) REQUIRE(EVP_EncryptUpdate(context.get(), encrypt ? raw(expected.data()) : nullptr, &done, raw(body.data()), static_cast<int>(body.size())) == 1);
      REQUIRE(EVP_EncryptFinal_ex(context.get(), nullptr, &done) == 1);
      REQUIRE(EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_GET_TAG, FrameSeal::tag_bytes, expected_tag.data()) == 1);
      CHECK(tag == expected_tag);
      CHECK(sent == expected);
      REQUIRE(opening.open(head, sent, encrypt, tag));
      CHECK(sent == body);
    }
  }
}

TEST_CASE("LidsLeadToTheirHosts") {
  const Subnet subnet;
  const auto first = subnet.seen_by(0), second = subnet.seen_by(1);
  CHECK(first->ours().first == 1);
  CHECK(first->ours().last == 100);
  CHECK_FALSE(first->host_of(50).has_value());  // ours
  CHECK_FALSE(first->host_of(201).has_value());
  REQUIRE(first->host_of(101).has_value());
  CHECK(first->host(*first->host_of(200))->name == "h1");
  CHECK(second->host(*second->host_of(1))->name == "h0");
  const auto holders = first->holders();
  REQUIRE(holders.size() == 1);
  CHECK(holders[0].host == *first->host_of(101));
  CHECK(holders[0].lids.first == 101);
  CHECK(holders[0].lids.last == 200);
  CHECK(first->host_named("h1")->tag_key == second->host_named("h0")->tag_key);
  CHECK(first->host_named("h0") == nullptr);
}

TEST_CASE("SecretsThatOthersMayReadAreRefused") {
  const Subnet subnet;
  ::chmod(subnet.secret.c_str(), 0640);
  CHECK_THROWS_WITH_AS(subnet.seen_by(0), doctest::Contains("others may read it"), std::runtime_error);
  ::chmod(subnet.secret.c_str(), 0600);
  REQUIRE(::truncate(subnet.secret.c_str(), 31) == 0);
  CHECK_THROWS_WITH_AS(subnet.seen_by(0), doctest::Contains("fewer than 32 bytes"), std::runtime_error);
}

TEST_CASE("ContradictingSubnetsAreRefused") {
  const auto why = [](const std::string& hosts, const std::string& own = R"("name": "a", "address": "10.0.0.1", "secret_file": "/s")") {
    svc::Config config;
    try {
      config.read_text("{\"remote\": {" + own + ", \"hosts\": [" + hosts + "]}}", "test");
      config.check();
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string a = R"({"name": "a", "address": "10.0.0.1", "lids": "1-99"})", b = R"({"name": "b", "address": "10.0.0.2", "lids": "100-200"})";
  CHECK(why(a + "," + b) == "");
  CHECK(why(b).find("none of") != std::string::npos);
  CHECK(why("").find("no \"hosts\"") != std::string::npos);
  CHECK(why(a + "," + a).find("host a is named twice") != std::string::npos);
  CHECK(why(a + R"(,{"name": "a", "address": "10.0.0.2", "lids": "100"})").find("host a is named twice") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "0.0.0.0", "lids": "100"})").find("names no host") != std::string::npos);
  CHECK(why(a, R"("name": "a", "address": "0.0.0.0", "secret_file": "/s")").find("names no host") != std::string::npos);
  CHECK(why(a, R"("name": "a", "address": "fe80::1", "secret_file": "/s")").find("is link-local") != std::string::npos);
  CHECK(why(a, R"("name": "a", "address": "::ffff:10.0.0.1", "secret_file": "/s")").find("give 10.0.0.1") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "::ffff:a00:2", "lids": "100"})").find("give 10.0.0.2") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "10.0.0.2", "lids": "99"})").find("in common") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "second.example", "lids": "100"})").find("numeric") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "10.0.0.2", "lids": "100-"})").find("range") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "10.0.0.2", "lids": "100-50000"})").find("range") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "10.0.0.2", "lids": "100", "colour": 1})").find("colour") != std::string::npos);
  CHECK(why(a, R"("name": "a", "address": "10.0.0.1")").find("secret_file") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "10.0.0.1", "lids": "100"})").find("hosts a and b are both at 10.0.0.1:28251") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "10.0.0.1", "port": 28252, "lids": "100"})") == "");
  const std::string mixed = why(a + R"(,{"name": "b", "address": "fd00::2", "lids": "100"})");
  CHECK(mixed.find("\"address\" is 10.0.0.1 (IPv4)") != std::string::npos);
  CHECK(mixed.find("host b fd00::2 (IPv6)") != std::string::npos);
  const std::string elsewhere = why(a, R"("name": "a", "address": "10.0.0.3", "secret_file": "/s")");
  CHECK(elsewhere.find("is at 10.0.0.3:28251") != std::string::npos);
  CHECK(elsewhere.find("at 10.0.0.1:28251 in \"hosts\"") != std::string::npos);
  CHECK(why(a, R"("name": "a", "address": "10.0.0.1", "port": 1, "secret_file": "/s")").find("10.0.0.1:1 ") != std::string::npos);
  // One address, in two spellings.
  CHECK(why(R"({"name": "a", "address": "fd00:0::1", "lids": "1"})", R"("name": "a", "address": "fd00::1", "secret_file": "/s")") == "");
  CHECK(why(a, R"("name": "a", "address": "10.0.0.1", "secret_file": "/s", "encrypt": true)") == "");
  CHECK(why(a, R"("name": "a", "address": "10.0.0.1", "secret_file": "/s", "encrypt": 1)").find("true or false") != std::string::npos);
}

TEST_CASE("RecordsArriveOnceAndInOrderBothWays") {
  const Subnet subnet;
  for (const bool encrypt : {false, true}) {
    CAPTURE(encrypt);
    End one(subnet, 0, encrypt), other(subnet, 1);  // it is done where either wants it
    one.await_session(other);
    other.await_session(one);
    CHECK(one.carrier->encrypts(0) == encrypt);
    CHECK(other.carrier->encrypts(0) == encrypt);
    constexpr std::uint32_t records = 600;
    std::mt19937 random(7);
    std::vector<std::uint32_t> sizes;
    for (std::uint32_t i = 0; i < records; ++i)
      sizes.push_back(random() % 4 == 0 ? static_cast<std::uint32_t>(random() % (engine::far_part_bytes + 1)) : static_cast<std::uint32_t>(random() % 64));
    for (std::uint32_t i = 0; i < records; ++i) {
      one.send(i, sizes[i], one.session);
      other.send(i, sizes[records - 1 - i], other.session);
    }
    for (std::uint32_t i = 0; i < records; ++i) other.expect(i, one), one.expect(i, other);
    while (one.carrier->gauge(0)->queued_bytes.load() != 0 || other.carrier->gauge(0)->queued_bytes.load() != 0) one.carrier->turn(), other.carrier->turn();
    CHECK(one.carrier->gauge(0)->resent.load() == 0);
    // Between two connections what was agreed on last still holds: nothing may take another way in clear meanwhile.
    one.carrier.reset();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (other.carrier->gauge(0)->connected.load() && std::chrono::steady_clock::now() < until) other.carrier->turn();
    CHECK_FALSE(other.carrier->gauge(0)->connected.load());
    CHECK(other.carrier->encrypts(0) == encrypt);
  }
}

TEST_CASE("OverIPv6Likewise") {
  Subnet subnet;
  {
    const vmci::UniqueFd socket(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in6 here{};
    here.sin6_family = AF_INET6;
    here.sin6_addr = in6addr_loopback;
    if (!socket || ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&here), sizeof(here)) != 0) {
      MESSAGE("SKIP: this machine has no ::1");
      return;
    }
  }
  for (auto& host : subnet.config.hosts) host.address = "::1";
  End one(subnet, 0), other(subnet, 1);
  one.await_session(other);
  other.await_session(one);
  for (std::uint32_t i = 0; i < 20; ++i) one.send(i, 3000, one.session), other.send(i, 3000, other.session);
  for (std::uint32_t i = 0; i < 20; ++i) other.expect(i, one), one.expect(i, other);
}

// For longer than a connection may be mute: each end looks, and neither takes what has come.
TEST_CASE("WhoIsSlowIsNotGivenUp") {
  const Subnet subnet;
  End one(subnet, 0), other(subnet, 1);
  one.await_session(other);
  other.await_session(one);
  constexpr std::uint32_t records = 3000;  // more than arrivals and the sockets hold
  for (std::uint32_t i = 0; i < records; ++i) one.send(i, 8192, one.session), other.send(i, 8192, other.session);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(6);
  while (std::chrono::steady_clock::now() < until) one.carrier->turn(), other.carrier->turn();
  CHECK(one.carrier->gauge(0)->queued_bytes.load() > 0);
  for (std::uint32_t i = 0; i < records; ++i) other.expect(i, one), one.expect(i, other);
  for (End* end : {&one, &other}) {
    CHECK(end->carrier->gauge(0)->reconnects.load() == 0);
    CHECK(end->carrier->gauge(0)->resent.load() == 0);
  }
}

TEST_CASE("AServiceThatBeginsAnewIsANewSession") {
  const Subnet subnet;
  for (const std::size_t stays : {std::size_t{0}, std::size_t{1}}) {  // who dials, who is dialed
    CAPTURE(stays);
    End one(subnet, stays);
    std::uint64_t before = 0;
    {
      End other(subnet, 1 - stays);
      one.await_session(other);
      other.await_session(one);
      before = one.session;
      one.send(1, 100, one.session);
      other.expect(1, one);
    }
    End other(subnet, 1 - stays);
    other.await_session(one);
    one.await_session(other);
    CHECK(one.session == before + 1);
    one.send(2, 100, before);  // of the session that is over
    one.send(3, 100, one.session);
    other.expect(3, one);
  }
}

TEST_CASE("ConnectionsEndWithACertificateAndNotWithASession") {
  for (const std::size_t knowing : {0, 1}) {
    CAPTURE(knowing);
    const Subnet subnet;
    const auto directory = std::make_shared<ChangingSubnet>(subnet.seen_by(knowing));
    End one(subnet, knowing, directory), other(subnet, 1 - knowing);
    one.await_session(other), other.await_session(one);
    directory->change([](PeerHost& host) { host.reachable = false; });
    one.send(1, 5000, one.session), other.send(1, 5000, other.session);
    other.expect(1, one), one.expect(1, other);
    CHECK(one.carrier->gauge(0)->connected.load());
    directory->change([](PeerHost& host) { host.expired = true; });
    one.carrier->turn();
    CHECK_FALSE(one.carrier->gauge(0)->connected.load());
    other.send(2, 5000, other.session);
    for (const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1); other.carrier->gauge(0)->connected.load();) {
      REQUIRE(std::chrono::steady_clock::now() < until);
      one.carrier->turn(), other.carrier->turn();
    }
    CHECK(one.carrier->receive() == nullptr);
    directory->change([](PeerHost&) {});  // the clock was wrong
    one.expect(2, other);
  }
}

// To who has another number for it a host is another one: neither end counts on with the numbers of records that there were.
TEST_CASE("AHostThatIsKnownByAnotherNumberIsANewSessionForBoth") {
  for (const std::size_t knowing : {0, 1}) {
    CAPTURE(knowing);
    const Subnet subnet;
    const auto directory = std::make_shared<ChangingSubnet>(subnet.seen_by(knowing));
    End one(subnet, knowing, directory), other(subnet, 1 - knowing);
    one.await_session(other), other.await_session(one);
    one.send(1, 5000, one.session), other.send(1, 5000, other.session);
    other.expect(1, one), one.expect(1, other);
    const auto before = other.session;
    directory->renumber();
    one.far = 1;
    one.await_session(other), other.await_session(one);
    CHECK(other.session == before + 1);
    for (std::uint32_t i = 2; i < 10; ++i) one.send(i, 5000, one.session), other.send(i, 5000, other.session);
    for (std::uint32_t i = 2; i < 10; ++i) other.expect(i, one), one.expect(i, other);
    CHECK_FALSE(one.carrier->gauge(0)->connected.load());
    CHECK(one.carrier->counters().malformed.load() + other.carrier->counters().malformed.load() == 0);
  }
}

TEST_CASE("WhoHasMovedIsNotWaitedForWhereHeWas") {
  const Subnet subnet;
  vmci::UniqueFd former(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));  // who takes connections there, and says nothing
  sockaddr_in here{};
  here.sin_family = AF_INET;
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(here);
  REQUIRE(::bind(former.get(), reinterpret_cast<const sockaddr*>(&here), bytes) == 0);
  REQUIRE(::listen(former.get(), 8) == 0);
  REQUIRE(::getsockname(former.get(), reinterpret_cast<sockaddr*>(&here), &bytes) == 0);
  const auto directory = std::make_shared<ChangingSubnet>(subnet.seen_by(0));
  directory->change([&](PeerHost& host) { host.carrier_port = ntohs(here.sin_port); });
  End one(subnet, 0, directory), other(subnet, 1);
  pollfd came{former.get(), POLLIN, 0};
  while (::poll(&came, 1, 0) == 0) one.carrier->turn();
  const vmci::UniqueFd knock(::accept4(former.get(), nullptr, nullptr, SOCK_CLOEXEC));
  REQUIRE(knock);
  directory->change([](PeerHost&) {});
  one.carrier->turn();  // only this once: nothing that takes time is seen
  pollfd ended{knock.get(), POLLRDHUP, 0};
  CHECK(::poll(&ended, 1, 10'000) == 1);
  one.await_session(other), other.await_session(one);
}

TEST_CASE("WhoHasAnotherSecretIsNotHeard") {
  const Subnet subnet;
  for (const std::size_t stranger_is : {std::size_t{0}, std::size_t{1}}) {
    subnet.write_secret('s');
    End one(subnet, 1 - stranger_is);
    subnet.write_secret('x');
    End stranger(subnet, stranger_is);
    const auto& counted = (stranger_is == 0 ? one : stranger).carrier->counters();  // by the one that is dialed
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    const auto of_the_other = [](End& end) { return end.carrier->gauge(0)->unauthenticated.load(); };  // both count it, of each other
    while ((counted.unauthenticated.load() == 0 || of_the_other(one) == 0 || of_the_other(stranger) == 0) && std::chrono::steady_clock::now() < until)
      one.carrier->turn(), stranger.carrier->turn();
    CHECK(counted.unauthenticated.load() != 0);
    CHECK(of_the_other(one) != 0);
    CHECK(of_the_other(stranger) != 0);
    CHECK(one.next(stranger, std::chrono::seconds(0)) == nullptr);
    CHECK(stranger.next(one, std::chrono::seconds(0)) == nullptr);
  }
}

TEST_CASE("HostsWhoseFilesGiveOtherLidsToOneOfThemSaySo") {
  const Subnet subnet;
  Subnet otherwise = subnet;
  otherwise.config.hosts[0].lid_first = 301, otherwise.config.hosts[0].lid_last = 400;
  End one(subnet, 0);
  {
    End other(otherwise, 1);
    one.await_session(other);
    other.await_session(one);
    CHECK(one.carrier->disagreement(0) == "h0 has LIDs 301-400 by the configuration of h1, 1-100 by that of h0");
    CHECK(other.carrier->disagreement(0) == "h0 has LIDs 1-100 by the configuration of h0, 301-400 by that of h1");
    one.send(1, 100, one.session);
    other.expect(1, one);
  }
  End corrected(subnet, 1);
  corrected.await_session(one);
  one.await_session(corrected);
  CHECK(one.carrier->disagreement(0) == "");
  CHECK(corrected.carrier->disagreement(0) == "");
}

TEST_CASE("ConnectionsThatBreakOrAreTamperedWithLoseAndRepeatNothing") {
  CuttablePair pair;
  End &one = pair.one, &other = pair.other;
  Middle& middle = pair.middle;
  middle.when_full([&] { one.carrier->turn(), other.carrier->turn(); });
  std::mt19937 random(11);
  std::uint32_t sent = 0, came = 0, back_sent = 0, back_came = 0;
  std::uint64_t spoil_at = 300'000;
  std::size_t spoiled = 0;
  constexpr std::uint32_t records = 2000;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  const auto take = [](End& end, std::uint32_t& next) {
    while (auto frame = end.carrier->receive()) {
      if (frame->record().kind == FarKind::news) {
        end.session = frame->session;
        continue;
      }
      REQUIRE(frame->record().message == next);
      for (std::uint32_t i = 0; i < frame->record().payload_bytes; ++i)
        if (frame->payload()[i] != static_cast<std::byte>(next * 31 + i)) FAIL("byte ", i, " of record ", next);
      ++next;
    }
  };
  while ((came < records || back_came < records) && std::chrono::steady_clock::now() < until) {
    if (one.session != 0 && sent < records && sent - came < 64) one.send(sent++, static_cast<std::uint32_t>(random() % 30000), one.session);
    if (other.session != 0 && back_sent < records && back_sent - back_came < 64) other.send(back_sent++, static_cast<std::uint32_t>(random() % 500), other.session);
    const bool spoil = middle.passed() > spoil_at;
    if (spoil) spoil_at += 3'000'000, ++spoiled;
    if (spoil && spoiled % 2 == 0) middle.cut();
    middle.turn(spoil && spoiled % 2 == 1);
    one.carrier->turn(), other.carrier->turn();
    take(one, back_came), take(other, came);
  }
  CHECK(came == records);
  CHECK(back_came == records);
  CHECK(one.session == 1);  // it was the same one all the time
  CHECK(other.session == 1);
  CHECK(spoiled >= 5);
  CHECK(one.carrier->gauge(0)->reconnects.load() >= 5);
  CHECK(one.carrier->counters().unauthenticated.load() + other.carrier->counters().unauthenticated.load() >= 2);
}

// Requests of a connection that was closed meanwhile, and datagrams; all else is, and what is left of them keeps their numbers.
TEST_CASE("WhatNobodyWouldRepeatIsNotSentAgain") {
  CuttablePair pair;
  End &one = pair.one, &other = pair.other;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto drive = [&] {
    REQUIRE(std::chrono::steady_clock::now() < until);
    pair.middle.turn();
    one.carrier->turn(), other.carrier->turn();
  };
  for (End* const end : {&one, &other})
    while (end->session == 0) {
      drive();
      if (const auto frame = end->carrier->receive()) end->session = frame->session;
    }
  const auto send = [&](FarKind kind, std::uint32_t connection, std::uint32_t epoch) {
    auto frame = FarFrame::make(1000);
    frame->record().kind = kind;
    frame->record().connection = connection;
    frame->record().epoch = epoch;
    frame->record().payload_bytes = 1000;
    frame->session = one.session;
    count_queued(*one.carrier->gauge(0), *frame, 1);
    one.carrier->send(std::move(frame));
  };
  send(FarKind::request, 7, 1);
  send(FarKind::more, 7, 1);
  send(FarKind::datagram, 9, 0);
  send(FarKind::request, 8, 1);
  send(FarKind::close, 7, 1);
  send(FarKind::request, 7, 2);
  one.carrier->turn();  // it is with the middle, which takes it no further
  CHECK(one.carrier->gauge(0)->queued_datagrams.load() > 1000);
  pair.middle.cut();
  std::vector<std::tuple<FarKind, std::uint32_t, std::uint32_t>> came;
  while (came.size() < 6) {
    drive();
    while (const auto frame = other.carrier->receive()) {
      const auto& record = frame->record();
      came.emplace_back(record.kind, record.connection, record.epoch);
      CHECK(record.payload_bytes == (record.kind == FarKind::credit ? 0u : 1000u));
    }
  }
  CHECK(came[0] == std::tuple{FarKind::credit, 7u, 1u});
  CHECK(came[1] == std::tuple{FarKind::credit, 7u, 1u});
  CHECK(came[2] == std::tuple{FarKind::credit, 9u, 0u});
  CHECK(came[3] == std::tuple{FarKind::request, 8u, 1u});
  CHECK(came[4] == std::tuple{FarKind::close, 7u, 1u});
  CHECK(came[5] == std::tuple{FarKind::request, 7u, 2u});
  while (one.carrier->gauge(0)->queued_bytes.load() != 0) drive();
  CHECK(one.carrier->gauge(0)->queued_datagrams.load() == 0);
  CHECK(other.carrier->gauge(0)->arrived_bytes.load() == 0);
}

// Connections stand on it one after the other, and their hello and signs of life pass: that is no host that can be waited for.
TEST_CASE("AHostToWhichOnlySmallPacketsPassIsSilentUntilTheyAllAreSmall") {
  CuttablePair pair;
  End &one = pair.one, &other = pair.other;
  pair.drive_until([&] { return one.carrier->gauge(0)->connected.load() && other.carrier->gauge(0)->connected.load(); });
  const auto news = one.carrier->receive();
  REQUIRE(news != nullptr);
  while (other.carrier->receive()) {
  }
  pair.middle.pass_at_most(4096);
  one.send(1, 20'000, news->session);
  const Gauge &there = *one.carrier->gauge(0), &here = *other.carrier->gauge(0);
  // Each longer than a connection lasts: the one whose record does not come through, and the one that may wait for it.
  pair.drive_until([&] { return here.silent_ns.load() > 4'000'000'000; });
  pair.drive_until([&] { return there.silent_ns.load() > 1'000'000'000 && there.small_packets.load() && here.small_packets.load(); });
  CHECK(there.queued_bytes.load() > 0);
  pair.middle.pass_at_most(~std::size_t{0});
  FarFramePtr came;
  pair.drive_until([&] { return (came = other.carrier->receive()) != nullptr; });
  CHECK(came->record().message == 1);
  CHECK(pair.middle.segment_bytes() <= 1220);
  pair.drive_until([&] { return there.silent_ns.load() == 0 && here.silent_ns.load() == 0; });
}

// Hello of the one who accepts may be in the same packet as records of his, which the other one sees as a connection that says nothing.
TEST_CASE("LargePacketsAreSeenToBeLostWhereTheOneWhoAcceptsSendsThem") {
  CuttablePair pair;
  End &one = pair.one, &other = pair.other;
  const Gauge &there = *one.carrier->gauge(0), &here = *other.carrier->gauge(0);
  pair.drive_until([&] { return there.connected.load() && here.connected.load(); });
  const auto news = other.carrier->receive();
  REQUIRE(news != nullptr);
  while (one.carrier->receive()) {
  }
  pair.middle.pass_at_most(4096, 1);
  other.send(1, 20'000, news->session);
  pair.drive_until([&] { return there.small_packets.load(); });
  pair.middle.pass_at_most(~std::size_t{0}, 1);
  FarFramePtr came;
  pair.drive_until([&] { return (came = one.carrier->receive()) != nullptr; });
  CHECK(came->record().message == 1);
  CHECK(pair.middle.segment_bytes() <= 1220);
  CHECK(here.small_packets.load());  // it was told
}

// On which one frame takes longer than a host may be mute.
TEST_CASE("WhoIsBehindANarrowWayIsNotGivenUp") {
  CuttablePair pair;
  End &one = pair.one, &other = pair.other;
  const Gauge &there = *one.carrier->gauge(0), &here = *other.carrier->gauge(0);
  const auto both_are_connected = [&] { return there.connected.load() && here.connected.load(); };
  pair.drive_until(both_are_connected);
  const auto news = one.carrier->receive();
  REQUIRE(news != nullptr);
  while (other.carrier->receive()) {
  }
  pair.middle.be_narrow(10'000);
  one.send(1, engine::far_part_bytes, news->session);
  FarFramePtr came;
  pair.drive_until([&] { return (came = other.carrier->receive()) != nullptr; });
  CHECK(came->record().message == 1);
  pair.drive_until([&] { return there.queued_bytes.load() == 0; });
  CHECK(there.reconnects.load() == 0);
  CHECK(here.reconnects.load() == 0);
  CHECK(there.resent.load() == 0);
  // Nor after its connection was cut with something under way: that this passes now is seen before it has come as a whole.
  one.send(2, engine::far_part_bytes, news->session);
  one.carrier->turn();
  pair.middle.cut();
  pair.drive_until([&] { return there.reconnects.load() == 1; });
  pair.drive_until([&] { return there.silent_ns.load() != 0; });
  pair.drive_until([&] { return both_are_connected() && there.silent_ns.load() == 0; });
  CHECK(there.queued_bytes.load() > 0);
  pair.drive_until([&] { return (came = other.carrier->receive()) != nullptr; });
  CHECK(came->record().message == 2);
  CHECK(there.reconnects.load() == 1);
}

// From which nothing comes for longer than a connection may be mute: packets of the other one's were lost, and are behind others in a queue.
TEST_CASE("WhoTakesMuchAndIsNotHeardForAWhileIsNotGivenUp") {
  using namespace std::chrono_literals;
  CuttablePair pair;
  End &one = pair.one, &other = pair.other;
  const Gauge &there = *one.carrier->gauge(0), &here = *other.carrier->gauge(0);
  pair.drive_until([&] { return there.connected.load() && here.connected.load(); });
  const auto news = one.carrier->receive();
  REQUIRE(news != nullptr);
  pair.middle.hold(1, true);
  std::uint32_t sent = 0, came = 0;
  const auto take = [&] {
    while (const auto frame = other.carrier->receive()) came += frame->record().kind == FarKind::request;
  };
  while (sent < 20) {
    one.send(++sent, engine::far_part_bytes, news->session);
    const auto next = std::chrono::steady_clock::now() + 250ms;
    pair.drive_until([&] { return take(), std::chrono::steady_clock::now() >= next; });
  }
  CHECK(there.reconnects.load() == 0);
  pair.middle.hold(1, false);
  pair.drive_until([&] { return take(), came == sent && there.queued_bytes.load() == 0; });
  CHECK(there.reconnects.load() == 0);
  CHECK(here.reconnects.load() == 0);
  CHECK(there.resent.load() == 0);
  // Who takes nothing more is: signs of life are not much.
  pair.middle.hold(1, true);
  pair.drive_until([&] { return take(), there.reconnects.load() == 1; });
}
