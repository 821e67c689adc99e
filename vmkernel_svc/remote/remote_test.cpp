#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>

#include "vmkernel_svc/remote/configured_subnet.hpp"
#include "vmkernel_svc/remote/tag.hpp"
#include "vmkernel_svc/remote/tcp_carrier.hpp"

using namespace vrdma;
using namespace vrdma::remote;
using engine::FarFrame;
using engine::FarFramePtr;
using engine::FarKind;

namespace {

// A secret and two hosts of this machine, with ports of their own.
struct Subnet {
  std::string secret = "/tmp/vrdma-remote-test." + std::to_string(::getpid());
  svc::RemoteConfig config;

  explicit Subnet(char fill = 's') {
    write_secret(fill);
    config.secret_file = secret;
    for (int i = 0; i < 2; ++i) {
      svc::RemoteHost host{"h" + std::to_string(i), "127.0.0.1", static_cast<std::uint16_t>(port() + i), static_cast<std::uint16_t>(1 + 100 * i),
                           static_cast<std::uint16_t>(100 + 100 * i)};
      config.hosts.push_back(host);
    }
  }
  ~Subnet() { ::unlink(secret.c_str()); }
  void write_secret(char fill) const {
    ::unlink(secret.c_str());
    const vmci::UniqueFd file(::open(secret.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    REQUIRE(::write(file.get(), std::string(40, fill).data(), 40) == 40);
  }
  static std::uint16_t port() { return static_cast<std::uint16_t>(20000 + 2 * (::getpid() % 4000)); }
  std::shared_ptr<ConfiguredSubnet> seen_by(std::size_t host) const {
    svc::RemoteConfig own = config;
    own.name = own.hosts[host].name;
    own.address = own.hosts[host].address;
    return std::make_shared<ConfiguredSubnet>(own);
  }
};

struct End {
  std::mutex mutex;
  std::condition_variable rung;
  bool ring = false;
  std::uint64_t session = 0;
  std::unique_ptr<TcpCarrier> carrier;

  End(const Subnet& subnet, std::size_t host)
      : carrier(std::make_unique<TcpCarrier>(TcpCarrier::Place{subnet.config.hosts[host].name, subnet.config.hosts[host].address, subnet.config.hosts[host].port},
                                             subnet.seen_by(host), [this] {
                                               const std::lock_guard lock(mutex);
                                               ring = true;
                                               rung.notify_all();
                                             })) {}
  // The next that comes; news is noted and passed on. nullptr: nothing within `patience`.
  FarFramePtr next(std::chrono::seconds patience = std::chrono::seconds(60)) {
    const auto until = std::chrono::steady_clock::now() + patience;
    for (;;) {
      if (auto frame = carrier->receive()) {
        if (frame->record().kind == FarKind::news) session = frame->session;
        return frame;
      }
      std::unique_lock lock(mutex);
      if (!rung.wait_until(lock, until, [this] { return ring; })) return nullptr;
      ring = false;
    }
  }
  void await_session() {
    const auto news = next();
    REQUIRE(news != nullptr);
    REQUIRE(news->record().kind == FarKind::news);
  }
  void send(std::uint32_t number, std::uint32_t bytes, std::uint64_t in_session) {
    auto frame = FarFrame::make(bytes);
    frame->record().kind = FarKind::request;
    frame->record().message = number;
    frame->record().payload_bytes = bytes;
    for (std::uint32_t i = 0; i < bytes; ++i) frame->payload()[i] = static_cast<std::byte>(number * 31 + i);
    frame->session = in_session;
    carrier->gauge(0)->queued_bytes += static_cast<std::int64_t>(frame->whole_bytes());
    carrier->send(std::move(frame));
  }
  void expect(std::uint32_t number) {
    const auto frame = next();
    REQUIRE(frame != nullptr);
    REQUIRE(frame->record().kind == FarKind::request);
    REQUIRE(frame->record().message == number);
    REQUIRE(frame->session == session);
    for (std::uint32_t i = 0; i < frame->record().payload_bytes; ++i)
      REQUIRE(frame->payload()[i] == static_cast<std::byte>(number * 31 + i));
  }
};

}  // namespace

TEST_CASE("TagsAreSipHash") {  // the vectors of its reference implementation
  std::array<std::byte, 16> key, expected;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i);
  const Tagger tagger{std::span<const std::byte, 16>(key)};
  const auto is = [&](std::span<const std::byte> text, const std::array<unsigned char, 16>& bytes) {
    std::memcpy(expected.data(), bytes.data(), 16);
    const Tag tag = tagger(text);
    return std::memcmp(tag.data(), expected.data(), 16) == 0;
  };
  CHECK(is({}, {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93}));
  CHECK(is(std::span(key).first(1), {0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22, 0xfc, 0x45}));
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
  CHECK(why(a + "," + a).find("twice") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "10.0.0.2", "lids": "99"})").find("in common") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "second.example", "lids": "100"})").find("numeric") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "10.0.0.2", "lids": "100-"})").find("range") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "10.0.0.2", "lids": "100-50000"})").find("range") != std::string::npos);
  CHECK(why(a + R"(,{"name": "b", "address": "10.0.0.2", "lids": "100", "colour": 1})").find("colour") != std::string::npos);
  CHECK(why(a, R"("name": "a", "address": "10.0.0.1")").find("secret_file") != std::string::npos);
}

TEST_CASE("RecordsArriveOnceAndInOrderBothWays") {
  const Subnet subnet;
  End one(subnet, 0), other(subnet, 1);
  one.await_session();
  other.await_session();
  constexpr std::uint32_t records = 600;
  std::mt19937 random(7);
  std::vector<std::uint32_t> sizes;
  for (std::uint32_t i = 0; i < records; ++i)
    sizes.push_back(random() % 4 == 0 ? static_cast<std::uint32_t>(random() % (engine::far_part_bytes + 1)) : static_cast<std::uint32_t>(random() % 64));
  for (std::uint32_t i = 0; i < records; ++i) {
    one.send(i, sizes[i], one.session);
    other.send(i, sizes[records - 1 - i], other.session);
  }
  for (std::uint32_t i = 0; i < records; ++i) other.expect(i), one.expect(i);
}

TEST_CASE("AServiceThatBeginsAnewIsANewSession") {
  const Subnet subnet;
  End one(subnet, 0);
  std::uint64_t before = 0;
  {
    End other(subnet, 1);
    one.await_session();
    other.await_session();
    before = one.session;
    one.send(1, 100, one.session);
    other.expect(1);
  }
  End other(subnet, 1);
  other.await_session();
  one.await_session();
  CHECK(one.session == before + 1);
  one.send(2, 100, before);  // of the session that is over
  one.send(3, 100, one.session);
  other.expect(3);
}

TEST_CASE("WhoHasAnotherSecretIsNotHeard") {
  const Subnet subnet;
  End one(subnet, 0);
  subnet.write_secret('x');
  End stranger(subnet, 1);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (one.carrier->counters().unauthenticated.load() == 0 && std::chrono::steady_clock::now() < until) ::usleep(1000);
  CHECK(one.carrier->counters().unauthenticated.load() != 0);
  CHECK(one.next(std::chrono::seconds(0)) == nullptr);
  CHECK(stranger.next(std::chrono::seconds(0)) == nullptr);
}
