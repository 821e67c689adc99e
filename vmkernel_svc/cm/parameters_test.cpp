// What requests and answers say, and what a queue pair and its path are given by it.
#include "vmkernel_svc/cm/test_pair.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;
using namespace vrdma::control;
using engine::QpType;

TEST_CASE("Requests and answers say what they have room for") {
  Pair pair(Hosts::one);
  CmParameters much{};
  much.retry_count = much.rnr_retry_count = 15, much.flow_control = 6, much.srq = 3;
  pair.call(much);
  const CmParameters asked = pair.answer_phone().parameters;
  CHECK(asked.retry_count == 7);
  CHECK(asked.rnr_retry_count == 7);
  CHECK(asked.flow_control == 0);
  CHECK(asked.srq == 1);
  much.flow_control = 7;
  REQUIRE(pair.server.accept(pair.called, pair.uid, much) == 0);
  const CmParameters answered = pair.client.expect(cm_connect_response, pair.caller).parameters;
  CHECK(answered.retry_count == 0);
  CHECK(answered.rnr_retry_count == 7);
  CHECK(answered.flow_control == 1);
  CHECK(answered.srq == 1);
}

TEST_CASE("A timeout of acknowledgements is for who has any, and 0 is one, too") {
  Pair pair(Hosts::one);
  const auto set = [&](TestGuest& who, const CmId& id, std::uint32_t value) { return TestGuest::error_of(who.cm().set_option(who.guest(), {id, cm_option_ack_timeout, value})); };
  CHECK(set(pair.client, pair.caller, 32) == EINVAL);
  CHECK(set(pair.client, pair.caller, 0) == 0);
  for (const QpType type : {QpType::rc, QpType::uc, QpType::ud, QpType::xrc_send, QpType::xrc_recv}) {
    CAPTURE(static_cast<int>(type));
    const auto made = pair.client.cm().create(pair.client.guest(), {pair.client.channel, RDMA_PS_IB, static_cast<std::uint16_t>(type), 5});
    REQUIRE(made);
    CHECK(set(pair.client, {made->id, pair.client.channel}, 7) == (type == QpType::rc || type == QpType::xrc_send ? 0 : EINVAL));
  }
  pair.come_to(Stage::established);
  const auto timeout = [](TestGuest& who, const CmId& id) { return who.cm().attributes(who.guest(), {id, 3, 0})->attributes.timeout; };
  CHECK(timeout(pair.client, pair.caller) == 0);
  CHECK(timeout(pair.server, pair.called) == 18);

  // A request tells it to who is called, an answer nobody; and who listens keeps its own.
  for (const bool of_caller : {false, true})
    for (const bool of_listener : {false, true})
      for (const bool of_called : {false, true}) {
        CAPTURE(of_caller);
        CAPTURE(of_listener);
        CAPTURE(of_called);
        Pair two(Hosts::two);
        if (of_caller) CHECK(set(two.client, two.caller, 9) == 0);
        if (of_listener) CHECK(set(two.server, two.listener, 10) == 0);
        two.come_to(Stage::requested);
        if (of_called) CHECK(set(two.server, two.called, 11) == 0);
        REQUIRE(two.server.accept(two.called, two.uid) == 0);
        REQUIRE(two.wire.waiting.size() == 1);
        CHECK(two.wire.waiting.front().message.ack_timeout == 0);
        two.wire.waiting.front().message.ack_timeout = 12;  // as an older host has it
        two.wire.carry_all();
        CHECK(timeout(two.client, two.caller) == (of_caller ? 9 : 18));
        CHECK(timeout(two.server, two.called) == (of_called ? 11 : of_caller ? 9 : 18));
      }
}

