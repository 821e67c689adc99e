#include <doctest/doctest.h>

#include "vmkernel_svc/engine/test_pair.hpp"

namespace vrdma::engine::test {
namespace {

TEST_CASE("What is wrong with the request itself fails locally, and the far side never hears of it") {
  struct Case {
    const char* what;
    WcStatus status;
    SendSpec (*spec)(Pair&);
  };
  const Case cases[] = {
      {"unknown key", WcStatus::loc_prot_err, [](Pair& p) { return SendSpec{.sges = {{p.mine.iova, 8, 0xbad}}}; }},
      {"beyond the end", WcStatus::loc_prot_err, [](Pair& p) { return SendSpec{.sges = {p.mine.sge((1 << 20) - 4, 8)}}; }},
      {"before the beginning", WcStatus::loc_prot_err, [](Pair& p) { return SendSpec{.sges = {{p.mine.iova - 1, 8, p.mine.key}}}; }},
      {"wraps", WcStatus::loc_prot_err, [](Pair& p) { return SendSpec{.sges = {{~std::uint64_t{0} - 3, 8, p.mine.key}}}; }},
      {"another's domain", WcStatus::loc_prot_err, [](Pair& p) { return SendSpec{.sges = {p.theirs.sge(0, 8)}}; }},
      {"second SGE", WcStatus::loc_prot_err, [](Pair& p) { return SendSpec{.sges = {p.mine.sge(0, 8), {0, 8, 0xbad}}}; }},
      {"READ into read-only memory", WcStatus::loc_prot_err,
       [](Pair& p) {
         Memory& read_only = p.world.memory(100, 1, access_local_read);
         return SendSpec{.opcode = WrOpcode::rdma_read, .sges = {read_only.sge(0, 8)}, .remote = p.theirs.remote(0)};
       }},
      {"more than 2 GiB", WcStatus::loc_len_err,
       [](Pair&) { return SendSpec{.sges = {{0, 0x80000000u, 1}, {0, 1, 1}}}; }},
      {"atomic of 4 bytes", WcStatus::loc_len_err,
       [](Pair& p) { return SendSpec{.opcode = WrOpcode::atomic_fetch_and_add, .sges = {p.mine.sge(0, 4)}, .remote = p.theirs.remote(0)}; }},
      {"atomic of 16 bytes", WcStatus::loc_len_err,
       [](Pair& p) { return SendSpec{.opcode = WrOpcode::atomic_fetch_and_add, .sges = {p.mine.sge(0, 16)}, .remote = p.theirs.remote(0)}; }},
      {"inline READ", WcStatus::loc_qp_op_err,
       [](Pair& p) { return SendSpec{.opcode = WrOpcode::rdma_read, .flags = wr_inline, .inline_data = std::vector<std::byte>(8), .remote = p.theirs.remote(0)}; }},
      {"an opcode that does not exist", WcStatus::loc_qp_op_err,
       [](Pair& p) { return SendSpec{.opcode = static_cast<WrOpcode>(0x33), .sges = {p.mine.sge(0, 4)}}; }},
      {"a receive in the send queue", WcStatus::loc_qp_op_err,
       [](Pair& p) { return SendSpec{.opcode = WrOpcode::receive, .sges = {p.mine.sge(0, 4)}}; }},
  };
  for (const Case& c : cases) {
    Pair p;
    p.b.post(ReceiveSpec{1, {p.theirs.sge(0, 1 << 20)}});
    SendSpec spec = c.spec(p);
    spec.flags = static_cast<std::uint8_t>(spec.flags & ~wr_signaled);  // errors complete even so (IBA 10.7.3.1)
    spec.wr_id = 77;
    p.a.post(spec);
    p.a.post(SendSpec{.wr_id = 78, .flags = 0, .sges = {p.mine.sge(0, 4)}});
    p.a.post(ReceiveSpec{79, {p.mine.sge(0, 4)}});
    p.world.settle();
    INFO(c.what);
    const auto failed = p.a.poll(Direction::send), flushed = p.a.poll(Direction::send), receive = p.a.poll(Direction::receive);
    REQUIRE((failed && flushed && receive));
    CHECK(failed->wr_id == 77);
    CHECK(failed->status == c.status);
    CHECK(flushed->wr_id == 78);
    CHECK(flushed->status == WcStatus::wr_flush_err);
    CHECK(flushed->position == p.a.send_writer.position());
    CHECK(receive->wr_id == 79);
    CHECK(receive->status == WcStatus::wr_flush_err);
    CHECK(p.a.core.state == QpState::err);
    CHECK(p.b.core.state == QpState::rts);
    CHECK(p.b.core.port.events.empty());
    CHECK_FALSE(p.b.poll(Direction::receive));
    CHECK(p.theirs.bytes == std::vector<std::byte>(1 << 20));
    // Whatever is posted later flushes too.
    p.a.post(SendSpec{.wr_id = 80});
    p.a.post(ReceiveSpec{81, {}});
    p.world.settle();
    CHECK(p.a.poll(Direction::send)->status == WcStatus::wr_flush_err);
    CHECK(p.a.poll(Direction::receive)->status == WcStatus::wr_flush_err);
  }
}

TEST_CASE("max_rd_atomic 0: READ and atomics fail at the requester") {
  Pair p;
  p.a.core.attributes.max_rd_atomic = 0;
  CHECK(p.run({.opcode = WrOpcode::rdma_read, .sges = {p.mine.sge(0, 8)}, .remote = p.theirs.remote(0)})->status == WcStatus::loc_qp_op_err);
}

TEST_CASE("What the responder refuses is told to the requester, and the responder goes to ERR with its event") {
  struct Case {
    const char* what;
    WcStatus status;
    AsyncEvent event;
    void (*prepare)(Pair&, SendSpec&);
  };
  const Case cases[] = {
      {"unknown key", WcStatus::rem_access_err, AsyncEvent::qp_access_err, [](Pair&, SendSpec& s) { s.remote.rkey = 0xbad; }},
      {"another domain's key", WcStatus::rem_access_err, AsyncEvent::qp_access_err,
       [](Pair& p, SendSpec& s) { s.remote = p.mine.remote(0); }},
      {"beyond the end", WcStatus::rem_access_err, AsyncEvent::qp_access_err,
       [](Pair& p, SendSpec& s) { s.remote = p.theirs.remote((1 << 20) - 7); }},
      {"wraps", WcStatus::rem_access_err, AsyncEvent::qp_access_err,
       [](Pair&, SendSpec& s) { s.remote.address = ~std::uint64_t{0} - 3; }},
      {"WRITE to memory without the right", WcStatus::rem_access_err, AsyncEvent::qp_access_err,
       [](Pair& p, SendSpec& s) { s.remote = p.world.memory(64, 2, access_local_write | access_remote_read).remote(0); }},
      {"READ of memory without the right", WcStatus::rem_access_err, AsyncEvent::qp_access_err,
       [](Pair& p, SendSpec& s) {
         s.opcode = WrOpcode::rdma_read;
         s.remote = p.world.memory(64, 2, access_local_write | access_remote_write).remote(0);
       }},
      {"queue pair without remote write", WcStatus::rem_inv_req_err, AsyncEvent::qp_req_err,
       [](Pair& p, SendSpec&) { p.b.core.attributes.access_flags = access_remote_read; }},
      {"queue pair without remote read", WcStatus::rem_inv_req_err, AsyncEvent::qp_req_err,
       [](Pair& p, SendSpec& s) {
         s.opcode = WrOpcode::rdma_read;
         p.b.core.attributes.access_flags = access_remote_write;
       }},
      {"queue pair without atomics", WcStatus::rem_inv_req_err, AsyncEvent::qp_req_err,
       [](Pair& p, SendSpec& s) {
         s.opcode = WrOpcode::atomic_fetch_and_add;
         p.b.core.attributes.access_flags = access_remote_write | access_remote_read;
       }},
      {"misaligned atomic", WcStatus::rem_inv_req_err, AsyncEvent::qp_req_err,
       [](Pair& p, SendSpec& s) {
         s.opcode = WrOpcode::atomic_cmp_and_swp;
         s.remote = p.theirs.remote(4);
       }},
      {"responder takes no READ", WcStatus::rem_inv_req_err, AsyncEvent::qp_req_err,
       [](Pair& p, SendSpec& s) {
         s.opcode = WrOpcode::rdma_read;
         p.b.core.attributes.max_dest_rd_atomic = 0;
       }},
  };
  for (const Case& c : cases) {
    Pair p;
    p.b.post(ReceiveSpec{5, {}});
    SendSpec spec = p.write(8);
    c.prepare(p, spec);
    const auto before = p.theirs.bytes;
    INFO(c.what);
    const auto completion = p.run(spec);
    REQUIRE(completion);
    CHECK(completion->status == c.status);
    CHECK(p.a.core.state == QpState::err);
    CHECK(p.b.core.state == QpState::err);
    CHECK(p.b.core.port.events == std::vector{c.event});
    CHECK(p.a.core.port.events.empty());
    CHECK(p.b.poll(Direction::receive)->status == WcStatus::wr_flush_err);
    CHECK(p.theirs.bytes == before);
  }
}

TEST_CASE("A receive buffer that is too small or bad is the receiver's error") {
  struct Case {
    WcStatus here, there;
    void (*prepare)(Pair&);
  };
  const Case cases[] = {
      {WcStatus::loc_len_err, WcStatus::rem_inv_req_err, [](Pair& p) { p.b.post(ReceiveSpec{5, {p.theirs.sge(0, 3), p.theirs.sge(9, 4)}}); }},
      {WcStatus::loc_len_err, WcStatus::rem_inv_req_err, [](Pair& p) { p.b.post(ReceiveSpec{5, {}}); }},
      {WcStatus::loc_prot_err, WcStatus::rem_op_err, [](Pair& p) { p.b.post(ReceiveSpec{5, {{p.theirs.iova, 8, 0xbad}}}); }},
      {WcStatus::loc_prot_err, WcStatus::rem_op_err, [](Pair& p) { p.b.post(ReceiveSpec{5, {p.theirs.sge(0, 4), {0, 4, 0xbad}}}); }},
      {WcStatus::loc_prot_err, WcStatus::rem_op_err,
       [](Pair& p) { p.b.post(ReceiveSpec{5, {p.world.memory(64, 2, access_local_read).sge(0, 8)}}); }},
      {WcStatus::loc_prot_err, WcStatus::rem_op_err, [](Pair& p) { p.b.post(ReceiveSpec{5, {p.mine.sge(0, 8)}}); }},
  };
  for (const Case& c : cases) {
    Pair p;
    c.prepare(p);
    p.b.post(ReceiveSpec{6, {}});
    const auto sent = p.run({.wr_id = 1, .sges = {p.mine.sge(0, 8)}});
    REQUIRE(sent);
    CHECK(sent->status == c.there);
    const auto received = p.b.poll(Direction::receive);
    REQUIRE(received);
    CHECK(received->wr_id == 5);
    CHECK(received->status == c.here);
    CHECK(p.b.poll(Direction::receive)->status == WcStatus::wr_flush_err);
    CHECK(p.b.core.state == QpState::err);
    CHECK(p.theirs.bytes == std::vector<std::byte>(1 << 20));
  }
}

TEST_CASE("A receive buffer that ends beyond its region takes what fits into the region") {
  for (const std::uint32_t within : {1u, 2u, 7u, 8u, 4095u}) {
    Pair p;
    const auto beyond = p.theirs.sge((1 << 20) - within, 1 << 16);
    p.b.post(ReceiveSpec{5, {p.theirs.sge(0, 4), beyond}});
    CHECK(p.run({.wr_id = 1, .sges = {p.mine.sge(0, within + 4)}})->status == WcStatus::success);
    CHECK(p.b.poll(Direction::receive)->status == WcStatus::success);
    CHECK(p.theirs.bytes.back() == p.mine.bytes[within + 3]);
    p.b.post(ReceiveSpec{6, {beyond, p.theirs.sge(0, 4)}});
    CHECK(p.run({.wr_id = 2, .sges = {p.mine.sge(0, within + 1)}})->status == WcStatus::rem_op_err);
    CHECK(p.b.poll(Direction::receive)->status == WcStatus::loc_prot_err);
  }
}

TEST_CASE("Without a receive the sender is put off by the receiver's timer and gives up after rnr_retry times") {
  Pair p;
  const std::uint64_t timer = rnr_timer_ns(12);
  CHECK(timer == 640'000);
  p.a.post(SendSpec{.wr_id = 1, .sges = {p.mine.sge(0, 8)}});
  p.world.pass(3 * timer - 1);
  CHECK_FALSE(p.a.poll(Direction::send));
  p.world.pass(2);
  CHECK(p.a.poll(Direction::send)->status == WcStatus::rnr_retry_exc_err);
  CHECK(p.b.core.counters.rnr_naks == 4);
  CHECK(p.b.core.state == QpState::rts);
}

TEST_CASE("rnr_retry 0 gives up at once, 7 never") {
  Pair none;
  none.a.core.attributes.rnr_retry = 0;
  CHECK(none.run({.wr_id = 1, .sges = {none.mine.sge(0, 8)}})->status == WcStatus::rnr_retry_exc_err);
  Pair ever;
  ever.a.core.attributes.rnr_retry = 7;
  ever.a.post(SendSpec{.wr_id = 1, .sges = {ever.mine.sge(0, 8)}});
  ever.world.pass(1'000'000'000);
  CHECK_FALSE(ever.a.poll(Direction::send));
  ever.b.post(ReceiveSpec{1, {ever.theirs.sge(0, 8)}});
  ever.world.pass(rnr_timer_ns(12));
  CHECK(ever.a.poll(Direction::send)->status == WcStatus::success);
}

TEST_CASE("RNR retries are counted for each message anew") {
  Pair p;
  for (std::uint64_t i = 0; i < 5; ++i) {
    p.a.post(SendSpec{.wr_id = i, .sges = {p.mine.sge(0, 8)}});
    p.world.pass(2 * rnr_timer_ns(12));  // two of three
    p.b.post(ReceiveSpec{i, {p.theirs.sge(0, 8)}});
    p.world.pass(rnr_timer_ns(12));
    CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
  }
}

TEST_CASE("Nobody at the far end: RETRY_EXC after retry_cnt + 1 timeouts") {
  const std::uint64_t timeout = ack_timeout_ns(14);
  CHECK(timeout == 4096ull << 14);
  const auto fails_in_time = [&](Pair& p) {
    p.a.post(SendSpec{.wr_id = 1, .sges = {p.mine.sge(0, 8)}});
    p.world.pass(4 * timeout - 1);
    CHECK_FALSE(p.a.poll(Direction::send));
    p.world.pass(2);
    const auto completion = p.a.poll(Direction::send);
    REQUIRE(completion);
    CHECK(completion->status == WcStatus::retry_exc_err);
    CHECK(p.a.core.state == QpState::err);
  };
  SUBCASE("gone") {
    Pair p;
    p.world.ports.queue_pairs.erase(p.b.core.qpn.value);
    fails_in_time(p);
  }
  SUBCASE("in RESET") {
    Pair p;
    REQUIRE(p.world.modify(p.b, QpState::reset, {}));
    fails_in_time(p);
  }
  SUBCASE("in ERR") {
    Pair p;
    REQUIRE(p.world.modify(p.b, QpState::err, {}));
    fails_in_time(p);
  }
  SUBCASE("connected to somebody else") {
    Pair p;
    p.b.core.attributes.dest_qp_num = 0x999;
    fails_in_time(p);
  }
  SUBCASE("connected to another port") {
    Pair p;
    p.b.core.attributes.path.dlid = 5;
    fails_in_time(p);
  }
  SUBCASE("of another kind") {
    Pair p;
    p.b.core.type = QpType::uc;
    fails_in_time(p);
  }
  SUBCASE("expects another sequence number") {
    Pair p;
    p.b.core.expected_psn = advance(p.b.core.expected_psn, 1);
    fails_in_time(p);
  }
}

TEST_CASE("A far end that comes up in time is served; timeout 0 waits for ever") {
  TestWorld world;
  TestQp &a = world.add(QpType::rc, 1, 1), &b = world.add(QpType::rc, 1, 2);
  Memory& memory = world.memory(4096);
  QpAttributes patient = connection(b.core.qpn.value, 2);
  patient.timeout = 0;
  world.bring_up(a, patient);
  a.post(SendSpec{.wr_id = 1, .opcode = WrOpcode::rdma_write, .sges = {memory.sge(0, 8)}, .remote = memory.remote(8)});
  world.pass(100'000'000'000);
  CHECK_FALSE(a.poll(Direction::send));
  world.bring_up(b, connection(a.core.qpn.value, 1));
  world.pass(60'000'000);
  CHECK(a.poll(Direction::send)->status == WcStatus::success);
}

TEST_CASE("UC: a message waits a while for a receive that comes late") {
  Pair p(QpType::uc);
  for (int spell = 0; spell < 2; ++spell) {
    p.a.post(SendSpec{.wr_id = 1, .sges = {p.mine.sge(0, 8)}});
    p.world.pass(Patience::connection_ns / 4);
    CHECK_FALSE(p.a.poll(Direction::send));
    p.b.post(ReceiveSpec{5, {p.theirs.sge(0, 8)}});
    p.world.pass(Patience::connection_ns / 16);
    CHECK(p.b.poll(Direction::receive)->wr_id == 5);
    CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
  }
  CHECK(p.b.core.counters.dropped == 0);
}

TEST_CASE("UC: what is wrong at the far side is nobody's error, and the receiver keeps its receive") {
  Pair p(QpType::uc);
  p.a.post(SendSpec{.wr_id = 1, .sges = {p.mine.sge(0, 8)}});  // no receive posted
  p.world.pass(Patience::connection_ns);
  CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
  p.b.post(ReceiveSpec{5, {p.theirs.sge(0, 4)}});
  CHECK(p.run({.wr_id = 1, .sges = {p.mine.sge(0, 8)}})->status == WcStatus::success);  // too long
  SendSpec bad = p.write(8);
  bad.remote.rkey = 0xbad;
  CHECK(p.run(bad)->status == WcStatus::success);
  CHECK(p.b.core.state == QpState::rts);
  CHECK(p.b.core.port.events.empty());
  CHECK_FALSE(p.b.poll(Direction::receive));
  CHECK(p.run({.wr_id = 1, .sges = {p.mine.sge(0, 4)}})->status == WcStatus::success);
  CHECK(p.b.poll(Direction::receive)->wr_id == 5);
  CHECK(p.b.core.counters.dropped == 3);
  // No connection at all.
  REQUIRE(p.world.modify(p.b, QpState::err, {}));
  CHECK(p.run({.wr_id = 1, .sges = {p.mine.sge(0, 4)}})->status == WcStatus::success);
}

TEST_CASE("UC: a local error stops the send queue, the receive queue lives, RTS brings it back") {
  Pair p(QpType::uc);
  p.a.post(ReceiveSpec{9, {p.mine.sge(0, 8)}});
  CHECK(p.run({.wr_id = 1, .sges = {{0, 8, 0xbad}}})->status == WcStatus::loc_prot_err);
  CHECK(p.a.core.state == QpState::sqe);
  CHECK(p.run({.wr_id = 2, .sges = {p.mine.sge(0, 8)}})->status == WcStatus::wr_flush_err);
  p.b.post(SendSpec{.wr_id = 3, .sges = {p.theirs.sge(0, 8)}});
  p.world.settle();
  CHECK(p.a.poll(Direction::receive)->status == WcStatus::success);
  REQUIRE(p.world.modify(p.a, QpState::rts, {}));
  CHECK(p.run(p.write(8))->status == WcStatus::success);
}

TEST_CASE("A WRITE with immediate that may not write ends the receive that its immediate was for") {
  Pair p;
  p.b.post(ReceiveSpec{5, {}});
  p.b.post(ReceiveSpec{6, {}});
  SendSpec spec = p.write(8);
  spec.opcode = WrOpcode::rdma_write_with_imm;
  spec.remote.rkey = 0xbad;
  CHECK(p.run(spec)->status == WcStatus::rem_access_err);
  CHECK(p.b.poll(Direction::receive)->status == WcStatus::loc_access_err);
  CHECK(p.b.poll(Direction::receive)->status == WcStatus::wr_flush_err);
  CHECK(p.b.core.port.events == std::vector{AsyncEvent::qp_access_err});
}

TEST_CASE("UC has no READ and no atomics") {
  Pair p(QpType::uc);
  CHECK(p.run({.opcode = WrOpcode::rdma_read, .sges = {p.mine.sge(0, 8)}, .remote = p.theirs.remote(0)})->status == WcStatus::loc_qp_op_err);
}

TEST_CASE("Memory that goes away in the middle of a message ends it with the right error") {
  struct Case {
    WrOpcode opcode;
    bool take_mine;
    WcStatus status;
    bool far_side_fails;
  };
  for (const Case c : {Case{WrOpcode::rdma_write, true, WcStatus::loc_prot_err, false},
                       Case{WrOpcode::rdma_write, false, WcStatus::rem_access_err, true},
                       Case{WrOpcode::rdma_write_with_imm, false, WcStatus::rem_access_err, true},
                       Case{WrOpcode::rdma_read, true, WcStatus::loc_prot_err, false},
                       Case{WrOpcode::rdma_read, false, WcStatus::rem_access_err, true},
                       Case{WrOpcode::send, true, WcStatus::loc_prot_err, false},
                       Case{WrOpcode::send, false, WcStatus::rem_op_err, true}}) {
    Pair p;
    p.b.post(ReceiveSpec{5, {p.theirs.sge(0, 1 << 20)}});
    p.a.post(SendSpec{.wr_id = 1, .opcode = c.opcode, .sges = {p.mine.sge(0, 1 << 20)}, .remote = p.theirs.remote(0)});
    Budget budget{1000, 8};
    p.world.engine.run(p.a.core, budget);
    REQUIRE(p.world.ports.remove_region(c.take_mine ? p.mine.key : p.theirs.key));
    p.world.settle();
    const auto completion = p.a.poll(Direction::send);
    REQUIRE(completion);
    CHECK(completion->status == c.status);
    CHECK((p.b.core.state == QpState::err) == c.far_side_fails);
    if (c.opcode == WrOpcode::send && c.far_side_fails)
      CHECK(p.b.poll(Direction::receive)->status == WcStatus::loc_prot_err);
    else if (c.far_side_fails)
      CHECK(p.b.core.port.events == std::vector{AsyncEvent::qp_access_err});
    if (c.opcode == WrOpcode::rdma_write_with_imm) CHECK(p.b.poll(Direction::receive)->status == WcStatus::loc_access_err);
  }
}

TEST_CASE("A message whose receiver was reset and connected to somebody else does not get into that one's buffers") {
  Pair p;
  TestQp& c = p.world.add(QpType::rc, 1, 1);
  Memory& other = p.world.memory(1 << 20, 1, all_access, std::byte{0xcc});
  p.b.post(ReceiveSpec{5, {p.theirs.sge(0, 1 << 20)}});
  p.a.post(SendSpec{.wr_id = 1, .sges = {p.mine.sge(0, 1 << 20)}});
  Budget budget{1000, 8};
  p.world.engine.run(p.a.core, budget);
  REQUIRE(p.world.modify(p.b, QpState::reset, {}));
  p.world.bring_up(p.b, connection(c.core.qpn.value, 1));
  p.world.bring_up(c, connection(p.b.core.qpn.value, 2));
  p.b.post(ReceiveSpec{6, {p.theirs.sge(0, 1 << 20)}});
  c.post(SendSpec{.wr_id = 2, .sges = {other.sge(0, 1 << 20)}});
  budget = {200'000, 8};
  p.world.engine.run(c.core, budget);
  p.a.core.port.runnable = true;
  p.world.settle();
  CHECK(p.b.poll(Direction::receive)->wr_id == 6);
  CHECK(p.theirs.bytes == other.bytes);
  p.world.pass(5 * ack_timeout_ns(14));
  CHECK(p.a.poll(Direction::send)->status == WcStatus::retry_exc_err);
}

TEST_CASE("A send record that makes no sense costs the guest its queue pair and nobody anything else") {
  struct Case {
    std::uint32_t user_control, slots;
  };
  for (const Case c : {Case{pack(WqeControl{WrOpcode::send, 0, 2}), 1},                        // SGEs beyond the record
                       Case{pack(WqeControl{WrOpcode::send, 0, 31}), 9},                       // too many
                       Case{pack(WqeControl{WrOpcode::send, wr_inline, 1000}), 9},             // inline beyond the record
                       Case{pack(WqeControl{WrOpcode::send, 0, 1}), 12}}) {                    // a record too long
    Pair p;
    p.a.post(ReceiveSpec{1, {}});
    p.a.send_writer.publish(7, 0, c.user_control, c.slots);
    p.world.settle();
    p.a.core.port.runnable = true;
    p.world.settle();
    CHECK(p.a.core.state == QpState::err);
    CHECK(p.a.core.port.events == std::vector{AsyncEvent::qp_fatal});
    CHECK(p.a.core.counters.malformed == 1);
    CHECK_FALSE(p.world.engine.may_take_sends(p.a.core));  // it would be looked at for ever
    CHECK(p.a.poll(Direction::receive)->status == WcStatus::wr_flush_err);
    CHECK(p.b.core.state == QpState::rts);
    while (p.a.poll(Direction::send)) {
    }
    // RESET begins anew, behind it.
    for (TestQp* qp : {&p.a, &p.b}) REQUIRE(p.world.modify(*qp, QpState::reset, {}));
    p.world.connect(p.a, p.b);
    CHECK(p.run(p.write(8))->status == WcStatus::success);
    p.a.post(p.write(8));
    CHECK(p.world.engine.may_take_sends(p.a.core));
  }
}

TEST_CASE("A receive record that makes no sense costs the receiver its queue pair, and the sender a peer") {
  Pair p;
  p.b.receive_writer.publish(7, 0, pack(WqeControl{WrOpcode::send, 0, 0}), receive_wqe_slots_max);
  p.a.post(SendSpec{.wr_id = 1, .sges = {p.mine.sge(0, 8)}});
  p.world.pass(5 * ack_timeout_ns(14));
  CHECK(p.b.core.state == QpState::err);
  CHECK(p.b.core.port.events == std::vector{AsyncEvent::qp_fatal});
  CHECK(p.a.poll(Direction::send)->status == WcStatus::retry_exc_err);
}

TEST_CASE("A full completion queue takes its queue pair to ERR and the sender learns of it") {
  Pair p;
  p.b.core.port.completions_max = 2;
  for (std::uint64_t i = 0; i < 4; ++i) p.b.post(ReceiveSpec{i, {p.theirs.sge(0, 8)}});
  for (std::uint64_t i = 0; i < 4; ++i) p.a.post(SendSpec{.wr_id = i, .sges = {p.mine.sge(0, 8)}});
  p.world.settle();
  CHECK(p.b.core.port.overran);
  CHECK(p.b.core.state == QpState::err);
  CHECK(p.b.core.port.events == std::vector{AsyncEvent::qp_fatal});  // once, whatever flushes there in vain
  CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
  CHECK(p.a.poll(Direction::send)->status == WcStatus::success);
  CHECK(p.a.poll(Direction::send)->status == WcStatus::rem_op_err);
  CHECK(p.a.poll(Direction::send)->status == WcStatus::wr_flush_err);
}

TEST_CASE("Whatever finds no room in a completion queue ends its queue pair with QP_FATAL: a success, an error, an unreliable queue pair's too") {
  for (const QpType type : {QpType::rc, QpType::uc}) {
    for (const bool good : {true, false}) {
      Pair p(type);
      p.a.core.port.completions_max = 1;
      p.a.post(p.write(8));
      SendSpec last = p.write(8);
      if (!good) last.sges[0].lkey = 0xdead;
      p.a.post(last);
      p.world.settle();
      CHECK(p.a.core.port.overran);
      CHECK(p.a.core.state == QpState::err);
      CHECK(p.a.core.port.events == std::vector{AsyncEvent::qp_fatal});
      CHECK(p.b.core.state == QpState::rts);
      CHECK(p.b.core.port.events.empty());
    }
  }
}

}  // namespace
}  // namespace vrdma::engine::test
