// Events through pipes that are full, or that nobody reads any more.
#include "vmkernel_svc/events.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "vmkernel_svc/control/desk.hpp"

using namespace vrdma;
using namespace vrdma::svc;

namespace {

struct World {
  Config config;
  control::ShardState state{};
  Shard shard{config, state};
  ControlDesk desk{shard};
  vmci::Segment page = *vmci::Segment::create("test-page", sizeof(control::ServicePage), true);
  Guest* guest = nullptr;
  std::uint32_t context = 0;
  vmci::UniqueFd events;  // the guest's end

  World() {
    std::vector<int> descriptors;
    std::vector<vmci::UniqueFd> keep, given;
    const auto attached = desk.attach(control::AttachRequest{}, AttachInfo{{0, ::getuid(), ::getgid()}, {}, {}}, page.fd(), descriptors, keep);
    REQUIRE(attached.has_value());
    guest = shard.fabric().guests.at(attached->guest).get();
    context = desk.on(*guest, control::OpenContextRequest{}, given)->context;
    events = std::move(given.at(0));
    REQUIRE(::fcntl(events.get(), F_SETFL, O_NONBLOCK) == 0);
    ::signal(SIGPIPE, SIG_IGN);  // the server blocks it in the shard's thread
  }
};

}  // namespace

TEST_CASE("What a full pipe did not take comes when there is room, also where the shard always has something to do and never sleeps") {
  World world;
  constexpr std::uint32_t count = 10'000;  // a pipe holds 4096
  for (std::uint32_t i = 0; i < count; ++i) raise_async(*world.guest, world.context, 1, Handle{i});
  CHECK(world.guest->events_held);
  std::uint32_t next = 0;
  for (const std::uint64_t until = vmci::monotonic_ns() + 60'000'000'000; next < count && vmci::monotonic_ns() < until;) {
    control::AsyncRecord record;
    if (::read(world.events.get(), &record, sizeof(record)) == static_cast<ssize_t>(sizeof(record)))
      REQUIRE(record.handle == next++);
    else
      world.shard.turn();
  }
  CHECK(next == count);
  CHECK_FALSE(world.guest->events_held);
}

TEST_CASE("What nobody can read any more is not kept") {
  World world;
  for (std::uint32_t i = 0; i < 5000; ++i) raise_async(*world.guest, world.context, 1, Handle{i});
  CHECK(world.guest->events_held);
  world.events.reset();
  CHECK_FALSE(flush_events(*world.guest));
  raise_async(*world.guest, world.context, 1, Handle{1});
  CHECK_FALSE(world.guest->events_held);
}
