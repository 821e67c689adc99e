// The service's side of virtual machines, against a machine that is only a file and a socket: what the link carries, whose memory
// is taken, and what becomes of a machine that restarts, ends or lies.
#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include <filesystem>

#include "guest_lib/test/service_fixture.hpp"
#include "tests/machine/fake_machine.hpp"
#include "vmci_channel/ready_bitmap.hpp"
#include "vmci_channel/record_ring.hpp"

namespace vrdma::test {
namespace {

using namespace control;
namespace fs = std::filesystem;
constexpr std::uint64_t ram_bytes = 64 << 20;

struct World {
  Service service;
  fs::path folder, ram;

  enum class Kind { interrupted, plain, launched };  // plain: the device is a file; launched: and the RAM comes with a launcher
  Kind kind;

  explicit World(Kind of = Kind::interrupted) : kind(of) {
    service.start();
    folder = fs::path(std::getenv("VRDMA_SOCKET")).parent_path() / "vm";
    ram = folder / "one.ram";
    fs::create_directories(folder / "one");
    std::ofstream(ram).close();
    fs::resize_file(ram, ram_bytes);
    const fs::path file = folder / "one" / "vm.json";
    nlohmann::json spec = nlohmann::json::object();
    if (kind != Kind::launched) spec["ram"] = ram;
    if (kind != Kind::interrupted) spec["plain"] = true;
    std::ofstream(file.string() + ".new") << spec;
    fs::rename(file.string() + ".new", file);
    eventually("the machine is served", [&] { return fs::exists(socket()); });
  }
  ~World() {
    service.kill_now();
    fs::remove_all(folder);
  }
  // launcher.sock is there last.
  fs::path socket() const { return folder / "one" / (kind == Kind::interrupted ? "ivshmem.sock" : "launcher.sock"); }
  fs::path link() const { return kind == Kind::interrupted ? socket() : folder / "one" / "link.bar"; }
};

// A process of a machine with its queues mapped: enough to ask for things by the control ring.
struct Process {
  FakeMachine& machine;
  std::uint32_t connection;
  std::vector<std::uint64_t> pages;
  vmci::Mapping arena;
  std::optional<AttachReply> attached;

