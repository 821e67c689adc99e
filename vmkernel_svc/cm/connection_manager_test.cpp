// How connections come and go: the connection manager's states and events, as guests see them, on one host and between two.
#include "vmkernel_svc/cm/test_pair.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;
using namespace vrdma::control;
using engine::QpType;

TEST_CASE("A connection is asked for, accepted, established and ended, and each side hears of it in order") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    Pair pair(hosts);
    CmParameters mine = with_data({1, 2, 3});
    mine.qpn = 0x1234, mine.responder_resources = 5, mine.initiator_depth = 7, mine.retry_count = 3, mine.rnr_retry_count = 2;
    mine.private_data[3] = 99;  // not its data any more
    pair.call(mine);
    const CmEvent request = pair.answer_phone();
    CHECK(request.uid == pair.server.at(pair.listener).uid);
    CHECK(request.parameters.qpn == 0x1234);
    CHECK(request.parameters.responder_resources == 7);
    CHECK(request.parameters.initiator_depth == 5);
    CHECK(request.parameters.private_bytes == 56);
    CHECK(request.parameters.private_data[2] == 3);
    CHECK(request.parameters.private_data[3] == 0);
    CHECK(request.is_datagram == 0);
    const CmIdentifier& called = pair.server.at(pair.called);
    CHECK(called.source.same_host(v4(10, 0, 0, 1)));
    CHECK(called.destination.same_host(v4(10, 0, 0, 2)));

    CmParameters theirs = with_data({9});
    theirs.qpn = 0x4321, theirs.responder_resources = 4, theirs.initiator_depth = 6, theirs.rnr_retry_count = 1;
    REQUIRE(pair.server.accept(pair.called, pair.uid, theirs) == 0);
    pair.wire.carry_all();
    const CmEvent response = pair.client.expect(cm_connect_response, pair.caller);
    CHECK(response.parameters.qpn == 0x4321);
    CHECK(response.parameters.responder_resources == 6);
    CHECK(response.parameters.initiator_depth == 4);
    CHECK(response.parameters.private_bytes == 196);
    CHECK(response.parameters.private_data[0] == 9);
    CHECK(pair.server.hears_nothing());

    // What the queue pairs are given is what the other side has said.
    const auto to_rtr = pair.client.cm().attributes(pair.client.guest(), {pair.caller, 2, 0});
    REQUIRE(to_rtr);
    CHECK(to_rtr->attributes.dest_qp_num == 0x4321);
    CHECK(to_rtr->attributes.rq_psn == called.psn);
    CHECK(to_rtr->attributes.path.dlid == pair.server.guest().lid);
    CHECK(to_rtr->attributes.max_dest_rd_atomic == 6);
    const auto to_rts = pair.server.cm().attributes(pair.server.guest(), {pair.called, 3, 0});
    REQUIRE(to_rts);
    CHECK(to_rts->attributes.sq_psn == called.psn);
    CHECK(to_rts->attributes.retry_cnt == 3);
    CHECK(to_rts->attributes.rnr_retry == 2);
    CHECK(pair.client.cm().attributes(pair.client.guest(), {pair.caller, 3, 0})->attributes.rnr_retry == 1);

    REQUIRE(pair.client.ready(pair.caller) == 0);
    CHECK(pair.client.ready(pair.caller) == EINVAL);
    pair.wire.carry_all();
    const CmEvent established = pair.server.expect(cm_established, pair.called);
    CHECK(established.uid == pair.uid);
    CHECK(pair.server.accept(pair.called, pair.uid) == EINVAL);

    REQUIRE(pair.client.disconnect(pair.caller) == 0);
    pair.wire.carry_all();
    pair.server.expect(cm_disconnected, pair.called);
    pair.client.expect(cm_disconnected, pair.caller);
    CHECK(pair.client.cm().waits());
    pair.one.cm().expire(in_seconds(1));
    pair.two.cm().expire(in_seconds(1));
    pair.client.expect(cm_timewait_exit, pair.caller);
    CHECK(pair.server.hears_nothing());  // it has not disconnected
    for (int again = 0; again < 2; ++again) {
      CHECK(pair.server.disconnect(pair.called) == 0);
      CHECK(pair.server.hears_nothing());
      pair.one.cm().expire(in_seconds(2 + again));
      pair.two.cm().expire(in_seconds(2 + again));
      if (again == 0) pair.server.expect(cm_timewait_exit, pair.called);
      CHECK(pair.server.hears_nothing());
    }
    CHECK_FALSE(pair.one.cm().waits());
    CHECK_FALSE(pair.two.cm().waits());
    CHECK(pair.client.hears_nothing());
  }
}

