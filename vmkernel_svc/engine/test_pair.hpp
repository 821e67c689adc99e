// Two connected queue pairs, each with memory of its own.
#pragma once

#include "vmkernel_svc/engine/test_world.hpp"

namespace vrdma::engine::test {

using Memory = TestWorld::Memory;

struct Pair {
  explicit Pair(QpType type = QpType::rc)
      : a(world.add(type, 1, 1)), b(world.add(type, 2, 2)), mine(world.memory(1 << 20, 1)), theirs(world.memory(1 << 20, 2)) {
    world.connect(a, b);
    TestWorld::fill(mine, 3);
  }
  std::optional<Completion> run(const SendSpec& spec) {
    a.post(spec);
    world.settle();
    return a.poll(Direction::send);
  }
  SendSpec write(std::uint32_t bytes, std::uint64_t at = 0) const {
    return {.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {mine.sge(0, bytes)}, .remote = theirs.remote(at)};
  }
  TestWorld world;
  TestQp &a, &b;
  Memory &mine, &theirs;
};

}  // namespace vrdma::engine::test