  explicit Process(FakeMachine& m) : machine(m), connection(m.open()), pages(m.take_pages(m.welcome.arena_bytes / vm::page_bytes)), arena(m.map(pages)) {
    machine.lend(connection, vm::segment_arena, pages);
    AttachRequest request{};
    request.magic = magic;
    request.major = version_major;
    request.minor = version_minor;
    attached = machine.call<Request::attach>(connection, request);
  }
};

// By its control queue and doorbell, as a process does once it is attached.
void ask_by_queues(Process& process) {
  vmci::QueuePairView control(process.arena.data() + process.attached->control_offset, process.attached->control_geometry);
  vmci::RecordWriter requests(control.produce(), process.attached->control_geometry.produce_slots);
  vmci::RecordReader replies(control.consume_records(), process.attached->control_geometry.consume_entries);
  Head head{};
  head.sequence = 99;
  requests.write(sizeof(RecordHead), std::as_bytes(std::span(&head, 1)).subspan(sizeof(RecordHead)));
  requests.publish(address_of(host_context, control_port), 0, static_cast<std::uint32_t>(Request::query_device), 1);
  vmci::ReadyBitmap(reinterpret_cast<vmci::ReadyWords*>(process.arena.data() + process.attached->doorbell_offset)).set(0);
  process.machine.ring(vm::doorbell_vector);
  alignas(64) std::byte record[record_slots_max * slot_bytes];
  std::uint32_t slots = 0;
  REQUIRE(process.machine.wait([&] { return replies.peek(record, record_slots_max, slots) == vmci::RecordReader::Peek::ready; }));
  std::memcpy(&head, record, sizeof(head));
  CHECK(head.sequence == 99);
  CHECK(head.status == 0);
}

TEST_CASE("a machine says hello, its processes attach with queues in its RAM, and leave nothing behind") {
  World world;
  for (const std::uint64_t high_bytes : {std::uint64_t{0}, ram_bytes / 2}) {
    FakeMachine machine(world.socket(), world.ram, /*seed=*/7 + high_bytes, high_bytes);
    REQUIRE(machine.connected());
    REQUIRE(machine.begin_session());
    REQUIRE(machine.greet() == 0);
    CHECK(std::string(machine.welcome.name) == "one");
    Process process(machine);
    REQUIRE_MESSAGE(process.attached, process.machine.status);
    CHECK(process.attached->arena_bytes == machine.welcome.arena_bytes);

    // A pipe of the service is a stream here, and the control ring is found where the reply says.
    const auto context = machine.call<Request::open_context>(process.connection, {});
    REQUIRE(context);
    CHECK(machine.first_stream != 0);
    ask_by_queues(process);

    machine.link().send(vm::Frame::close, process.connection, std::span<const std::byte>{});
    CHECK(machine.await(vm::Frame::closed, process.connection));
  }
}

TEST_CASE("memory that a machine lends must be its own, and all of it there when it is used") {
  World world;
  FakeMachine machine(world.socket(), world.ram, 3);
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  Process process(machine);
  REQUIRE_MESSAGE(process.attached, process.machine.status);

  const auto pages = machine.take_pages(5);
  machine.lend(process.connection, 16, pages);
  const auto added = machine.call<Request::add_pinned>(process.connection, {0x10000100, 4 * 4096, 0, 16});
  REQUIRE(added);
  CHECK(machine.call<Request::remove_backing>(process.connection, {added->backing, 0}));
  CHECK(!machine.call<Request::queue_pair_alloc>(process.connection, {}));  // its descriptors do not get there
  CHECK(machine.status == EOPNOTSUPP);
  CHECK(!machine.call<Request::add_pinned>(process.connection, {0x10000000, 4096, 0, 16}));  // used up
  CHECK(machine.status == EINVAL);
  machine.lend(process.connection, 17, pages);
  CHECK(!machine.call<Request::add_pinned>(process.connection, {0x10000001, 5 * 4096, 0, 17}));  // one page short
  CHECK(machine.status == EINVAL);

  const vm::Run beyond{ram_bytes / vm::page_bytes - 1, 2};
  machine.link().send(vm::Frame::segment, process.connection, beyond, 18);
  CHECK(!machine.call<Request::add_pinned>(process.connection, {0x10000000, 4096, 0, 18}));
  CHECK(machine.status == EIO);  // no session any more
  CHECK(machine.begin_session());
  CHECK(machine.greet() == 0);
}

TEST_CASE("a machine that is reset has lost its guests before its memory is used anew") {
  World world;
  FakeMachine machine(world.socket(), world.ram, 12);
  vmci::UniqueFd monitor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, (world.folder / "one" / "monitor.sock").c_str(), sizeof(address.sun_path) - 1);
  REQUIRE(::connect(monitor.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  const auto says = [&](std::string_view text) { REQUIRE(::send(monitor.get(), text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size())); };
  says("{\"QMP\": {\"version\": {}}}\r\n{\"return\": {}}\r\n");
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  Process process(machine);
  REQUIRE(process.attached);
  says("{\"event\": \"STOP\"}\r\nno JSON\r\n{\"timestamp\": {}, \"eve");
  CHECK(machine.call<Request::open_context>(process.connection, {}));
  says("nt\": \"RESET\", \"data\": {\"guest\": true}}\r\n");
  CHECK(!machine.call<Request::open_context>(process.connection, {}));
  CHECK(machine.status == EIO);
  REQUIRE(machine.begin_session());  // its next boot
  CHECK(machine.greet() == 0);
}

TEST_CASE("a machine that can interrupt nobody is served; when its heart stands still it is forgotten, and finds that out") {
  World world(World::Kind::plain);
  FakeMachine machine(world.link(), world.ram, 21);
  REQUIRE(machine.connected());
  REQUIRE((std::atomic_ref(machine.header().service.flags).load() & vm::service_polls) != 0);
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  {
    Process process(machine);
    REQUIRE_MESSAGE(process.attached, process.machine.status);
    ask_by_queues(process);
    machine.heart_beats = false;
    REQUIRE(machine.wait([&] { return std::atomic_ref(machine.header().service.accepted).load(std::memory_order_acquire) == 0; }, 60000));
    CHECK(!machine.has(vm::Frame::closed, process.connection));
    machine.give_back(process.pages);
  }
  // It goes on, with another session.
  machine.heart_beats = true;
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  Process process(machine);
  REQUIRE(process.attached);
  ask_by_queues(process);
}

TEST_CASE("a plain machine that is cut off from its link harms nobody else") {
  World world(World::Kind::plain);
  Device host;
  FakeMachine machine(world.link(), world.ram, 22);
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  fs::resize_file(world.link(), 0);
  ibv_port_attr port{};
  for (int asked = 0; asked < 100; ++asked) REQUIRE(ibv_query_port(host.context, 1, &port) == 0);
}

// As `vrdma vm uml`.
vmci::UniqueFd launch(const fs::path& path, int ram) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  vmci::UniqueFd launcher(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(::connect(launcher.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  char word = 1;
  iovec data{&word, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  *CMSG_FIRSTHDR(&message) = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
  std::memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), &ram, sizeof(ram));
  REQUIRE(::sendmsg(launcher.get(), &message, MSG_NOSIGNAL) == 1);
  return launcher;
}

TEST_CASE("a launcher brings the memory of its machine, and its end is the machine's") {
  World world(World::Kind::launched);
  const auto ram = vmci::Segment::create("ram", ram_bytes);
  REQUIRE(ram.has_value());
  const std::string path = "/proc/self/fd/" + std::to_string(ram->fd());
  for (std::uint64_t boots = 0; boots < 3; ++boots) {
    FakeMachine machine(world.link(), path, 31 + boots);
    auto launcher = launch(world.socket(), ram->fd());
    REQUIRE(machine.begin_session());
    REQUIRE(machine.greet() == 0);
    Process process(machine);
    REQUIRE(process.attached);
    ask_by_queues(process);
    launcher.reset();
    REQUIRE(machine.wait([&] { return std::atomic_ref(machine.header().service.accepted).load(std::memory_order_acquire) == 0; }));
  }
  // Nothing but memory is taken for memory, and who brings none is not it.
  const vmci::UniqueFd other(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  auto liar = launch(world.socket(), other.get());
  pollfd hung_up{liar.get(), POLLIN, 0};
  CHECK(::poll(&hung_up, 1, 5000) == 1);
  FakeMachine machine(world.link(), path, 41);
  REQUIRE(machine.begin_session());
  CHECK(machine.greet() == ENODEV);
}

TEST_CASE("a machine sees what is its own") {
  World world;
  Device host;
  FakeMachine machine(world.socket(), world.ram, 4);
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  Process process(machine);
  REQUIRE(process.attached);
  const auto shown_to = [&](std::uint32_t uid) {
    const std::uint32_t tool = machine.open(uid);
    REQUIRE(machine.call<Request::show>(tool, {}));
    std::string text;
    for (auto part = machine.await(vm::Frame::stream, tool); part; part = machine.await(vm::Frame::stream, tool, 50))
      text.append(reinterpret_cast<const char*>(part->body.data()), part->body.size());
    return nlohmann::json::parse(text);
  };
  for (const std::uint32_t uid : {0u, 1000u}) {
    const auto shown = shown_to(uid);
    REQUIRE(shown["guests"].size() == 1);  // not the host's
    CHECK(shown["guests"][0]["machine"] == "one");
    CHECK(shown["vms"].size() == 1);
    CHECK(shown["tenants"].empty());
  }
  CHECK(shown_to(1001)["guests"].empty());
}

TEST_CASE("a session that begins anew, and a machine that ends, take their guests along") {
  World world;
  Device host;  // a process of the host, whose service goes on
  auto machine = std::make_unique<FakeMachine>(world.socket(), world.ram, 5);
  for (int boots = 0; boots < 20; ++boots) {
    REQUIRE(machine->begin_session());
    REQUIRE(machine->greet() == 0);
    const Process process(*machine);
    REQUIRE_MESSAGE(process.attached, process.machine.status);
    machine->give_back(process.pages);
  }
  machine = std::make_unique<FakeMachine>(world.socket(), world.ram, 6);  // before the service has seen the end of the other
  if (!machine->connected()) machine = std::make_unique<FakeMachine>(world.socket(), world.ram, 6);
  ibv_port_attr port{};
  CHECK(ibv_query_port(host.context, 1, &port) == 0);
}

TEST_CASE("a machine whose RAM file is cut off under it harms nobody else") {
  World world;
  Device host;
  FakeMachine machine(world.socket(), world.ram, 9);
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  const Process process(machine);
  REQUIRE(process.attached);
  fs::resize_file(world.ram, 0);
  machine.ring(vm::doorbell_vector);
  for (int i = 0; i < 100; ++i) machine.call<Request::query_device>(process.connection, {});
  ibv_port_attr port{};
  CHECK(ibv_query_port(host.context, 1, &port) == 0);
  fs::resize_file(world.ram, ram_bytes);
}

TEST_CASE("who cannot show that the service sees its memory is refused") {
  World world;
  FakeMachine machine(world.socket(), world.ram, 5);
  REQUIRE(machine.begin_session());
  CHECK(machine.greet(/*proof_offset=*/8) == EFAULT);
}

}  // namespace
}  // namespace vrdma::test