TEST_CASE("Who is called may end the connection as well, and both at once") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    Pair pair(hosts);
    pair.come_to(Stage::established);
    REQUIRE(pair.server.disconnect(pair.called) == 0);
    pair.wire.carry_all();
    pair.server.expect(cm_disconnected, pair.called);
    pair.client.expect(cm_disconnected, pair.caller);

    Pair both(hosts);
    both.come_to(Stage::established);
    REQUIRE(both.server.disconnect(both.called) == 0);
    REQUIRE(both.client.disconnect(both.caller) == 0);
    both.wire.carry_all();
    both.server.expect(cm_disconnected, both.called);
    both.client.expect(cm_disconnected, both.caller);
    CHECK(both.server.hears_nothing());
    CHECK(both.client.hears_nothing());
  }
}

TEST_CASE("Who has begun to talk to others may disconnect, and where there is no connection, nothing comes of it") {
  for (const Hosts hosts : {Hosts::one, Hosts::two})
    for (const bool datagrams : {false, true}) {
      CAPTURE(hosts);
      CAPTURE(datagrams);
      Pair pair(hosts, datagrams ? RDMA_PS_UDP : RDMA_PS_TCP);
      const auto both_hear_nothing = [&] {
        pair.wire.carry_all();
        return pair.client.hears_nothing() && pair.server.hears_nothing();
      };
      CHECK(pair.client.disconnect(pair.caller) == EINVAL);
      CHECK(pair.server.disconnect(pair.listener) == EINVAL);
      const CmId at_device = pair.server.listener(v4(10, 0, 0, 1, 5001));
      CHECK(pair.server.disconnect(at_device) == 0);
      CHECK(pair.server.state(at_device) == CmState::listening);
      pair.find();
      CHECK(pair.client.disconnect(pair.caller) == EINVAL);
      REQUIRE(pair.client.connect(pair.caller) == 0);
      CHECK(pair.client.disconnect(pair.caller) == 0);
      pair.wire.carry_all();
      pair.answer_phone();
      CHECK(pair.server.disconnect(pair.called) == 0);
      CHECK(both_hear_nothing());
      REQUIRE(pair.server.accept(pair.called, pair.uid) == 0);
      pair.wire.carry_all();
      pair.client.expect(datagrams ? cm_established : cm_connect_response, pair.caller);
      if (datagrams) {
        CHECK(pair.client.disconnect(pair.caller) == 0);
        CHECK(pair.server.disconnect(pair.called) == 0);
        CHECK(pair.client.state(pair.caller) == CmState::established);
      }
      CHECK(both_hear_nothing());
    }
}

TEST_CASE("Data that comes before the rtu establish the connection once") {
  Pair pair(Hosts::two);
  pair.come_to(Stage::accepted);
  REQUIRE(pair.server.cm().established(pair.server.guest(), pair.called));
  pair.server.expect(cm_established, pair.called);
  CHECK(TestGuest::error_of(pair.server.cm().established(pair.server.guest(), pair.called)) == EISCONN);
  REQUIRE(pair.client.ready(pair.caller) == 0);
  pair.wire.carry_all();
  CHECK(pair.server.hears_nothing());
  CHECK(pair.server.state(pair.called) == CmState::established);

  Pair datagrams(Hosts::one, RDMA_PS_UDP);
  datagrams.call();
  datagrams.answer_phone();
  REQUIRE(datagrams.server.accept(datagrams.called, datagrams.uid) == 0);
  CHECK(TestGuest::error_of(datagrams.server.cm().established(datagrams.server.guest(), datagrams.called)) == EINVAL);
}

