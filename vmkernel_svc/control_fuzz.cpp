// Fuzz target: two guests, one on InfiniBand and one on Ethernet, that may write what they like into all that they share with the service: requests, datagrams, WQEs,
// cursors, doorbells; through the real shard, turned by hand. The victim beside them must not notice (fuzz_world.hpp).
//
// Input: steps of one byte (bits 0–2: what, bit 3: which guest, bits 4–7: how many turns after it) and what the step needs.
// Handles count up from 1, so that small numbers name what earlier steps made. Handles 1 and 2 are contexts, 3 is a completion
// channel, 4 a backing of 64 KiB. Each has two event channels of rdma_cm, and 10.0.0.1 or 10.0.0.2 in one network namespace;
// the one on InfiniBand has opened umad0.
#include <sys/socket.h>

#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/fuzz_world.hpp"

namespace {

using namespace vrdma;
using namespace vrdma::svc;

constexpr std::uint64_t backing_bytes = 64 << 10;

void equip(FuzzWorld& world, Guest& guest, int memory) {
  std::vector<vmci::UniqueFd> given;
  (void)world.desk().on(guest, control::OpenContextRequest{}, given);
  (void)world.desk().on(guest, control::OpenContextRequest{}, given);
  (void)world.desk().on(guest, control::CreateChannelRequest{1, 0}, given);
  (void)world.desk().on(guest, control::AddBackingRequest{}, vmci::UniqueFd(::dup(memory)));
  (void)world.desk().on_cm_open(guest, given);
  (void)world.desk().on_cm_open(guest, given);
  (void)world.desk().on_mad_open(guest, given);
  control::CmPlaceRequest place{};
  place.network = place.count = 1;
  place.addresses[0] = {AF_INET, 0, 0, {10, 0, 0, static_cast<std::uint8_t>(guest.link_layer)}};
  (void)world.shard().fabric().cm->place(guest, place);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t bytes) {
  FuzzWorld& world = FuzzWorld::instance();
  static const vmci::UniqueFd memory = *vmci::create_sealed("fuzz-backing", backing_bytes);
  FuzzInput input(data, bytes);
  Guest* guests[2];
  for (const auto link_layer : {control::link_layer_infiniband, control::link_layer_ethernet}) {
    control::AttachRequest request{};
    request.link_layer = link_layer;
    Guest* const guest = guests[link_layer - 1] = world.attach(request);
    fuzz_require(guest != nullptr, "there is room for two guests");
    equip(world, *guest, memory.get());
  }
  for (int steps = 0; steps < 128 && !input.empty(); ++steps) {
    const auto step = input.value<std::uint8_t>();
    Guest& guest = *guests[(step >> 3) & 1];
    switch (step & 7) {
      case 0: case 1: case 2:
        world.step_request(guest, input);
        break;
      case 3: case 4:
        world.step_work_request(guest, input);
        break;
      case 5:
        world.step_scribble(guest, input);
        break;
      case 6:
        world.step_doorbell(guest, input);
        break;
      default:
        world.shard().turn();
    }
    world.turn(step >> 4);
  }
  world.turn(8);
  world.check_routes();
  for (Guest* guest : guests) world.desk().detach(*guest);
  world.turn(2);
  world.check();
  return 0;
}
