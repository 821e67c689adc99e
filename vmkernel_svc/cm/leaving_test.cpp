// Guests and identifiers that go: what the others hear, and what is left behind.
#include "vmkernel_svc/cm/test_pair.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;
using namespace vrdma::control;
using engine::QpType;

namespace {
// How one may go: its identifier, its channel, or itself.
constexpr const char* ways[] = {"destroys its identifier", "closes its channel", "leaves"};
void go(TestGuest& who, const CmId& id, int way) {
  if (way == 0) who.destroy(id);
  else if (way == 1) who.close(id.channel);
  else who.leave();
}
}  // namespace

TEST_CASE("Whoever goes, and however, the other one hears what it has to") {
  for (const Hosts hosts : {Hosts::one, Hosts::two})
    for (const Stage stage : {Stage::requested, Stage::accepted, Stage::established})
      for (const bool server_goes : {false, true})
        for (int way = 0; way < 3; ++way) {
          CAPTURE(hosts);
          CAPTURE(static_cast<int>(stage));
          CAPTURE(server_goes);
          CAPTURE(ways[way]);
          Pair pair(hosts);
          pair.come_to(stage);
          go(server_goes ? pair.server : pair.client, server_goes ? pair.called : pair.caller, way);
          pair.wire.carry_all();
          TestGuest& other = server_goes ? pair.client : pair.server;
          const CmId its = server_goes ? pair.caller : pair.called;
          if (stage == Stage::established) {
            other.expect(cm_disconnected, its);
          } else if (stage == Stage::requested && !server_goes) {
            CHECK(other.hears_nothing());
            CHECK(other.accept(its, 1) == EINVAL);
          } else {
            other.expect(cm_rejected, its, 28);
          }
          CHECK(other.hears_nothing());
          other.destroy(its);
          other.leave();
          const std::size_t left = server_goes && way == 0 ? 1 : 0;  // the listener
          CHECK(pair.one.cm().identifiers().size() + pair.two.cm().identifiers().size() == left);
        }
}

TEST_CASE("Who asks for a queue pair of datagrams and goes is answered all the same") {
  for (const Hosts hosts : {Hosts::one, Hosts::two})
    for (int way = 0; way < 4; ++way) {
      if (way == 3 && hosts == Hosts::one) continue;
      CAPTURE(hosts);
      CAPTURE(way);
      Pair pair(hosts, RDMA_PS_UDP);
      pair.come_to(Stage::requested);
      if (way == 3) pair.wire.lose();
      else go(pair.client, pair.caller, way);
      pair.wire.carry_all();
      CHECK(pair.server.accept(pair.called, pair.uid) == 0);
      pair.wire.carry_all();
      CHECK(pair.server.hears_nothing());
      pair.server.destroy(pair.called);
      pair.wire.carry_all();
    }
}

TEST_CASE("Whoever goes before it has called anybody leaves nothing behind") {
  for (int way = 0; way < 3; ++way)
    for (int steps = 0; steps < 5; ++steps) {
      TestHost one, two;
      TestWire wire(one, two);
      TestGuest a(one, 1, {v4(10, 0, 0, 1)}), b(one, 2, {v4(10, 0, 0, 2)});
      b.listener(any_v4(5000));
      Tenant& tenant = a.tenant();
      const CmId id = a.create();
      if (steps == 1) CHECK(a.bind(id, v4(10, 0, 0, 1, 6000)) == 0);
      if (steps == 2) CHECK(a.resolve(id, v4(10, 9, 9, 9, 5000)) == 0);  // other hosts are asked
      if (steps >= 3) CHECK(a.resolve(id, v4(10, 0, 0, 2, 5000)) == 0);
      if (steps == 4) CHECK(TestGuest::error_of(a.cm().resolve_route(a.guest(), id)) == 0);
      go(a, id, way);
      wire.carry_all();
      b.leave();
      a.leave();
      CHECK(one.cm().identifiers().empty());
      CHECK_FALSE(one.cm().waits());
      CHECK(tenant.objects == 0);
      CHECK(tenant.descriptors == 0);
    }
}

TEST_CASE("A listener that goes takes with it who has not been heard of, and leaves the others") {
  for (int way = 0; way < 3; ++way) {
    CAPTURE(ways[way]);
    Pair pair(Hosts::two);
    pair.call();  // nobody reads it
    go(pair.server, pair.listener, way);
    pair.wire.carry_all();
    pair.client.expect(cm_rejected, pair.caller, 28);
    CHECK(pair.one.cm().identifiers().empty());
  }
  Pair pair(Hosts::two);
  pair.come_to(Stage::established);
  pair.server.destroy(pair.listener);
  pair.wire.carry_all();
  CHECK(pair.client.hears_nothing());
  CHECK(pair.server.state(pair.called) == CmState::established);
}

TEST_CASE("An answer to somebody who is gone is refused") {
  Pair pair(Hosts::two);
  pair.come_to(Stage::requested);
  pair.client.destroy(pair.caller);
  REQUIRE(pair.server.accept(pair.called, pair.uid) == 0);  // before the news has come
  pair.wire.carry_all();
  pair.server.expect(cm_rejected, pair.called, 28);
}
