// Multicast groups: what identifiers are told of those that they join.
#include "vmkernel_svc/cm/test_pair.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;
using namespace vrdma::control;

namespace {

// A guest with an identifier that may join.
struct Joiner {
  TestHost host;
  TestGuest guest;
  CmId id;

  explicit Joiner(std::uint32_t link_layer, std::uint16_t space = RDMA_PS_UDP)
      : guest(host, 1, {v4(10, 0, 0, 1)}, 1000, link_layer), id(guest.create(space)) {
    REQUIRE(guest.bind(id, v4(10, 0, 0, 1, 5000)) == 0);
  }
  int error(const CmAddress& group) { return TestGuest::error_of(guest.cm().join(guest.guest(), {id, 9, group, 0, 0})); }
  CmEvent join(const CmAddress& group) {
    REQUIRE(error(group) == 0);
    const CmEvent joined = guest.take();
    CHECK(joined.event == cm_multicast_join);
    CHECK(joined.status == 0);
    CHECK(joined.parameters.qpn == 0xffffff);
    CHECK(joined.parameters.qkey == cm_udp_qkey);
    CHECK(joined.address.is_global == 1);
    CHECK(joined.address.traffic_class == 0);
    return joined;
  }
  Gid mgid(const CmAddress& group) { return std::to_array(join(group).address.dgid); }
};

}  // namespace

TEST_CASE("On Ethernet an IPv4 group is RoCE v2's, which is sent to from the GID of v2 that an IPv4 address is") {
  Joiner joiner(link_layer_ethernet);
  const CmEvent joined = joiner.join(v4(239, 1, 2, 3));
  const Gid mgid = std::to_array(joined.address.dgid);
  CHECK(mgid == Gid{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3});
  CHECK(is_multicast(mgid));  // who joins is attached to it
  const GidEntry& from = joiner.guest.guest().gids[joined.address.sgid_index];
  CHECK(from.type == 2);
  CHECK(is_ipv4_mapped(from.gid));
  CHECK(joined.address.hop_limit == 64);
  CHECK(joined.address.dlid == 0);
}

TEST_CASE("A guest that could not attach to RoCE v2's group is told of v1's") {
  Joiner joiner(link_layer_ethernet);
  joiner.guest.guest().minor = minor_of_ipv4_groups - 1;
  const CmEvent joined = joiner.join(v4(239, 1, 2, 3));
  CHECK(std::to_array(joined.address.dgid) == Gid{0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3});
  CHECK(joined.address.hop_limit == 1);
}

TEST_CASE("On InfiniBand an IP group's MGID is RFC 4391's, with rdma_cm's signature in its own port space") {
  CHECK(Joiner(link_layer_infiniband).mgid(v4(239, 1, 2, 3)) == Gid{0xff, 0x12, 0x40, 0x01, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0x0f, 1, 2, 3});
  CHECK(Joiner(link_layer_infiniband, RDMA_PS_IPOIB).mgid(v4(239, 1, 2, 3)) == Gid{0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0x0f, 1, 2, 3});
  const CmAddress v6_group{AF_INET6, 0, 0, {0xff, 0x0e, 0, 0, 0, 0, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
  CHECK(Joiner(link_layer_infiniband).mgid(v6_group) == Gid{0xff, 0x12, 0x60, 0x01, 0xff, 0xff, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
  const CmEvent joined = Joiner(link_layer_infiniband).join(v4(239, 1, 2, 3));
  CHECK(joined.address.dlid >= first_multicast_lid);
  CHECK(joined.address.sgid_index == 0);
}

TEST_CASE("On InfiniBand any address may be a group's, also one's own") {
  Joiner joiner(link_layer_infiniband);
  CHECK(joiner.mgid(v4(10, 0, 0, 1)) == Gid{0xff, 0x12, 0x40, 0x01, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0x0a, 0, 0, 1});
  CHECK(joiner.mgid(v6(7)) == Gid{0xff, 0x12, 0x60, 0x01, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7});
  CHECK(joiner.error(joiner.guest.gid(0)) == EINVAL);  // but no port's GID
}

TEST_CASE("Who joins any group on InfiniBand is in a new one, which others join by its MGID") {
  for (const CmAddress& any : {any_v4(0), any_v6(0), any_gid(0), v4(127, 0, 0, 1), CmAddress{AF_INET6, 0, 0, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}}}) {
    CAPTURE(any.family);
    Joiner joiner(link_layer_infiniband);
    const Gid mine = joiner.mgid(any);
    CHECK(is_multicast(mine));
    CHECK(joiner.mgid(any) != mine);
    Joiner other(link_layer_infiniband);
    CHECK(other.mgid(any) != mine);
    CHECK(other.mgid({AF_INET6, 0, 0, mine}) == mine);
    CHECK(other.mgid({AF_IB, 0, 0, mine}) == mine);
  }
}

TEST_CASE("On Ethernet an address that is no group's is joined, and nobody can be attached to what comes of it; any is refused") {
  Joiner joiner(link_layer_ethernet);
  CHECK(joiner.mgid(v4(10, 0, 0, 1)) == Gid{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1});
  CHECK(joiner.mgid(v4(127, 0, 0, 1)) == Gid{});
  CHECK_FALSE(is_multicast(joiner.mgid(v4(10, 0, 0, 1))));
  CHECK(joiner.error(any_v4(0)) == EINVAL);
  CHECK(joiner.error(any_v6(0)) == EINVAL);
}

TEST_CASE("On Ethernet an IPv6 group is its address, which is sent to from a GID that gives an IPv6 header") {
  Joiner joiner(link_layer_ethernet);
  const CmAddress group{AF_INET6, 0, 0, {0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5}};
  const CmEvent joined = joiner.join(group);
  CHECK(std::to_array(joined.address.dgid) == group.ip);
  const GidEntry& from = joiner.guest.guest().gids[joined.address.sgid_index];
  CHECK(from.type == 2);
  CHECK_FALSE(is_ipv4_mapped(from.gid));
}

TEST_CASE("Groups are joined by who has an address, and has not gone on from there") {
  Pair pair(Hosts::one, RDMA_PS_UDP);
  const auto join = [](TestGuest& who, const CmId& id) { return TestGuest::error_of(who.cm().join(who.guest(), {id, 9, v4(239, 1, 2, 3), 0, 0})); };
  CHECK(join(pair.client, pair.client.create(RDMA_PS_UDP)) == EINVAL);
  const CmId at_any = pair.client.create(RDMA_PS_UDP);
  REQUIRE(pair.client.bind(at_any, any_v4(0)) == 0);
  CHECK(join(pair.client, at_any) == EINVAL);  // of no device
  const CmId at_device = pair.server.listener(v4(10, 0, 0, 1, 5001), RDMA_PS_UDP);
  CHECK(join(pair.server, at_device) == EINVAL);

  REQUIRE(pair.client.resolve(pair.caller, v4(10, 0, 0, 1, 5000), v4(10, 0, 0, 2)) == 0);
  pair.client.expect(cm_address_resolved, pair.caller);
  CHECK(join(pair.client, pair.caller) == 0);
  CHECK(pair.client.take().event == cm_multicast_join);
  REQUIRE(pair.client.cm().resolve_route(pair.client.guest(), pair.caller));
  CHECK(join(pair.client, pair.caller) == EINVAL);
  REQUIRE(pair.client.connect(pair.caller) == 0);
  CHECK(join(pair.client, pair.caller) == EINVAL);
  pair.client.expect(cm_route_resolved, pair.caller);
  pair.answer_phone();
  CHECK(join(pair.server, pair.called) == EINVAL);
}
