#include "vmkernel_svc/engine/engine.hpp"

#include <doctest/doctest.h>

#include "vmkernel_svc/engine/test_world.hpp"

namespace vrdma::engine::test {
namespace {

using Memory = TestWorld::Memory;

bool same_bytes(const Memory& a, std::size_t at_a, const Memory& b, std::size_t at_b, std::size_t bytes) {
  return std::memcmp(a.bytes.data() + at_a, b.bytes.data() + at_b, bytes) == 0;
}

struct Pair {
  explicit Pair(QpType type = QpType::rc, TestPorts::Srq* srq = nullptr)
      : a(world.add(type, 1, 1)), b(world.add(type, 2, 2, srq)), mine(world.memory(1 << 20, 1)), theirs(world.memory(1 << 20, 2)) {
    world.connect(a, b);
    TestWorld::fill(mine, 3);
  }
  Completion send(const SendSpec& spec) {
    a.post(spec);
    world.settle();
    const auto completion = a.poll(Direction::send);
    REQUIRE(completion.has_value());
    return *completion;
  }
  TestWorld world;
  TestQp &a, &b;
  Memory &mine, &theirs;
};

TEST_CASE("A SEND lands in the receive buffers and completes on both sides") {
  Pair p;
  p.b.post(ReceiveSpec{7, {p.theirs.sge(100, 64)}});
  const auto sent = p.send({.wr_id = 5, .opcode = WrOpcode::send_with_imm, .imm = 0x01020304, .sges = {p.mine.sge(8, 33)}});
  CHECK(sent.wr_id == 5);
  CHECK(sent.status == WcStatus::success);
  CHECK(sent.opcode == WcOpcode::send);
  CHECK(sent.position == p.a.send_writer.position());
  const auto received = p.b.poll(Direction::receive);
  REQUIRE(received);
  CHECK(received->wr_id == 7);
  CHECK(received->status == WcStatus::success);
  CHECK(received->opcode == WcOpcode::recv);
  CHECK(received->byte_len == 33);
  CHECK(received->flags == wc_with_imm);
  CHECK(received->imm == 0x01020304);
  CHECK(received->src_qp == p.a.core.qpn.value);
  CHECK(same_bytes(p.mine, 8, p.theirs, 100, 33));
  CHECK(p.theirs.bytes[99] == std::byte{0});
  CHECK(p.theirs.bytes[133] == std::byte{0});
}

TEST_CASE("Any cut of the source arrives in any cut of the destination") {
  for (std::uint32_t seed = 1; seed < 200; ++seed) {
    Pair p;
    std::uint32_t state = seed * 2654435761u;
    const auto random = [&](std::uint32_t n) {
      state = state * 1664525u + 1013904223u;
      return (state >> 8) % n;
    };
    SendSpec send{.wr_id = 1};
    ReceiveSpec receive{2, {}};
    std::vector<std::byte> model;
    for (std::uint32_t i = random(send_sge_max + 1); i > 0; --i) {
      const std::uint32_t at = random(1000), bytes = random(300);
      send.sges.push_back(p.mine.sge(at, bytes));
      model.insert(model.end(), p.mine.bytes.begin() + at, p.mine.bytes.begin() + at + bytes);
    }
    std::uint32_t room = 0, at = 0;
    while (receive.sges.size() < receive_sge_max && room < model.size()) {
      const std::uint32_t bytes = receive.sges.size() == receive_sge_max - 1 ? 10000 : random(700);
      receive.sges.push_back(p.theirs.sge(at, bytes));
      room += bytes, at += bytes + 1 + random(9);
    }
    p.b.post(receive);
    CHECK(p.send(send).status == WcStatus::success);
    const auto received = p.b.poll(Direction::receive);
    REQUIRE(received);
    CHECK(received->byte_len == model.size());
    std::vector<std::byte> got;
    for (const Sge& sge : receive.sges) {
      const auto from = p.theirs.bytes.begin() + static_cast<std::ptrdiff_t>(sge.address - p.theirs.iova);
      got.insert(got.end(), from, from + sge.bytes);
    }
    got.resize(model.size());
    CHECK(got == model);
  }
}

TEST_CASE("Inline data is sent from the WQE itself") {
  Pair p;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{16}, std::size_t{17}, std::size_t{inline_bytes_max}}) {
    p.b.post(ReceiveSpec{1, {p.theirs.sge(0, inline_bytes_max)}});
    const std::vector<std::byte> data(bytes, std::byte{0x5a});
    CHECK(p.send({.wr_id = 1, .flags = wr_signaled | wr_inline, .inline_data = data}).status == WcStatus::success);
    CHECK(p.b.poll(Direction::receive)->byte_len == bytes);
    CHECK(std::equal(data.begin(), data.end(), p.theirs.bytes.begin()));
  }
}

