// How processes, the service and the agent end.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>

#include "guest_agent/test/machine.hpp"
#include "vmci_channel/page_pin.hpp"

using namespace vrdma;
using namespace vrdma::agent;
using namespace vrdma::agent::test;
using control::Request;
using vm::Frame;
using vmci::Mapping;
using vmci::Writable;

namespace {

struct Served : AttachedProcess {
  explicit Served(Machine& of) : AttachedProcess(of) {
    auto mapped = Mapping::map(descriptors[1].get(), 0, sizeof(control::ServicePage), Writable::no);
    REQUIRE(mapped.has_value());
    page = std::move(*mapped);
  }
  bool told_of_death() const {
    auto& word = *reinterpret_cast<std::uint32_t*>(reinterpret_cast<control::ServicePage*>(page.data())->alive_mutex);
    return (std::atomic_ref(word).load() & FUTEX_OWNER_DIED) != 0;
  }
  Mapping page;
};

}  // namespace

TEST_CASE("What a process has shared stays pinned after its end, until the service is through with it") {
  if (!can_pin()) return;
  ServedMachine machine;
  const std::size_t rings_before = rings_open();
  std::uint32_t number;
  {
    Served served(machine);
    number = served.number;
    CHECK(rings_open() == rings_before + 1);
  }
  CHECK(machine.await(Frame::close).head.connection == number);
  CHECK(rings_open() == rings_before + 1);
  // What comes late for it does no harm.
  machine.send(Frame::stream, number, std::byte{1}, 1);
  machine.send(Frame::stream_end, number, {}, 1);
  machine.send(Frame::closed, number);
  machine.until("the memory is free", [&] { return rings_open() == rings_before; });
  machine.send(Frame::closed, number);
  Process next(machine);
  CHECK(next.number != number);
}

TEST_CASE("A request that is under way when its process ends keeps its memory pinned") {
  if (!can_pin()) return;
  ServedMachine machine;
  const std::size_t rings_before = rings_open();
  FrameIn packet{};
  {
    Served served(machine);
    std::byte page[2 * vm::page_bytes];
    auto ring = vmci::pin_pages(std::span(page));
    REQUIRE(ring.has_value());
    served.ask(Request::add_pinned, control::AddPinnedRequest{reinterpret_cast<std::uintptr_t>(page), sizeof(page), ring->get(), 0});
    packet = machine.await(Frame::packet);
  }
  machine.await(Frame::close);
  CHECK(rings_open() == rings_before + 2);  // arena and memory
  machine.reply_with(packet, control::AddBackingReply{1, 0});
  machine.send(Frame::closed, packet.head.connection);
  machine.until("the memory is free", [&] { return rings_open() == rings_before; });
}

TEST_CASE("The end of a process counts even where its child still has the connection") {
  if (!can_pin()) return;
  ServedMachine machine;
  int held[2];
  REQUIRE(::pipe(held) == 0);
  const pid_t process = ::fork();
  if (process == 0) {
    auto socket = vmci::PacketSocket::connect(machine.socket);
    if (!socket) ::_exit(1);
    if (::fork() == 0) {  // keeps the socket until the test is over
      char end;
      ::close(held[1]);
      ::_exit(static_cast<int>(::read(held[0], &end, 1)));
    }
    char go;
    ::close(held[1]);
    ::_exit(static_cast<int>(::read(held[0], &go, 1)));
  }
  ::close(held[0]);
  const FrameIn open = machine.await(Frame::open);
  CHECK(open.as<vm::Open>().pid == static_cast<std::uint32_t>(process));
  ::kill(process, SIGKILL);
  CHECK(machine.await(Frame::close).head.connection == open.head.connection);
  ::waitpid(process, nullptr, 0);
  ::close(held[1]);
}

