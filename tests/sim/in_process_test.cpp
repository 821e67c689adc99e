#include <doctest/doctest.h>

#include <cstring>

#include "tests/sim/in_process_ports.hpp"

namespace vrdma::sim {
namespace {

using engine::Direction;

constexpr std::uint32_t all = engine::access_local_write | engine::access_remote_write;

struct Connection {
  Connection() {
    InProcessEnd::join(a, b);
    for (auto* memory : {&memory_a, &memory_b}) keys[memory == &memory_b] = ports.add(std::as_writable_bytes(std::span(*memory)), all);
  }
  Sge sge(int end, std::size_t word, std::uint32_t bytes) {
    auto& memory = end == 0 ? memory_a : memory_b;
    return {reinterpret_cast<std::uintptr_t>(memory.data() + word), bytes, keys[end]};
  }
  InProcessPorts ports;
  std::atomic_flag claim;
  InProcessEnd a{ports, claim, 0x11}, b{ports, claim, 0x12};
  std::vector<std::uint64_t> memory_a = std::vector<std::uint64_t>(4096), memory_b = std::vector<std::uint64_t>(4096);
  std::uint32_t keys[2];
};

Cqe wait_for(InProcessEnd& end, Direction direction) {
  vmci::Backoff backoff;
  for (;;) {
    if (const auto cqe = end.poll(direction)) return *cqe;
    backoff.idle();
  }
}

TEST_CASE("RC SEND is carried out in the posting thread: complete when post returns") {
  Connection c;
  c.memory_a[0] = 0x1234;
  c.b.post_receive(7, c.sge(1, 5, 64));
  std::thread::id poster;
  std::thread([&] {
    poster = std::this_thread::get_id();
    c.a.post_send(1, WrOpcode::send, c.sge(0, 0, 8));
  }).join();
  CHECK(c.a.core.port.last_runner == poster);
  CHECK(c.memory_b[5] == 0x1234);
  const auto received = c.b.poll(Direction::receive);
  REQUIRE(received);
  CHECK(received->wr_id == 7);
  CHECK(received->byte_len == 8);
  CHECK(unpack_cqe_state(c.a.poll(Direction::send)->state).status == WcStatus::success);
}

TEST_CASE("RDMA WRITE is carried out in the posting thread, and its rights are checked there") {
  Connection c;
  for (std::size_t i = 0; i < 1000; ++i) c.memory_a[i] = i * i;
  const Sge far = c.sge(1, 10, 0);
  c.a.post_send(1, WrOpcode::rdma_write, c.sge(0, 0, 8000), RemoteOperand{far.address, 0, 0, far.lkey, 0});
  CHECK(c.a.core.port.last_runner == std::this_thread::get_id());
  CHECK(unpack_cqe_state(c.a.poll(Direction::send)->state).status == WcStatus::success);
  CHECK(std::memcmp(c.memory_a.data(), c.memory_b.data() + 10, 8000) == 0);
  c.a.post_send(2, WrOpcode::rdma_write, c.sge(0, 0, 8), RemoteOperand{far.address, 0, 0, 99, 0});
  CHECK(unpack_cqe_state(c.a.poll(Direction::send)->state).status == WcStatus::rem_access_err);
  CHECK(c.b.core.state == engine::QpState::err);
}

TEST_CASE("Two threads play ping-pong by SEND, each running the engine for what it posts") {
  constexpr std::uint64_t rounds = 20'000;
  Connection c;
  std::uint64_t wrong[2] = {};
  const auto play = [&](int me, InProcessEnd& end, bool serves) {
    auto& memory = me == 0 ? c.memory_a : c.memory_b;
    for (std::uint64_t i = 0; i < 8; ++i) end.post_receive(i, c.sge(me, 100 + i, 8));
    if (serves) {
      memory[0] = 0;
      end.post_send(0, WrOpcode::send, c.sge(me, 0, 8));
      wait_for(end, Direction::send);
    }
    for (std::uint64_t round = 0; round < rounds; ++round) {
      const Cqe received = wait_for(end, Direction::receive);
      const std::uint64_t expected = 2 * round + (serves ? 1 : 0);
      wrong[me] += memory[100 + received.wr_id] != expected;
      end.post_receive(received.wr_id, c.sge(me, 100 + received.wr_id, 8));
      if (serves && round + 1 == rounds) break;
      memory[0] = expected + 1;
      end.post_send(round, WrOpcode::send, c.sge(me, 0, 8));
      wrong[me] += unpack_cqe_state(wait_for(end, Direction::send).state).status != WcStatus::success;
    }
  };
  const std::uint64_t start = vmci::monotonic_ns();
  std::thread other([&] { play(1, c.b, false); });
  play(0, c.a, true);
  other.join();
  MESSAGE("half round trip ", (vmci::monotonic_ns() - start) / (2 * rounds), " ns");
  CHECK(wrong[0] == 0);
  CHECK(wrong[1] == 0);
  CHECK(c.a.core.counters.received_messages == rounds);
  CHECK(c.b.core.counters.received_messages == rounds);
}

}  // namespace
}  // namespace vrdma::sim