TEST_CASE("WRITE, WRITE with immediate and READ move bytes without the far application's doing") {
  Pair p;
  CHECK(p.send({.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {p.mine.sge(0, 5000)}, .remote = p.theirs.remote(77)}).opcode ==
        WcOpcode::rdma_write);
  CHECK(same_bytes(p.mine, 0, p.theirs, 77, 5000));
  CHECK_FALSE(p.b.poll(Direction::receive));

  p.b.post(ReceiveSpec{9, {}});
  p.send({.wr_id = 2, .opcode = WrOpcode::rdma_write_with_imm, .imm = 42, .sges = {p.mine.sge(1, 100)}, .remote = p.theirs.remote(9000)});
  const auto received = p.b.poll(Direction::receive);
  REQUIRE(received);
  CHECK(received->opcode == WcOpcode::recv_rdma_with_imm);
  CHECK(received->byte_len == 100);
  CHECK(received->imm == 42);
  CHECK(same_bytes(p.mine, 1, p.theirs, 9000, 100));

  TestWorld::fill(p.theirs, 99);
  const auto read = p.send({.wr_id = 3,
                            .opcode = WrOpcode::rdma_read,
                            .sges = {p.mine.sge(500, 10), p.mine.sge(600, 3000)},
                            .remote = p.theirs.remote(12)});
  CHECK(read.opcode == WcOpcode::rdma_read);
  CHECK(read.byte_len == 3010);
  CHECK(same_bytes(p.mine, 500, p.theirs, 12, 10));
  CHECK(same_bytes(p.mine, 600, p.theirs, 22, 3000));
}

TEST_CASE("Atomics change the far word and return what was there") {
  Pair p;
  std::uint64_t word = 40, old;
  std::memcpy(p.theirs.bytes.data() + 8, &word, 8);
  p.send({.wr_id = 1, .opcode = WrOpcode::atomic_fetch_and_add, .sges = {p.mine.sge(16, 8)}, .remote = p.theirs.remote(8, 2)});
  std::memcpy(&old, p.mine.bytes.data() + 16, 8);
  CHECK(old == 40);
  const auto swapped = p.send(
      {.wr_id = 2, .opcode = WrOpcode::atomic_cmp_and_swp, .sges = {p.mine.sge(0, 3), p.mine.sge(10, 5)}, .remote = p.theirs.remote(8, 42, 7)});
  CHECK(swapped.opcode == WcOpcode::comp_swap);
  std::memcpy(&word, p.theirs.bytes.data() + 8, 8);
  CHECK(word == 7);
  CHECK(p.mine.bytes[0] == std::byte{42});  // scattered over both
  p.send({.wr_id = 3, .opcode = WrOpcode::atomic_cmp_and_swp, .sges = {p.mine.sge(16, 8)}, .remote = p.theirs.remote(8, 42, 9)});
  std::memcpy(&word, p.theirs.bytes.data() + 8, 8);
  CHECK(word == 7);
}

TEST_CASE("Zero-length operations complete and never look at a key") {
  Pair p;
  const RemoteOperand nowhere{0xdead, 0, 0, 0xbad, 0};
  for (const WrOpcode opcode : {WrOpcode::rdma_write, WrOpcode::rdma_read})
    CHECK(p.send({.wr_id = 1, .opcode = opcode, .sges = {{0x1234, 0, 0xbad}}, .remote = nowhere}).status == WcStatus::success);
  p.b.post(ReceiveSpec{4, {{0, 0, 0xbad}}});
  CHECK(p.send({.wr_id = 2, .sges = {}}).status == WcStatus::success);
  CHECK(p.b.poll(Direction::receive)->byte_len == 0);
  p.b.post(ReceiveSpec{5, {}});
  CHECK(p.send({.wr_id = 3, .opcode = WrOpcode::rdma_write_with_imm, .remote = nowhere}).status == WcStatus::success);
  CHECK(p.b.poll(Direction::receive)->wr_id == 5);
}

TEST_CASE("A receive buffer that the message does not reach may have a bad key") {
  Pair p;
  p.b.post(ReceiveSpec{4, {p.theirs.sge(0, 10), {0, 100, 0xbad}}});
  CHECK(p.send({.wr_id = 2, .sges = {p.mine.sge(0, 10)}}).status == WcStatus::success);
  CHECK(p.b.poll(Direction::receive)->status == WcStatus::success);
}

