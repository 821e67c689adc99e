// Guests that pass descriptors whose closing waits (given_descriptors.hpp), beside one that only wants an answer: without the closer's thread it
// would wait as long as they like. And guests that do not read what they are answered: what is under way is the service's.
#include "vmkernel_svc/reception.hpp"

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <boost/asio/post.hpp>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <future>
#include <span>
#include <string>
#include <thread>

#include "vmci_channel/test/lingering.hpp"
#include "vmkernel_svc/control/test_service.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::control;
using vmci::PacketSocket;
using vmci::test::Lingering;

namespace {

constexpr int patience_ms = 20'000;  // far less than they linger

struct Outlasting {
  boost::asio::io_context io;  // what the shard has left to do may know it
};

struct Service : Outlasting, test::TestService {
  explicit Service(std::uint32_t of_one_user = 64) : reception(io, shard, packets, {.open_files = 1024, .of_one_user = of_one_user}, 0, [] {}) {
    char name[] = "/tmp/vrdma-reception-test-XXXXXX";
    REQUIRE(::mkdtemp(name) != nullptr);
    folder = name;
    auto listener = vmci::listen_packets(path(), 0600);
    REQUIRE(listener.has_value());
    reception.open(std::move(*listener));
    shard_thread = std::thread([this] { shard.run(); });
    io_thread = std::thread([this] { io.run(); });
  }
  ~Service() {
    io.stop();
    io_thread.join();
    shard.stop();
    shard_thread.join();
    std::filesystem::remove_all(folder);
  }
  std::string path() const { return folder + "/s"; }

  PacketDesk packets{shard, desk, page.fd()};
  Reception reception;
  std::string folder;
  std::thread shard_thread, io_thread;
};

// Its thread that reads what guests send.
class Holding {
 public:
  explicit Holding(Service& service) {
    std::promise<void> held;
    auto holds = held.get_future();
    boost::asio::post(service.io, [&held, until = over_.get_future().share()] { held.set_value(), until.wait(); });
    holds.wait();
  }
  ~Holding() { over_.set_value(); }

 private:
  std::promise<void> over_;
};

std::vector<std::byte> packet_of(Request request) {
  std::vector<std::byte> packet(sizeof(Head) + sizeof(AttachRequest));
  Head head{};
  head.record.control = static_cast<std::uint32_t>(request);
  std::memcpy(packet.data(), &head, sizeof(head));
  AttachRequest attach{};
  attach.magic = magic;
  attach.major = version_major;
  attach.minor = version_minor;
  std::memcpy(packet.data() + sizeof(head), &attach, sizeof(attach));
  return packet;
}

// The status of the next answer; ETIMEDOUT: there is none; ENOTCONN: the connection has ended.
int answer(const PacketSocket& socket, int within_ms = patience_ms) {
  std::array<std::byte, sizeof(Head) + body_bytes_max> reply;
  const auto received = socket.receive(reply, within_ms);
  if (!received) return value(received.error());
  if (received->bytes < sizeof(Head)) return ENOTCONN;
  Head head{};
  std::memcpy(&head, reply.data(), sizeof(head));
  return head.status;
}

int ask(const PacketSocket& socket) {
  if (const auto sent = socket.send(packet_of(Request::query_link_layer)); !sent) return value(sent.error());
  return answer(socket);
}

// While the service reads nothing: when it does, nobody else has the descriptor any more. Who closes last waits.
bool give(Service& service, Lingering& slow, const PacketSocket& to, std::span<const std::byte> packet) {
  const Holding nobody_reads(service);
  return slow.leave(to.fd(), packet).has_value();
}

PacketSocket connect(const Service& service) {
  auto socket = PacketSocket::connect(service.path());
  REQUIRE(socket.has_value());
  return std::move(*socket);
}

// One that the service has taken in, as nobody can pass descriptors before.
PacketSocket admitted(const Service& service) {
  auto socket = connect(service);
  REQUIRE(ask(socket) == 0);
  return socket;
}

}  // namespace

