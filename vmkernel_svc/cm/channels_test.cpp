// Event channels, and what guests have of each other's: nothing.
#include "vmkernel_svc/cm/test_pair.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;
using namespace vrdma::control;

TEST_CASE("One record is in the pipe exactly while events wait") {
  Pair pair(Hosts::one);
  TestGuest& server = pair.server;
  CHECK(server.records(server.channel) == 0);
  for (int i = 0; i < 3; ++i) {
    pair.call();
    CHECK(server.records(server.channel) == 1);
    pair.caller = pair.client.create();
  }
  server.take();
  server.take();
  CHECK(server.records(server.channel) == 1);
  server.take();
  CHECK(server.records(server.channel) == 0);
  CHECK(server.hears_nothing());

  // What is destroyed takes its events along, and says whether they were the last.
  pair.call();
  CHECK(server.records(server.channel) == 1);
  server.destroy(pair.listener);
  CHECK(server.records(server.channel) == 0);
  CHECK(server.hears_nothing());
}

TEST_CASE("Events that wait move to another channel with their identifier, and requests with their listener") {
  Pair pair(Hosts::one);
  TestGuest& server = pair.server;
  pair.call();
  const CmId other = server.create();
  CHECK(server.resolve(other, v4(203, 0, 113, 1, 5000)) == 0);  // an event that stays
  const std::uint32_t second = server.open();
  auto moved = server.cm().migrate(server.guest(), {pair.listener, second, 0});
  REQUIRE(moved);
  CHECK(moved->last == 0);
  CHECK(server.records(server.channel) == 1);
  CHECK(server.records(second) == 1);
  const CmEvent request = server.take(second);
  CHECK(request.event == cm_connect_request);
  CHECK(server.accept({request.id, server.channel}, 1) == EINVAL);
  CHECK(server.accept({request.id, second}, 1) == 0);
  pair.client.expect(cm_connect_response, pair.caller);

  moved = server.cm().migrate(server.guest(), {other, second, 0});
  REQUIRE(moved);
  CHECK(moved->last == 1);
  server.take_record(server.channel);
  server.expect(cm_address_error, {other.id, second}, -EHOSTUNREACH);
  CHECK(TestGuest::error_of(server.cm().migrate(server.guest(), {other, second, 0})) == EINVAL);  // it is not there any more
  CHECK(TestGuest::error_of(server.cm().migrate(server.guest(), {{other.id, second}, pair.client.channel, 0})) == EINVAL);
  server.close(server.channel);
  CHECK(server.state({other.id, second}) == CmState::bound);
  server.channel = second;
}

TEST_CASE("A guest writes events for itself, which come in their turn") {
  Pair pair(Hosts::one);
  TestGuest& server = pair.server;
  pair.call();
  const auto write = [&](const CmId& id, std::uint32_t event) { return TestGuest::error_of(server.cm().write_event(server.guest(), {id, event, -7, {1, 2, 3, 4, 5, 6, 7, 8}})); };
  CHECK(write(pair.listener, cm_user) == 0);
  CHECK(write(pair.listener, cm_internal) == 0);
  CHECK(server.take().event == cm_connect_request);
  for (const std::uint32_t event : {cm_user, cm_internal}) {
    const CmEvent taken = server.expect(event, pair.listener, -7);
    CHECK(taken.parameters.private_bytes == 8);
    CHECK(taken.parameters.private_data[0] == 1);
    CHECK(taken.parameters.private_data[7] == 8);
  }
  CHECK(server.hears_nothing());
  CHECK(write(pair.listener, cm_established) == EINVAL);
  CHECK(write(pair.caller, cm_user) == ENOENT);  // another one's

}

TEST_CASE("A guest writes so many events for itself, wherever it puts them") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)});
  const auto write = [&](const CmId& id) { return TestGuest::error_of(a.cm().write_event(a.guest(), {id, cm_user, 0, {}})); };
  const std::uint32_t sink = a.open();
  std::vector<CmId> full;
  std::size_t written = 0;
  for (int error = 0; error == 0;) {
    const CmId id = a.create();
    for (int i = 0; i < 1000 && (error = write(id)) == 0; ++i) REQUIRE(++written <= 4096);
    CHECK((error == 0 || error == ENOBUFS));
    if (error == 0 && a.cm().migrate(a.guest(), {id, sink, 0})->last == 1) a.take_record(a.channel);
    full.push_back({id.id, error == 0 ? sink : a.channel});
  }
  CHECK(written == 4096);
  const CmId other = a.create();
  CHECK(write(other) == ENOBUFS);
  SUBCASE("What is read makes room") { a.expect(cm_user, full[0].channel == sink ? full[0] : full.back()); }
  SUBCASE("And what goes with its identifier") {
    a.destroy(full[0]);
    CHECK(a.expect(cm_user, full[1]).status == 0);
  }
  SUBCASE("Or its channel") {
    a.close(sink);
    CHECK(a.guest().cm_written == 96);
  }
  CHECK(write(other) == 0);
}

