#include <doctest/doctest.h>

#include "vmkernel_svc/engine/test_world.hpp"

namespace vrdma::engine::test {
namespace {

using Memory = TestWorld::Memory;

struct Datagrams {
  Datagrams() : a(world.add(QpType::ud, 1, 1)), b(world.add(QpType::ud, 2, 2)), mine(world.memory(1 << 16, 1)), theirs(world.memory(1 << 16, 2)) {
    for (TestQp* qp : {&a, &b}) world.bring_up(*qp, connection(0, 0));
    TestWorld::fill(mine, 9);
  }
  SendSpec to(const TestQp& receiver, std::uint32_t bytes, std::uint32_t qkey = 0x1111) const {
    SendSpec spec{.wr_id = 1, .sges = {mine.sge(0, bytes)}};
    spec.ud.remote_qpn = receiver.core.qpn.value;
    spec.ud.remote_qkey = qkey;
    spec.ud.dlid = receiver.core.port.lid;
    spec.ud.sl = 3;
    return spec;
  }
  Completion send(const SendSpec& spec) {
    a.post(spec);
    world.settle();
    const auto completion = a.poll(Direction::send);
    REQUIRE(completion);
    return *completion;
  }
  TestWorld world;
  TestQp &a, &b;
  Memory &mine, &theirs;
};

TEST_CASE("A datagram lies behind 40 bytes for its GRH, which is there when the address is global") {
  for (const bool global : {false, true}) {
    Datagrams d;
    d.b.post(ReceiveSpec{5, {d.theirs.sge(0, 30), d.theirs.sge(100, 4200)}});
    SendSpec spec = d.to(d.b, 4096);
    spec.ud.route_flags = global ? route_global : 0;
    CHECK(d.send(spec).status == WcStatus::success);
    const auto received = d.b.poll(Direction::receive);
    REQUIRE(received);
    CHECK(received->byte_len == 4096 + 40);
    CHECK(received->src_qp == d.a.core.qpn.value);
    CHECK(((received->flags & wc_grh) != 0) == global);
    CHECK(d.theirs.bytes[0] == std::byte{global ? std::uint8_t{0x60} : std::uint8_t{0}});
    CHECK(std::memcmp(d.theirs.bytes.data() + 110, d.mine.bytes.data(), 4096) == 0);
  }
}

TEST_CASE("A datagram waits a while for a receive that comes late, until nobody has any patience with the receiver") {
  Datagrams d;
  d.a.post(d.to(d.b, 10));
  d.world.pass(Patience::datagram_ns / 2);
  CHECK_FALSE(d.a.poll(Direction::send));
  d.b.post(ReceiveSpec{5, {d.theirs.sge(0, 60)}});
  d.world.pass(Patience::datagram_ns / 4);
  CHECK(d.b.poll(Direction::receive)->wr_id == 5);
  CHECK(d.a.poll(Direction::send));
  d.a.post(d.to(d.b, 10));  // at least half of it is left, and a 16th was earned
  d.world.pass(Patience::datagram_ns / 4);
  CHECK_FALSE(d.a.poll(Direction::send));
  d.world.pass(Patience::datagram_ns);
  CHECK(d.a.poll(Direction::send)->status == WcStatus::success);
  CHECK(d.b.core.counters.dropped == 1);
  CHECK(d.send(d.to(d.b, 10)).status == WcStatus::success);  // lost at once
  CHECK(d.b.core.counters.dropped == 2);
  for (int i = 0; i < 16; ++i) {
    d.b.post(ReceiveSpec{6, {d.theirs.sge(0, 60)}});
    d.send(d.to(d.b, 10));
  }
  d.a.post(d.to(d.b, 10));
  d.world.pass(Patience::datagram_ns - 1);
  CHECK_FALSE(d.a.poll(Direction::send));
}

TEST_CASE("To a multicast group nothing waits for a member without a receive") {
  Datagrams d;
  SendSpec spec = d.to(d.b, 10);
  spec.ud.remote_qpn = multicast_qpn.value;
  spec.ud.dgid[0] = 0xff;
  d.world.ports.groups[Gid{0xff}] = {&d.b.core};
  CHECK(d.send(spec).status == WcStatus::success);
  CHECK(d.b.core.counters.dropped == 1);
}

TEST_CASE("A group is of IBA's form, or an IPv4 group as RoCE v2 has it; to any other GID nothing goes to a group") {
  const auto mapped = [](std::uint8_t first) { return Gid{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, first, 1, 2, 3}; };
  Gid almost = mapped(239), not_quite = mapped(239);
  almost[9] = 1, not_quite[11] = 0xfe;
  const std::pair<Gid, bool> gids[] = {{Gid{0xff, 0x12}, true}, {Gid{0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3}, true}, {mapped(224), true}, {mapped(239), true},
                                       {mapped(223), false},    {mapped(240), false}, {almost, false}, {not_quite, false}, {Gid{0xfe, 0x80}, false}, {Gid{}, false}};
  for (const auto& [gid, is_group] : gids) {
    CHECK(is_multicast(gid) == is_group);
    Datagrams d;
    SendSpec spec = d.to(d.b, 10);
    spec.ud.remote_qpn = multicast_qpn.value;
    std::memcpy(spec.ud.dgid, gid.data(), sizeof(spec.ud.dgid));
    d.world.ports.groups[gid] = {&d.b.core};
    d.b.post(ReceiveSpec{5, {d.theirs.sge(0, 60)}});
    CHECK(d.send(spec).status == WcStatus::success);
    CHECK(d.b.poll(Direction::receive).has_value() == is_group);
  }
}

TEST_CASE("What a receiver cannot take is dropped in silence, and its receive stays for the next one") {
  Datagrams d;
  d.a.post(d.to(d.b, 10));  // nothing posted
  d.world.pass(Patience::datagram_ns);
  CHECK(d.a.poll(Direction::send)->status == WcStatus::success);
  d.b.post(ReceiveSpec{5, {d.theirs.sge(0, 60)}});
  CHECK(d.send(d.to(d.b, 21)).status == WcStatus::success);          // too long
  CHECK(d.send(d.to(d.b, 10, 0x2222)).status == WcStatus::success);  // another Q_Key
  SendSpec nobody = d.to(d.b, 10);
  nobody.ud.remote_qpn = 0x777;
  CHECK(d.send(nobody).status == WcStatus::success);
  SendSpec elsewhere = d.to(d.b, 10);
  elsewhere.ud.dlid = 99;
  CHECK(d.send(elsewhere).status == WcStatus::success);
  CHECK_FALSE(d.b.poll(Direction::receive));
  CHECK(d.b.core.state == QpState::rts);
  CHECK(d.send(d.to(d.b, 20)).status == WcStatus::success);
  CHECK(d.b.poll(Direction::receive)->wr_id == 5);
  CHECK(d.b.core.counters.dropped == 3);
}

TEST_CASE("A Q_Key with its top bit set means the queue pair's own") {
  Datagrams d;
  d.b.post(ReceiveSpec{5, {d.theirs.sge(0, 100)}});
  d.send(d.to(d.b, 10, 0x80000000));
  CHECK(d.b.poll(Direction::receive));
}

TEST_CASE("A datagram beyond the MTU is a local error and stops the send queue alone") {
  Datagrams d;
  d.a.post(ReceiveSpec{7, {d.mine.sge(0, 100)}});
  CHECK(d.send(d.to(d.b, 4097)).status == WcStatus::loc_len_err);
  CHECK(d.a.core.state == QpState::sqe);
  CHECK(d.send(d.to(d.b, 8)).status == WcStatus::wr_flush_err);
  d.b.post(SendSpec(d.to(d.a, 8)));
  d.b.post(ReceiveSpec{1, {d.theirs.sge(0, 100)}});
  SendSpec back = d.to(d.a, 8);
  back.sges = {d.theirs.sge(0, 8)};
  d.b.post(back);
  d.world.settle();
  REQUIRE(d.world.modify(d.a, QpState::rts, {}));
  CHECK(d.send(d.to(d.b, 8)).status == WcStatus::success);
}

TEST_CASE("The receive queue of a queue pair in SQE is alive") {
  Datagrams d;
  d.a.post(ReceiveSpec{7, {d.mine.sge(0, 100)}});
  CHECK(d.send(d.to(d.b, 4097)).status == WcStatus::loc_len_err);
  SendSpec back = d.to(d.a, 8);
  back.sges = {d.theirs.sge(0, 8)};
  d.b.post(back);
  d.world.settle();
  CHECK(d.a.poll(Direction::receive)->wr_id == 7);
}

TEST_CASE("READ, WRITE and atomics are not for datagrams") {
  for (const WrOpcode opcode : {WrOpcode::rdma_write, WrOpcode::rdma_write_with_imm, WrOpcode::rdma_read, WrOpcode::atomic_cmp_and_swp}) {
    Datagrams d;
    SendSpec spec = d.to(d.b, 8);
    spec.opcode = opcode;
    CHECK(d.send(spec).status == WcStatus::loc_qp_op_err);
    CHECK(d.a.core.state == QpState::sqe);
  }
}

TEST_CASE("A multicast datagram reaches every member of the group once, the sender only as a member") {
  for (const bool member : {false, true}) {
    Datagrams d;
    TestQp& c = d.world.add(QpType::ud, 2, 2);
    d.world.bring_up(c, connection(0, 0));
    SendSpec spec = d.to(d.b, 33);
    spec.ud.remote_qpn = multicast_qpn.value;
    spec.ud.route_flags = route_global;
    spec.ud.dgid[0] = 0xff, spec.ud.dgid[15] = 7;
    Gid gid;
    std::memcpy(gid.data(), spec.ud.dgid, 16);
    d.world.ports.groups[gid] = {&d.b.core, &c.core};
    if (member) d.world.ports.groups[gid].push_back(&d.a.core);
    d.a.post(ReceiveSpec{1, {d.mine.sge(8192, 100)}});
    for (TestQp* qp : {&d.b, &c}) qp->post(ReceiveSpec{2, {d.theirs.sge(qp == &c ? 1000 : 0, 100)}});
    CHECK(d.send(spec).status == WcStatus::success);
    for (TestQp* qp : {&d.b, &c}) {
      CHECK(qp->poll(Direction::receive)->byte_len == 73);
      CHECK_FALSE(qp->poll(Direction::receive));
    }
    CHECK(d.a.poll(Direction::receive).has_value() == member);
    CHECK(std::memcmp(d.theirs.bytes.data() + 1040, d.mine.bytes.data(), 33) == 0);
  }
}

TEST_CASE("While one datagram is being put into a receiver's slow memory the next sender waits, and neither is lost") {
  Datagrams d;
  TestQp& c = d.world.add(QpType::ud, 1, 1);
  d.world.bring_up(c, connection(0, 0));
  for (std::uint64_t i = 0; i < 2; ++i) d.b.post(ReceiveSpec{i, {d.theirs.sge(i * 1000, 500)}});
  d.world.ports.copy_pends = [&](const TestPorts::Qp& qp, std::uint64_t) {
    return &qp == &d.a.core && qp.operation.stage == Operation::Stage::delivering;
  };
  d.a.post(d.to(d.b, 100));
  d.world.settle();
  c.post(d.to(d.b, 200));
  d.world.settle();
  CHECK_FALSE(d.b.poll(Direction::receive));
  CHECK(c.core.port.wake_ns != 0);
  d.world.ports.finish_copy(0);
  d.world.pass(100'000);
  CHECK(d.b.poll(Direction::receive)->byte_len == 140);
  CHECK(d.b.poll(Direction::receive)->byte_len == 240);
}

TEST_CASE("A receiver whose memory never answers costs its senders one datagram each and keeps its receive") {
  Datagrams d;
  TestQp& c = d.world.add(QpType::ud, 2, 2);
  d.world.bring_up(c, connection(0, 0));
  d.b.post(ReceiveSpec{1, {d.theirs.sge(0, 500)}});
  c.post(ReceiveSpec{2, {d.theirs.sge(1000, 500)}});
  bool stuck = true;
  d.world.ports.copy_pends = [&](const TestPorts::Qp& qp, std::uint64_t) {
    return stuck && qp.accepted_by == &d.b.core && qp.operation.stage == Operation::Stage::delivering;
  };
  d.a.post(d.to(d.b, 100));
  d.a.post(d.to(c, 50));
  d.world.pass(1'000'000'000);
  CHECK(c.poll(Direction::receive)->byte_len == 90);
  CHECK_FALSE(d.b.poll(Direction::receive));
  stuck = false;
  CHECK(d.send(d.to(d.b, 10)).status == WcStatus::success);
}

TEST_CASE("Behind a receiver whose memory does not answer others wait once, and it receives again when it answers") {
  constexpr std::uint64_t count = 16;
  Datagrams d;
  TestQp& c = d.world.add(QpType::ud, 2, 2);
  d.world.bring_up(c, connection(0, 0));
  for (std::uint64_t i = 0; i < count; ++i) c.post(ReceiveSpec{i, {d.theirs.sge(1000 + i * 100, 100)}});
  d.b.post(ReceiveSpec{1, {d.theirs.sge(0, 500)}});
  bool stuck = true;
  d.world.ports.copy_pends = [&](const TestPorts::Qp& qp, std::uint64_t) {
    return stuck && qp.accepted_by == &d.b.core && qp.operation.stage == Operation::Stage::delivering;
  };
  for (std::uint64_t i = 0; i < count; ++i) {
    d.a.post(d.to(d.b, 100));
    d.a.post(d.to(c, 50));
  }
  d.world.pass(250'000'000);
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto received = c.poll(Direction::receive);
    REQUIRE(received);
    CHECK(received->byte_len == 90);
  }
  CHECK(d.b.core.counters.dropped == count);
  for (std::uint64_t i = 0; i < 2 * count; ++i) CHECK(d.a.poll(Direction::send)->status == WcStatus::success);
  stuck = false;
  d.world.pass(300'000'000);
  CHECK(d.send(d.to(d.b, 10)).status == WcStatus::success);
  CHECK(d.b.poll(Direction::receive)->byte_len == 50);
}

TEST_CASE("A multicast goes on with the next member when the one that is being served leaves") {
  for (const QpState leaves_to : {QpState::err, QpState::reset}) {
    Datagrams d;
    TestQp& c = d.world.add(QpType::ud, 2, 2);
    d.world.bring_up(c, connection(0, 0));
    SendSpec spec = d.to(d.b, 33);
    spec.ud.remote_qpn = multicast_qpn.value;
    spec.ud.dgid[0] = 0xff;
    Gid gid;
    std::memcpy(gid.data(), spec.ud.dgid, 16);
    d.world.ports.groups[gid] = {&d.b.core, &c.core};
    for (TestQp* qp : {&d.b, &c}) qp->post(ReceiveSpec{2, {d.theirs.sge(qp == &c ? 1000 : 0, 100)}});
    bool pends = true;
    d.world.ports.copy_pends = [&](const TestPorts::Qp& qp, std::uint64_t) {
      return pends && qp.operation.stage == Operation::Stage::delivering;
    };
    d.a.post(spec);
    d.world.settle();
    REQUIRE(d.world.ports.jobs.size() == 1);
    REQUIRE(d.world.modify(d.b, leaves_to, {}));
    pends = false;
    d.world.settle();
    CHECK_FALSE(d.b.poll(Direction::receive));  // a flush waits for the copy
    d.world.ports.finish_copy(0);
    d.a.core.port.runnable = true;
    d.world.settle();
    if (leaves_to == QpState::err) CHECK(d.b.poll(Direction::receive)->status == WcStatus::wr_flush_err);
    CHECK(c.poll(Direction::receive)->byte_len == 73);
    CHECK(std::memcmp(d.theirs.bytes.data() + 1040, d.mine.bytes.data(), 33) == 0);
    CHECK(d.a.poll(Direction::send)->status == WcStatus::success);
  }
}

TEST_CASE("While one member of a group is waited for others leave and join: who stays gets the datagram once") {
  Datagrams d;
  TestQp &c = d.world.add(QpType::ud, 2, 2), &e = d.world.add(QpType::ud, 2, 2);  // their numbers ascend: a, b, c, e
  for (TestQp* qp : {&c, &e}) d.world.bring_up(*qp, connection(0, 0));
  for (const bool leaves : {true, false}) {
    CAPTURE(leaves);
    SendSpec spec = d.to(d.b, 33);
    spec.ud.remote_qpn = multicast_qpn.value;
    spec.ud.dgid[0] = 0xff;
    Gid gid;
    std::memcpy(gid.data(), spec.ud.dgid, 16);
    std::vector<TestPorts::Qp*>& members = d.world.ports.groups[gid];
    if (leaves) members = {&d.b.core, &c.core, &e.core};
    else members = {&c.core, &e.core};
    for (TestQp* qp : {&d.b, &c, &e})
      for (std::uint64_t i = 0; i < 2; ++i) qp->post(ReceiveSpec{i, {d.theirs.sge(qp->core.qpn.value * 1000, 100)}});
    bool pends = true;
    d.world.ports.copy_pends = [&](const TestPorts::Qp& qp, std::uint64_t) { return pends && qp.accepted_by == &c.core; };
    d.a.post(spec);
    d.world.settle();
    REQUIRE(d.world.ports.jobs.size() == 1);
    if (leaves) std::erase(members, &d.b.core);  // has it already
    else members.insert(members.begin(), &d.b.core);
    pends = false;
    while (!d.world.ports.jobs.empty()) {
      d.world.ports.finish_copy(0);
      d.world.settle();
    }
    CHECK(d.a.poll(Direction::send)->status == WcStatus::success);
    for (TestQp* qp : {&d.b, &c, &e}) {
      CHECK(qp->poll(Direction::receive).has_value() == (leaves || qp != &d.b));
      CHECK_FALSE(qp->poll(Direction::receive));
    }
  }
}

}  // namespace
}  // namespace vrdma::engine::test
