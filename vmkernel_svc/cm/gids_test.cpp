// Addresses of the family AF_IB.
#include "vmkernel_svc/cm/test_pair.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;
using namespace vrdma::control;

namespace {

// One that listens, and one that calls it by GID, on one host or on two; without IP addresses.
struct GidPair {
  TestHost one, two;
  TestWire wire{one, two};
  TestGuest server, client;
  explicit GidPair(Hosts hosts) : server(one, 1, {}), client(hosts == Hosts::two ? two : one, 2, {}, 2000) { wire.is_up = hosts == Hosts::two; }

  CmId call(const CmAddress& to, std::uint16_t space = RDMA_PS_TCP, const CmParameters& parameters = {}) {
    const CmId caller = client.create(space);
    REQUIRE(client.resolve(caller, to) == 0);
    wire.carry_all();
    client.expect(cm_address_resolved, caller);
    REQUIRE(client.cm().resolve_route(client.guest(), caller));
    client.expect(cm_route_resolved, caller);
    REQUIRE(client.connect(caller, parameters) == 0);
    wire.carry_all();
    return caller;
  }
  void refused(const CmAddress& to, std::int32_t reason = rej_invalid_service_id) {
    const CmId caller = call(to);
    one.cm().expire(in_seconds(1));  // it was kept for who might listen
    wire.carry_all();
    client.expect(cm_rejected, caller, reason);
  }
};

}  // namespace

TEST_CASE("A guest is called by its GID, on its own host and on another") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    GidPair pair(hosts);
    const bool names_it = hosts == Hosts::two;  // or listens at any
    const CmId listener = pair.server.listener(names_it ? pair.server.gid(5000) : any_gid(5000));
    CmParameters mine{};
    mine.private_bytes = 92;  // there are no IP addresses before it
    mine.private_data[91] = 7;
    const CmId caller = pair.call(pair.server.gid(5000), RDMA_PS_TCP, mine);
    const CmEvent request = pair.server.take();
    REQUIRE(request.event == cm_connect_request);
    CHECK(request.uid == pair.server.at(listener).uid);
    CHECK(request.parameters.private_bytes == 92);
    CHECK(request.parameters.private_data[91] == 7);
    const CmId called{request.id, pair.server.channel};
    REQUIRE(pair.server.accept(called, 77) == 0);
    pair.wire.carry_all();
    pair.client.expect(cm_connect_response, caller);
    REQUIRE(pair.client.ready(caller) == 0);
    pair.wire.carry_all();
    pair.server.expect(cm_established, called);
    const auto asked = pair.client.cm().query(pair.client.guest(), caller);
    CHECK(asked->source.ip == pair.client.guest().gids[0].gid);
    CHECK(asked->source.port != 0);
    CHECK(asked->source.port_space() == RDMA_PS_TCP);
    CHECK(asked->destination.port == 5000);
    CHECK(asked->dgid == pair.server.guest().gids[0].gid);
    CHECK(asked->dlid == pair.server.guest().lid);
    CHECK(pair.server.at(called).source.same_host(pair.server.gid(0)));
    CHECK(pair.server.at(called).destination.same_host(pair.client.gid(0)));
  }
}

TEST_CASE("The path to a GID is known before anybody is called") {
  GidPair pair(Hosts::two);
  const CmId caller = pair.client.create();
  REQUIRE(pair.client.resolve(caller, pair.server.gid(5000)) == 0);
  pair.wire.carry_all();
  const auto asked = pair.client.cm().query(pair.client.guest(), caller);
  CHECK(asked->dgid == pair.server.guest().gids[0].gid);
  CHECK(asked->dlid == pair.server.guest().lid);
  CHECK(asked->mtu != 0);
  CHECK(asked->pkey == hosts::pkey_default);
}

TEST_CASE("Who calls a GID that nobody has, or where nobody listens, hears it") {
  for (const Hosts hosts : {Hosts::one, Hosts::two}) {
    CAPTURE(hosts);
    GidPair pair(hosts);
    pair.server.listener(any_gid(5000));
    CmAddress nobody = pair.server.gid(5000);
    nobody.ip[14] ^= 0x40;
    const CmId caller = pair.client.create();
    REQUIRE(pair.client.resolve(caller, nobody) == 0);
    pair.wire.carry_all();
    pair.client.expect(cm_address_error, caller, -EHOSTUNREACH);
    pair.refused(pair.server.gid(5001));
    pair.refused(pair.server.gid(5000, RDMA_PS_IB));
    pair.refused(pair.server.gid(5000, 0));
    pair.refused(pair.server.gid(5000, CmAddress::other_space));
  }
}