TEST_CASE("What a queue pair is to be given is told where there is a connection, and before it what INIT takes") {
  constexpr std::uint32_t init = 1, rtr = 2, rts = 3, sqd = 4;
  constexpr std::uint32_t to_init = qp_attr_state | qp_attr_pkey_index | qp_attr_port | qp_attr_access_flags;
  constexpr std::uint32_t to_rtr = qp_attr_state | qp_attr_av | qp_attr_path_mtu | qp_attr_dest_qpn | qp_attr_rq_psn | qp_attr_max_dest_rd_atomic | qp_attr_min_rnr_timer;
  constexpr std::uint32_t to_rts = qp_attr_state | qp_attr_sq_psn | qp_attr_timeout | qp_attr_retry_cnt | qp_attr_rnr_retry | qp_attr_max_qp_rd_atomic;
  constexpr std::uint32_t nothing = 0;
  const auto mask = [](TestGuest& who, const CmId& id, std::uint32_t state) {
    const auto told = who.cm().attributes(who.guest(), {id, state, 0});
    if (!told) CHECK(TestGuest::error_of(told) == EINVAL);
    if (told) CHECK(told->attributes.state == state);
    return told ? told->mask : nothing;
  };
  // Of INIT, RTR, RTS, SQD.
  const auto are = [&](TestGuest& who, const CmId& id, std::array<std::uint32_t, 4> expected) {
    for (const std::uint32_t state : {init, rtr, rts, sqd}) {
      CAPTURE(state);
      CHECK(mask(who, id, state) == expected[state - 1]);
    }
  };
  const std::array<std::uint32_t, 4> none{}, unconnected{to_init, to_init, to_init, to_init}, called{to_init, nothing, nothing, nothing}, connected{to_init, to_rtr, to_rts, nothing};
  SUBCASE("Connections") {
    Pair pair(Hosts::two);
    are(pair.server, pair.listener, none);  // at no device
    are(pair.server, pair.server.listener(v4(10, 0, 0, 1, 5001)), none);
    are(pair.client, pair.caller, none);  // on no device yet
    pair.find();
    are(pair.client, pair.caller, unconnected);
    CHECK(pair.client.cm().attributes(pair.client.guest(), {pair.caller, init, 0})->attributes.access_flags == 0);
    const CmId bound = pair.client.create();
    REQUIRE(pair.client.bind(bound, v4(10, 0, 0, 2)) == 0);
    are(pair.client, bound, unconnected);
    REQUIRE(pair.client.connect(pair.caller) == 0);
    are(pair.client, pair.caller, called);
    CHECK(pair.client.cm().attributes(pair.client.guest(), {pair.caller, init, 0})->attributes.access_flags == access_remote_write);
    pair.wire.carry_all();
    pair.answer_phone();
    are(pair.server, pair.called, connected);
    SUBCASE("Rejected") {
      REQUIRE(pair.server.cm().reject(pair.server.guest(), {pair.called, 0, 0, {}}));
      pair.wire.carry_all();
      are(pair.client, pair.caller, none);
      are(pair.server, pair.called, none);
    }
    SUBCASE("Accepted") {
      REQUIRE(pair.server.accept(pair.called, pair.uid) == 0);
      are(pair.server, pair.called, connected);
      pair.wire.carry_all();
      are(pair.client, pair.caller, connected);
      REQUIRE(pair.client.ready(pair.caller) == 0);
      pair.wire.carry_all();
      are(pair.client, pair.caller, connected);
      are(pair.server, pair.called, connected);
      REQUIRE(pair.client.disconnect(pair.caller) == 0);
      are(pair.client, pair.caller, none);
      pair.wire.carry_all();
      are(pair.client, pair.caller, none);
      are(pair.server, pair.called, none);
    }
  }
  SUBCASE("Datagrams") {
    constexpr std::uint32_t of_datagrams = qp_attr_state | qp_attr_pkey_index | qp_attr_port | qp_attr_qkey;
    static_assert(of_datagrams == 0x71);  // of enum ibv_qp_attr_mask
    const std::array<std::uint32_t, 4> always{of_datagrams, of_datagrams, of_datagrams, of_datagrams};
    Pair pair(Hosts::two, RDMA_PS_UDP);
    are(pair.server, pair.server.listener(v4(10, 0, 0, 1, 5001), RDMA_PS_UDP), always);
    pair.find();
    are(pair.client, pair.caller, always);
    REQUIRE(pair.client.connect(pair.caller) == 0);
    are(pair.client, pair.caller, always);
    pair.wire.carry_all();
    pair.answer_phone();
    are(pair.server, pair.called, always);
    SUBCASE("Accepted") { REQUIRE(pair.server.accept(pair.called, pair.uid) == 0); }
    SUBCASE("Rejected") { REQUIRE(pair.server.cm().reject(pair.server.guest(), {pair.called, 0, 0, {}})); }
    pair.wire.carry_all();
    are(pair.client, pair.caller, always);
    are(pair.server, pair.called, always);
    CHECK(pair.client.cm().attributes(pair.client.guest(), {pair.caller, rts, 0})->attributes.qkey == cm_udp_qkey);
  }
}

