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
  // The status of a request by the control ring; the beginning of the reply's body.
  template <control::Request R>
  int ask_by_ring(const typename control::Message<R>::RequestBody& body, std::uint32_t* reply = nullptr) {
    vmci::RecordReader replies(guest->control.consume_records(), guest->control.geometry().consume_entries, guest->replies.position());
    vmci::RecordWriter requests(guest->control.produce(), guest->control.geometry().produce_slots, guest->requests.position());
    std::vector<std::byte> record(sizeof(control::Head) + sizeof(body));
    std::memcpy(record.data() + sizeof(control::Head), &body, sizeof(body));
    requests.write(sizeof(RecordHead), std::span(record).subspan(sizeof(RecordHead)));
    requests.publish(control::address_of(control::host_context, control::control_port), sizeof(body), static_cast<std::uint32_t>(R),
                     static_cast<std::uint32_t>((record.size() + slot_bytes - 1) / slot_bytes));
    desk.serve(*guest);
    alignas(64) std::byte answer[record_slots_max * slot_bytes] = {};
    std::uint32_t slots = 0;
    REQUIRE(replies.peek(answer, record_slots_max, slots) == vmci::RecordReader::Peek::ready);
    std::atomic_ref(guest->control.header().creator.consumed).store(guest->replies.position());
    control::Head head{};
    std::memcpy(&head, answer, sizeof(head));
    if (reply != nullptr) std::memcpy(reply, answer + sizeof(head), sizeof(*reply));
    return head.status;
  }
  // The status of a registration of memory that no file backs.
  int register_memory() {
    std::vector<vmci::UniqueFd> given;
    const auto context = desk.on(*guest, control::OpenContextRequest{}, given);
    REQUIRE(context.has_value());
    std::uint32_t pd = 0;
    REQUIRE(ask_by_ring<control::Request::create_pd>({context->context, 0}, &pd) == 0);
    control::StageExtentsRequest stage{};
    stage.clear_first = stage.count = 1;
    stage.extents[0] = {0x10000, 4096, 0, control::backing_process, 0};
    REQUIRE(ask_by_ring<control::Request::stage_extents>(stage) == 0);
    return ask_by_ring<control::Request::reg_mr>({pd, 15, 0x10000, 4096, 0x10000});
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

// Seen before: a child with the socket of a process that had become another program registered all of that one's memory, and never asked.
TEST_CASE("What no file backs is not registered before the guest has asked how it is reached") {
  World world;
  CHECK(world.register_memory() == EINVAL);
  world.ask();
  CHECK(world.register_memory() == 0);
}
