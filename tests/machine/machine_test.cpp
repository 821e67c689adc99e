// The service's side of virtual machines, against a machine that is only a file and a socket: what the link carries, whose memory
// is taken, and what becomes of a machine that restarts, ends or lies.
#include "tests/machine/world.hpp"

#include <sched.h>
#include <sys/mount.h>

#include "vmci_channel/descriptor_passing.hpp"

namespace vrdma::test {
namespace {

using namespace control;

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

TEST_CASE("memory that was plugged into a machine is not taken for its RAM file's") {
  World world;
  FakeMachine machine(world.socket(), world.ram, 17);
  machine.plugged_bytes = std::uint64_t{128} << 20;
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  CHECK(machine.welcome.ram.low_bytes == ram_bytes);
  CHECK(machine.welcome.ram.high_bytes == 0);
  Process process(machine);
  CHECK(process.attached);
}

TEST_CASE("a channel of a machine's process has a ring for its events where the machine can be interrupted for it") {
  constexpr std::uint32_t vectors = 4;
  World world(World::Kind::interrupted, "{}", {}, vectors);
  FakeMachine machine(world.socket(), world.ram, 31, 0, vectors);
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  CHECK(std::atomic_ref(machine.header().service.vectors).load() == vectors);
  Process process(machine);
  REQUIRE_MESSAGE(process.attached, process.machine.status);
  const auto context = machine.call<Request::open_context>(process.connection, {});
  REQUIRE(context);
  for (const std::uint32_t vector : {vm::doorbell_vector, vectors, ~0u}) {
    CHECK(!machine.call<Request::create_channel>(process.connection, {context->context, vector}));
    CHECK(machine.status == EINVAL);
  }
  const auto by_pipe = machine.call<Request::create_channel>(process.connection, {context->context, 0});
  REQUIRE(by_pipe);
  CHECK(by_pipe->ring == 0);
  for (std::uint32_t vector = vm::fixed_vectors; vector < vectors; ++vector) {
    const auto channel = machine.call<Request::create_channel>(process.connection, {context->context, vector});
    REQUIRE(channel);
    CHECK(machine.first_stream != 0);  // its end is still told by a pipe
    REQUIRE(channel->ring != 0);
    const std::uint64_t offset = std::uint64_t{channel->ring} * ring_unit_bytes;
    REQUIRE(offset <= process.attached->arena_bytes - sizeof(EventRing));
    const auto& ring = *reinterpret_cast<const EventRing*>(process.arena.data() + offset);
    CHECK(ring.news == 0);
    CHECK(ring.consumed == 0);
  }
  machine.clog();
  ask_by_queues(process);  // nobody waits for this machine
  REQUIRE(machine.begin_session());  // whatever there was goes in order
  CHECK(machine.greet() == 0);
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
  machine.call_patience_ms = 3000;  // nobody answers
  CHECK(!machine.call<Request::add_pinned>(process.connection, {0x10000000, 4096, 0, 18}));
  CHECK(machine.status == EIO);  // no session any more
  CHECK(machine.begin_session());
  CHECK(machine.greet() == 0);
}

TEST_CASE("a machine that is reset has lost its guests before its memory is used anew") {
  World world;
  FakeMachine machine(world.socket(), world.ram, 12);
  const Monitor monitor(world);
  const auto says = [&](std::string_view text) { monitor.says(text); };
  says("{\"QMP\": {\"version\": {}}}\r\n{\"return\": {}}\r\n");
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  Process process(machine);
  REQUIRE(process.attached);
  says("{\"event\": \"POWERDOWN\"}\r\nno JSON\r\n{\"timestamp\": {}, \"eve");
  CHECK(machine.call<Request::open_context>(process.connection, {}));
  says("nt\": \"RESET\", \"data\": {\"guest\": true}}\r\n");
  machine.call_patience_ms = 3000;  // nobody answers
  CHECK(!machine.call<Request::open_context>(process.connection, {}));
  CHECK(machine.status == EIO);
  REQUIRE(machine.begin_session());  // its next boot
  CHECK(machine.greet() == 0);
}

TEST_CASE("a machine that runs is found again by a service that is started anew, however the one before ended") {
  World world;
  const fs::path keeper = world.folder / "keeper.sock";
  {
    FakeMachine machine(world.socket(), world.ram, 23);
    REQUIRE(machine.connected());
    const Monitor monitor(world);
    for (const int signal : {SIGKILL, SIGTERM, SIGKILL}) {
      REQUIRE(machine.begin_session());
      REQUIRE(machine.greet() == 0);
      {
        Process process(machine);
        REQUIRE_MESSAGE(process.attached, machine.status);
        ask_by_queues(process);
        machine.give_back(process.pages);
      }
      const std::uint64_t epoch = machine.service_epoch();
      world.service.kill_now(signal);
      world.service.start();
      REQUIRE(machine.wait([&] { return machine.service_epoch() != epoch; }, 60000));
    }
    // So is its monitor.
    REQUIRE(machine.begin_session());
    REQUIRE(machine.greet() == 0);
    const std::uint64_t epoch = machine.service_epoch();
    monitor.event("RESET");
    CHECK(machine.wait([&] { return machine.service_epoch() != epoch; }, 60000));
    CHECK(fs::exists(keeper));
  }
  eventually("what was kept is given up with the machine", [&] { return !fs::exists(keeper); });
  // The next one is another one.
  FakeMachine machine(world.socket(), world.ram, 24);
  REQUIRE(machine.begin_session());
  CHECK(machine.greet() == 0);
  fs::remove(world.folder / "one" / "vm.json");
  eventually("what was kept is given up with its registration", [&] { return !fs::exists(keeper); });
}

TEST_CASE("a process whose queues do not fit into what it has lent is told so, and goes on with those that it has") {
  const fs::path log = fs::temp_directory_path() / ("vrdma-machine-test-" + std::to_string(::getpid()) + ".log");
  {
    World world(World::Kind::interrupted, nlohmann::json{{"machine_arena_bytes", 1 << 20}, {"log_file", log}}.dump());
    FakeMachine machine(world.socket(), world.ram, 37);
    REQUIRE(machine.begin_session());
    REQUIRE(machine.greet() == 0);
    Process process(machine);
    REQUIRE_MESSAGE(process.attached, process.machine.status);
    const auto context = machine.call<Request::open_context>(process.connection, {});
    REQUIRE(context);
    ControlQueue control(process);
    std::vector<std::uint32_t> queues;
    CreateCqReply made{};
    const auto make = [&] { return control.ask<Request::create_cq>({context->context, 64, 0, 0}, &made); };
    int status = 0;
    while ((status = make()) == 0 && queues.size() < 1000) queues.push_back(made.cq);
    CHECK(status == ENOMEM);
    REQUIRE(queues.size() > 10);
    CHECK(make() == ENOMEM);
    // What it gives back it can have again.
    CHECK(control.ask<Request::destroy_cq>({queues.back(), 0}) == 0);
    CHECK(make() == 0);
    CHECK(make() == ENOMEM);
    machine.link().send(vm::Frame::close, process.connection, std::span<const std::byte>{});
    CHECK(machine.await(vm::Frame::closed, process.connection));
    CHECK(World::shown()["guests"].empty());
  }
  std::ifstream in(log);
  std::size_t said = 0;
  for (std::string line; std::getline(in, line);) said += line.find("machine_arena_bytes") != line.npos && line.find("machine one") != line.npos;
  CHECK(said == 1);
  fs::remove(log);
}

TEST_CASE("two services do not serve the same machines") {
  World world;
  FakeMachine machine(world.socket(), world.ram, 27);
  REQUIRE(machine.connected());
  const std::string other = "timeout -s KILL 60 '" VRDMAD_PATH "' --socket '" + (world.folder / "other.sock").string() + "' --vm-folder '" + world.folder.string() + "' 2>&1";
  FILE* const second = ::popen(other.c_str(), "re");
  REQUIRE(second != nullptr);
  std::string said;
  for (int c; (c = std::fgetc(second)) != EOF;) said += static_cast<char>(c);
  const int status = ::pclose(second);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 1));
  CHECK_MESSAGE(said.find("process " + std::to_string(world.service.pid())) != said.npos, said);
  CHECK_MESSAGE(said.find("--vm-folder") != said.npos, said);
  // The first one's sockets are there, and its successor has the folder for itself.
  CHECK(fs::exists(world.socket()));
  REQUIRE(machine.begin_session());
  CHECK(machine.greet() == 0);
  world.service.kill_now();
  const std::uint64_t epoch = machine.service_epoch();
  world.service.start();
  CHECK(machine.wait([&] { return machine.service_epoch() != epoch; }));
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
    const std::uint64_t epoch = machine.service_epoch();
    REQUIRE(machine.wait([&] { return machine.service_epoch() != epoch; }, 60000));
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

TEST_CASE("a machine of which nobody tells is left alone while its agent is silent, and goes on when that is heard, or ends for another agent") {
  for (const auto kind : {World::Kind::plain, World::Kind::interrupted}) {
    CAPTURE(static_cast<int>(kind));
    World world(kind);
    FakeMachine machine(world.link(), world.ram, 23);
    REQUIRE(machine.begin_session());
    REQUIRE(machine.greet() == 0);
    const std::uint64_t epoch = machine.service_epoch();
    const auto state = [] { return World::shown()["vms"][0]["state"].get<std::string>(); };
    {
      Process process(machine);
      REQUIRE(process.attached);
      ControlQueue queue(process);
      const auto answered = [&] { return queue.ask<Request::query_device>({}) == 0; };
      for (int times = 0; times < 2; ++times) {
        CHECK(answered());
        eventually("it is left alone", [&] { return state() == "paused"; });
        eventually("it goes on", [&] {
          machine.beat();
          return state() == "attached";
        });
        CHECK(answered());
        CHECK(machine.service_epoch() == epoch);
      }
      // It boots anew, and its next agent comes before its heart is missed for good.
      eventually("it is left alone once more", [&] { return state() == "paused"; });
      REQUIRE(machine.begin_session());
      machine.give_back(process.pages);
    }
    CHECK(machine.service_epoch() == epoch);
    REQUIRE(machine.greet() == 0);
    Process process(machine);
    REQUIRE(process.attached);
    ask_by_queues(process);
  }
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
  const std::byte word{1};
  REQUIRE(vmci::send_with_descriptors(launcher.get(), std::span(&word, 1), std::span(&ram, 1)).has_value());
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
    const std::uint64_t epoch = machine.service_epoch();
    launcher.reset();
    REQUIRE(machine.wait([&] { return machine.service_epoch() != epoch; }));
  }
  // Nothing but memory is taken for memory, and who brings none is not it.
  const vmci::UniqueFd other(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  auto liar = launch(world.socket(), other.get());
  pollfd hung_up{liar.get(), POLLIN, 0};
  CHECK(::poll(&hung_up, 1, 60000) == 1);
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
    REQUIRE(machine.await(vm::Frame::stream_end, tool));  // what comes before it has come
    std::string text;
    for (auto part = machine.await(vm::Frame::stream, tool, 0); part; part = machine.await(vm::Frame::stream, tool, 0))
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

TEST_CASE("of two QEMUs that want to be one machine the second is told so, and ends") {
  World world;
  FakeMachine machine(world.socket(), world.ram, 26);
  REQUIRE(machine.connected());
  vmci::UniqueFd second(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, world.socket().c_str(), sizeof(address.sun_path) - 1);
  REQUIRE(::connect(second.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  // QEMU ends at a version that is not 0; at the end of the file before its number it would read on for ever.
  std::int64_t version = 0;
  REQUIRE(::recv(second.get(), &version, sizeof(version), MSG_WAITALL) == sizeof(version));
  CHECK(version == -EBUSY);
  CHECK(::recv(second.get(), &version, sizeof(version), 0) == 0);
  REQUIRE(machine.begin_session());
  CHECK(machine.greet() == 0);
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

// Lets the kernel make a few huge pages of ordinary memory, as long as this lives.
class LentHugePages {
 public:
  LentHugePages() {
    std::ifstream(file) >> before_;
    std::ofstream(file) << before_ + 4;
  }
  ~LentHugePages() { std::ofstream(file) << before_; }
  LentHugePages(const LentHugePages&) = delete;
  LentHugePages& operator=(const LentHugePages&) = delete;

 private:
  static constexpr const char* file = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";
  std::uint64_t before_ = 0;
};

// A hugetlbfs that this process and its children see, with a file that can be mapped; `file` is empty where that cannot be had.
class OwnHugePages {
 public:
  explicit OwnHugePages(std::uint64_t bytes) {
    fs::create_directory(folder_);
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("vrdma", folder_.c_str(), "hugetlbfs", 0, "pagesize=2M") != 0)
      return;
    mounted_ = true;
    const vmci::UniqueFd ram(::open((folder_ / "ram").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!ram || ::ftruncate(ram.get(), static_cast<off_t>(bytes)) != 0) return;
    void* const all = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ram.get(), 0);
    if (all == MAP_FAILED) return;
    ::munmap(all, bytes);
    file = folder_ / "ram";
  }
  ~OwnHugePages() {
    if (mounted_) ::umount2(folder_.c_str(), MNT_DETACH);
    ::rmdir(folder_.c_str());
  }
  OwnHugePages(const OwnHugePages&) = delete;
  OwnHugePages& operator=(const OwnHugePages&) = delete;
  fs::path file;

 private:
  const fs::path folder_ = fs::temp_directory_path() / ("vrdma-huge-pages-" + std::to_string(::getpid()));
  bool mounted_ = false;
};

TEST_CASE("RAM on larger pages than queues have room for is refused when the agent greets") {
  constexpr std::uint64_t huge = 2 << 20;
  const LentHugePages lent;
  const OwnHugePages ram(2 * huge);
  if (ram.file.empty()) {
    MESSAGE("SKIP: no huge pages can be had here: ", std::strerror(errno));
    return;
  }
  for (const auto& [configuration, status] : {std::pair{R"({"machine_arena_bytes": 1048576})", EINVAL},
                                              std::pair{R"({"machine_arena_bytes": 2097152})", EFAULT}}) {  // what it shows is looked at: nothing
    World world(World::Kind::interrupted, configuration, ram.file);
    FakeMachine machine(world.socket(), world.ram, 51);
    REQUIRE(machine.begin_session());
    CHECK(machine.greet() == status);
    eventually("the service has none of it mapped", [&] { return !world.ram_mapped(); });
  }
}

TEST_CASE("what stands in the place of a machine's RAM and is a link to other memory is not mapped") {
  World world;
  const fs::path other = world.folder / "other.ram";
  fs::rename(world.ram, other);
  fs::create_symlink(other, world.ram);
  FakeMachine machine(world.socket(), world.ram, 15);
  REQUIRE(machine.begin_session());
  CHECK(machine.greet() == ENODEV);
  fs::rename(other, world.ram);
  REQUIRE(machine.begin_session());
  CHECK(machine.greet() == 0);
}

TEST_CASE("who cannot show that the service sees its memory is refused") {
  World world;
  FakeMachine machine(world.socket(), world.ram, 5);
  REQUIRE(machine.begin_session());
  CHECK(machine.greet(/*proof_offset=*/8) == EFAULT);
}

}  // namespace
}  // namespace vrdma::test