TEST_CASE("Who is rejected hears the reason and the data") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    for (const bool by_caller : {false, true}) {
      CAPTURE(by_caller);
      Pair pair(hosts);
      pair.come_to(by_caller ? Stage::accepted : Stage::requested);
      TestGuest& who = by_caller ? pair.client : pair.server;
      CmRejectRequest no{by_caller ? pair.caller : pair.called, 24, 2, {}};
      no.private_data[0] = 5, no.private_data[1] = 6, no.private_data[2] = 7;
      REQUIRE(who.cm().reject(who.guest(), no));
      CHECK(TestGuest::error_of(who.cm().reject(who.guest(), no)) == EINVAL);
      pair.wire.carry_all();
      const CmEvent rejected = by_caller ? pair.server.expect(cm_rejected, pair.called, 24) : pair.client.expect(cm_rejected, pair.caller, 24);
      CHECK(rejected.parameters.private_bytes == 148);
      CHECK(rejected.parameters.private_data[1] == 6);
      CHECK(rejected.parameters.private_data[2] == 0);
      CHECK(who.hears_nothing());
    }
  }
}

TEST_CASE("Who is established already hears of it that the other one has rejected") {
  for (const bool ends : {false, true}) {  // it has said that it ends the connection, too
    CAPTURE(ends);
    CmRejectRequest no{{}, 24, 1, {}};
    no.private_data[0] = 5;
    const auto check = [&](TestGuest& who, const CmId& its) {
      const CmEvent rejected = who.expect(cm_rejected, its, 24);
      CHECK(rejected.parameters.private_bytes == 148);
      CHECK(rejected.parameters.private_data[0] == 5);
      CHECK(who.state(its) == CmState::ended);
      CHECK(who.hears_nothing());
    };
    // It has not waited for the rtu.
    for (const Hosts hosts : {Hosts::one, Hosts::two}) {
      if (ends && hosts == Hosts::one) continue;  // the other one would hear that at once
      CAPTURE(hosts);
      Pair early(hosts);
      early.come_to(Stage::accepted);
      REQUIRE(early.server.cm().established(early.server.guest(), early.called));
      early.server.expect(cm_established, early.called);
      no.id = early.caller;
      REQUIRE(early.client.cm().reject(early.client.guest(), no));
      if (ends) REQUIRE(early.server.disconnect(early.called) == 0);
      early.wire.carry_all();
      check(early.server, early.called);
      CHECK(early.client.hears_nothing());
    }
    // The rtu meets a server that has thought better of it.
    Pair crossing(Hosts::two);
    crossing.come_to(Stage::accepted);
    no.id = crossing.called;
    REQUIRE(crossing.server.cm().reject(crossing.server.guest(), no));
    REQUIRE(crossing.client.ready(crossing.caller) == 0);
    if (ends) REQUIRE(crossing.client.disconnect(crossing.caller) == 0);
    crossing.wire.carry_all();
    check(crossing.client, crossing.caller);
    CHECK(crossing.server.hears_nothing());
  }
  // Between datagrams there is no connection, whatever another host says.
  Pair datagrams(Hosts::two, RDMA_PS_UDP);
  datagrams.call();
  datagrams.answer_phone();
  REQUIRE(datagrams.server.accept(datagrams.called, datagrams.uid) == 0);
  datagrams.wire.carry_all();
  datagrams.client.expect(cm_established, datagrams.caller);
  CmMessage rej{};
  rej.kind = CmKind::rej, rej.from = datagrams.called.id, rej.to = datagrams.caller.id, rej.status = 28;
  datagrams.two.cm().arrived(1, rej);
  CHECK(datagrams.client.hears_nothing());
  CHECK(datagrams.client.state(datagrams.caller) == CmState::established);
}

TEST_CASE("Who connects and thinks better of it rejects, and so does who has accepted") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    Pair early(hosts);
    early.call();
    early.answer_phone();
    REQUIRE(early.client.cm().reject(early.client.guest(), {early.caller, 0, 0, {}}));
    early.wire.carry_all();
    CHECK(early.client.connect(early.caller) == EINVAL);
    CHECK(early.server.accept(early.called, early.uid) == EINVAL);
    CHECK(early.server.hears_nothing());
    CHECK(early.client.hears_nothing());

    Pair late(hosts);
    late.come_to(Stage::accepted);
    REQUIRE(late.server.cm().reject(late.server.guest(), {late.called, 0, 0, {}}));
    late.wire.carry_all();
    late.client.expect(cm_rejected, late.caller, 28);
    CHECK(late.client.ready(late.caller) == EINVAL);
    late.one.cm().expire(in_seconds(1));
    late.server.expect(cm_timewait_exit, late.called);

    Pair datagrams(hosts, RDMA_PS_UDP);
    datagrams.call();
    CHECK(TestGuest::error_of(datagrams.client.cm().reject(datagrams.client.guest(), {datagrams.caller, 0, 0, {}})) == EINVAL);
  }
}