TEST_CASE("Who was given a process's socket cannot have memory of that process translated") {
  if (!can_pin()) return;
  ServedMachine machine;
  Served served(machine);
  auto* const page = static_cast<std::byte*>(::mmap(nullptr, vm::page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  REQUIRE(page != MAP_FAILED);
  auto ring = vmci::pin_pages(std::span(page, vm::page_bytes));
  REQUIRE(ring.has_value());
  const control::AddPinnedRequest request{reinterpret_cast<std::uintptr_t>(page), vm::page_bytes, ring->get(), 0};
  const pid_t other = ::fork();
  if (other == 0) {
    served.ask(Request::add_pinned, request);
    ::_exit(0);
  }
  ++served.sequence;
  CHECK(served.reply().head.status == EPERM);
  ::waitpid(other, nullptr, 0);
  served.ask(Request::add_pinned, request);
  machine.reply_with(machine.await(Frame::packet), control::AddBackingReply{1, 0});
  CHECK(served.reply().head.status == 0);
  ::munmap(page, vm::page_bytes);
}

TEST_CASE("A process that the service is through with learns it from its socket") {
  if (!can_pin()) return;
  ServedMachine machine;
  const std::size_t rings_before = rings_open();
  Served served(machine), other(machine);
  machine.send(Frame::closed, served.number);
  CHECK(served.closed());
  machine.until("the memory is free", [&] { return rings_open() == rings_before + 1; });
  CHECK(!other.told_of_death());
  other.ask(Request::query_device);
  machine.await(Frame::packet);
}

TEST_CASE("Another service: who used the last one is told, and memory is kept until the new one has accepted the machine") {
  if (!can_pin()) return;
  ServedMachine machine;
  const std::size_t rings_before = rings_open();  // the page's
  Served served(machine);
  CHECK(!served.told_of_death());
  machine.begin_service(epoch + 1);
  machine.until("the process is told", [&] { return served.told_of_death(); });
  CHECK(served.closed());
  machine.await_boot();
  CHECK(!std::filesystem::exists(machine.socket));
  CHECK(rings_open() == rings_before + 1);
  machine.open_session();
  CHECK(rings_open() == rings_before);
  CHECK(served.told_of_death());
  Served again(machine);
  CHECK(!again.told_of_death());
}

TEST_CASE("A service whose heart stands still is lost, and asked anew when it goes on") {
  if (!can_pin()) return;
  ServedMachine machine({.patience_ns = short_patience_ns});
  Served served(machine);
  machine.heart_beats = false;
  machine.until("the process is told", [&] { return served.told_of_death(); });
  CHECK(served.closed());
  machine.await_boot();
  machine.heart_beats = true;
  machine.open_session();
  Served again(machine);
}

TEST_CASE("Nothing is written to a device that has nothing of vrdma's") {
  if (!can_pin()) return;
  Machine machine;
  for (std::uint64_t at = sizeof(vm::ServiceLine); at < vm::bar_bytes; ++at) machine.bar[at] = static_cast<std::byte>(at * 7);  // another program's, and in use
  machine.stop();  // having looked once, at least
  CHECK(machine.error().empty());
  bool same = true;
  for (std::uint64_t at = sizeof(vm::ServiceLine); at < vm::bar_bytes; ++at) same = same && machine.bar[at] == static_cast<std::byte>(at * 7);
  CHECK(same);
  CHECK(machine.last_rung() == 0);
}

TEST_CASE("A service manager is told that the agent serves, and, where there is no service, that it waits") {
  if (!can_pin()) return;
  constexpr char name[] = "\0vrdma-life-test";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::string path = std::string(name, sizeof(name) - 1) + std::to_string(::getpid());
  path.copy(address.sun_path, path.size());
  const vmci::UniqueFd manager(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  REQUIRE(::bind(manager.get(), reinterpret_cast<sockaddr*>(&address), static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size())) == 0);
  path[0] = '@';
  ::setenv("NOTIFY_SOCKET", path.c_str(), 1);
  Machine machine({.patience_ns = short_patience_ns});
  const auto await = [&](const char* text) {
    std::string said;
    machine.until("the manager is told", [&] {
      char message[512];
      const auto bytes = ::recv(manager.get(), message, sizeof(message), 0);
      if (bytes > 0) said.assign(message, static_cast<std::size_t>(bytes));
      return bytes > 0;
    });
    CHECK(said.starts_with("READY=1\nSTATUS="));
    CHECK(said.find(text) != std::string::npos);
  };
  await("waits for the host's vrdmad");
  machine.begin_service(epoch);
  machine.open_session();
  await("serves ");
  ::unsetenv("NOTIFY_SOCKET");
}

TEST_CASE("A service that breaks the protocol costs the session, not the agent") {
  if (!can_pin()) return;
  ServedMachine machine;
  const auto side = vmci::ByteSide::of(machine.bar + vm::queues_offset, vm::queues, vmci::End::attacher);
  SUBCASE("by a frame that is too long") {
    Served served(machine);
    const vm::FrameHead head{vm::frame_bytes_max + 1, static_cast<std::uint16_t>(Frame::reply), 0, served.number, 0};
    // As bytes of the stream: VmLinkEnd would not send it. Its writer is only this one's from now on.
    std::uint32_t& produced = side.mine->produced;
    const std::uint32_t at = produced & (side.out_bytes - 1);
    std::memcpy(side.out + at, &head, sizeof(head));
    std::atomic_ref(produced).store(produced + static_cast<std::uint32_t>(sizeof(head)), std::memory_order_release);
    machine.until("the process is told", [&] { return served.told_of_death(); });
  }
  SUBCASE("by a position that is nowhere") {
    Served served(machine);
    side.mine->produced += 1u << 30;
    machine.until("the process is told", [&] { return served.told_of_death(); });
  }
  SUBCASE("by an answer that nobody asked for") {
    Served served(machine);
    machine.send(Frame::reply, served.number, control::Head{});
    machine.until("the process is told", [&] { return served.told_of_death(); });
  }
  SUBCASE("by a second welcome") {
    Served served(machine);
    machine.send(Frame::welcome, 0, vm::Welcome{});
    machine.until("the process is told", [&] { return served.told_of_death(); });
  }
  SUBCASE("not by frames of a later version, or for connections that are no more") {
    machine.send(static_cast<Frame>(1000), 0);
    machine.send(static_cast<Frame>(1000), 4711);
    machine.send(Frame::closed, 4711);
    Served served(machine);
    return;
  }
  machine.open_session();
  Served again(machine);
}

TEST_CASE("A service that refuses the machine ends the agent, with a sentence that says what to do") {
  if (!can_pin()) return;
  for (const int status : {EPROTONOSUPPORT, EACCES}) {
    Machine machine;
    machine.begin_service(epoch);
    machine.open_session(status);
    machine.until("the agent ends", [&] { return !machine.running(); });
    CHECK(machine.error().find("ref") != std::string::npos);
  }
}

TEST_CASE("Where the service does not find a page, one that is below all that may have been plugged in is looked for, and waited for") {
  if (!can_pin()) return;
  Machine machine({.patience_ns = short_patience_ns});
  machine.begin_service(epoch);
  const std::uint64_t refused = machine.open_session(EFAULT).page * vm::page_bytes;
  constexpr std::uint64_t always_there = std::uint64_t{1} << 32;
  if (refused < always_there) {
    machine.until("the agent ends", [&] { return !machine.running(); });
    CHECK(machine.error().find("start the machine") != std::string::npos);
    return;
  }
  std::ifstream iomem("/proc/iomem");
  const std::uint64_t below = std::max(agent::part_begin(iomem, refused), always_there);
  for (int boots = 0; boots < 2;) {
    machine.until("the agent asks again", [&] { return machine.begun() || !machine.frames.empty(); });
    if (machine.begun()) {
      machine.accept_boot();
      ++boots;
    } else {
      CHECK(machine.await(Frame::hello).as<vm::Hello>().page * vm::page_bytes < below);
      break;
    }
  }
  CHECK(machine.running());
}

TEST_CASE("A service that has no memory of the machine yet is asked again") {
  if (!can_pin()) return;
  Machine machine({.patience_ns = short_patience_ns});
  machine.begin_service(epoch);
  machine.open_session(ENODEV);
  CHECK(!std::filesystem::exists(machine.socket));
  machine.open_session(ENODEV);
  machine.open_session();
  Served served(machine);
}

TEST_CASE("A service of another major version is not spoken to") {
  if (!can_pin()) return;
  Machine machine;
  machine.begin_service(0);
  std::atomic_ref(machine.header().service.major).store(vm::version_major + 1);
  std::atomic_ref(machine.header().service.service_epoch).store(epoch);
  machine.until("the agent ends", [&] { return !machine.running(); });
  CHECK(machine.error().find("speaks version " + std::to_string(vm::version_major + 1) + ".") != std::string::npos);
}

TEST_CASE("An agent that is stopped tells its processes, and leaves when the service has let go of their memory") {
  if (!can_pin()) return;
  ServedMachine machine;
  const std::size_t rings_before = rings_open();
  Served served(machine);
  machine.stop_without_waiting();
  machine.await_boot();
  CHECK(served.told_of_death());
  CHECK(served.closed());
  CHECK(rings_open() == rings_before + 1);
  CHECK(machine.running());
  machine.stop();
  CHECK(machine.error().empty());
  CHECK(!std::filesystem::exists(machine.socket));
  CHECK(rings_open() == rings_before - 1);  // nor the page's
}

TEST_CASE("An agent whose service is silent is stopped too") {
  if (!can_pin()) return;
  Machine machine;
  SUBCASE("before there was one") {}
  SUBCASE("that has not accepted it") {
    machine.begin_service(epoch);
    machine.await_boot();
  }
  machine.stop_without_waiting();
  machine.until("the agent leaves", [&] { return !machine.running(); });
  CHECK(machine.error().empty());
}
