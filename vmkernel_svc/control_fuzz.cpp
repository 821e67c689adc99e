// libFuzzer: any control datagrams in a guest's ring, through the control desk of a shard that has no sockets and no thread.
// Handles count up from 1, so that small numbers in the input name objects that earlier records made.
//
// Input: records of 4 bytes control word (request, slots), 4 bytes length word, then the record from `source_context` on.
#include <cstring>
#include <span>

#include "vmkernel_svc/control_desk.hpp"

namespace {
using namespace vrdma;
using namespace vrdma::svc;
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t bytes) {
  static Config config;
  config.arena_bytes = 1 << 24;
  static control::ShardState state{};
  static Shard shard(config, state);
  static ControlDesk desk(shard);
  std::vector<int> descriptors;
  std::vector<vmci::UniqueFd> keep;
  const auto reply = desk.attach(control::AttachRequest{}, AttachInfo{{0, 1, 1}, {}, {}}, -1, descriptors, keep);
  if (!reply) return 0;
  Guest& guest = *shard.fabric().guests.at(reply->guest);
  std::vector<vmci::UniqueFd> given;
  (void)desk.on(guest, control::OpenContextRequest{}, given);  // handle 1
  (void)desk.on(guest, control::OpenContextRequest{}, given);  // handle 2
  (void)desk.on(guest, control::CreateChannelRequest{1, 0}, given);
  vmci::RecordWriter writer(guest.control.produce(), guest.control.geometry().produce_slots);
  std::span<const std::byte> left(reinterpret_cast<const std::byte*>(data), bytes);
  for (int records = 0; records < 64 && left.size() >= 8 && !guest.broken; ++records) {
    std::uint32_t control, word;
    std::memcpy(&control, left.data(), 4);
    std::memcpy(&word, left.data() + 4, 4);
    left = left.subspan(8);
    const std::uint32_t slots = 1 + ((control >> control_slots_shift) & control_slots_mask);
    const auto body = left.first(std::min(left.size(), slots * slot_bytes - sizeof(RecordHead)));
    left = left.subspan(body.size());
    writer.set_freed(guest.requests.position());
    writer.write(sizeof(RecordHead), body);
    writer.publish(0, word, control & control_user_mask, slots);
    desk.serve(guest);
    guest.control.header().creator.consumed = guest.replies.position();
  }
  desk.detach(guest);
  return 0;
}