TEST_CASE("Who listens is called by the type of queue pair that fits its own, and others are rejected") {
  constexpr QpType types[] = {QpType::rc, QpType::uc, QpType::ud, QpType::xrc_send, QpType::xrc_recv};
  for (const Hosts hosts : {Hosts::one, Hosts::two})
    for (const QpType listens : types)
      for (const QpType calls : types) {
        CAPTURE(hosts);
        CAPTURE(static_cast<int>(listens));
        CAPTURE(static_cast<int>(calls));
        Pair pair(hosts, RDMA_PS_IB);
        pair.server.destroy(pair.listener);
        const auto create = [](TestGuest& who, QpType type) {
          const auto made = who.cm().create(who.guest(), {who.channel, RDMA_PS_IB, static_cast<std::uint16_t>(type), 5});
          REQUIRE(made);
          return CmId{made->id, who.channel};
        };
        pair.listener = create(pair.server, listens);
        REQUIRE(pair.server.bind(pair.listener, any_v4(5000)) == 0);
        REQUIRE(pair.server.listen(pair.listener) == 0);
        pair.caller = create(pair.client, calls);
        pair.call();
        if (calls == engine::peer_type(listens)) {
          CHECK(pair.answer_phone().parameters.private_bytes == (calls == QpType::ud ? 180 : 56));
          CHECK(pair.client.hears_nothing());
        } else {
          CHECK(pair.server.hears_nothing());
          if (calls == QpType::ud) pair.client.expect(cm_unreachable, pair.caller, 2);
          else pair.client.expect(cm_rejected, pair.caller, 28);
        }
      }
  // Of a host that does not say.
  Pair pair(Hosts::two);
  pair.find();
  REQUIRE(pair.client.connect(pair.caller) == 0);
  pair.wire.waiting.front().message.qp_type = 0;
  pair.wire.carry_all();
  pair.answer_phone();
}

TEST_CASE("An address that nobody has is unknown, and may be asked for again") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)});
  const CmId id = a.create();
  for (int i = 0; i < 3; ++i) {
    CHECK(a.resolve(id, v4(203, 0, 113, 1, 5000)) == 0);
    CHECK(a.expect(cm_address_error, id, -EHOSTUNREACH).uid == a.at(id).uid);
  }
  CHECK(TestGuest::error_of(a.cm().resolve_route(a.guest(), id)) == EINVAL);
}

TEST_CASE("Who asks again and again without reading what came of it is refused, until it reads") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)});
  const CmId id = a.create();
  int refused = 0;
  for (int i = 0; i < 1000; ++i) refused += a.resolve(id, v4(203, 0, 113, 1, 5000)) == ENOBUFS;
  CHECK(refused > 900);
  CHECK(a.cm().channels().at(a.channel)->events.waiting().size() < 100);
  while (!a.hears_nothing()) continue;
  CHECK(a.resolve(id, v4(203, 0, 113, 1, 5000)) == 0);
}

TEST_CASE("A datagram's sender is told the queue pair that it asks for") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    Pair pair(hosts, RDMA_PS_UDP);
    CmParameters mine = with_data({4});
    mine.qpn = 0x55;
    pair.call(mine);
    const CmEvent request = pair.answer_phone();
    CHECK(request.is_datagram == 1);
    CHECK(request.parameters.qpn == 0);
    CHECK(request.parameters.private_bytes == 180);
    CHECK(request.parameters.private_data[0] == 4);
    CmParameters theirs = with_data({8});
    theirs.qpn = 0x66;
    REQUIRE(pair.server.accept(pair.called, pair.uid, theirs) == 0);
    CHECK(pair.server.disconnect(pair.called) == 0);  // which is nothing to anybody
    pair.wire.carry_all();
    const CmEvent established = pair.client.expect(cm_established, pair.caller);
    CHECK(established.is_datagram == 1);
    CHECK(established.parameters.qpn == 0x66);
    CHECK(established.parameters.qkey == cm_udp_qkey);
    CHECK(established.parameters.private_bytes == 136);
    CHECK(established.address.dlid == pair.server.guest().lid);
    pair.server.destroy(pair.called);
    pair.wire.carry_all();
    CHECK(pair.client.hears_nothing());  // there was no connection
  }
}

