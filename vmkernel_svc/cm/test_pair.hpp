// Two guests that are to be connected with each other, for the tests of the connection manager.
#pragma once

#include "vmkernel_svc/cm/test_guests.hpp"

namespace vrdma::svc::test {

using namespace control;

inline std::uint64_t in_seconds(std::uint64_t seconds) { return vmci::monotonic_ns() + seconds * 1'000'000'000; }

inline CmParameters with_data(std::initializer_list<std::uint8_t> data) {
  CmParameters out{};
  out.private_bytes = static_cast<std::uint8_t>(data.size());
  std::copy(data.begin(), data.end(), out.private_data.begin());
  return out;
}

// One that is called and one that calls, on one host or on two, and how far they have come with each other.
enum class Stage { requested, accepted, established, disconnecting };
struct Pair {
  TestHost one, two;
  TestWire wire{one, two};
  TestGuest server, client;
  CmId listener, called{}, caller{};
  std::uint64_t uid = 77;

  explicit Pair(Hosts hosts, std::uint16_t port_space = RDMA_PS_TCP)
      : server(one, 1, {v4(10, 0, 0, 1)}), client(hosts == Hosts::two ? two : one, 2, {v4(10, 0, 0, 2)}, 2000),
        listener(server.listener(any_v4(5000), port_space)), caller(client.create(port_space)) {
    wire.is_up = hosts == Hosts::two;
  }

  void find() {
    REQUIRE(client.resolve(caller, v4(10, 0, 0, 1, 5000), v4(10, 0, 0, 2)) == 0);
    wire.carry_all();
    client.expect(cm_address_resolved, caller);
    REQUIRE(TestGuest::error_of(client.cm().resolve_route(client.guest(), caller)) == 0);
    client.expect(cm_route_resolved, caller);
  }
  void call(const CmParameters& parameters = {}) {
    find();
    REQUIRE(client.connect(caller, parameters) == 0);
    wire.carry_all();
  }
  CmEvent answer_phone() {
    const CmEvent request = server.take();
    REQUIRE(request.event == cm_connect_request);
    called = {request.id, server.channel};
    return request;
  }
  void come_to(Stage stage) {
    call();
    answer_phone();
    if (stage == Stage::requested) return;
    REQUIRE(server.accept(called, uid) == 0);
    wire.carry_all();
    client.expect(cm_connect_response, caller);
    if (stage == Stage::accepted) return;
    REQUIRE(client.ready(caller) == 0);
    wire.carry_all();
    server.expect(cm_established, called);
  }
};

}  // namespace vrdma::svc::test