TEST_CASE("Whoever gives the service descriptors whose closing waits keeps nobody else waiting") {
  Service service;
  std::deque<Lingering> slow(4);  // they end before the service does
  for (const auto& one : slow) REQUIRE(one);
  const auto good = admitted(service);
  auto bad = admitted(service);
  SUBCASE("by a request that takes none") { REQUIRE(give(service, slow[0], bad, packet_of(Request::query_link_layer))); }
  SUBCASE("by attaching") { REQUIRE(give(service, slow[0], bad, packet_of(Request::attach))); }
  SUBCASE("as memory") {
    REQUIRE(bad.send(packet_of(Request::attach)).has_value());
    CHECK(answer(bad) == 0);
    REQUIRE(give(service, slow[0], bad, packet_of(Request::add_backing)));
    CHECK(answer(bad) == EPERM);
  }
  SUBCASE("as the file of an XRC domain") {
    REQUIRE(bad.send(packet_of(Request::attach)).has_value());
    CHECK(answer(bad) == 0);
    REQUIRE(give(service, slow[0], bad, packet_of(Request::open_xrcd)));
    CHECK(answer(bad) == EINVAL);  // it names no context
  }
  SUBCASE("by a packet that is shorter than a head") { REQUIRE(give(service, slow[0], bad, std::array<std::byte, 8>{})); }
  SUBCASE("by packets that are not read any more") {
    {
      const Holding nobody_reads(service);
      REQUIRE(bad.send(std::array<std::byte, 8>{}).has_value());  // for which the connection is ended
      for (auto& one : slow) REQUIRE(one.leave(bad.fd(), packet_of(Request::query_link_layer)).has_value());
    }
    const int ended = answer(bad);
    CHECK((ended == ENOTCONN || ended == ECONNRESET));
  }
  SUBCASE("and by leaving") {
    for (auto& one : slow) REQUIRE(give(service, one, bad, packet_of(Request::attach)));
    bad = {};
  }
  CHECK(ask(good) == 0);
  CHECK(ask(admitted(service)) == 0);
}

TEST_CASE("Of whom many descriptors are yet to be closed gets no further connection, until they are") {
  constexpr std::uint32_t most = 8;
  Service service(most);
  std::deque<Lingering> slow(most + 2);
  auto bad = admitted(service);
  int answered = 0;
  for (auto& one : slow) {
    REQUIRE(one);
    if (give(service, one, bad, packet_of(Request::query_link_layer)) && answer(bad, 1000) == 0) ++answered;  // whoever has too many is not read
  }
  CHECK(answered <= static_cast<int>(most) + 1);
  CHECK(answer(connect(service)) == EDQUOT);
  for (auto& one : slow) one.end();
  for (bool served = false; !served;) served = ask(connect(service)) == 0;  // or the watchdog ends this
}

TEST_CASE("Who leaves such descriptors unread has them counted, though no other connection of his stands") {
  constexpr std::uint32_t most = 4;
  Service service(most);
  std::deque<Lingering> slow(most + 4);
  int left = 0;
  for (auto& one : slow) {
    auto bad = connect(service);
    if (ask(bad) != 0) break;
    {
      const Holding nobody_reads(service);
      REQUIRE(bad.send(std::array<std::byte, 8>{}).has_value());  // for which the connection is ended
      REQUIRE(one.leave(bad.fd(), packet_of(Request::query_link_layer)).has_value());
    }
    const int ended = answer(bad, 1000);
    ++left;
    if (ended == ETIMEDOUT) break;  // whoever has too many is not read
    REQUIRE((ended == ENOTCONN || ended == ECONNRESET));
  }
  CHECK(left <= static_cast<int>(most) + 2);
  for (auto& one : slow) one.end();
}

TEST_CASE("Who does not read what he is answered gets no further descriptors, and is hung up on") {
  Service service;
  auto bad = admitted(service);
  REQUIRE(bad.send(packet_of(Request::attach)).has_value());
  for (int i = 0; i < 64; ++i)
    if (!bad.send(packet_of(Request::open_context))) break;  // it has been
  pollfd hung_up{bad.fd(), POLLRDHUP, 0};
  CHECK(::poll(&hung_up, 1, patience_ms) == 1);
  CHECK(ask(admitted(service)) == 0);
}

namespace {
// A program that has attached, has not read the answer, and is gone, but for its socket, which somebody else has.
vmci::UniqueFd left_behind(const Service& service) {
  vmci::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  service.path().copy(address.sun_path, sizeof(address.sun_path) - 1);
  const auto packet = packet_of(Request::attach);
  const pid_t program = ::fork();
  if (program == 0) {
    pollfd answered{socket.get(), POLLIN, 0};
    const bool done = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                      ::send(socket.get(), packet.data(), packet.size(), 0) >= 0 && ::poll(&answered, 1, patience_ms) == 1;
    ::_exit(done ? 0 : 1);
  }
  int status = 1;
  REQUIRE(::waitpid(program, &status, 0) == program);
  REQUIRE(status == 0);
  return socket;
}
}  // namespace

TEST_CASE("Answers of programs that have ended count as their user's for as long as somebody can read them") {
  Service service(16);
  std::vector<vmci::UniqueFd> sockets;
  for (int i = 0; i < 2; ++i) sockets.push_back(left_behind(service));
  while (ask(connect(service)) == 0) {}  // until their ends are noticed, or the watchdog ends this
  CHECK(answer(connect(service)) == EDQUOT);
  sockets.clear();
  while (ask(connect(service)) != 0) {}
}
