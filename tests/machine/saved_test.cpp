// A machine that stands still, is saved to a file, and comes back, or does not.
#include "tests/machine/world.hpp"

namespace vrdma::test {
namespace {

using namespace control;

// A machine with a process, that is to be saved.
struct Saved {
  World world;
  FakeMachine machine;
  std::unique_ptr<Monitor> monitor = std::make_unique<Monitor>(world);
  std::unique_ptr<Process> process;
  const std::uint64_t generation_offset, epoch;
  std::uint64_t saved_generation = 0;

  explicit Saved(const std::string& configuration = "{}", std::uint32_t vectors = 0)
      : world(World::Kind::interrupted, configuration, {}, vectors),
        machine(world.socket(), world.ram, 21, 0, vectors != 0 ? vectors : vm::fixed_vectors), generation_offset(attach()), epoch(machine.service_epoch()) {}
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
    end();
  }
  void end() {
    saved_generation = generation();
    machine.end();
    monitor.reset();
  }
  // Another QEMU, and what the file brings back of its memory.
  void load() {
    machine.come_back(world.socket());
    machine.write_ram(generation_offset, &saved_generation, sizeof(saved_generation));
  }
  void restore() {
    load();
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
  // Its next session takes nothing of this one over.
  REQUIRE(saved.machine.begin_session());
  CHECK(saved.machine.greet() == 0);
  CHECK(Process(saved.machine).attached);
}

TEST_CASE("a machine that was written to while it was saved is not kept") {
  Saved saved;
  saved.save(Saved::earlier_s);
  saved.session_is_over_after([&] { saved.restore(); });
}

TEST_CASE("a machine that comes back as it was at another time is another one") {
  Saved saved;
  saved.save(Saved::later_s);
  ++saved.saved_generation;
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

TEST_CASE("a machine whose loading nobody heard of is known by what was loaded") {
  Saved saved;
  for (const char* state : {"running", "paused", ""}) {
    saved.save(Saved::later_s);
    saved.load();
    saved.monitor = std::make_unique<Monitor>(saved.world);
    if (*state != 0) saved.monitor->runs_as(state);
    if (state != std::string("running")) saved.monitor->event("RESUME");
    CHECK(saved.opens_context());
    CHECK(saved.machine.service_epoch() == saved.epoch);
  }
}

TEST_CASE("a machine that comes back without a monitor is given up in time") {
  Saved saved(R"({"machine_keep_s": 1})");
  saved.save(Saved::later_s);
  saved.session_is_over_after([&] { saved.load(); });
}

TEST_CASE("a machine that comes back with a monitor that says nothing is given up in time") {
  Saved saved(R"({"machine_keep_s": 1})");
  saved.save(Saved::later_s);
  saved.session_is_over_after([&] {
    saved.load();
    saved.monitor = std::make_unique<Monitor>(saved.world);
  });
}

TEST_CASE("a machine that comes back without a monitor is another one when its agent is seen to live") {
  Saved saved;
  saved.save(Saved::later_s);
  saved.session_is_over_after([&] {
    saved.load();
    saved.machine.wait([&] { return saved.machine.service_epoch() != saved.epoch; });
  });
}

TEST_CASE("a machine that stands still when its monitor goes is another one when its agent is seen to live") {
  Saved saved;
  const std::uint64_t before = saved.generation();
  saved.monitor->event("STOP");
  saved.until_frozen(before);
  saved.session_is_over_after([&] {
    saved.monitor.reset();
    saved.machine.wait([&] { return saved.machine.service_epoch() != saved.epoch; });
  });
}

TEST_CASE("a machine that was frozen when QEMU answered was saved well, whatever the clock says") {
  Saved saved;
  for (int times = 0; times < 2; ++times) {
    const std::uint64_t before = saved.generation();
    saved.monitor->event("STOP");
    saved.until_frozen(before);
    saved.monitor->answers();
    for (const char* status : {"setup", "active", "completed"}) saved.monitor->migration(status, Saved::earlier_s);
    saved.end();
    saved.restore();
    CHECK(saved.opens_context());
    CHECK(saved.machine.service_epoch() == saved.epoch);
  }
}

TEST_CASE("a machine that stops and goes on without end costs no more than one that does it now and then") {
  constexpr std::uint32_t vector = vm::fixed_vectors;
  Saved saved("{}", vector + 1);
  Device host;  // whose service goes on
  const auto context = saved.machine.call<Request::open_context>(saved.process->connection, {});
  REQUIRE(context);
  REQUIRE(saved.machine.call<Request::create_channel>(saved.process->connection, {context->context, vector}));
  std::string times_500;
  for (int i = 0; i < 500; ++i) times_500 += "{\"event\": \"STOP\"}\n{\"event\": \"RESUME\"}\n";
  constexpr std::uint64_t rounds = 40;
  const auto begin = Clock::now();
  ibv_port_attr port{};
  for (std::uint64_t round = 0; round < rounds; ++round) {
    saved.monitor->says(times_500);
    CHECK(ibv_query_port(host.context, 1, &port) == 0);
  }
  eventually("all of it was heard", [&] { return saved.monitor->all_heard(); });
  CHECK(saved.opens_context());
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
  // Its channel is interrupted whenever it is thawed.
  const std::uint64_t thaws = saved.machine.take_interrupts(vector);
  CHECK(thaws > 0);
  CHECK_MESSAGE(thaws <= static_cast<std::uint64_t>(took.count()) / 10 + 2, thaws, " thaws in ", took.count(), " ms");
  CHECK(saved.machine.service_epoch() == saved.epoch);
}

TEST_CASE("a second monitor is not heard beside the first") {
  Saved saved;
  for (int times = 0; times < 3; ++times) {
    Monitor other(saved.world);
    CHECK(other.hears_end());
  }
  const std::uint64_t before = saved.generation();
  saved.monitor->event("STOP");
  saved.until_frozen(before);
  saved.monitor->event("RESUME");
  CHECK(saved.opens_context());
  // In place of one that has hung up it is heard, however often; who does that keeps nobody else waiting for long.
  constexpr int times = 30;
  const auto begin = Clock::now();
  for (int i = 0; i < times; ++i) {
    saved.monitor.reset();
    saved.monitor = std::make_unique<Monitor>(saved.world);
    saved.monitor->hears("qmp_capa");
  }
  CHECK(Clock::now() - begin >= std::chrono::milliseconds(20 * (times - 1)));
  const std::uint64_t then = saved.generation();
  saved.monitor->event("STOP");
  saved.until_frozen(then);
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