TEST_CASE("A GID of another subnet, a P_Key that the port has not, and a port on Ethernet lead nowhere") {
  TestHost host;
  TestGuest a(host, 1, {}), b(host, 1, {}), ethernet(host, 1, {}, 1000, link_layer_ethernet);
  CmAddress elsewhere = b.gid(5000);
  elsewhere.ip[7] = 1;
  CHECK(a.resolve(a.create(), elsewhere) == ENODEV);
  CHECK(a.resolve(a.create(), b.gid(5000, RDMA_PS_TCP, 0x8001)) == ENODEV);
  CHECK(a.resolve(a.create(), b.gid(5000, RDMA_PS_TCP, 0)) == ENODEV);
  CHECK(a.resolve(a.create(), b.gid(5000), a.gid(0, 0, 0x8001)) == ENODEV);
  CHECK(a.resolve(a.create(), b.gid(5000), b.gid(0)) == ENODEV);
  CHECK(a.resolve(a.create(), b.gid(5000), v4(127, 0, 0, 1)) == EINVAL);
  CHECK(a.bind(a.create(), b.gid(5000)) == ENODEV);
  CHECK(ethernet.bind(ethernet.create(), ethernet.gid(5000)) == ENODEV);
  CHECK(ethernet.resolve(ethernet.create(), ethernet.gid(5000)) == ENODEV);
  CHECK(ethernet.resolve(ethernet.create(), any_gid(5000)) == ENODEV);
  CHECK(ethernet.bind(ethernet.create(RDMA_PS_IB), any_gid(0)) == 0);  // by which librdmacm knows that there are such addresses
  CHECK(a.resolve(a.create(), ethernet.gid(5000)) == 0);
  // What a guest says of its interfaces is no GID of its own.
  CmPlaceRequest place{};
  place.network = place.count = 1;
  place.addresses[0] = b.gid(0);
  REQUIRE(a.cm().place(a.guest(), place));
  CHECK(a.bind(a.create(), b.gid(5000)) == ENODEV);
}

TEST_CASE("Any GID as a destination is one's own") {
  TestHost host;
  TestGuest a(host, 1, {});
  a.listener(any_gid(5000));
  const CmId caller = a.create();
  REQUIRE(a.resolve(caller, any_gid(5000, RDMA_PS_TCP, 0)) == 0);
  a.expect(cm_address_resolved, caller);
  CHECK(a.at(caller).destination.same_host(a.gid(0)));
  REQUIRE(a.cm().resolve_route(a.guest(), caller));
  a.expect(cm_route_resolved, caller);
  REQUIRE(a.connect(caller) == 0);
  CHECK(a.take().event == cm_connect_request);
}

TEST_CASE("The ports of a GID are those of its service IDs' port space, and of no other address") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)}), b(host, 1, {v4(10, 0, 0, 1)});
  const auto binds = [](TestGuest& who, std::uint16_t space, const CmAddress& address) { return who.bind(who.create(space), address); };
  CHECK(binds(a, RDMA_PS_TCP, any_gid(5000)) == 0);
  CHECK(binds(a, RDMA_PS_TCP, a.gid(5000)) == EADDRNOTAVAIL);
  CHECK(binds(a, RDMA_PS_TCP, a.gid(5002)) == 0);
  CHECK(binds(a, RDMA_PS_IB, a.gid(5002, RDMA_PS_TCP)) == EADDRINUSE);
  CHECK(binds(a, RDMA_PS_IB, any_gid(5000)) == EADDRNOTAVAIL);
  CHECK(binds(a, RDMA_PS_IB, any_gid(5000, RDMA_PS_UDP)) == 0);
  CHECK(binds(a, RDMA_PS_UDP, any_gid(5000, 0)) == EADDRNOTAVAIL);
  CHECK(binds(a, RDMA_PS_IB, any_gid(5000, 0)) == 0);
  CHECK(binds(a, RDMA_PS_IB, any_gid(5000, RDMA_PS_IB)) == EADDRNOTAVAIL);
  CHECK(binds(b, RDMA_PS_TCP, any_gid(5000)) == 0);
  CHECK(binds(a, RDMA_PS_TCP, any_v4(5000)) == 0);
  CHECK(binds(a, RDMA_PS_TCP, any_gid(5001, RDMA_PS_UDP)) == EPROTONOSUPPORT);
  CHECK(binds(a, RDMA_PS_IB, any_gid(5001, CmAddress::other_space)) == EPROTONOSUPPORT);
  CHECK(binds(a, RDMA_PS_IPOIB, any_gid(5001, 0)) == EPROTONOSUPPORT);
  const CmId given = a.create();
  CHECK(a.bind(given, any_gid(0)) == 0);
  CHECK(a.at(given).source.port != 0);
  const std::uint16_t port = a.at(given).source.port;
  a.destroy(given);
  CHECK(binds(a, RDMA_PS_TCP, any_gid(port)) == 0);
}

