// Processes and a service that say what they like, at random: whoever is good is served afterwards. Most is found with the sanitizers.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <cstdlib>
#include <optional>
#include <random>
#include <utility>

#include "guest_agent/test/machine.hpp"
#include "vmci_channel/test/lingering.hpp"

using namespace vrdma;
using namespace vrdma::agent;
using namespace vrdma::agent::test;
using control::Request;
using vm::Frame;

namespace {

struct Chance {
  explicit Chance(const std::string& what) {
    const char* given = std::getenv("VRDMA_TEST_SEED");
    const auto seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    MESSAGE(what, ", VRDMA_TEST_SEED=", seed);
    engine.seed(seed);
  }
  std::uint64_t below(std::uint64_t bound) { return std::uniform_int_distribution<std::uint64_t>(0, bound - 1)(engine); }
  bool one_in(std::uint64_t count) { return below(count) == 0; }
  std::vector<std::byte> bytes(std::size_t count) {
    std::vector<std::byte> result(count);
    for (auto& byte : result) byte = static_cast<std::byte>(engine());
    return result;
  }
  std::mt19937_64 engine;
};

bool hung_up(const vmci::PacketSocket& socket) {
  pollfd end{socket.fd(), 0, 0};
  return ::poll(&end, 1, 0) == 1 && (end.revents & POLLHUP) != 0;
}

// What others have asked before is still in the link: a good process's request is told by its number. As long as much of what its user has given
// is not closed yet, it is turned away.
bool served(Machine& machine) {
  constexpr std::uint32_t sequence = 0x900d900d;
  const std::uint64_t end_ns = vmci::monotonic_ns() + 60'000'000'000;
  for (std::optional<FrameIn> asked; vmci::monotonic_ns() < end_ns;) {
    auto socket = vmci::PacketSocket::connect(machine.socket);
    if (!socket) {
      MESSAGE("cannot connect: errno ", value(socket.error()));
      return false;
    }
    control::Head head{};
    head.record.control = static_cast<std::uint32_t>(Request::query_device);
    head.sequence = sequence;
    (void)socket->send(std::as_bytes(std::span(&head, 1)));
    machine.until("a good process's request", [&] {
      for (; !machine.frames.empty() && !asked; machine.frames.pop_front())
        if (static_cast<Frame>(machine.frames.front().head.kind) == Frame::packet && machine.frames.front().request().sequence == sequence) asked = std::move(machine.frames.front());
      return asked || hung_up(*socket);
    });
    if (!asked) continue;
    machine.reply(*asked, 0);
    head = {};
    const auto reply = socket->receive(std::as_writable_bytes(std::span(&head, 1)), 10'000);
    return reply && reply->bytes == sizeof(head) && head.sequence == sequence && head.status == 0;
  }
  return false;  // turned away for a minute
}

}  // namespace

TEST_CASE("Processes that send anything are bounded, and others are served") {
  if (!can_pin()) return;
  Chance chance("processes");
  ServedMachine machine;
  const vmci::UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  std::vector<vmci::PacketSocket> sockets;
  const auto connect = [&] {
    auto connected = vmci::PacketSocket::connect(machine.socket);
    if (!connected) FAIL("cannot connect: errno ", value(connected.error()));
    ::fcntl(connected->fd(), F_SETFL, O_NONBLOCK);
    return std::move(*connected);
  };
  for (int i = 0; i < 8; ++i) sockets.push_back(connect());
  for (int step = 0; step < 20000; ++step) {
    auto& socket = sockets[chance.below(sockets.size())];
    std::vector<std::byte> packet = chance.bytes(chance.one_in(20) ? chance.below(vm::frame_bytes_max + 100) : sizeof(control::Head) + chance.below(64));
    if (packet.size() >= sizeof(control::Head) && !chance.one_in(10)) {
      control::Head head{};
      head.record.control = static_cast<std::uint32_t>(chance.below(static_cast<std::uint64_t>(Request::count) + 3));
      if (chance.one_in(3)) head.record.control = static_cast<std::uint32_t>(chance.one_in(2) ? Request::attach : Request::add_pinned);
      head.sequence = static_cast<std::uint32_t>(chance.one_in(50) ? chance.below(4) : static_cast<std::uint64_t>(step));
      std::memcpy(packet.data(), &head, sizeof(head));
      if (packet.size() >= sizeof(head) + sizeof(control::AddPinnedRequest) && chance.one_in(2)) {
        const control::AddPinnedRequest pinned{reinterpret_cast<std::uintptr_t>(packet.data()) + chance.below(8192), chance.below(1 << 20),
                                               static_cast<std::int32_t>(chance.below(64)) - 2, 0};
        std::memcpy(packet.data() + sizeof(head), &pinned, sizeof(pinned));
      }
    }
    const int given[] = {event.get(), event.get(), event.get()};
    const auto sent = socket.send(packet, std::span(given).first(chance.below(4)));
    if ((!sent && value(sent.error()) != EAGAIN && value(sent.error()) != EPERM) || chance.one_in(300)) socket = connect();
    // The service answers some, with anything.
    machine.pump();
    while (!machine.frames.empty()) {
      const FrameIn frame = std::move(machine.frames.front());
      machine.frames.pop_front();
      const auto kind = static_cast<Frame>(frame.head.kind);
      if (kind == Frame::close) machine.send(Frame::closed, frame.head.connection);
      if (kind != Frame::packet || chance.one_in(20)) continue;
      const bool attach = (frame.request().record.control & 0xffff) == static_cast<std::uint32_t>(Request::attach);
      if (attach) {
        control::AttachReply reply{};
        reply.arena_bytes = Machine::arena_bytes;
        machine.reply_with(frame, reply, 1, 1);
      } else {
        machine.reply(frame, chance.one_in(2) ? 0 : EINVAL, chance.bytes(64));
      }
    }
  }
  sockets.clear();
  CHECK(served(machine));
}

TEST_CASE("A process that passes a descriptor whose closing waits is not waited for") {
  if (!can_pin()) return;
  ServedMachine machine;
  vmci::test::Lingering slow;
  REQUIRE(slow);
  std::size_t bytes = 0;
  SUBCASE("with a request") { bytes = sizeof(control::Head); }
  SUBCASE("with less than a head") { bytes = 8; }
  const Process bad(machine);
  REQUIRE(slow.pass(bad.socket.fd(), std::vector<std::byte>(bytes)).has_value());
  CHECK(served(machine));
}

TEST_CASE("A service that says anything costs sessions, and a good one is served again") {
  if (!can_pin()) return;
  Chance chance("service");
  Machine machine;
  machine.begin_service(epoch);
  for (int round = 0; round < 20; ++round) {
    machine.open_session();
    AttachedProcess process(machine);
    for (int i = 0; i < 3; ++i) process.ask(static_cast<Request>(chance.below(static_cast<std::uint64_t>(Request::count))), chance.bytes(64));
    const std::uint64_t boot = machine.header().agent.boot;
    for (int step = 0; step < 300 && std::atomic_ref(machine.header().agent.boot).load() == boot && machine.link; ++step) {
      const Frame kinds[] = {Frame::welcome, Frame::reply, Frame::stream, Frame::stream_end, Frame::closed, Frame::hello, static_cast<Frame>(chance.below(65536))};
      // Rarely what ends the session at once, or there is little to see.
      const Frame kind = kinds[chance.one_in(40) ? chance.below(2) : 2 + chance.below(std::size(kinds) - 2)];
      auto body = chance.bytes(chance.below(200));
      if (kind == Frame::reply && body.size() >= sizeof(control::Head) && chance.one_in(2)) {
        control::Head head{};
        head.sequence = static_cast<std::uint32_t>(1 + chance.below(3));
        std::memcpy(body.data(), &head, sizeof(head));
      }
      const auto item = static_cast<std::uint32_t>(chance.one_in(3) ? chance.engine() : chance.below(4));
      machine.link->send(kind, chance.one_in(4) ? static_cast<std::uint32_t>(chance.engine()) : process.number, std::as_bytes(std::span(body)), item,
                         static_cast<std::uint16_t>(chance.one_in(3) ? chance.engine() : chance.below(3)));
      machine.pump();
    }
    machine.begin_service(epoch + 1 + static_cast<std::uint64_t>(round));
  }
  machine.open_session();
  CHECK(served(machine));
}
