// Fuzz target: whatever a guest may write into its rings, through the engine over in-memory ports. The ports assert that the engine
// stays within what find() granted, zones around the memory that it has; and that it comes to an end; the sanitizers see the rest.
//
// Input: steps of one byte (what, which queue pair) and what the step needs; a short input ends it.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "vmkernel_svc/engine/fuzz_input.hpp"
#include "vmkernel_svc/engine/test_world.hpp"

namespace {

using namespace vrdma;
using namespace vrdma::engine;
using namespace vrdma::engine::test;

constexpr std::size_t zone_bytes = 4096;
constexpr std::byte zone_byte{0xa5};

// Memory of which the middle is registered; what lies before and behind it must stay as it is, and, without the right to write
// or in another protection domain, all of it.
class Zoned {
 public:
  Zoned(TestWorld& world, std::size_t bytes, std::uint32_t pd, std::uint32_t access)
      : memory_(world.memory(bytes + 2 * zone_bytes, pd, access, zone_byte)), bytes_(bytes), writable_(pd == 1 && access == all_access) {
    TestRegion& region = world.ports.regions.at(memory_.key);
    region.memory += zone_bytes;
    region.bytes = bytes;
  }
  const TestWorld::Memory& memory() const { return memory_; }
  void check() const {
    const auto untouched = [this](std::size_t from, std::size_t to) {
      require(std::all_of(memory_.bytes.begin() + static_cast<std::ptrdiff_t>(from), memory_.bytes.begin() + static_cast<std::ptrdiff_t>(to),
                          [](std::byte b) { return b == zone_byte; }),
              "bytes that nothing granted are left alone");
    };
    untouched(0, writable_ ? zone_bytes : zone_bytes + bytes_);
    untouched(zone_bytes + bytes_, memory_.bytes.size());
  }

 private:
  TestWorld::Memory& memory_;
  std::size_t bytes_;
  bool writable_;
};

// Time stands still meanwhile, so an engine that goes on for ever is found here.
void settle(TestWorld& world, Budget turn) {
  constexpr int turns_max = 100'000;
  for (int turns = 0;; ++turns) {
    require(turns < turns_max, "the engine comes to an end with what was posted");
    bool more = false;
    for (auto& qp : world.qps) {
      if (!qp->core.port.runnable) continue;
      Budget budget = turn;
      qp->core.port.runnable = world.engine.run(qp->core, budget) == Progress::worked;
      more = true;
    }
    if (!more) return;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  TestWorld world;
  TestSrq srq(8, 1);
  TestQp* const qps[] = {&world.add(QpType::rc), &world.add(QpType::rc),         &world.add(QpType::uc), &world.add(QpType::uc),
                         &world.add(QpType::ud), &world.add(QpType::rc, 1, 1, &srq.core), &world.add(QpType::rc)};
  constexpr std::size_t peer[] = {1, 0, 3, 2, 4, 6, 5};
  const Zoned zones[] = {{world, 1 << 16, 1, all_access},        // key 0x100, from 0x10000000
                         {world, 4096, 1, access_local_read},    // 0x101, from 0x20000000
                         {world, 4096, 2, all_access}};          // 0x102, from 0x30000000: in nobody's protection domain
  const auto& memory = zones[0].memory();
  for (std::size_t i = 0; i < std::size(qps); ++i) {
    qps[i]->core.port.completions_max = 64;
    world.bring_up(*qps[i], connection(qps[peer[i]]->core.qpn.value, 1));
    qps[i]->post(ReceiveSpec{i, {memory.sge(i * 4096, 4096)}});
  }
  FuzzInput input(data, bytes);
  for (int steps = 0; steps < 64 && !input.empty(); ++steps) {
    const auto step = input.value<std::uint8_t>();
    const std::size_t which = (step >> 3) % std::size(qps);
    TestQp& qp = *qps[which];
    switch (step & 7) {
      case 0: case 1: case 2: {  // a send WQE: control word, then its bytes
        const auto control = input.value<std::uint32_t>();
        const auto slots = 1 + ((control >> control_slots_shift) & control_slots_mask);
        qp.send_writer.set_freed(qp.send_writer.position());
        qp.send_writer.write(sizeof(RecordHead), input.take(slots * slot_bytes - sizeof(RecordHead)));
        qp.send_writer.publish(steps, 0, control & control_user_mask, slots);
        qp.core.port.runnable = true;
        break;
      }
      case 3: case 4: {  // a receive WQE, of the SRQ where it has one
        const auto control = input.value<std::uint32_t>();
        const auto slots = 1 + ((control >> control_slots_shift) & control_slots_mask);
        vmci::RecordWriter& writer = qp.core.srq != nullptr ? srq.writer : qp.receive_writer;
        if (qp.core.srq != nullptr) srq.core.port.posted += input.value<std::uint8_t>();
        writer.set_freed(writer.position());
        writer.write(sizeof(RecordHead), input.take(slots * slot_bytes - sizeof(RecordHead)));
        writer.publish(steps, 0, control & control_user_mask, slots);
        break;
      }
      case 5:
        world.pass(std::uint64_t{input.value<std::uint16_t>()} * 10'000);
        break;
      case 6:
        world.modify(qp, QpState::reset, {});
        world.bring_up(qp, connection(qps[peer[which]]->core.qpn.value, 1));
        break;
      default:
        settle(world, {4096, 4});
        while (qp.poll(Direction::send)) {
        }
        while (qp.poll(Direction::receive)) {
        }
    }
  }
  settle(world, {1 << 20, 64});
  for (const Zoned& zone : zones) zone.check();
  return 0;
}