TEST_CASE("Unsignalled requests complete nothing; the next signalled completion frees their slots") {
  Pair p;
  for (std::uint64_t i = 0; i < 6; ++i) {
    p.b.post(ReceiveSpec{i, {p.theirs.sge(0, 64)}});
    p.a.post(SendSpec{.wr_id = i, .flags = static_cast<std::uint8_t>(i == 4 ? wr_signaled : 0), .sges = {p.mine.sge(0, 8)}});
  }
  const std::uint32_t after_five = p.a.send_writer.position() - 1;
  p.world.settle();
  const auto sent = p.a.poll(Direction::send);
  REQUIRE(sent);
  CHECK(sent->wr_id == 4);
  CHECK(sent->position == after_five);
  CHECK_FALSE(p.a.poll(Direction::send));
  for (std::uint64_t i = 0; i < 6; ++i) CHECK(p.b.poll(Direction::receive)->wr_id == i);
}

TEST_CASE("The solicited flag travels to the receiver") {
  Pair p;
  p.b.post(ReceiveSpec{1, {p.theirs.sge(0, 64)}});
  p.send({.wr_id = 1, .flags = wr_signaled | wr_solicited, .sges = {p.mine.sge(0, 8)}});
  CHECK((p.b.poll(Direction::receive)->flags & wc_solicited) != 0);
}

