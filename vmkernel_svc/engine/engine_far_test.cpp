// Connections to another host: what of their two halves the simulation cannot judge, because it only looks at what programs see.
#include <doctest/doctest.h>

#include "vmkernel_svc/engine/test_hosts.hpp"
#include "vmkernel_svc/engine/test_world.hpp"

namespace vrdma::engine::test {
namespace {

constexpr std::uint64_t second_ns = 1'000'000'000;

struct FarPair {
  explicit FarPair(QpType type) : a(world.add(type, 1, 1)), b(world.add(type, 2, 2)), mine(world.memory(1 << 16, 1)), theirs(world.memory(1 << 16, 2)) {
    b.core.port.host = 1;
    hosts.host_of_lid = {{1, 0}, {2, 1}};
    world.connect(a, b);
    TestWorld::fill(theirs, 3);
  }
  // Until nobody has anything to do; records from b's host stay where they are where that does not listen.
  void settle(bool listens = true) {
    for (bool more = true; more;) {
      world.settle();
      more = hosts.anything_on_the_way(0, 1) || (listens && hosts.anything_on_the_way(1, 0));
      hosts.deliver(0, 1, 64);
      if (listens) hosts.deliver(1, 0, 64);
      more |= hosts.run_stand_ins();
    }
  }
  std::size_t polled(TestQp& qp) {
    std::size_t count = 0;
    while (const auto completion = qp.poll(Direction::send)) {
      CHECK(completion->status == WcStatus::success);
      ++count;
    }
    return count;
  }
  TestWorld world;
  TestHosts hosts{world.ports, world.engine};
  TestQp &a, &b;
  TestWorld::Memory &mine, &theirs;
};

TEST_CASE("READs of a host that does not take their answers wait") {
  FarPair pair(QpType::rc);
  pair.hosts.room_bytes = 1000;
  for (std::uint64_t i = 0; i < 16; ++i) {
    pair.a.post({.wr_id = i, .opcode = WrOpcode::rdma_read, .sges = {pair.mine.sge(i * 256, 256)}, .remote = pair.theirs.remote(i * 256)});
    pair.settle(false);
  }
  const std::size_t answer_bytes = FarFrame::make(FarLimits<TestPorts>::part_bytes)->whole_bytes() + FarLimits<TestPorts>::part_bytes;
  CHECK(pair.hosts.link(1, 0).bytes <= pair.hosts.room_bytes + answer_bytes);
  CHECK(pair.hosts.link(1, 0).bytes >= pair.hosts.room_bytes);
  std::size_t polled = 0;
  for (int i = 0; i < 64 && polled < 16; ++i) {
    pair.world.ports.time_ns += 1'000'000;
    const auto fire = [&](TestPorts::Qp& core) {
      if (core.port.wake_ns != 0 && core.port.wake_ns <= pair.world.ports.time_ns) core.port.wake_ns = 0, core.port.runnable = true;
    };
    pair.hosts.for_each_stand_in([&](auto& stand_in) { fire(stand_in.core); });
    fire(pair.a.core);
    pair.settle();
    polled += pair.polled(pair.a);
  }
  CHECK(polled == 16);
  CHECK(std::equal(pair.mine.bytes.begin(), pair.mine.bytes.begin() + 16 * 256, pair.theirs.bytes.begin()));
}

TEST_CASE("UC: who has lost a message to a silent host loses the next ones without waiting for each") {
  FarPair pair(QpType::uc);
  pair.hosts.cut(1, 0);
  const auto send = [&](std::uint64_t wr_id) {
    pair.a.post({.wr_id = wr_id, .opcode = WrOpcode::rdma_write, .sges = {pair.mine.sge(0, 8)}, .remote = pair.theirs.remote(0)});
    pair.world.settle();
  };
  send(1);
  pair.world.pass(4 * second_ns);
  CHECK(pair.polled(pair.a) == 0);
  pair.world.pass(2 * second_ns);
  CHECK(pair.polled(pair.a) == 1);
  for (std::uint64_t i = 2; i < 20; ++i) send(i);
  pair.world.pass(second_ns / 100);
  CHECK(pair.polled(pair.a) == 18);

  pair.hosts.heal(1, 0);
  pair.settle();
  send(20);
  pair.settle();
  CHECK(pair.polled(pair.a) == 1);
  CHECK(pair.a.core.counters.ack_timeouts > 0);
}

TEST_CASE("UC: who has no room with a silent host for what was sent of messages that are over loses the next ones, too") {
  FarPair pair(QpType::uc);
  const auto write = [&] {
    pair.a.post({.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {pair.mine.sge(0, 8)}, .remote = pair.theirs.remote(0)});
  };
  write();
  pair.settle();
  CHECK(pair.polled(pair.a) == 1);
  pair.a.core.far->sent = pair.a.core.far->credited + FarLimits<TestPorts>::window_bytes;
  pair.hosts.cut(1, 0);
  write();
  pair.world.pass(4 * second_ns);
  CHECK(pair.polled(pair.a) == 0);
  pair.world.pass(4 * second_ns);
  CHECK(pair.polled(pair.a) == 1);
}

TEST_CASE("UC: a message whose sender's memory goes away in the middle leaves the receiver to the next one") {
  FarPair pair(QpType::uc);
  auto& gone = pair.world.memory(1 << 16, 1);
  constexpr std::uint32_t bytes = 2 * FarLimits<TestPorts>::window_bytes;
  pair.a.post({.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {gone.sge(0, bytes)}, .remote = pair.theirs.remote(0)});
  pair.world.settle();  // half of it is on its way
  REQUIRE(pair.world.ports.remove_region(gone.key));
  pair.hosts.deliver(0, 1, 64);
  REQUIRE(pair.hosts.run_stand_ins());
  pair.hosts.deliver(1, 0, 64);
  Budget budget{1 << 20, 64};
  pair.world.engine.run(pair.a.core, budget);
  const auto refused = pair.a.poll(Direction::send);
  REQUIRE(refused);
  CHECK(refused->status == WcStatus::loc_prot_err);
  REQUIRE(pair.world.modify(pair.a, QpState::rts, {}));
  pair.a.post({.wr_id = 2, .opcode = WrOpcode::rdma_write, .sges = {pair.mine.sge(0, bytes)}, .remote = pair.theirs.remote(0)});
  pair.settle();
  CHECK(pair.polled(pair.a) == 1);
  CHECK(std::equal(pair.mine.bytes.begin(), pair.mine.bytes.begin() + bytes, pair.theirs.bytes.begin()));
}

TEST_CASE("A request that is refused keeps its own end when the far host is lost before those before it are told of") {
  for (const bool known_opcode : {true, false}) {
    FarPair pair(QpType::rc);
    pair.a.post({.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {pair.mine.sge(0, 8)}, .remote = pair.theirs.remote(0)});
    if (known_opcode) pair.a.post({.wr_id = 2, .opcode = WrOpcode::rdma_write, .sges = {Sge{0, 8, 0xbad}}, .remote = pair.theirs.remote(0)});
    else pair.a.post({.wr_id = 2, .opcode = static_cast<WrOpcode>(12), .sges = {pair.mine.sge(0, 8)}, .remote = pair.theirs.remote(0)});
    pair.world.settle();
    pair.hosts.deliver(0, 1, 64);
    pair.hosts.run_stand_ins();
    pair.hosts.deliver(1, 0, 64);  // the answer to the first, …
    CHECK(pair.a.core.operation.stage == Operation::Stage::refused);
    pair.hosts.restart(1);
    pair.hosts.deliver(1, 0, 64);  // … and that nobody remembers it, before the queue pair has its turn
    pair.world.settle();
    const auto first = pair.a.poll(Direction::send), second = pair.a.poll(Direction::send);
    REQUIRE(first);
    REQUIRE(second);
    CHECK(first->status == WcStatus::success);
    CHECK(second->status == (known_opcode ? WcStatus::loc_prot_err : WcStatus::loc_qp_op_err));
  }
}

TEST_CASE("What reaches nobody is executed also where the far host is lost; the next message finds that nobody answers") {
  FarPair pair(QpType::rc);
  const auto write = [&](std::uint64_t wr_id) {
    pair.a.post({.wr_id = wr_id, .opcode = WrOpcode::rdma_write, .sges = {pair.mine.sge(0, 8)}, .remote = pair.theirs.remote(0)});
  };
  write(1);
  pair.settle();
  CHECK(pair.polled(pair.a) == 1);
  pair.hosts.restart(1);
  pair.settle();
  pair.a.post({.wr_id = 2, .opcode = WrOpcode::local_inv});
  pair.settle();
  CHECK(pair.polled(pair.a) == 1);
  write(3);
  pair.settle();
  const auto lost = pair.a.poll(Direction::send);
  REQUIRE(lost);
  CHECK(lost->status == WcStatus::retry_exc_err);
}

TEST_CASE("Who is refused a stand-in hears that nobody answers, and UC that its messages are lost; whoever gets one later is served") {
  for (const QpType type : {QpType::rc, QpType::uc}) {
    FarPair pair(type);
    pair.hosts.refuses_opens = true;
    constexpr std::uint32_t bytes = 2 * FarLimits<TestPorts>::part_bytes;  // and so `more`, which is not answered
    const auto write = [&](std::uint64_t wr_id) {
      pair.a.post({.wr_id = wr_id, .opcode = WrOpcode::rdma_write, .sges = {pair.mine.sge(0, bytes)}, .remote = pair.theirs.remote(0)});
    };
    write(1), write(2);
    pair.settle();
    const auto first = pair.a.poll(Direction::send), second = pair.a.poll(Direction::send);
    REQUIRE(first);
    REQUIRE(second);
    CHECK(first->status == (type == QpType::rc ? WcStatus::retry_exc_err : WcStatus::success));
    CHECK(second->status == (type == QpType::rc ? WcStatus::wr_flush_err : WcStatus::success));
    pair.hosts.refuses_opens = false;
    if (type == QpType::rc) {
      for (TestQp* const qp : {&pair.a, &pair.b}) REQUIRE(pair.world.modify(*qp, QpState::reset, {}));
      pair.world.connect(pair.a, pair.b);
    }
    write(3);
    pair.settle();
    CHECK(pair.polled(pair.a) == 1);
    CHECK(std::equal(pair.mine.bytes.begin(), pair.mine.bytes.begin() + bytes, pair.theirs.bytes.begin()));
  }
}

TEST_CASE("Who connects while the far host is away reaches the service that is there when it is back") {
  FarPair pair(QpType::rc);
  auto& later = pair.world.add(QpType::rc, 1, 1);
  auto& there = pair.world.add(QpType::rc, 2, 2);
  there.core.port.host = 1;
  pair.world.connect(later, there);
  const auto write = [&](TestQp& qp) {
    qp.post({.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {pair.mine.sge(0, 8)}, .remote = pair.theirs.remote(0)});
  };
  write(pair.a);
  pair.settle();
  CHECK(pair.polled(pair.a) == 1);
  pair.hosts.cut(1, 0);
  pair.world.pass(TestHosts::noticed_ns);
  write(later);
  pair.world.pass(second_ns);
  CHECK(pair.hosts.link(0, 1).frames.empty());
  pair.hosts.restart(1);
  pair.hosts.heal(1, 0);
  pair.settle();
  pair.world.pass(second_ns / 100);
  pair.settle();
  CHECK(pair.polled(later) == 1);
}

TEST_CASE("What is on its way when both ends are reset does not come in their next connection, and what is sent in that one does") {
  for (const QpType type : {QpType::rc, QpType::uc})
    for (const std::uint32_t ahead : {0u, 1u, 2u, 4u}) {  // records that come between the RESETs of the two ends: open, two requests, close
      CAPTURE(static_cast<int>(type));
      CAPTURE(ahead);
      FarPair pair(type);
      const std::vector<std::byte> as_it_was = pair.theirs.bytes;
      const auto write = [&](std::uint64_t wr_id, std::uint64_t at) {
        pair.a.post({.wr_id = wr_id, .opcode = WrOpcode::rdma_write, .sges = {pair.mine.sge(0, 64)}, .remote = pair.theirs.remote(at)});
      };
      const auto send = [&](std::uint64_t wr_id) { pair.a.post({.wr_id = wr_id, .opcode = WrOpcode::send, .sges = {pair.mine.sge(0, 64)}}); };
      write(1, 0), send(2);
      pair.world.settle();
      REQUIRE(pair.world.modify(pair.b, QpState::reset, {}));
      if (ahead < 4) pair.hosts.deliver(0, 1, ahead), pair.hosts.run_stand_ins();
      REQUIRE(pair.world.modify(pair.a, QpState::reset, {}));
      if (ahead >= 4) pair.hosts.deliver(0, 1, ahead), pair.hosts.run_stand_ins();
      pair.world.connect(pair.a, pair.b);
      for (std::uint64_t wr_id : {7, 8}) pair.b.post(ReceiveSpec{.wr_id = wr_id, .sges = {pair.theirs.sge(1024 * wr_id, 64)}});
      write(3, 512), send(4);  // before the mark can be back
      pair.settle();
      CHECK(pair.polled(pair.a) == 2);
      const auto received = pair.b.poll(Direction::receive);
      REQUIRE(received);
      CHECK(received->status == WcStatus::success);
      CHECK(!pair.b.poll(Direction::receive));
      CHECK(pair.b.core.counters.received_messages == 2);
      CHECK(std::equal(pair.theirs.bytes.begin(), pair.theirs.bytes.begin() + 64, as_it_was.begin()));
      CHECK(std::equal(pair.theirs.bytes.begin() + 512, pair.theirs.bytes.begin() + 512 + 64, pair.mine.bytes.begin()));
    }
}

TEST_CASE("A peer that was not reset is heard by who is connected anew") {
  for (const QpType type : {QpType::rc, QpType::uc}) {
    FarPair pair(type);
    const auto write = [&] {
      pair.a.post({.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {pair.mine.sge(0, 8)}, .remote = pair.theirs.remote(0)});
      pair.world.settle();
    };
    write();
    pair.settle();
    CHECK(pair.polled(pair.a) == 1);
    REQUIRE(pair.world.modify(pair.b, QpState::reset, {}));
    auto again = connection(pair.a.core.qpn.value, pair.a.core.port.lid);
    again.rq_psn = pair.a.core.send_psn.value;
    write();
    pair.world.bring_up(pair.b, again);
    write();
    pair.settle();
    CHECK(pair.polled(pair.a) == 2);
    CHECK(pair.b.core.counters.received_messages == 3);
  }
}

TEST_CASE("One mark is under way at a time, and none that was sent before it was wanted counts") {
  FarMarks marks;
  CHECK(marks.want() == 0);  // of a host that was not met, or sends none back
  CHECK(marks.next() == 0);
  marks.begin(true);
  const auto one = marks.want();
  CHECK(!marks.is_back(one));
  CHECK(marks.next() == one);
  const auto two = marks.want();
  CHECK(marks.want() == two);
  CHECK(marks.next() == 0);
  CHECK(!marks.came_back(two));
  CHECK(marks.came_back(one));
  CHECK(!marks.came_back(one));
  CHECK(marks.is_back(one));
  CHECK(!marks.is_back(two));
  CHECK(!marks.all_back());
  CHECK(marks.next() == two);
  const auto three = marks.want();
  marks.begin(false);
  CHECK(marks.is_back(three));
  CHECK(marks.all_back());
  CHECK(!marks.came_back(two));
  CHECK(marks.want() == 0);
}

}  // namespace
}  // namespace vrdma::engine::test
