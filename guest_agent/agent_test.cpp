// What processes ask for, against a service that the test plays.
#include "guest_agent/agent.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "guest_agent/test/machine.hpp"
#include "vmci_channel/page_pin.hpp"
#include "vmci_channel/sleep_word.hpp"
#include "vrdma/copy_ring.hpp"

using namespace vrdma;
using namespace vrdma::agent;
using namespace vrdma::agent::test;
using control::Request;
using vm::Frame;
using vmci::Mapping;
using vmci::UniqueFd;
using vmci::Writable;

namespace {

constexpr std::uint64_t epoch = 77;

bool same(const Runs& a, const Runs& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](auto& x, auto& y) { return x.page == y.page && x.pages == y.pages; });
}

Runs runs_at(const void* memory, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += vm::page_bytes) static_cast<const volatile std::byte*>(memory)[at];  // into the page table
  const auto runs = Pagemap::of_self()->runs(reinterpret_cast<std::uintptr_t>(memory), bytes);
  REQUIRE(runs.has_value());
  return *runs;
}

// Memory of the process that it has pinned as libvrdma does.
struct Buffer {
  explicit Buffer(std::size_t pages) : bytes(pages * vm::page_bytes) {
    data = static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(data != MAP_FAILED);
    auto pinned = vmci::pin_pages(std::span(data, bytes));
    REQUIRE(pinned.has_value());
    ring = std::move(*pinned);
  }
  ~Buffer() { ::munmap(data, bytes); }
  control::AddPinnedRequest request(std::uint64_t offset, std::uint64_t length) const {
    return {reinterpret_cast<std::uintptr_t>(data) + offset, length, ring.get(), 0};
  }
  std::byte* data;
  std::size_t bytes;
  UniqueFd ring;
};

bool readable(int fd) {
  pollfd waiting{fd, POLLIN, 0};
  return ::poll(&waiting, 1, 0) == 1;
}

// Nothing of this kind comes, though a later packet has.
bool nothing_forwarded(Machine& machine, Process& process) {
  process.ask(Request::query_device);
  return machine.await(Frame::packet).request().record.control == static_cast<std::uint32_t>(Request::query_device);
}

}  // namespace

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