TEST_CASE("Events that have moved are in the order in which they happened") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)});
  const CmId moves = a.create(RDMA_PS_UDP), stays = a.create();
  REQUIRE(a.bind(moves, v4(10, 0, 0, 1, 5000)) == 0);
  const auto write = [&](const CmId& id, int status) { REQUIRE(a.cm().write_event(a.guest(), {id, cm_user, status, {}})); };
  write(moves, 1);
  const auto joined = a.cm().join(a.guest(), {moves, 9, v4(239, 1, 2, 3), 1, 0});
  REQUIRE(joined);
  write(stays, 2);
  write(moves, 3);
  const std::uint32_t second = a.open();
  REQUIRE(a.cm().migrate(a.guest(), {moves, second, 0})->last == 0);
  a.expect(cm_user, {moves.id, second}, 1);
  a.expect(cm_multicast_join, {joined->id, second});
  a.expect(cm_user, {moves.id, second}, 3);
  CHECK(a.hears_nothing(second));
  a.expect(cm_user, stays, 2);
  CHECK(a.hears_nothing());
}

TEST_CASE("Who guesses the number of a request before reading it harms nobody") {
  Pair pair(Hosts::one);
  TestGuest& server = pair.server;
  pair.call();
  const CmId made{pair.caller.id + 1, server.channel};
  REQUIRE(server.cm().identifiers().contains(made.id));
  REQUIRE(server.accept(made, 5) == 0);
  pair.client.expect(cm_connect_response, pair.caller);
  REQUIRE(pair.client.ready(pair.caller) == 0);
  const std::uint32_t second = server.open();
  SUBCASE("It goes with its listener, and its own event, too") {
    REQUIRE(server.cm().migrate(server.guest(), {pair.listener, second, 0})->last == 1);
    server.take_record(server.channel);
    server.destroy({pair.listener.id, second});
    CHECK(server.records(second) == 0);
    CHECK_FALSE(server.cm().identifiers().contains(made.id));
    pair.client.expect(cm_disconnected, pair.caller);
  }
  SUBCASE("It has gone elsewhere, and stays when its listener goes") {
    REQUIRE(server.cm().migrate(server.guest(), {made, second, 0})->last == 0);
    server.destroy(pair.listener);
    server.expect(cm_established, {made.id, second});
    CHECK(server.hears_nothing());
  }
  SUBCASE("It is gone, and its number is somebody else's when the listener goes") {
    server.destroy(made);
    pair.client.expect(cm_disconnected, pair.caller);
    CHECK(server.take().event == cm_connect_request);
    CHECK(server.accept(made, 5) == ENOENT);
  }
}

TEST_CASE("Nobody may name what is another one's") {
  Pair pair(Hosts::one);
  pair.come_to(Stage::established);
  TestGuest stranger(pair.one, 1, {v4(10, 0, 0, 1)}, 3000);
  auto& cm = stranger.cm();
  for (const CmId& theirs : {pair.listener, pair.called, pair.caller})
    for (const std::uint32_t channel : {stranger.channel, theirs.channel}) {
      const CmId id{theirs.id, channel};
      CHECK(TestGuest::error_of(cm.destroy(stranger.guest(), id)) == ENOENT);
      CHECK(TestGuest::error_of(cm.query(stranger.guest(), id)) == ENOENT);
      CHECK(stranger.disconnect(id) == ENOENT);
      CHECK(TestGuest::error_of(cm.migrate(stranger.guest(), {id, stranger.channel, 0})) == ENOENT);
    }
  CHECK(TestGuest::error_of(cm.take_event(stranger.guest(), pair.server.channel)) == EINVAL);
  CHECK(TestGuest::error_of(cm.close(stranger.guest(), pair.server.channel)) == EINVAL);
  CHECK(TestGuest::error_of(cm.create(stranger.guest(), {pair.server.channel, RDMA_PS_TCP, 2, 1})) == EINVAL);
}

