// What becomes of copies, buffers and requests when a queue pair flushes, is reset or destroyed, or its patience ends.
#include <doctest/doctest.h>

#include "vmkernel_svc/engine/test_pair.hpp"

namespace vrdma::engine::test {
namespace {

// Whose copies pend until the test ends them.
struct SlowPair : Pair {
  SlowPair() {
    world.ports.copy_pends = [](const TestPorts::Qp&, std::uint64_t) { return true; };
  }
  void begin_send() {
    b.post(ReceiveSpec{5, {theirs.sge(0, 100)}});
    begin({.wr_id = 1, .sges = {mine.sge(0, 100)}});
  }
  void begin_read() { begin({.wr_id = 1, .opcode = WrOpcode::rdma_read, .sges = {mine.sge(0, 100)}, .remote = theirs.remote(0)}); }

 private:
  void begin(const SendSpec& spec) {
    a.post(spec);
    world.settle();
    REQUIRE(world.ports.jobs.size() == 1);
  }
};

TEST_CASE("A copy that does not end is given up after its patience; a machine that stood still for a minute has used up a part of that") {
  for (const bool ends : {true, false}) {
    SlowPair p;
    p.a.post(p.write(8));
    p.world.settle();
    REQUIRE(p.world.ports.jobs.size() == 1);
    p.world.ports.time_ns += 60'000'000'000;  // nobody had any of it
    p.world.pass(100'000'000);
    CHECK_FALSE(p.a.poll(Direction::send));
    if (ends) p.world.ports.finish_copy(0);
    p.world.pass(2'000'000'000);
    CHECK(p.a.poll(Direction::send)->status == (ends ? WcStatus::success : WcStatus::retry_exc_err));
  }
}

TEST_CASE("A copy's patience does not pass while others have their turns before it") {
  for (const bool atomic : {false, true}) {
    SlowPair p;
    p.world.ports.atomics_pend = p.world.ports.others_go_first = true;
    p.a.post(atomic ? SendSpec{.wr_id = 1, .opcode = WrOpcode::atomic_fetch_and_add, .sges = {p.mine.sge(0, 8)}, .remote = p.theirs.remote(0, 1)} : p.write(8));
    p.world.pass(30'000'000'000);
    CHECK_FALSE(p.a.poll(Direction::send));
    p.world.ports.others_go_first = false;
    p.world.pass(800'000'000);
    CHECK_FALSE(p.a.poll(Direction::send));
    p.world.pass(2'000'000'000);
    CHECK(p.a.poll(Direction::send)->status == WcStatus::retry_exc_err);
  }
}

TEST_CASE("A flushed receive's buffer is its owner's: no copy that was pending writes to it afterwards") {
  SlowPair p;
  p.begin_send();
  REQUIRE(p.world.modify(p.b, QpState::err, {}));
  p.world.settle();
  CHECK_FALSE(p.b.poll(Direction::receive));
  p.world.ports.finish_copy(0);
  p.world.settle();
  CHECK(p.b.poll(Direction::receive)->status == WcStatus::wr_flush_err);
}

TEST_CASE("A requester's memory that never answers holds the receiver's flush only for a while") {
  SlowPair p;
  p.begin_send();
  REQUIRE(p.world.modify(p.b, QpState::err, {}));
  p.world.pass(110'000'000);
  CHECK(p.b.poll(Direction::receive)->status == WcStatus::wr_flush_err);
  p.world.pass(2'000'000'000);
  CHECK(p.a.poll(Direction::send)->status == WcStatus::retry_exc_err);
}

TEST_CASE("A flush waits for the last step of what it has called off, and for 2 s at most") {
  for (const bool receiver_leaves : {true, false}) {
    for (const bool ends : {true, false}) {
      CAPTURE(receiver_leaves);
      CAPTURE(ends);
      SlowPair p;
      receiver_leaves ? p.begin_send() : p.begin_read();
      p.world.ports.begin_copy(0);
      TestQp& leaving = receiver_leaves ? p.b : p.a;
      const Direction direction = receiver_leaves ? Direction::receive : Direction::send;
      REQUIRE(p.world.modify(leaving, QpState::err, {}));
      p.world.pass(110'000'000);  // its patience
      CHECK_FALSE(leaving.poll(direction));
      if (ends) p.world.ports.finish_copy(0);
      else p.world.pass(TestPorts::last_step_max_ns);
      p.world.pass(2'000'000);
      CHECK(leaving.poll(direction)->status == WcStatus::wr_flush_err);
    }
  }
}

TEST_CASE("What was called off before it began changes nothing any more") {
  SlowPair p;
  p.begin_send();
  REQUIRE(p.world.modify(p.b, QpState::err, {}));
  p.world.pass(110'000'000);
  CHECK(p.b.poll(Direction::receive)->status == WcStatus::wr_flush_err);
  const auto before = p.theirs.bytes;
  p.world.ports.finish_copy(0);
  CHECK(p.theirs.bytes == before);
}

TEST_CASE("A flushed READ's buffer is its owner's too") {
  SlowPair p;
  p.begin_read();
  REQUIRE(p.world.modify(p.a, QpState::err, {}));
  p.world.settle();
  CHECK_FALSE(p.a.poll(Direction::send));
  p.world.ports.finish_copy(0);
  p.world.settle();
  CHECK(p.a.poll(Direction::send)->status == WcStatus::wr_flush_err);
}

// The far end is out of reach: another path, no common partition, a machine that stands still. And within reach again.
struct HiddenPair : SlowPair {
  explicit HiddenPair(bool begins) : begins_(begins) { world.ports.atomics_pend = true; }
  void begin(const SendSpec& spec) {
    a.post(spec);
    world.settle();
    REQUIRE(world.ports.jobs.size() == 1);
    if (begins_) world.ports.begin_copy(0);
    b.core.port.lid = 99;
    look();
  }
  void finish_all() {
    while (!world.ports.jobs.empty()) {
      world.ports.finish_copy(0);
      look();
    }
  }
  void come_back() {
    b.core.port.lid = 2;
    world.pass(60'000'000);
    finish_all();
  }
  void look() {
    a.core.port.runnable = true;
    world.settle();
  }

 private:
  bool begins_;
};

TEST_CASE("An atomic whose far end is out of reach for a moment is carried out once") {
  for (const bool begun : {true, false}) {
    for (const bool ends_meanwhile : {true, false}) {
      CAPTURE(begun);
      CAPTURE(ends_meanwhile);
      HiddenPair p(begun);
      p.world.ports.copy_pends = [](const TestPorts::Qp&, std::uint64_t) { return false; };
      p.begin({.wr_id = 1, .opcode = WrOpcode::atomic_fetch_and_add, .sges = {p.mine.sge(0, 8)}, .remote = p.theirs.remote(0, 5)});
      CHECK(p.world.engine.copies_under_way(p.b.core));
      if (ends_meanwhile) p.finish_all();
      p.come_back();
      CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
      std::uint64_t there = 0, seen = 1;
      std::memcpy(&there, p.theirs.bytes.data(), sizeof(there));
      std::memcpy(&seen, p.mine.bytes.data(), sizeof(seen));
      CHECK(there == 5);
      CHECK(seen == 0);
      CHECK_FALSE(p.b.core.serves);
      CHECK(p.run(p.write(0))->status == WcStatus::success);  // each knows the other's PSN
    }
  }
}

TEST_CASE("A target that ends while its initiator's atomic is carried out leaves it to its heir, and it is carried out once") {
  for (const bool ends_before : {true, false}) {
    CAPTURE(ends_before);
    Pair p;
    p.world.ports.atomics_pend = true;
    TestQp& heir = p.world.add(QpType::rc, p.b.core.port.pd, p.b.core.port.lid);
    p.a.post(SendSpec{.wr_id = 1, .opcode = WrOpcode::atomic_fetch_and_add, .sges = {p.mine.sge(0, 8)}, .remote = p.theirs.remote(0, 5)});
    p.world.settle();
    REQUIRE(p.world.ports.jobs.size() == 1);
    p.world.ports.begin_copy(0);
    if (ends_before) p.world.ports.finish_copy(0);  // and its requester has not had its turn yet
    p.world.engine.hand_over(p.b.core, heir.core);
    for (TestQp* qp : {&p.b, &heir}) p.world.ports.queue_pairs[qp->core.qpn.value] = &qp->core;
    p.world.engine.abandon(p.b.core);
    p.a.core.port.runnable = true;
    p.world.settle();
    while (!p.world.ports.jobs.empty()) {
      p.world.ports.finish_copy(0);
      p.world.settle();
    }
    CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
    std::uint64_t there = 0;
    std::memcpy(&there, p.theirs.bytes.data(), sizeof(there));
    CHECK(there == 5);
    CHECK(p.run(p.write(0))->status == WcStatus::success);  // the heir knows its PSN
  }
}

TEST_CASE("A target that ends in the middle of a SEND leaves the receive to its heir") {
  SlowPair p;
  TestQp& heir = p.world.add(QpType::rc, p.b.core.port.pd, p.b.core.port.lid);
  p.begin_send();
  p.world.engine.hand_over(p.b.core, heir.core);
  for (TestQp* qp : {&p.b, &heir}) p.world.ports.queue_pairs[qp->core.qpn.value] = &qp->core;
  p.world.engine.abandon(p.b.core);
  p.world.ports.finish_copy(0);
  p.world.settle();
  CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
  const auto received = heir.poll(Direction::receive);
  REQUIRE(received);
  CHECK(received->wr_id == 5);
  CHECK(received->byte_len == 100);
}

TEST_CASE("An atomic whose responder begins anew while it is carried out is not carried out again") {
  for (const bool ends_before : {true, false}) {
    CAPTURE(ends_before);
    Pair p;
    p.world.ports.atomics_pend = true;
    p.a.post(SendSpec{.wr_id = 1, .opcode = WrOpcode::atomic_fetch_and_add, .sges = {p.mine.sge(0, 8)}, .remote = p.theirs.remote(0, 5)});
    p.world.settle();
    REQUIRE(p.world.ports.jobs.size() == 1);
    p.world.ports.begin_copy(0);
    if (ends_before) p.world.ports.finish_copy(0);
    const QpAttributes same = p.b.core.attributes;
    REQUIRE(p.world.modify(p.b, QpState::reset, {}));
    p.world.bring_up(p.b, same, QpState::rtr);
    p.a.core.port.runnable = true;
    p.world.pass(ends_before ? 1'000'000 : TestPorts::last_step_max_ns + 10'000'000);  // until the worker is waited for no longer
    while (!p.world.ports.jobs.empty()) p.world.ports.finish_copy(0);
    p.world.pass(1'000'000);
    CHECK(p.a.poll(Direction::send)->status == WcStatus::retry_exc_err);
    std::uint64_t there = 0;
    std::memcpy(&there, p.theirs.bytes.data(), sizeof(there));
    CHECK(there == 5);
  }
}

TEST_CASE("A WRITE that has come to its end while the far end is out of reach does not come again over what is there then") {
  HiddenPair p(true);
  p.begin(p.write(100));
  p.finish_all();
  CHECK(p.theirs.bytes[99] == p.mine.bytes[99]);
  p.theirs.bytes[99] = std::byte{0xee};
  p.come_back();
  CHECK(p.theirs.bytes[99] == std::byte{0xee});
  CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
  CHECK_FALSE(p.a.poll(Direction::send));
}

TEST_CASE("What is out of reach in the middle of a message gets no more of it until it is back, and then all of it") {
  constexpr std::uint32_t bytes = 3 * slice_bytes;
  HiddenPair p(true);
  p.begin(p.write(bytes));
  p.finish_all();
  CHECK(p.theirs.bytes[slice_bytes - 1] == p.mine.bytes[slice_bytes - 1]);
  CHECK(p.theirs.bytes[slice_bytes] == std::byte{0});
  CHECK_FALSE(p.a.poll(Direction::send));
  p.come_back();
  CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
  CHECK(std::equal(p.mine.bytes.begin(), p.mine.bytes.begin() + bytes, p.theirs.bytes.begin()));
}

TEST_CASE("What stays out of reach, at memory that does not come, is given up in time") {
  HiddenPair p(true);
  p.begin(p.write(100));
  p.world.pass(2'000'000'000);
  CHECK(p.a.poll(Direction::send)->status == WcStatus::retry_exc_err);
}

TEST_CASE("An atomic that has for ever is under way as any other is") {
  HiddenPair p(true);
  p.a.core.attributes.timeout = 0;
  p.begin({.wr_id = 1, .opcode = WrOpcode::atomic_fetch_and_add, .sges = {p.mine.sge(0, 8)}, .remote = p.theirs.remote(0, 5)});
  CHECK(p.world.engine.copies_under_way(p.a.core));
  CHECK(p.world.engine.copies_under_way(p.b.core));
  p.b.core.port.lid = 2;
  p.world.pass(60'000'000'000);
  CHECK_FALSE(p.a.poll(Direction::send));
  p.finish_all();
  CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
}

TEST_CASE("What was posted before a position gets on while it waits for copies only") {
  SlowPair p;
  const auto send = [&p](std::uint64_t wr_id) { p.a.post(SendSpec{.wr_id = wr_id, .sges = {p.mine.sge(0, 100)}}); };
  for (std::uint64_t i = 0; i < 4; ++i) p.b.post(ReceiveSpec{i, {p.theirs.sge(i * 100, 100)}});
  for (std::uint64_t i = 0; i < 3; ++i) send(i);
  const std::uint32_t position = p.a.send_writer.position();
  send(3);
  CHECK(p.world.engine.sends_get_on(p.a.core, position));
  int copies = 0;
  for (p.world.settle(); p.world.engine.sends_get_on(p.a.core, position); p.world.settle(), ++copies) p.world.ports.finish_copy(0);
  CHECK(copies == 3);
  REQUIRE(p.world.modify(p.a, QpState::err, {}));
  CHECK_FALSE(p.world.engine.sends_get_on(p.a.core, p.a.send_writer.position()));
  p.world.ports.finish_copy(0);
  p.world.settle();
  for (std::uint64_t i = 0; i < 4; ++i) {
    const auto completion = p.a.poll(Direction::send);
    REQUIRE(completion);
    CHECK(completion->wr_id == i);
    CHECK(completion->status == (i < 3 ? WcStatus::success : WcStatus::wr_flush_err));
  }
}

TEST_CASE("What waits for a receive WQE or an answer does not get on") {
  for (const bool answers : {true, false}) {
    Pair p;
    if (!answers) REQUIRE(p.world.modify(p.b, QpState::reset, {}));
    p.a.post(SendSpec{.wr_id = 1, .sges = {p.mine.sge(0, 100)}});
    CHECK(p.world.engine.sends_get_on(p.a.core, p.a.send_writer.position()));
    p.world.settle();
    CHECK_FALSE(p.world.engine.sends_get_on(p.a.core, p.a.send_writer.position()));
  }
}

TEST_CASE("A requester that is destroyed in the middle of a SEND leaves the receive for the next message or the flush") {
  Pair p;
  p.b.post(ReceiveSpec{5, {p.theirs.sge(0, 1 << 20)}});
  p.a.post(SendSpec{.wr_id = 1, .sges = {p.mine.sge(0, 1 << 20)}});
  Budget budget{1000, 8};
  p.world.engine.run(p.a.core, budget);
  p.world.engine.abandon(p.a.core);
  CHECK(p.b.core.serves == nullptr);
  REQUIRE(p.world.modify(p.b, QpState::err, {}));
  p.world.settle();
  const auto flushed = p.b.poll(Direction::receive);
  REQUIRE(flushed);
  CHECK(flushed->wr_id == 5);
  CHECK(flushed->status == WcStatus::wr_flush_err);
}

TEST_CASE("RESET forgets what was posted and completes nothing") {
  Pair p;
  for (std::uint64_t i = 0; i < 4; ++i) p.a.post(p.write(8));
  for (std::uint64_t i = 0; i < 4; ++i) p.a.post(ReceiveSpec{i, {}});
  REQUIRE(p.world.modify(p.a, QpState::reset, {}));
  p.world.settle();
  CHECK_FALSE(p.a.poll(Direction::send));
  CHECK_FALSE(p.a.poll(Direction::receive));
  REQUIRE(p.world.modify(p.b, QpState::reset, {}));
  p.world.connect(p.a, p.b);
  CHECK(p.run(p.write(8))->status == WcStatus::success);
}

TEST_CASE("RESET to ERR flushes what is posted afterwards") {
  TestWorld world;
  TestQp& qp = world.add(QpType::rc);
  REQUIRE(world.modify(qp, QpState::err, {}));
  qp.post(ReceiveSpec{3, {}});
  qp.post(SendSpec{.wr_id = 4});
  world.settle();
  CHECK(qp.poll(Direction::receive)->status == WcStatus::wr_flush_err);
  CHECK(qp.poll(Direction::send)->status == WcStatus::wr_flush_err);
}

}  // namespace
}  // namespace vrdma::engine::test