TEST_CASE("Where the device has interrupts the agent says so, and looks when it is interrupted") {
  if (!can_pin()) return;
  Machine machine(true, Machine::short_patience_ns);
  machine.begin_service(epoch);
  CHECK(machine.open_session().flags == vm::hello_interrupts);
  Process process(machine);
  const auto descriptors = process.attach();
  process.ask(Request::query_device);
  machine.reply(machine.await(Frame::packet), 0);
  CHECK(process.reply().head.status == 0);
  for (int i = 0; i < 300; ++i) machine.send(Frame::stream, process.number, std::byte{1}, 1);  // more frames than it takes at a time
  process.ask(Request::query_device);
  machine.reply(machine.await(Frame::packet), 0);
  CHECK(process.reply().head.status == 0);
  machine.heart_beats = false;
  CHECK(process.closed());
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
  Machine machine;
  machine.begin_service(epoch);
  machine.open_session();
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
  Machine machine;
  machine.begin_service(epoch);
  machine.open_session();
  Process process(machine);
  process.attach();
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

namespace {

// A channel of a process, as libvrdma asks for one. ring: what the service answers; vector: which it was told, 0: none.
struct AskedChannel {
  AskedChannel(Machine& machine, Process& process, std::uint32_t stream_in, std::uint32_t wish = control::interrupt_wanted, std::uint32_t ring = 5)
      : stream(stream_in) {
    process.ask(Request::create_channel, control::CreateChannelRequest{3, wish});
    const auto packet = machine.await(Frame::packet);
    vector = packet.as<control::CreateChannelRequest>(sizeof(control::Head)).interrupt;
    machine.reply_with(packet, control::ChannelReply{stream, vector != 0 ? ring : 0}, 1, stream);
    descriptors = process.reply().descriptors;
  }
  std::uint32_t stream, vector = 0;
  std::vector<UniqueFd> descriptors;
};

void ring(const UniqueFd& event) {
  const std::uint64_t one = 1;
  REQUIRE(::write(event.get(), &one, sizeof(one)) == sizeof(one));
}

}  // namespace

TEST_CASE("A channel gets an interrupt of its own while there are any, and gives it back with its pipe") {
  if (!can_pin()) return;
  Machine machine(true);
  machine.begin_service(epoch);
  machine.open_session();
  Process process(machine), other(machine);
  process.attach();
  other.attach();
  AskedChannel first(machine, process, 11), second(machine, other, 11), third(machine, process, 12);
  CHECK(first.vector >= vm::fixed_vectors);
  CHECK(second.vector >= vm::fixed_vectors);
  CHECK(first.vector != second.vector);
  REQUIRE(first.descriptors.size() == 2);
  REQUIRE(second.descriptors.size() == 2);
  ring(machine.interrupts[first.vector]);
  CHECK(readable(first.descriptors[1].get()));
  CHECK(!readable(second.descriptors[1].get()));
  CHECK((::fcntl(first.descriptors[1].get(), F_GETFL) & O_NONBLOCK) != 0);
  CHECK(third.vector == 0);  // the machine of the test has two
  CHECK(third.descriptors.size() == 1);
  machine.send(Frame::stream, process.number, control::CompletionRecord{1, 2, 0}, 12);
  machine.until("the event of a channel without", [&] { return readable(third.descriptors[0].get()); });

  machine.send(Frame::stream_end, process.number, {}, 11);  // the channel is destroyed
  machine.until("its end", [&] { return readable(first.descriptors[0].get()); });
  AskedChannel fourth(machine, other, 13);
  CHECK(fourth.vector == first.vector);
  REQUIRE(fourth.descriptors.size() == 2);
  ring(machine.interrupts[fourth.vector]);
  CHECK(readable(fourth.descriptors[1].get()));  // whoever had it before holds another eventfd

  other.socket = {};  // it ends, and both are free; this process is still there
  machine.until("its departure", [&] { return std::any_of(machine.frames.begin(), machine.frames.end(), [](const FrameIn& frame) { return frame.head.kind == static_cast<std::uint16_t>(Frame::close); }); });
  machine.frames.clear();
  CHECK(AskedChannel(machine, process, 14).vector != 0);
  CHECK(AskedChannel(machine, process, 15).vector != 0);
  CHECK(AskedChannel(machine, process, 16).vector == 0);
}

TEST_CASE("A channel's interrupt is for who knows what to do with it: the library, the service, the device") {
  if (!can_pin()) return;
  Machine machine(true);
  machine.begin_service(epoch);
  machine.open_session();
  Process process(machine);
  process.attach();
  const AskedChannel older_library(machine, process, 11, 0);
  CHECK(older_library.vector == 0);
  CHECK(older_library.descriptors.size() == 1);
  for (std::uint32_t i = 0; i < 5; ++i) {  // a service that makes no ring, or refuses: none is used up
    const AskedChannel without(machine, process, 20 + i, control::interrupt_wanted, 0);
    CHECK(without.vector != 0);
    CHECK(without.descriptors.size() == 1);
    process.ask(Request::create_channel, control::CreateChannelRequest{3, control::interrupt_wanted});
    machine.reply(machine.await(Frame::packet), EDQUOT);
    CHECK(process.reply().head.status == EDQUOT);
  }
  std::atomic_ref(machine.header().service.vectors).store(vm::fixed_vectors);
  CHECK(AskedChannel(machine, process, 30).vector == 0);
  std::atomic_ref(machine.header().service.vectors).store(~std::uint64_t{0});
  const AskedChannel of_nonsense(machine, process, 31);
  CHECK(of_nonsense.vector >= vm::fixed_vectors);
  CHECK(of_nonsense.vector < Machine::vectors);

  Machine polling;
  polling.begin_service(epoch);
  polling.open_session();
  Process there(polling);
  there.attach();
  CHECK(AskedChannel(polling, there, 11).vector == 0);
}

TEST_CASE("Where the kernel rings the device, processes have its eventfd for their doorbell, unless the service only polls") {
  if (!can_pin()) return;
  Machine machine(true);
  machine.begin_service(epoch);
  machine.open_session();
  Process process(machine);
  auto descriptors = process.attach();
  ring(descriptors[2]);
  CHECK(nothing_forwarded(machine, process));  // the agent has had its turn
  CHECK(readable(machine.kernel_doorbell.get()));
  std::atomic_ref(machine.header().service.flags).store(vm::service_polls);
  Process later(machine);
  descriptors = later.attach();
  ring(descriptors[2]);
  machine.until("the agent counts it", [&] { return std::atomic_ref(machine.header().agent.doorbells).load() != 0; });
}

TEST_CASE("What the service shows comes as a file, when it is whole") {
  if (!can_pin()) return;
  Machine machine;
  machine.begin_service(epoch);
  machine.open_session();
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
  Machine machine;
  machine.begin_service(epoch);
  machine.open_session();
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

TEST_CASE("Pinned memory is translated as it lies, and stays pinned until the service has removed it") {
  if (!can_pin()) return;
  Machine machine;
  machine.begin_service(epoch);
  machine.open_session();
  Process process(machine);
  process.attach();
  const std::size_t rings_before = rings_open();
  const void* memory;
  {
    Buffer buffer(700);  // more runs than a frame holds, if RAM is scattered
    memory = buffer.data;
    process.ask(Request::add_pinned, buffer.request(5000, 690 * vm::page_bytes));  // pages 1 to 691
    const auto packet = machine.await(Frame::packet);
    const auto asked = packet.as<control::AddPinnedRequest>(sizeof(control::Head));
    CHECK(asked.segment >= vm::segment_first);
    CHECK(asked.address == buffer.request(5000, 1).address);
    CHECK(same(machine.take_segment(process.number, asked.segment), runs_at(buffer.data + vm::page_bytes, 691 * vm::page_bytes)));
    machine.reply_with(packet, control::AddBackingReply{40, 0});
    CHECK(process.reply().head.status == 0);
    CHECK(rings_open() == rings_before + 2);
    buffer.ring.reset();
    CHECK(rings_open() == rings_before + 1);  // the agent's
    CHECK(memory == buffer.data);
  }
  process.ask(Request::remove_backing, control::RemoveBackingRequest{40, 0});
  machine.reply(machine.await(Frame::packet), EBUSY);
  CHECK(process.reply().head.status == EBUSY);
  CHECK(rings_open() == rings_before + 1);
  process.ask(Request::remove_backing, control::RemoveBackingRequest{40, 0});
  machine.reply(machine.await(Frame::packet), 0);
  CHECK(process.reply().head.status == 0);
  CHECK(rings_open() == rings_before);
}

TEST_CASE("Two pieces of memory have two segments, and one that the service refuses is let go at once") {
  if (!can_pin()) return;
  Machine machine;
  machine.begin_service(epoch);
  machine.open_session();
  Process process(machine);
  process.attach();
  const std::size_t rings_before = rings_open();
  Buffer a(1), b(1);
  process.ask(Request::add_pinned, a.request(0, 1));
  process.ask(Request::add_pinned, b.request(0, 1));
  const auto first = machine.await(Frame::packet), second = machine.await(Frame::packet);
  CHECK(first.as<control::AddPinnedRequest>(sizeof(control::Head)).segment != second.as<control::AddPinnedRequest>(sizeof(control::Head)).segment);
  machine.reply(second, EDQUOT);  // replies may come in any order
  CHECK(process.reply().head.status == EDQUOT);
  machine.reply_with(first, control::AddBackingReply{1, 0});
  CHECK(process.reply().head.status == 0);
  a.ring.reset();
  b.ring.reset();
  CHECK(rings_open() == rings_before + 1);
}

// Nobody is connected whose leaving would tell that there is something again.
TEST_CASE("Who cannot be accepted for want of descriptors is when there are some, though nobody has left") {
  if (!can_pin()) return;
  for (const bool by_interrupts : {false, true}) {
    CAPTURE(by_interrupts);
    Machine machine(by_interrupts);
    machine.begin_service(epoch);
    machine.open_session();
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

TEST_CASE("A process that registers very much leaves descriptors for others") {
  if (!can_pin()) return;
  Machine machine;
  machine.begin_service(epoch);
  machine.open_session();
  Process hog(machine);
  hog.attach();
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  constexpr std::uint32_t limit = 256;
  const rlimit few{limit, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  std::uint32_t backing = 100;
  const auto serve = [&](Process& process) {
    Buffer one(1);
    process.ask(Request::add_pinned, one.request(0, 1));
    machine.reply_with(machine.await(Frame::packet), control::AddBackingReply{backing++, 0});
    return process.reply().head.status;
  };
  for (std::uint32_t i = 0; i < limit / 2; ++i) REQUIRE(serve(hog) == 0);
  Buffer one(1);
  hog.ask(Request::add_pinned, one.request(0, 1));
  CHECK(hog.reply().head.status == ENOMEM);
  Process other(machine);
  other.attach();
  CHECK(serve(other) == 0);
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

TEST_CASE("Memory that is not pinned, not there or not described rightly never reaches the service") {
  if (!can_pin()) return;
  Machine machine;
  machine.begin_service(epoch);
  machine.open_session();
  Process process(machine);
  process.attach();
  const std::size_t rings_before = rings_open();
  const auto status_of = [&](control::AddPinnedRequest request) {
    process.ask(Request::add_pinned, request);
    return process.reply().head.status;
  };
  {
    Buffer buffer(4);
    CHECK(status_of(buffer.request(0, 0)) == EINVAL);
    CHECK(status_of(buffer.request(0, ~std::uint64_t{0})) == EINVAL);
    CHECK(status_of({~std::uint64_t{0} - 4096, 4096, buffer.ring.get(), 0}) == EINVAL);
    CHECK(status_of({buffer.request(0, 1).address, 1, -1, 0}) == EBADF);
    CHECK(status_of({buffer.request(0, 1).address, 1, process.socket.fd(), 0}) == EINVAL);
    CHECK(status_of(buffer.request(0, 4 * vm::page_bytes + 1)) == EFAULT);  // one page more than is pinned
    CHECK(status_of(buffer.request(0, 1)) == EPERM);                        // a ring is given once
  }
  {
    Buffer buffer(4);
    REQUIRE(::munmap(buffer.data + vm::page_bytes, vm::page_bytes) == 0);
    CHECK(status_of(buffer.request(0, 4 * vm::page_bytes)) == EFAULT);
  }
  CHECK(rings_open() == rings_before);
  CHECK(nothing_forwarded(machine, process));
  CHECK(machine.segments.size() == 1);  // the arena
}

TEST_CASE("The copying thread of a process is woken where it sleeps") {
  if (!can_pin()) return;
  Machine machine;
  machine.begin_service(epoch);
  machine.open_session();
  Process process(machine);
  process.attach();
  process.ask(Request::reach_process, control::ReachProcessRequest{1, 2});
  const auto packet = machine.await(Frame::packet);
  const Runs runs = machine.take_segment(process.number, vm::segment_copier);
  machine.reply_with(packet, control::ReachProcessReply{control::reach_by_guest, 9}, 1, 30);
  const auto reply = process.reply();
  REQUIRE(reply.descriptors.size() == 1);
  auto segment = Mapping::map(reply.descriptors[0].get(), 0, copying::segment_bytes, Writable::yes);
  REQUIRE(segment.has_value());
  CHECK(same(runs, runs_at(segment->data(), copying::segment_bytes)));

  std::uint32_t& news = reinterpret_cast<copying::Header*>(segment->data())->service.news;
  std::atomic<bool> woken{false};
  std::thread sleeper([&] {
    constexpr std::uint64_t for_ever_ns = 60'000'000'000;
    vmci::sleep_on_word(&news, 0, for_ever_ns);
    woken.store(true);
  });
  // The service changes the word where it sees it; the wake comes by the stream. Again, as nobody knows when the thread sleeps.
  auto* const seen_by_service = reinterpret_cast<copying::Header*>(machine.at_frame(runs.front().page));
  REQUIRE(seen_by_service != nullptr);
  machine.until("the thread wakes", [&] {
    machine.send(Frame::stream, process.number, std::byte{1}, 30);
    return woken.load();
  });
  sleeper.join();
  std::atomic_ref(seen_by_service->service.news).store(5);
  CHECK(std::atomic_ref(news).load() == 5);

  // Asked again, it is the same segment, announced once.
  process.ask(Request::reach_process, control::ReachProcessRequest{1, 2});
  machine.reply_with(machine.await(Frame::packet), control::ReachProcessReply{control::reach_by_service, 9});
  CHECK(process.reply().descriptors.empty());
  CHECK(machine.take_segment(process.number, vm::segment_copier).empty());
}

TEST_CASE("Who does not keep to the protocol is closed, alone") {
  if (!can_pin()) return;
  Machine machine;
  machine.begin_service(epoch);
  machine.open_session();
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