TEST_CASE("A datagram's sender that is rejected hears status 2") {
  for (const bool destroys : {false, true}) {
    Pair pair(Hosts::two, RDMA_PS_UDP);
    pair.come_to(Stage::requested);
    if (destroys) pair.server.destroy(pair.called);
    else REQUIRE(pair.server.cm().reject(pair.server.guest(), {pair.called, 0, 0, {}}));
    pair.wire.carry_all();
    const AddressVector told = pair.client.expect(cm_unreachable, pair.caller, 2).address, nowhere{};
    CHECK(std::memcmp(&told, &nowhere, sizeof(nowhere)) == 0);
  }
}

TEST_CASE("Who is called for a queue pair of datagrams is told no path") {
  for (const bool datagrams : {false, true}) {
    CAPTURE(datagrams);
    Pair pair(Hosts::two, datagrams ? RDMA_PS_UDP : RDMA_PS_TCP);
    const auto paths = [](TestGuest& who, const CmId& id) { return static_cast<int>(who.cm().query(who.guest(), id)->has_path); };
    pair.come_to(Stage::requested);
    CHECK(paths(pair.server, pair.called) == !datagrams);
    REQUIRE(pair.server.accept(pair.called, pair.uid) == 0);
    pair.wire.carry_all();
    CHECK(paths(pair.server, pair.called) == !datagrams);
    CHECK(paths(pair.client, pair.caller) == 1);
  }
}

TEST_CASE("The peer of who has none yet has an address of the same family") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1), v6(1)});
  const auto peer = [&](const CmId& id) { return a.cm().query(a.guest(), id)->destination; };
  CHECK(peer(a.create()).family == 0);
  for (const CmAddress& at : {v4(10, 0, 0, 1, 5000), any_v4(5001), v6(1, 5002), any_v6(5003), a.gid(5004), any_gid(5005)}) {
    const CmId id = a.create();
    REQUIRE(a.bind(id, at) == 0);
    CHECK(peer(id).family == at.family);
    CHECK(peer(id).is_any());
    CHECK(peer(id).port == 0);
    REQUIRE(a.listen(id) == 0);
    CHECK(peer(id).family == at.family);
  }
}

TEST_CASE("Data that do not fit into a message are refused") {
  Pair pair(Hosts::one);
  pair.find();
  CmParameters much{};
  much.private_bytes = 57;
  CHECK(pair.client.connect(pair.caller, much) == EINVAL);
  much.private_bytes = 56;
  CHECK(pair.client.connect(pair.caller, much) == 0);
  pair.answer_phone();
  for (const std::uint32_t bytes : {149u, 257u, ~0u}) {
    CmRejectRequest no{pair.called, 0, bytes, {}};
    CHECK(TestGuest::error_of(pair.server.cm().reject(pair.server.guest(), no)) == EINVAL);
  }
  CmPlaceRequest place{};
  for (const std::uint32_t count : {cm_addresses_at_once + 1, ~0u}) {
    place.count = count;
    CHECK(TestGuest::error_of(pair.server.cm().place(pair.server.guest(), place)) == EINVAL);
  }
}

TEST_CASE("Who is accepted with more data than fit into an answer is rejected") {
  for (const Hosts hosts : {Hosts::one, Hosts::two})
    for (const bool datagrams : {false, true}) {
      CAPTURE(hosts);
      CAPTURE(datagrams);
      Pair pair(hosts, datagrams ? RDMA_PS_UDP : RDMA_PS_TCP);
      pair.come_to(Stage::requested);
      CmParameters much{};
      much.private_bytes = datagrams ? 137 : 197;
      CHECK(pair.server.accept(pair.called, pair.uid, much) == EINVAL);
      pair.wire.carry_all();
      if (datagrams) pair.client.expect(cm_unreachable, pair.caller, 2);
      else pair.client.expect(cm_rejected, pair.caller, 28);
      CHECK(pair.server.accept(pair.called, pair.uid) == EINVAL);
      CHECK(pair.server.hears_nothing());
      pair.wire.carry_all();
      CHECK(pair.client.hears_nothing());
    }
}

