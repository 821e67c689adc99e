// What a guest gets that asks how its memory is reached, where a thread of its own copies it, and what one that asks again.
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/stat.h>

#include "vmkernel_svc/control/test_service.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;

namespace {

// A service that leaves copying to its guests, and a guest of it.
struct World : TestService {
  World() : TestService(by_guests()) {}
  ~World() { guest->machine.reset(); }

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

  static Config by_guests() {
    Config config;
    config.process_memory = "guest";
    return config;
  }
  Guest* const guest = attach();
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
