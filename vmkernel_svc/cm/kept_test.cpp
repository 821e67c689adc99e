// Requests for which nobody listens, or nobody yet.
#include "vmkernel_svc/cm/test_pair.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;
using namespace vrdma::control;

namespace {
// The client calls where nobody listens.
void call_nobody(Pair& pair) {
  pair.find();
  pair.server.destroy(pair.listener);
  REQUIRE(pair.client.connect(pair.caller) == 0);
  pair.wire.carry_all();
}
}  // namespace

TEST_CASE("Where nobody listens, who calls is rejected with status 8, or as a datagram's sender with 1") {
  for (const Hosts hosts : {Hosts::one, Hosts::two})
    for (const bool datagrams : {false, true}) {
      CAPTURE(hosts);
      CAPTURE(datagrams);
      Pair pair(hosts, datagrams ? RDMA_PS_UDP : RDMA_PS_TCP);
      call_nobody(pair);
      CHECK(pair.client.hears_nothing());  // somebody may be about to listen
      pair.one.cm().expire(in_seconds(1));
      pair.wire.carry_all();
      if (datagrams) pair.client.expect(cm_unreachable, pair.caller, 1);
      else pair.client.expect(cm_rejected, pair.caller, 8);
    }
}

TEST_CASE("Who calls a moment before somebody listens is heard") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    Pair pair(hosts);
    call_nobody(pair);
    CHECK(pair.server.hears_nothing());
    pair.listener = pair.server.listener(any_v4(5000));
    pair.answer_phone();
    REQUIRE(pair.server.accept(pair.called, pair.uid) == 0);
    pair.wire.carry_all();
    pair.client.expect(cm_connect_response, pair.caller);
  }
}

TEST_CASE("Who calls a moment too early and is gone by then has not called") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    Pair pair(hosts);
    call_nobody(pair);
    pair.client.destroy(pair.caller);
    pair.wire.carry_all();
    pair.listener = pair.server.listener(any_v4(5000));
    CHECK(pair.server.hears_nothing());
  }
}

TEST_CASE("Who calls too early waits for who is meant, whoever else listens") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    Pair pair(hosts);
    pair.client.tenant().pkeys = {0x8001};
    pair.server.tenant().pkeys = {0x8003};
    pair.call();  // nobody in its partition
    TestGuest elsewhere(pair.one, 3, {v4(10, 0, 0, 3)}, 3000);
    for (const CmAddress& at : {any_v4(5000), any_v4(5001)}) {
      elsewhere.listener(at);
      pair.wire.carry_all();
      CHECK(pair.client.hears_nothing());
    }
    CHECK(elsewhere.hears_nothing());
    pair.one.cm().expire(in_seconds(1));
    pair.wire.carry_all();
    pair.client.expect(cm_rejected, pair.caller, 8);
  }
}

TEST_CASE("Who calls too early is found by who listens at its address, or at any") {
  TestHost host;
  TestGuest server(host, 1, {v4(10, 0, 0, 1), v6(1)}), client(host, 2, {v4(10, 0, 0, 2), v6(2)});
  const auto call = [&](const CmAddress& to) {
    const CmId caller = client.create();
    REQUIRE(client.resolve(caller, to) == 0);
    client.expect(cm_address_resolved, caller);
    REQUIRE(client.cm().resolve_route(client.guest(), caller));
    client.expect(cm_route_resolved, caller);
    REQUIRE(client.connect(caller) == 0);
    CHECK(server.hears_nothing());
  };
  for (const CmAddress& at : {v4(10, 0, 0, 1, 5000), any_v4(5000), any_v6(5000), server.mapped(5000)}) {
    const bool is_own_kind = at.ip[0] == 198;
    call(is_own_kind ? at : v4(10, 0, 0, 1, 5000));
    const CmId elsewhere = server.listener(any_v4(5001)), other_family = server.listener(v6(1, 5000));
    CHECK(server.hears_nothing());
    server.destroy(other_family);
    const CmId listener = server.listener(at);
    CHECK(server.take().event == cm_connect_request);
    CHECK(server.hears_nothing());
    server.destroy(listener);
    server.destroy(elsewhere);
  }
  call(v6(1, 5000));
  server.listener(any_v6(5000));
  CHECK(server.take().event == cm_connect_request);
}

TEST_CASE("Who calls in vain again and again takes nobody else's moment of grace") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    Pair pair(hosts);
    TestGuest other(hosts == Hosts::two ? pair.two : pair.one, 2, {v4(10, 0, 0, 2)}, 3000);
    const auto call = [&](TestGuest& who, std::uint16_t port) {
      const CmId caller = who.create();
      REQUIRE(who.resolve(caller, v4(10, 0, 0, 1, port), v4(10, 0, 0, 2)) == 0);
      pair.wire.carry_all();
      who.take();
      REQUIRE(who.cm().resolve_route(who.guest(), caller));
      who.take();
      REQUIRE(who.connect(caller) == 0);
      pair.wire.carry_all();
      return caller;
    };
    const CmId first = call(pair.client, 5001);
    for (int i = 1; i < 4096; ++i) call(pair.client, 5001);
    CHECK(pair.client.hears_nothing());
    const CmId too_many = call(pair.client, 5001);
    pair.client.expect(cm_rejected, too_many, 8);
    call(other, 5002);
    CHECK(other.hears_nothing());
    pair.server.listener(any_v4(5002));
    CHECK(pair.server.take().event == cm_connect_request);
    // Those that are withdrawn make room.
    pair.client.destroy(first);
    pair.wire.carry_all();
    call(pair.client, 5001);
    CHECK(pair.client.hears_nothing());
  }
}