TEST_CASE("A service ID of TCP's is listened at by an identifier of IB's, too") {
  GidPair pair(Hosts::one);
  const CmId listener = pair.server.create(RDMA_PS_IB);
  REQUIRE(pair.server.bind(listener, any_gid(5000, RDMA_PS_TCP)) == 0);
  REQUIRE(pair.server.listen(listener) == 0);
  pair.call(pair.server.gid(5000));
  CHECK(pair.server.take().event == cm_connect_request);
}

TEST_CASE("The P_Key of an address is the connection's") {
  GidPair pair(Hosts::one);
  Tenant &server = pair.server.tenant(), &client = pair.client.tenant();
  server.pkeys = {hosts::pkey_default, 0x8001, 0x8003};
  client.pkeys = {hosts::pkey_default, 0x0001, 0x8002};
  pair.server.listener(any_gid(5000));
  const CmId caller = pair.call(pair.server.gid(5000, RDMA_PS_TCP, 0x8001));
  const CmEvent request = pair.server.take();
  REQUIRE(request.event == cm_connect_request);
  CHECK(pair.server.cm().attributes(pair.server.guest(), {{request.id, pair.server.channel}, 1, 0})->attributes.pkey_index == 1);
  CHECK(pair.client.cm().attributes(pair.client.guest(), {caller, 1, 0})->attributes.pkey_index == 1);
  CHECK(pair.client.cm().query(pair.client.guest(), caller)->pkey == 0x0001);
  pair.refused(pair.server.gid(5000, RDMA_PS_TCP, 0x8002));  // in which the server is not
  client.pkeys[2] = 0x8003;
  const CmId late = pair.client.create();
  REQUIRE(pair.client.resolve(late, pair.server.gid(5000, RDMA_PS_TCP, 0x8003)) == 0);
  pair.client.expect(cm_address_resolved, late);
  REQUIRE(pair.client.cm().resolve_route(pair.client.guest(), late));
  pair.client.expect(cm_route_resolved, late);
  client.pkeys[2] = 0;  // it has left the partition since
  REQUIRE(pair.client.connect(late) == 0);
  pair.one.cm().expire(in_seconds(1));
  pair.client.expect(cm_rejected, late, rej_invalid_service_id);
}

TEST_CASE("A multicast group of AF_IB is the GID itself") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)}), ethernet(host, 1, {v4(10, 0, 0, 1)}, 1000, link_layer_ethernet);
  const CmAddress group{AF_IB, 0, 0, {0xff, 0x12, 0xa0, 0x1b, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5}};
  for (const CmAddress& from : {v4(10, 0, 0, 1), a.gid(0, RDMA_PS_UDP)}) {
    const CmId id = a.create(RDMA_PS_UDP);
    REQUIRE(a.bind(id, from) == 0);
    REQUIRE(a.cm().join(a.guest(), {id, 9, group, 0, 0}));
    const CmEvent joined = a.take();
    CHECK(joined.event == cm_multicast_join);
    CHECK(std::equal(group.ip.begin(), group.ip.end(), joined.address.dgid));
    CHECK(TestGuest::error_of(a.cm().join(a.guest(), {id, 9, a.gid(0), 0, 0})) == EINVAL);
  }
  const CmId unbound = a.create(RDMA_PS_UDP), bound = a.create(RDMA_PS_UDP);
  CHECK(a.resolve(unbound, group) == ENODEV);  // it says no P_Key, and is of no subnet
  REQUIRE(a.bind(bound, a.gid(0, RDMA_PS_UDP)) == 0);
  REQUIRE(a.resolve(bound, group) == 0);
  CHECK(a.take().event == cm_address_resolved);
  CHECK(a.cm().query(a.guest(), bound)->dlid == 0);
  const CmId id = ethernet.create(RDMA_PS_UDP);
  REQUIRE(ethernet.bind(id, v4(10, 0, 0, 1)) == 0);
  CHECK(TestGuest::error_of(ethernet.cm().join(ethernet.guest(), {id, 9, group, 0, 0})) == EINVAL);
}
