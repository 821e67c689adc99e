// What a guest gets that asks how its memory is reached, where a thread of its own copies it, and what one that asks again.
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "vmkernel_svc/control/desk.hpp"

using namespace vrdma;
using namespace vrdma::svc;

namespace {

// A service without threads and sockets, and a guest of it.
struct World {
  World() : page(*vmci::Segment::create("reach-test", sizeof(control::ServicePage), true)) {
    std::vector<int> descriptors;
    std::vector<vmci::UniqueFd> keep;
    const auto attached = desk.attach(control::AttachRequest{}, AttachInfo{{0, 1000, 1000}, {}, vmci::UniqueFd(::dup(page.fd()))}, page.fd(), descriptors, keep);
    REQUIRE(attached.has_value());
    guest = shard.fabric().guest(GuestId{attached->guest});
    REQUIRE(guest != nullptr);
  }
  ~World() {
    guest->machine.reset();
    desk.detach(*guest);
  }

  struct Reached {
    control::ReachProcessReply reply{};
    vmci::UniqueFd fd;
  };
  Reached ask() {
    Reached reached;
    bool answered = false;
    const Status asked = desk.ask_how_reached(*guest, {}, [&](bool by_service) {
      answered = true;
      std::vector<vmci::UniqueFd> given;
      const auto reply = desk.reach(*guest, by_service, given);
      REQUIRE(reply.has_value());
      REQUIRE(given.size() == 1);
      reached = {*reply, std::move(given.front())};
    });
    REQUIRE(asked.has_value());
    REQUIRE(answered);
    CHECK(reached.reply.way == control::reach_by_guest);
    return reached;
  }

  static Config config_of_test() {
    Config config;
    config.arena_bytes = 16 << 20;
    config.process_memory = "guest";
    return config;
  }
  Config config = config_of_test();
  control::ServicePage service_page{};
  Shard shard{config, service_page};
  ControlDesk desk{shard};
  vmci::Segment page;
  Guest* guest = nullptr;
};

ino_t inode_of(const vmci::UniqueFd& fd) {
  struct stat file {};
  REQUIRE(::fstat(fd.get(), &file) == 0);
  return file.st_ino;
}
bool has_ended(const vmci::UniqueFd& pipe) {
  pollfd end{pipe.get(), POLLIN, 0};
  return ::poll(&end, 1, 0) == 1 && (end.revents & POLLHUP) != 0;
}

}  // namespace

TEST_CASE("A guest that asks again gets the same segment, for which its tenant is charged once") {
  World world;
  const auto first = world.ask();
  const auto charged = std::pair(world.guest->tenant->queue_bytes, world.guest->tenant->descriptors);
  const auto again = world.ask();
  CHECK(inode_of(again.fd) == inode_of(first.fd));
  CHECK(again.reply.doorbell == first.reply.doorbell);
  CHECK(std::pair(world.guest->tenant->queue_bytes, world.guest->tenant->descriptors) == charged);
}

TEST_CASE("A guest in a machine that asks again gets another pipe, in place of the first") {
  World world;
  world.guest->machine = std::make_unique<InMachine>();
  world.guest->machine->copier_segment = *vmci::Segment::create("reach-test", copying::segment_bytes);
  const auto first = world.ask();
  CHECK_FALSE(has_ended(first.fd));
  const auto again = world.ask();
  CHECK(has_ended(first.fd));
  CHECK_FALSE(has_ended(again.fd));
  CHECK(again.reply.doorbell == first.reply.doorbell);
}
