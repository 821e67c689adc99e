// libFuzzer: whatever a guest may write into its rings, through the engine over in-memory ports. The ports assert that the
// engine stays within what find() granted; the sanitizers see the rest.
//
// Input: steps of one byte (what, which queue pair) and what the step needs; a short input ends it.
#undef NDEBUG
#include <cstddef>
#include <cstdint>

#include "vmkernel_svc/engine/test_world.hpp"

namespace {

using namespace vrdma;
using namespace vrdma::engine;
using namespace vrdma::engine::test;

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t bytes) : left_(reinterpret_cast<const std::byte*>(data), bytes) {}
  bool empty() const { return left_.empty(); }
  std::span<const std::byte> take(std::size_t bytes) {
    const auto part = left_.first(std::min(bytes, left_.size()));
    left_ = left_.subspan(part.size());
    return part;
  }
  template <class T>
  T value() {
    T out{};
    const auto part = take(sizeof(T));
    std::memcpy(&out, part.data(), part.size());
    return out;
  }

 private:
  std::span<const std::byte> left_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  TestWorld world;
  TestSrq srq(8, 1);
  TestQp* const qps[] = {&world.add(QpType::rc), &world.add(QpType::rc),         &world.add(QpType::uc), &world.add(QpType::uc),
                         &world.add(QpType::ud), &world.add(QpType::rc, 1, 1, &srq.core), &world.add(QpType::rc)};
  constexpr std::size_t peer[] = {1, 0, 3, 2, 4, 6, 5};
  auto& memory = world.memory(1 << 16);  // key 0x100, from 0x10000000
  world.memory(4096, 1, access_local_read);
  for (std::size_t i = 0; i < std::size(qps); ++i) {
    qps[i]->core.port.completions_max = 64;
    world.bring_up(*qps[i], connection(qps[peer[i]]->core.qpn.value, 1));
    qps[i]->post(ReceiveSpec{i, {memory.sge(i * 4096, 4096)}});
  }
  Input input(data, bytes);
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
        world.settle({4096, 4});
        while (qp.poll(Direction::send)) {
        }
        while (qp.poll(Direction::receive)) {
        }
    }
  }
  world.settle();
  return 0;
}
