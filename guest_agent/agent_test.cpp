// What processes ask for, against a service that the test plays.
#include "guest_agent/agent.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "guest_agent/test/machine.hpp"

using namespace vrdma;
using namespace vrdma::agent;
using namespace vrdma::agent::test;
using control::Request;
using vm::Frame;
using vmci::Mapping;
using vmci::UniqueFd;
using vmci::Writable;

TEST_CASE("A session begins with a page that the service sees, and processes are served from then on") {
  if (!can_pin()) return;
  Machine machine;
  machine.begin_service(epoch);
  machine.await_boot();
  CHECK(!std::filesystem::exists(machine.socket));
  const auto hello = machine.open_session();
  CHECK(hello.major == vm::version_major);
  CHECK(hello.flags == 0);  // no interrupts here
  CHECK(hello.proof != 0);
  Process first(machine), second(machine);
  CHECK(first.number != second.number);
}

TEST_CASE("Attaching gives a pinned arena, a page that nobody can write to, a doorbell and a wake pipe") {
  if (!can_pin()) return;
  Machine machine;
  machine.begin_service(epoch);
  const auto hello = machine.open_session();
  Process process(machine);
  const auto descriptors = process.attach();
  const Runs announced = machine.take_segment(process.number, vm::segment_arena);

  auto arena = vmci::Segment::adopt(UniqueFd(::fcntl(descriptors[0].get(), F_DUPFD_CLOEXEC, 0)), Machine::arena_bytes, Writable::yes);
  REQUIRE(arena.has_value());
  CHECK(std::all_of(arena->data(), arena->data() + arena->bytes(), [](std::byte b) { return b == std::byte{0}; }));
  CHECK(same(announced, runs_at(arena->data(), arena->bytes())));

  auto page = Mapping::map(descriptors[1].get(), 0, sizeof(control::ServicePage), Writable::no);
  REQUIRE(page.has_value());
  CHECK(reinterpret_cast<const control::ServicePage*>(page->data())->magic == control::magic);
  CHECK(runs_at(page->data(), vm::page_bytes).front().page == hello.page);
  CHECK(!Mapping::map(descriptors[1].get(), 0, vm::page_bytes, Writable::yes).has_value());
  const UniqueFd reopened(::open(("/proc/self/fd/" + std::to_string(descriptors[1].get())).c_str(), O_RDWR | O_CLOEXEC));
  if (reopened) {
    CHECK(!Mapping::map(reopened.get(), 0, vm::page_bytes, Writable::yes).has_value());
    CHECK(::write(reopened.get(), "x", 1) == -1);
  }

  const std::uint64_t one = 1;
  machine.registers[3] = 0xffffffff;
  REQUIRE(::write(descriptors[2].get(), &one, sizeof(one)) == sizeof(one));
  machine.until("the doorbell's interrupt", [&] { return machine.last_rung() == (vm::service_peer << 16 | vm::doorbell_vector); });
  CHECK(!readable(descriptors[2].get()));

  CHECK(!readable(descriptors[3].get()));
  machine.send(Frame::stream, process.number, std::byte{1}, 1);
  machine.until("the wake", [&] { return readable(descriptors[3].get()); });

  process.ask(Request::attach, control::AttachRequest{});
  CHECK(process.reply().head.status == EISCONN);
}

TEST_CASE("A refused attach says why, with its body and without descriptors") {
  if (!can_pin()) return;
  ServedMachine machine;
  Process process(machine);
  process.ask(Request::attach, control::AttachRequest{});
  control::AttachReply mine{};
  mine.major = 9;
  machine.reply(machine.await(Frame::packet), EPROTONOSUPPORT, std::as_bytes(std::span(&mine, 1)));
  const auto reply = process.reply();
  CHECK(reply.head.status == EPROTONOSUPPORT);
  REQUIRE(reply.body.size() == sizeof(mine));
  CHECK(reinterpret_cast<const control::AttachReply*>(reply.body.data())->major == 9);
  CHECK(reply.descriptors.empty());
}

TEST_CASE("Where all memory was plugged into the machine, whoever attaches is told that there is none, and the machine is served on") {
  if (!can_pin()) return;
  Machine machine;
  machine.in_file_bytes = vm::page_bytes;
  machine.begin_service(epoch);
  machine.open_session();
  Process process(machine);
  process.ask(Request::attach, control::AttachRequest{});
  CHECK(process.reply().head.status == ENOMEM);
  CHECK(machine.running());
}

TEST_CASE("Events come whole by the pipe of their context, and its end when the service ends it") {
  if (!can_pin()) return;
  ServedMachine machine;
  AttachedProcess process(machine);
  process.ask(Request::open_context, control::OpenContextRequest{});
  machine.reply_with(machine.await(Frame::packet), control::OpenContextReply{3, 0}, 1, 12);
  auto reply = process.reply();
  REQUIRE(reply.descriptors.size() == 1);
  const int pipe = reply.descriptors[0].get();
  CHECK((::fcntl(pipe, F_GETFL) & O_NONBLOCK) == 0);

  constexpr std::uint32_t count = 12000;  // more than a pipe takes
  for (std::uint32_t i = 0; i < count; ++i) machine.send(Frame::stream, process.number, control::AsyncRecord{i, ~i, 0}, 12);
  machine.send(Frame::stream_end, process.number, {}, 12);
  for (std::uint32_t i = 0; i < count; ++i) {
    machine.until("an event", [&] { return readable(pipe); });
    control::AsyncRecord record{};
    REQUIRE(::read(pipe, &record, sizeof(record)) == sizeof(record));
    REQUIRE(record.event == i);
    REQUIRE(record.handle == ~i);
  }
  machine.until("the end", [&] { return readable(pipe); });
  char rest;
  CHECK(::read(pipe, &rest, 1) == 0);
}