TEST_CASE("Ports on Ethernet have no LIDs in their path") {
  for (const std::uint32_t link_layer : {link_layer_infiniband, link_layer_ethernet}) {
    CAPTURE(link_layer);
    TestHost host;
    TestGuest server(host, 1, {v4(10, 0, 0, 1)}, 1000, link_layer), client(host, 2, {v4(10, 0, 0, 2)}, 1000, link_layer);
    server.listener(any_v4(5000));
    const CmId caller = client.create();
    REQUIRE(client.resolve(caller, v4(10, 0, 0, 1, 5000), v4(10, 0, 0, 2)) == 0);
    const auto path = client.cm().query(client.guest(), caller);
    REQUIRE(path);
    const bool has_lids = link_layer == link_layer_infiniband;
    CHECK(path->slid == (has_lids ? client.guest().lid : 0));
    CHECK(path->dlid == (has_lids ? server.guest().lid : 0));
  }
}

TEST_CASE("On Ethernet a type of service is the traffic class of the path and of both ends' queue pairs") {
  for (const std::uint32_t link_layer : {link_layer_infiniband, link_layer_ethernet})
    for (const bool datagrams : {false, true}) {
      CAPTURE(link_layer);
      CAPTURE(datagrams);
      TestHost host;
      TestGuest server(host, 1, {v4(10, 0, 0, 1)}, 1000, link_layer), client(host, 2, {v4(10, 0, 0, 2)}, 1000, link_layer);
      const std::uint16_t space = datagrams ? RDMA_PS_UDP : RDMA_PS_TCP;
      server.listener(any_v4(5000), space);
      const CmId caller = client.create(space);
      const auto set = [&](std::uint32_t tos) { REQUIRE(client.cm().set_option(client.guest(), {caller, cm_option_tos, tos})); };
      set(0x68);
      REQUIRE(client.resolve(caller, v4(10, 0, 0, 1, 5000), v4(10, 0, 0, 2)) == 0);
      REQUIRE(client.cm().resolve_route(client.guest(), caller));
      set(0x20);  // too late
      REQUIRE(client.connect(caller) == 0);
      const CmEvent request = server.take();
      REQUIRE(request.event == cm_connect_request);
      const CmId called{request.id, server.channel};
      REQUIRE(server.accept(called, 9) == 0);
      const int expected = link_layer == link_layer_ethernet ? 0x68 : 0;
      CHECK(client.cm().query(client.guest(), caller)->traffic_class == expected);
      CHECK(server.cm().query(server.guest(), called)->traffic_class == expected);
      client.expect(cm_address_resolved, caller);
      client.expect(cm_route_resolved, caller);
      const CmEvent answer = client.take();
      if (datagrams) {
        CHECK(answer.address.traffic_class == expected);
      } else {
        CHECK(client.cm().attributes(client.guest(), {caller, 2, 0})->attributes.path.traffic_class == expected);
        CHECK(server.cm().attributes(server.guest(), {called, 2, 0})->attributes.path.traffic_class == expected);
      }
    }
}