TEST_CASE("A listener whose requests nobody reads is sent no more than there can be") {
  Pair pair(Hosts::one);
  const std::uint32_t before = pair.server.tenant().objects;
  for (int i = 0; i < 1500; ++i) {
    pair.call();
    if (i >= 1024) pair.client.expect(cm_rejected, pair.caller, 3);
    pair.client.destroy(pair.caller);
    pair.caller = pair.client.create();
  }
  CHECK(pair.server.tenant().objects == before + 1024);
  // Each that is read makes room for another.
  const CmId read{pair.server.take().id, pair.server.channel};
  pair.server.destroy(read);
  pair.call();
  CHECK(pair.client.hears_nothing());
}

TEST_CASE("Numbers that come round again leave out the one that is nobody's") {
  TestHost host;
  host.fabric.cm = std::make_unique<ConnectionManager>(host.fabric, 0xfffffffe);
  TestGuest a(host, 1, {v4(10, 0, 0, 1)});
  CHECK(a.channel == 0xffffffff);
  CHECK(a.create().id == 1);
}

TEST_CASE("A tenant's quota holds channels, identifiers and memberships") {
  TestHost host;
  host.config.quota.objects = 4;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)});
  const CmId id = a.create(RDMA_PS_UDP);
  a.create();
  REQUIRE(a.bind(id, v4(10, 0, 0, 1, 5000)) == 0);
  const CmJoinRequest join{id, 9, v4(239, 1, 2, 3), 1, 0};
  const auto joined = a.cm().join(a.guest(), join);
  REQUIRE(joined);
  CHECK(TestGuest::error_of(a.cm().join(a.guest(), join)) == EDQUOT);
  CHECK(TestGuest::error_of(a.cm().create(a.guest(), {a.channel, RDMA_PS_TCP, 2, 1})) == EDQUOT);
  CHECK(TestGuest::error_of(a.cm().open(a.guest(), {})) == EDQUOT);
  const CmEvent event = a.take();
  CHECK(event.event == cm_multicast_join);
  CHECK(event.id == joined->id);
  CHECK(event.uid == 9);
  CHECK(TestGuest::error_of(a.cm().leave_group(a.guest(), {joined->id, a.channel})) == 0);
  CHECK(TestGuest::error_of(a.cm().leave_group(a.guest(), {joined->id, a.channel})) == ENOENT);
  // Its event goes with it when nobody has read it.
  for (int i = 0; i < 100; ++i) {
    const auto again = a.cm().join(a.guest(), join);
    REQUIRE(again);
    CHECK(a.records(a.channel) == 1);
    REQUIRE(a.cm().leave_group(a.guest(), {again->id, a.channel})->last == 1);
    a.take_record(a.channel);
  }
  CHECK(a.hears_nothing());
  REQUIRE(a.cm().join(a.guest(), join));
  Tenant& tenant = a.tenant();
  a.leave();
  CHECK(tenant.objects == 0);
  CHECK(tenant.descriptors == 0);
  CHECK(host.cm().memberships().empty());
}

TEST_CASE("Without a partition in common it is as if nobody listened") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    Pair pair(hosts);
    pair.client.tenant().pkeys = {0x8001, 0x0002};
    pair.server.tenant().pkeys = {0x8003, 0x0002};
    pair.call();
    CHECK(pair.client.hears_nothing());  // as long as it would be kept for somebody who is about to listen
    pair.one.cm().expire(in_seconds(1));
    pair.wire.carry_all();
    pair.client.expect(cm_rejected, pair.caller, 8);
    CHECK(pair.server.hears_nothing());
    CHECK(pair.server.guest().bad_pkeys == 1);
    CHECK(pair.one.cm().identifiers().size() == (hosts == Hosts::two ? 1 : 2));
  }
}

TEST_CASE("Both ends of a connection have the partition's place in their own table") {
  for (const std::uint16_t of_client : {std::uint16_t{0x8002}, std::uint16_t{0x0002}}) {
    Pair pair(Hosts::two);
    pair.client.tenant().pkeys = {0x8001, 0x8005, of_client};
    pair.server.tenant().pkeys = {0x8003, static_cast<std::uint16_t>(of_client ^ 0x8000)};
    pair.come_to(Stage::established);
    CHECK(pair.client.cm().attributes(pair.client.guest(), {pair.caller, 1, 0})->attributes.pkey_index == 2);
    CHECK(pair.server.cm().attributes(pair.server.guest(), {pair.called, 1, 0})->attributes.pkey_index == 1);
    CHECK(pair.client.cm().query(pair.client.guest(), pair.caller)->pkey == of_client);
  }
}