TEST_CASE("What the service shows comes as a file, when it is whole") {
  if (!can_pin()) return;
  ServedMachine machine;
  Process process(machine);  // a tool attaches to nothing
  process.ask(Request::show);
  machine.reply(machine.await(Frame::packet), 0, {}, 1, 7);
  const std::string text(3 * vm::frame_bytes_max / 2, 'x');
  const auto bytes = std::as_bytes(std::span(text));
  machine.send(Frame::stream, process.number, bytes.first(vm::frame_bytes_max), 7);
  machine.send(Frame::stream, process.number, bytes.subspan(vm::frame_bytes_max), 7);
  machine.send(Frame::stream_end, process.number, {}, 7);
  const auto reply = process.reply();
  CHECK(reply.head.status == 0);
  REQUIRE(reply.descriptors.size() == 1);
  std::string read(text.size() + 1, ' ');
  REQUIRE(::pread(reply.descriptors[0].get(), read.data(), read.size(), 0) == static_cast<ssize_t>(text.size()));
  read.resize(text.size());
  CHECK(read == text);
}

TEST_CASE("What a virtual machine cannot do is refused by the agent, what it does not know is the service's to say") {
  if (!can_pin()) return;
  ServedMachine machine;
  Process process(machine);
  for (const Request request : {Request::add_pinned, Request::reach_process}) {
    process.ask(request, control::AddPinnedRequest{});
    CHECK(process.reply().head.status == ENOTCONN);
  }
  process.attach();
  for (const Request request : {Request::add_backing, Request::queue_pair_alloc, Request::queue_pair_attach}) {
    process.ask(request, std::array<std::byte, 64>{});
    const auto reply = process.reply();
    CHECK(reply.head.status == EOPNOTSUPP);
    CHECK(reply.head.sequence == process.sequence - 1);
  }
  process.ask(Request::add_pinned);  // without a body
  CHECK(process.reply().head.status == EINVAL);
  CHECK(machine.frames.empty());

  const auto unknown = std::array{1, 2, 3, 4, 5};
  process.ask(static_cast<Request>(999), unknown);
  const auto packet = machine.await(Frame::packet);
  CHECK(packet.head.connection == process.number);
  CHECK(packet.body.size() == sizeof(control::Head) + sizeof(unknown));
  CHECK(packet.request().record.control == 999);
  CHECK(packet.as<std::array<int, 5>>(sizeof(control::Head)) == unknown);
  machine.reply_with(packet, unknown);
  const auto reply = process.reply();
  CHECK(reply.head.status == 0);
  CHECK(reply.body == std::vector(packet.body.begin() + sizeof(control::Head), packet.body.end()));
}

// Nobody is connected whose leaving would tell that there is something again.
TEST_CASE("Who cannot be accepted for want of descriptors is when there are some, though nobody has left") {
  if (!can_pin()) return;
  for (const bool by_interrupts : {false, true}) {
    CAPTURE(by_interrupts);
    ServedMachine machine({.has_interrupts = by_interrupts});
    rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    std::vector<UniqueFd> taken;
    taken.emplace_back(::dup(STDERR_FILENO));
    rlimit few = before;
    few.rlim_cur = static_cast<rlim_t>(taken.back().get()) + 16;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
    for (UniqueFd one(::dup(STDERR_FILENO)); one; one.reset(::dup(STDERR_FILENO))) taken.push_back(std::move(one));
    taken.pop_back();
    vmci::PacketSocket waiting;  // has the last one
    machine.until("a connection", [&] {
      auto connected = vmci::PacketSocket::connect(machine.socket);
      if (connected) waiting = std::move(*connected);
      return connected.has_value();
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it has tried, most likely
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK(machine.await(Frame::open).head.connection != 0);
  }
}

TEST_CASE("Who does not keep to the protocol is closed, alone") {
  if (!can_pin()) return;
  ServedMachine machine;
  Process good(machine);
  const auto closes = [&](Process& process) {
    CHECK(process.closed());
    CHECK(machine.await(Frame::close).head.connection == process.number);
  };

  Process brief(machine);
  REQUIRE(brief.socket.send(std::as_bytes(std::span("short", 5))).has_value());
  closes(brief);

  Process endless(machine);
  const std::vector<std::byte> too_long(vm::frame_bytes_max + 1);
  REQUIRE(endless.socket.send(too_long).has_value());
  closes(endless);

  Process impatient(machine);
  for (std::size_t i = 0; i <= Connection::outstanding_max; ++i) impatient.ask(Request::query_device);
  closes(impatient);

  Process repeating(machine);
  repeating.ask(Request::query_device);
  repeating.sequence = 0;
  repeating.ask(Request::query_device);
  closes(repeating);

  machine.frames.clear();
  good.ask(Request::query_device);
  machine.reply(machine.await(Frame::packet), 0);
  CHECK(good.reply().head.status == 0);
}