TEST_CASE("A long message goes on over many turns and never overdraws one by more than a slice") {
  Pair p;
  std::uint64_t turns = 0;
  p.a.post(SendSpec{.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {p.mine.sge(0, 1 << 20)}, .remote = p.theirs.remote(0)});
  for (bool more = true; more; ++turns) {
    Budget budget{100'000, 8};
    more = p.world.engine.run(p.a.core, budget) == Progress::worked;
    CHECK(budget.bytes > -static_cast<std::int64_t>(slice_bytes));
  }
  CHECK(turns >= (1 << 20) / (100'000 + static_cast<int>(slice_bytes)));
  CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
  CHECK(p.mine.bytes == p.theirs.bytes);
}

TEST_CASE("A turn starts no more requests than its budget says") {
  Pair p;
  for (std::uint64_t i = 0; i < 10; ++i)
    p.a.post(SendSpec{.wr_id = i, .opcode = WrOpcode::rdma_write, .sges = {p.mine.sge(0, 8)}, .remote = p.theirs.remote(0)});
  Budget budget{1 << 20, 4};
  CHECK(p.world.engine.run(p.a.core, budget) == Progress::worked);
  int done = 0;
  while (p.a.poll(Direction::send)) ++done;
  CHECK(done == 4);
}

TEST_CASE("Sequence numbers advance by packets of the path MTU, by one for atomics and empty messages, and wrap at 24 bits") {
  Pair p;  // path_mtu 3 = 1024 bytes, both PSNs start at 0xfffffe
  const auto expect = [&](std::uint32_t psn) {
    CHECK(p.a.core.send_psn.value == psn);
    CHECK(p.b.core.expected_psn.value == psn);
  };
  p.send({.wr_id = 1, .opcode = WrOpcode::rdma_write, .remote = p.theirs.remote(0)});
  expect(0xffffff);
  p.send({.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {p.mine.sge(0, 1025)}, .remote = p.theirs.remote(0)});
  expect(1);
  p.send({.wr_id = 1, .opcode = WrOpcode::rdma_read, .sges = {p.mine.sge(0, 3072)}, .remote = p.theirs.remote(0)});
  expect(4);
  p.send({.wr_id = 1, .opcode = WrOpcode::atomic_fetch_and_add, .sges = {p.mine.sge(0, 8)}, .remote = p.theirs.remote(0)});
  expect(5);
}

TEST_CASE("A queue pair connected to itself works") {
  TestWorld world;
  TestQp& qp = world.add(QpType::rc);
  world.bring_up(qp, connection(qp.core.qpn.value, 1));
  Memory& memory = world.memory(4096);
  TestWorld::fill(memory, 1);
  qp.post(ReceiveSpec{1, {memory.sge(2048, 100)}});
  qp.post(SendSpec{.wr_id = 2, .sges = {memory.sge(0, 100)}});
  world.settle();
  CHECK(qp.poll(Direction::send)->status == WcStatus::success);
  CHECK(qp.poll(Direction::receive)->status == WcStatus::success);
  CHECK(same_bytes(memory, 0, memory, 2048, 100));
  // And fails as a whole: both halves are its own.
  qp.post(ReceiveSpec{3, {memory.sge(2048, 1)}});
  qp.post(ReceiveSpec{4, {memory.sge(2048, 1)}});
  qp.post(SendSpec{.wr_id = 5, .sges = {memory.sge(0, 100)}});
  qp.post(SendSpec{.wr_id = 6, .sges = {memory.sge(0, 100)}});
  world.settle();
  CHECK(qp.poll(Direction::send)->status == WcStatus::rem_inv_req_err);
  CHECK(qp.poll(Direction::send)->status == WcStatus::wr_flush_err);
  CHECK(qp.poll(Direction::receive)->status == WcStatus::loc_len_err);
  CHECK(qp.poll(Direction::receive)->status == WcStatus::wr_flush_err);
}

TEST_CASE("Communication is established once, for a receiver that is not at RTS yet") {
  TestWorld world;
  TestQp &a = world.add(QpType::rc, 1, 1), &b = world.add(QpType::rc, 1, 2);
  Memory& memory = world.memory(4096);
  world.bring_up(a, connection(b.core.qpn.value, 2));
  world.bring_up(b, connection(a.core.qpn.value, 1), QpState::rtr);
  for (std::uint64_t i = 0; i < 3; ++i) {
    b.post(ReceiveSpec{i, {memory.sge(0, 100)}});
    a.post(SendSpec{.wr_id = i, .sges = {memory.sge(200, 100)}});
    world.settle();
    CHECK(a.poll(Direction::send)->status == WcStatus::success);
  }
  CHECK(b.core.port.events == std::vector{AsyncEvent::comm_est});
}

TEST_CASE("Before RTS nothing posted is looked at") {
  TestWorld world;
  TestQp &a = world.add(QpType::rc, 1, 1), &b = world.add(QpType::rc, 1, 2);
  Memory& memory = world.memory(4096);
  world.bring_up(a, connection(b.core.qpn.value, 2), QpState::rtr);
  world.bring_up(b, connection(a.core.qpn.value, 1));
  a.post(SendSpec{.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {memory.sge(0, 8)}, .remote = memory.remote(8)});
  world.settle();
  CHECK_FALSE(a.poll(Direction::send));
  REQUIRE(world.modify(a, QpState::rts, connection(b.core.qpn.value, 2)));
  world.settle();
  CHECK(a.poll(Direction::send)->status == WcStatus::success);
}

TEST_CASE("In SQD the message under way ends, the next one waits, and the drain is reported when asked for") {
  for (const bool notify : {false, true}) {
    Pair p;
    p.a.post(SendSpec{.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {p.mine.sge(0, 1 << 20)}, .remote = p.theirs.remote(0)});
    p.a.post(SendSpec{.wr_id = 2, .opcode = WrOpcode::rdma_write, .sges = {p.mine.sge(0, 8)}, .remote = p.theirs.remote(0)});
    Budget budget{1000, 8};
    p.world.engine.run(p.a.core, budget);
    QpAttributes wanted{};
    wanted.en_sqd_async_notify = notify;
    REQUIRE(p.world.modify(p.a, QpState::sqd, wanted, qp_attr_en_sqd_async_notify));
    CHECK_FALSE(p.a.core.drain_reported);
    p.world.settle();
    CHECK(p.a.core.drain_reported);
    CHECK(p.a.poll(Direction::send)->wr_id == 1);
    CHECK_FALSE(p.a.poll(Direction::send));
    CHECK(p.a.core.port.events.size() == (notify ? 1 : 0));
    REQUIRE(p.world.modify(p.a, QpState::rts, wanted));
    p.world.settle();
    CHECK(p.a.poll(Direction::send)->wr_id == 2);
    // And each time anew.
    REQUIRE(p.world.modify(p.a, QpState::sqd, wanted, qp_attr_en_sqd_async_notify));
    p.world.settle();
    CHECK(p.a.core.port.events.size() == (notify ? 2 : 0));
  }
}

TEST_CASE("A shared receive queue feeds several queue pairs in order and says once that it runs low") {
  TestWorld world;
  TestSrq srq(16, 2);
  TestQp &a1 = world.add(QpType::rc, 1, 1), &a2 = world.add(QpType::rc, 1, 1);
  TestQp &b1 = world.add(QpType::rc, 3, 2, &srq.core), &b2 = world.add(QpType::rc, 3, 2, &srq.core);
  world.connect(a1, b1);
  world.connect(a2, b2);
  Memory &mine = world.memory(4096, 1), &theirs = world.memory(4096, 2);  // the SRQ's own protection domain
  srq.core.limit = 3;
  for (std::uint64_t i = 0; i < 5; ++i) srq.post(ReceiveSpec{i, {theirs.sge(i * 100, 100)}});
  const auto send = [&](TestQp& from) {
    from.post(SendSpec{.wr_id = 1, .sges = {mine.sge(0, 50)}});
    world.settle();
  };
  send(a1), send(a2);
  CHECK(srq.core.port.limit_events == 0);  // three left: not below three
  send(a2);
  CHECK(srq.core.port.limit_events == 1);
  CHECK(srq.core.limit == 0);
  send(a1);
  CHECK(srq.core.port.limit_events == 1);
  CHECK(b1.poll(Direction::receive)->wr_id == 0);
  CHECK(b2.poll(Direction::receive)->wr_id == 1);
  CHECK(b2.poll(Direction::receive)->wr_id == 2);
  CHECK(b1.poll(Direction::receive)->wr_id == 3);
}

TEST_CASE("The last WQE of a queue pair with an SRQ is reported once, when it has entered ERR") {
  TestWorld world;
  TestSrq srq(16, 1);
  TestQp &a = world.add(QpType::rc, 1, 1), &b = world.add(QpType::rc, 1, 2, &srq.core);
  world.connect(a, b);
  REQUIRE(world.modify(b, QpState::err, {}));
  world.settle();
  world.settle();
  CHECK(b.core.port.events == std::vector{AsyncEvent::qp_last_wqe_reached});
}

TEST_CASE("An SRQ's receive that was taken for a message cut short by a reset serves the next one") {
  TestWorld world;
  TestSrq srq(4, 2);
  TestQp &a1 = world.add(QpType::rc, 1, 1), &a2 = world.add(QpType::rc, 1, 1);
  TestQp &b1 = world.add(QpType::rc, 2, 2, &srq.core), &b2 = world.add(QpType::rc, 2, 2, &srq.core);
  world.connect(a1, b1);
  world.connect(a2, b2);
  Memory &mine = world.memory(1 << 20, 1), &theirs = world.memory(1 << 20, 2);
  TestWorld::fill(mine, 4);
  srq.post(ReceiveSpec{11, {theirs.sge(0, 1 << 20)}});
  a1.post(SendSpec{.wr_id = 1, .sges = {mine.sge(0, 1 << 20)}});
  Budget budget{1000, 8};
  world.engine.run(a1.core, budget);
  CHECK(b1.core.inbound.active);
  REQUIRE(world.modify(b1, QpState::reset, {}));
  a2.post(SendSpec{.wr_id = 2, .sges = {mine.sge(5, 1000)}});
  world.settle();
  const auto received = b2.poll(Direction::receive);
  REQUIRE(received);
  CHECK(received->wr_id == 11);
  CHECK(same_bytes(mine, 5, theirs, 0, 1000));
}

TEST_CASE("A pending copy is waited for and repeated exactly, whichever turn it comes to an end in") {
  for (const WrOpcode opcode : {WrOpcode::send, WrOpcode::rdma_write, WrOpcode::rdma_read}) {
    Pair p;
    TestWorld::fill(p.theirs, 201);
    p.world.ports.copy_pends = [](const TestPorts::Qp&, std::uint64_t) { return true; };
    if (opcode == WrOpcode::send) p.b.post(ReceiveSpec{1, {p.theirs.sge(0, 150'000), p.theirs.sge(200'000, 150'000)}});
    p.a.post(SendSpec{.wr_id = 1, .opcode = opcode, .sges = {p.mine.sge(0, 100'000), p.mine.sge(150'000, 100'000)}, .remote = p.theirs.remote(0)});
    int jobs = 0;
    for (p.world.settle(); !p.world.ports.jobs.empty(); p.world.settle()) {
      CHECK_FALSE(p.a.poll(Direction::send));
      Budget small{1, 1};  // an idle look in between changes nothing
      CHECK(p.world.engine.run(p.a.core, small) == Progress::waiting);
      p.world.ports.finish_copy(0);
      ++jobs;
    }
    CHECK(jobs >= 4);
    CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
    const std::size_t second = opcode == WrOpcode::send ? 150'000 : 100'000;
    CHECK(same_bytes(p.mine, 0, p.theirs, 0, 100'000));
    if (opcode == WrOpcode::send) {
      CHECK(same_bytes(p.mine, 150'000, p.theirs, 100'000, 50'000));
      CHECK(same_bytes(p.mine, 200'000, p.theirs, 200'000, 50'000));
    } else {
      CHECK(same_bytes(p.mine, 150'000, p.theirs, second, 100'000));
    }
  }
}

}  // namespace
}  // namespace vrdma::engine::test