TEST_CASE("Who is accepted or established where that cannot be is rejected") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    const auto check = [&](Pair& pair, TestGuest& rejected, const CmId& its, TestGuest& other) {
      pair.wire.carry_all();
      rejected.expect(cm_rejected, its, 28);
      pair.wire.carry_all();
      CHECK(rejected.hears_nothing());
      CHECK(other.hears_nothing());
    };
    {
      Pair pair(hosts);
      pair.come_to(Stage::requested);
      CHECK(pair.server.ready(pair.called) == EINVAL);
      check(pair, pair.client, pair.caller, pair.server);
      CHECK(pair.server.accept(pair.called, pair.uid) == EINVAL);
    }
    {
      Pair pair(hosts);
      pair.come_to(Stage::accepted);
      CHECK(pair.client.accept(pair.caller, 1) == EINVAL);
      check(pair, pair.server, pair.called, pair.client);
      CHECK(pair.client.ready(pair.caller) == EINVAL);
    }
    {
      Pair pair(hosts);
      pair.come_to(Stage::accepted);
      CHECK(pair.server.accept(pair.called, pair.uid) == EINVAL);
      check(pair, pair.client, pair.caller, pair.server);
    }
    {
      Pair pair(hosts);
      pair.come_to(Stage::requested);
      CHECK(pair.client.ready(pair.caller) == EINVAL);
      pair.wire.carry_all();
      CHECK(pair.server.accept(pair.called, pair.uid) == EINVAL);
      pair.wire.carry_all();
      CHECK(pair.client.hears_nothing());
      CHECK(pair.server.hears_nothing());
    }
    {
      Pair pair(hosts);
      pair.come_to(Stage::established);
      CHECK(pair.client.ready(pair.caller) == EINVAL);
      CHECK(pair.client.accept(pair.caller, 1) == EINVAL);
      CHECK(pair.server.accept(pair.called, pair.uid) == EINVAL);
      pair.wire.carry_all();
      CHECK(pair.client.hears_nothing());
      CHECK(pair.server.hears_nothing());
      CHECK(pair.client.state(pair.caller) == CmState::established);
    }
  }
}

TEST_CASE("Who asks for a queue pair of datagrams may be established without one, once") {
  Pair pair(Hosts::two, RDMA_PS_UDP);
  pair.come_to(Stage::requested);
  CHECK(pair.client.ready(pair.caller) == EINVAL);
  CHECK(pair.server.ready(pair.called) == 0);
  pair.wire.carry_all();
  const CmEvent established = pair.client.expect(cm_established, pair.caller);
  CHECK(established.parameters.qpn == 0);
  CHECK(established.parameters.qkey == cm_udp_qkey);
  CHECK(pair.server.ready(pair.called) == EINVAL);
  pair.wire.carry_all();
  CHECK(pair.client.hears_nothing());
  CHECK(pair.client.state(pair.caller) == CmState::established);
  CHECK(pair.server.state(pair.called) == CmState::established);
}

TEST_CASE("Who listens does not listen once more, and goes on") {
  Pair pair(Hosts::one);
  CHECK(pair.server.listen(pair.listener) == EINVAL);
  pair.call();
  pair.answer_phone();
  CHECK(pair.server.listen(pair.called) == EINVAL);
  const CmId idle = pair.server.create();
  CHECK(pair.server.listen(idle) == 0);  // at any address, and a port that it is given
  CHECK(pair.server.at(idle).source.port != 0);
}

TEST_CASE("A guest is found by the address in its GIDs, also one of several that share it") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)}), b(host, 1, {v4(10, 0, 0, 1)}), c(host, 2, {v4(10, 0, 0, 2)});
  for (TestGuest* const listens : {&a, &b}) {
    b.guest().lid = a.guest().lid, b.guest().guid = a.guest().guid;
    const CmId listener = listens->listener(listens->mapped(5000));
    const CmId caller = c.create();
    REQUIRE(c.resolve(caller, a.mapped(5000), v4(10, 0, 0, 2)) == 0);
    c.expect(cm_address_resolved, caller);
    REQUIRE(c.cm().resolve_route(c.guest(), caller));
    c.expect(cm_route_resolved, caller);
    REQUIRE(c.connect(caller) == 0);
    CHECK(listens->take().event == cm_connect_request);
    CHECK(c.at(caller).source.same_host(c.mapped()));
    listens->destroy(listener);
  }
}
