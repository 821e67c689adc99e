// A machine that stands still, is saved to a file, and comes back, or does not.
#include "tests/machine/world.hpp"

namespace vrdma::test {
namespace {

using namespace control;

// A machine with a process, that is to be saved.
struct Saved {
  World world;
  FakeMachine machine{world.socket(), world.ram, 21};
  std::unique_ptr<Monitor> monitor = std::make_unique<Monitor>(world);
  std::unique_ptr<Process> process;
  const std::uint64_t generation_offset, epoch;

  explicit Saved(const std::string& configuration = "{}")
      : world(World::Kind::interrupted, configuration), generation_offset(attach()), epoch(machine.service_epoch()) {}
  std::uint64_t attach() {
    REQUIRE(machine.begin_session());
    REQUIRE(machine.greet() == 0);
    process = std::make_unique<Process>(machine);
    REQUIRE(process->attached);
    return machine.service_page() * vm::page_bytes + offsetof(ServicePage, machine_generation);
  }
  std::uint64_t generation() const {
    std::uint64_t value = 0;
    machine.read_ram(generation_offset, &value, sizeof(value));
    return value;
  }
  void until_frozen(std::uint64_t before) {
    eventually("the machine is frozen", [&] { return generation() != before; });
  }
  // Nothing of the machine is left but its place, if that is.
  void until_given_up() {
    eventually("its guests have gone", [&] { return World::shown()["guests"].empty(); });
    eventually("its memory is unmapped", [&] { return !world.ram_mapped(); });
    const auto shown = World::shown();
    for (const auto& tenant : shown["tenants"])
      for (const char* what : {"guests", "objects", "registered_bytes", "queue_bytes"}) CHECK_MESSAGE(tenant[what] == 0, what);
    CHECK(shown["counters"]["regions"] == 0);
  }
  std::string state() const {
    const auto shown = World::shown();
    return shown["vms"].empty() ? "" : shown["vms"][0]["state"].get<std::string>();
  }
  bool opens_context() { return machine.call<Request::open_context>(process->connection, {}).has_value(); }
  // As QEMU tells that saves it to a file; copies_at_s: when the first page went out.
  void save(std::int64_t copies_at_s) {
    const std::uint64_t before = generation();
    monitor->event("STOP");
    until_frozen(before);
    monitor->migration("setup", copies_at_s);
    monitor->migration("active", copies_at_s);
    monitor->migration("completed", copies_at_s);
    machine.end();
    monitor.reset();
  }
  void restore() {
    machine.come_back(world.socket());
    monitor = std::make_unique<Monitor>(world);
    monitor->runs_as("inmigrate");
    monitor->migration("active", later_s);
    monitor->event("RESUME");
    monitor->migration("completed", later_s);
  }
  template <class Act>
  void session_is_over_after(const Act& act) {
    act();
    eventually("an agent finds another service", [&] { return machine.service_epoch() != epoch; });
    // As an agent, which begins again where it finds yet another one.
    int tries = 40;
    while (!machine.begin_session(250) && --tries > 0) continue;
    CHECK(tries > 0);
    CHECK(machine.greet() == 0);
  }
  static constexpr std::int64_t later_s = 1ll << 40, earlier_s = 1;
};

TEST_CASE("a machine that stands still is not heard, and goes on as if nothing had been") {
  Saved saved;
  for (int times = 0; times < 3; ++times) {
    const std::uint64_t before = saved.generation();
    saved.monitor->event("STOP");
    saved.until_frozen(before);
    const std::uint32_t another = saved.machine.open();
    saved.machine.lend(another, vm::segment_first, {0});
    CHECK(!saved.machine.wait([&] { return saved.machine.all_taken(); }, 300));
    saved.monitor->event("RESUME");
    CHECK(saved.machine.wait([&] { return saved.machine.all_taken(); }));
    CHECK(saved.opens_context());
    CHECK(saved.machine.service_epoch() == saved.epoch);
  }
}

TEST_CASE("a machine that was saved is kept, and goes on where it comes back as it was") {
  Saved saved;
  for (int times = 0; times < 3; ++times) {
    saved.save(Saved::later_s);
    saved.restore();
    CHECK(saved.opens_context());
    CHECK(saved.machine.service_epoch() == saved.epoch);
  }
}

TEST_CASE("a machine that was written to while it was saved is not kept") {
  Saved saved;
  saved.save(Saved::earlier_s);
  saved.session_is_over_after([&] { saved.restore(); });
}

TEST_CASE("a machine that comes back as it was at another time is another one") {
  Saved saved;
  saved.save(Saved::later_s);
  const std::uint64_t other = saved.generation() + 1;
  saved.machine.write_ram(saved.generation_offset, &other, sizeof(other));
  saved.session_is_over_after([&] { saved.restore(); });
}

TEST_CASE("a machine that is loaded into a QEMU that runs is another one") {
  Saved saved;
  const std::uint64_t then = saved.generation();
  saved.monitor->event("STOP");
  saved.until_frozen(then);
  saved.machine.write_ram(saved.generation_offset, &then, sizeof(then));
  saved.session_is_over_after([&] { saved.monitor->event("RESUME"); });
}

TEST_CASE("a machine that boots anew in place of one that was saved is another one") {
  Saved saved;
  saved.save(Saved::later_s);
  saved.session_is_over_after([&] {
    saved.machine.come_back(saved.world.socket());
    saved.monitor = std::make_unique<Monitor>(saved.world);
    saved.monitor->runs_as("running");
  });
}

TEST_CASE("a machine that boots anew in place of one that was saved is served without a monitor, too") {
  Saved saved;
  saved.save(Saved::later_s);
  saved.machine.come_back(saved.world.socket());
  CHECK(saved.machine.begin_session());
  CHECK(saved.machine.greet() == 0);
}

TEST_CASE("a machine that was saved and does not come back in time is given up, and is another one when it comes") {
  Saved saved(R"({"machine_keep_s": 1})");
  REQUIRE(saved.world.ram_mapped());
  saved.save(Saved::later_s);
  eventually("its time is over", [&] { return saved.state() == "waiting"; });
  saved.until_given_up();
  saved.session_is_over_after([&] { saved.restore(); });
  const Process process(saved.machine);
  CHECK_MESSAGE(process.attached, process.machine.status);
}

TEST_CASE("a machine that comes back in time is not given up afterwards") {
  Saved saved(R"({"machine_keep_s": 5})");
  saved.save(Saved::later_s);
  saved.restore();
  const auto over = Clock::now() + std::chrono::milliseconds(5500);  // that the time passes is what is tried
  saved.machine.wait([&] { return saved.machine.service_epoch() != saved.epoch || Clock::now() > over; }, 60000);
  CHECK(saved.opens_context());
  CHECK(saved.machine.service_epoch() == saved.epoch);
}

TEST_CASE("a machine that was saved is not kept where the configuration says so") {
  Saved saved(R"({"machine_keep_s": 0})");
  saved.save(Saved::later_s);
  eventually("it is away", [&] { return saved.state() == "waiting"; });
  saved.until_given_up();
  saved.session_is_over_after([&] { saved.restore(); });
}

TEST_CASE("a machine that is removed while it is saved is given up, with its place") {
  Saved saved;
  Device host;  // goes on
  saved.save(Saved::later_s);
  eventually("it is kept", [&] { return saved.state() == "suspended"; });
  CHECK(saved.world.ram_mapped());
  fs::remove(saved.world.folder / "one" / "vm.json");
  eventually("it is removed", [&] { return World::shown()["vms"].empty(); });
  eventually("its guests have gone", [&] { return World::shown()["guests"].size() == 1; });
  eventually("its memory is unmapped", [&] { return !saved.world.ram_mapped(); });
  CHECK(!fs::exists(saved.world.folder / "one"));
  ibv_port_attr port{};
  CHECK(ibv_query_port(host.context, 1, &port) == 0);
}

}  // namespace
}  // namespace vrdma::test
