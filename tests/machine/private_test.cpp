// Machines whose RAM is their own, to the service: what they lend is of the BAR, and nothing of the link.
#include "tests/machine/world.hpp"

namespace vrdma::test {
namespace {

using namespace control;

constexpr std::uint64_t bar_bytes = 32 << 20;

World world_of(World::Kind kind) { return World(kind, "{}", {}, 0, bar_bytes); }

TEST_CASE("a machine whose RAM is its own lends of the BAR, and its processes are served as others") {
  for (const auto kind : {World::Kind::interrupted, World::Kind::plain}) {
    const World world = world_of(kind);
    FakeMachine machine(world.link(), "", 7 + static_cast<std::uint64_t>(kind));
    REQUIRE(machine.connected());
    CHECK(machine.ram_bytes() == bar_bytes);
    CHECK((std::atomic_ref(machine.header().service.flags).load() & vm::service_lends_bar) != 0);
    REQUIRE(machine.begin_session());
    REQUIRE(machine.greet() == 0);
    eventually("the service says so", [] { return World::shown()["vms"][0]["state"] == "attached"; });
    CHECK(World::shown()["vms"][0]["bar_bytes"] == bar_bytes);
    Process process(machine);
    REQUIRE_MESSAGE(process.attached, process.machine.status);
    ask_by_queues(process);

    const auto pages = machine.take_pages(4);
    machine.lend(process.connection, 16, pages);
    const auto added = machine.call<Request::add_pinned>(process.connection, {0, 4 * vm::page_bytes, lend_pages, 16});
    REQUIRE(added);
    CHECK(machine.call<Request::remove_backing>(process.connection, {added->backing, 0}));
    machine.link().send(vm::Frame::close, process.connection, std::span<const std::byte>{});
    CHECK(machine.await(vm::Frame::closed, process.connection));
  }
}

TEST_CASE("neither the link nor what lies behind the BAR can be lent") {
  const World world = world_of(World::Kind::interrupted);
  FakeMachine machine(world.link(), "", 21);
  constexpr std::uint64_t first = vm::bar_bytes / vm::page_bytes, end = bar_bytes / vm::page_bytes;
  const vm::Run bad[] = {{0, 1}, {1, 4}, {first - 1, 1}, {first - 1, 2}, {0, end}, {end, 1}, {end - 1, 2}, {first, end}, {~std::uint64_t{0}, 1},
                         {first, ~std::uint64_t{0}}, {first, 0}, {(std::uint64_t{1} << 32) / vm::page_bytes, 1}};
  for (const vm::Run run : bad) {
    CAPTURE(run.page);
    CAPTURE(run.pages);
    REQUIRE(machine.begin_session());
    REQUIRE(machine.greet() == 0);
    const std::uint32_t connection = machine.open();
    machine.link().send(vm::Frame::segment, connection, run, 16);
    // Who lends that has no session any more: what he asks is not answered, and he may begin another.
    machine.call_patience_ms = 500;
    CHECK(!machine.call<Request::add_pinned>(connection, {0, vm::page_bytes, lend_pages, 16}));
    CHECK(machine.status == EIO);
    machine.call_patience_ms = FakeMachine::patience_ms;
  }
  for (const vm::Run good : {vm::Run{first, 1}, vm::Run{end - 1, 1}, vm::Run{first, end - first}}) {
    REQUIRE(machine.begin_session());
    REQUIRE(machine.greet() == 0);
    Process process(machine);
    REQUIRE(process.attached);
    machine.link().send(vm::Frame::segment, process.connection, good, 16);
    CHECK(machine.call<Request::add_pinned>(process.connection, {0, vm::page_bytes, lend_pages, 16}));
  }
}

TEST_CASE("an agent that knows of no such machines, or lies about its page, is refused") {
  const World world = world_of(World::Kind::interrupted);
  FakeMachine machine(world.link(), "", 33);
  REQUIRE(machine.begin_session());
  machine.in_bar = false;
  CHECK(machine.greet() == EPROTONOSUPPORT);
  machine.in_bar = true;
  REQUIRE(machine.begin_session());
  CHECK(machine.greet(/*proof_offset=*/8) == EFAULT);
  REQUIRE(machine.begin_session());
  CHECK(machine.greet() == 0);
}

TEST_CASE("a service that is started anew finds the BAR of such a machine again, in its size") {
  World world = world_of(World::Kind::interrupted);
  FakeMachine machine(world.link(), "", 41);
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  const std::uint64_t epoch = machine.service_epoch();
  world.service.kill_now();
  world.service.start();
  REQUIRE(machine.wait([&] { return machine.service_epoch() != epoch && machine.service_epoch() != 0; }));
  REQUIRE(machine.begin_session());
  REQUIRE(machine.greet() == 0);
  Process process(machine);
  REQUIRE_MESSAGE(process.attached, process.machine.status);
  ask_by_queues(process);
}

}  // namespace
}  // namespace vrdma::test
