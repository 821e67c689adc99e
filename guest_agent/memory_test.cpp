// Memory that processes have pinned or share with the service: what that sees of it, and what the agent keeps open for it. The service is the test.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <thread>

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

// What a process of somebody's is told that attaches and pins a page. 200: it cannot; of a child.
int status_of_pinning(const std::string& socket_path, bool is_dumpable) {
  constexpr uid_t somebody = 65533;
  constexpr int cannot = 200, patience_ms = 60'000;
  const std::filesystem::path path = socket_path;
  if (::chdir(path.parent_path().c_str()) != 0 || ::setresgid(somebody, somebody, somebody) != 0 || ::setresuid(somebody, somebody, somebody) != 0) return cannot;
  if (::prctl(PR_SET_DUMPABLE, is_dumpable ? 1 : 0) != 0) return cannot;
  auto socket = vmci::PacketSocket::connect(path.filename());
  if (!socket) return cannot;
  const auto status_of = [&](Request request, const auto& body) {
    control::Head head{};
    head.record.word = sizeof(body);
    head.record.control = static_cast<std::uint32_t>(request);
    std::vector<std::byte> packet(sizeof(head) + std::max<std::size_t>(sizeof(body), control::body_bytes_max));
    std::memcpy(packet.data(), &head, sizeof(head));
    std::memcpy(packet.data() + sizeof(head), &body, sizeof(body));
    if (!socket->send(std::span(packet).first(sizeof(head) + sizeof(body)))) return cannot;
    const auto received = socket->receive(packet, patience_ms);
    if (!received || received->bytes < sizeof(head)) return cannot;
    std::memcpy(&head, packet.data(), sizeof(head));
    return head.status;
  };
  control::AttachRequest attach{};
  attach.magic = control::magic;
  if (status_of(Request::attach, attach) != 0) return cannot;
  void* const page = ::mmap(nullptr, vm::page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return cannot;
  const auto ring = vmci::pin_pages(std::span(static_cast<std::byte*>(page), vm::page_bytes));
  if (!ring) return cannot;
  return status_of(Request::add_pinned, control::AddPinnedRequest{reinterpret_cast<std::uintptr_t>(page), vm::page_bytes, ring->get(), 0});
}

}  // namespace

TEST_CASE("Pinned memory is translated as it lies, and stays pinned until the service has removed it") {
  if (!can_pin()) return;
  ServedMachine machine;
  AttachedProcess process(machine);
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
  machine.until("the agent's ring is closed", [&] { return rings_open() == rings_before; });
}

TEST_CASE("Two pieces of memory have two segments, and one that the service refuses is let go at once") {
  if (!can_pin()) return;
  ServedMachine machine;
  AttachedProcess process(machine);
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
  machine.until("the ring of what was refused is closed", [&] { return rings_open() == rings_before + 1; });
}

TEST_CASE("A process that registers very much leaves descriptors for others") {
  if (!can_pin()) return;
  ServedMachine machine;
  AttachedProcess hog(machine);
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
  AttachedProcess other(machine);
  CHECK(serve(other) == 0);
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

TEST_CASE("Memory that is not pinned, not there or not described rightly never reaches the service") {
  if (!can_pin()) return;
  ServedMachine machine;
  AttachedProcess process(machine);
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
  machine.until("the rings are closed, the last of them behind its answer", [&] { return rings_open() == rings_before; });
  CHECK(nothing_forwarded(machine, process));
  CHECK(machine.segments.size() == 1);  // the arena
}

// Seen before: a page of /etc/passwd that is mapped where a pinned one was, to be written by a peer's RDMA.
TEST_CASE("Pages that are others', too, are not lent, though the process has pinned its own at that address before") {
  if (!can_pin()) return;
  ServedMachine machine;
  AttachedProcess process(machine);
  const std::size_t rings_before = rings_open();
  const auto status_with = [&](int protection, int flags, int fd) {
    Buffer buffer(1);
    REQUIRE(::mmap(buffer.data, vm::page_bytes, protection, flags | MAP_FIXED, fd, 0) == buffer.data);
    (void)*static_cast<volatile std::byte*>(buffer.data);
    process.ask(Request::add_pinned, buffer.request(0, 1));
    return process.reply().head.status;
  };
  const UniqueFd program(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  CHECK(status_with(PROT_READ, MAP_SHARED, program.get()) == EACCES);
  CHECK(status_with(PROT_READ, MAP_PRIVATE, program.get()) == EACCES);
  CHECK(status_with(PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1) == EACCES);  // read only yet: everybody's page of zeroes
  machine.until("the rings are closed behind the answers", [&] { return rings_open() == rings_before; });
  CHECK(nothing_forwarded(machine, process));
}

TEST_CASE("Memory that a process shares is pinned by the agent itself, until the service has removed it") {
  if (!can_pin()) return;
  ServedMachine machine;
  AttachedProcess process(machine);
  const std::size_t rings_before = rings_open();
  constexpr std::uint64_t bytes = 4 * vm::page_bytes;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  {
    const auto ring = vmci::pin_pages(std::span(static_cast<std::byte*>(memory), bytes));
    REQUIRE(ring.has_value());
    process.ask(Request::add_pinned, control::AddPinnedRequest{reinterpret_cast<std::uintptr_t>(memory), bytes, ring->get(), 0});
    const auto packet = machine.await(Frame::packet);
    const auto asked = packet.as<control::AddPinnedRequest>(sizeof(control::Head));
    CHECK(same(machine.take_segment(process.number, asked.segment), runs_at(memory, bytes)));
    machine.reply_with(packet, control::AddBackingReply{40, 0});
    CHECK(process.reply().head.status == 0);
  }
  ::munmap(memory, bytes);
  CHECK(rings_open() == rings_before + 1);
  process.ask(Request::remove_backing, control::RemoveBackingRequest{40, 0});
  machine.reply(machine.await(Frame::packet), 0);
  CHECK(process.reply().head.status == 0);
  machine.until("the agent's ring is closed", [&] { return rings_open() == rings_before; });
}

// As one is that has executed a set-group-ID program, or one of capabilities, before it was accepted.
TEST_CASE("Nothing of a process that is not dumpable is translated, and of the same process otherwise it is") {
  if (!can_pin()) return;
  ServedMachine machine;
  for (const bool is_dumpable : {false, true}) {
    CAPTURE(is_dumpable);
    const pid_t process = ::fork();
    REQUIRE(process >= 0);
    if (process == 0) ::_exit(status_of_pinning(machine.socket, is_dumpable));
    int state = 0;
    machine.until("the process has ended", [&] {
      while (!machine.frames.empty()) {
        const FrameIn frame = std::move(machine.frames.front());
        machine.frames.pop_front();
        if (static_cast<Frame>(frame.head.kind) != Frame::packet) continue;
        if (frame.request().record.control == static_cast<std::uint32_t>(Request::add_pinned)) {
          machine.reply_with(frame, control::AddBackingReply{1, 0});
        } else {
          control::AttachReply granted{};
          granted.arena_bytes = Machine::arena_bytes;
          machine.reply_with(frame, granted, 1, 1);
        }
      }
      return ::waitpid(process, &state, WNOHANG) == process;
    });
    REQUIRE(WIFEXITED(state));
    if (WEXITSTATUS(state) == 200) {
      MESSAGE("SKIPPED: somebody cannot pin memory here");
      return;
    }
    CHECK(WEXITSTATUS(state) == (is_dumpable ? 0 : EPERM));
  }
}

TEST_CASE("The copying thread of a process is woken where it sleeps") {
  if (!can_pin()) return;
  ServedMachine machine;
  AttachedProcess process(machine);
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
