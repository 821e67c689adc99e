// Time that passes, and other hosts.
#include "vmkernel_svc/cm/test_pair.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;
using namespace vrdma::control;

TEST_CASE("Nobody waits for ever for an answer") {
  SUBCASE("To who has") {
    Pair pair(Hosts::two);
    REQUIRE(pair.client.resolve(pair.caller, v4(10, 0, 0, 1, 5000)) == 0);
    pair.wire.waiting.clear();
    pair.two.cm().expire(vmci::monotonic_ns());
    CHECK(pair.client.hears_nothing());
    pair.two.cm().expire(in_seconds(2));
    pair.client.expect(cm_address_error, pair.caller, -ETIMEDOUT);
    CHECK_FALSE(pair.two.cm().waits());
    pair.find();  // again
  }
  SUBCASE("To a request") {
    Pair pair(Hosts::two);
    pair.come_to(Stage::requested);
    pair.two.cm().expire(in_seconds(15 * 60));
    CHECK(pair.client.hears_nothing());
    SUBCASE("Which comes late") {
      CHECK(pair.server.accept(pair.called, 1) == 0);
      pair.wire.carry_all();
      pair.client.expect(cm_connect_response, pair.caller);
    }
    SUBCASE("Which does not come") {
      pair.two.cm().expire(in_seconds(17 * 60));
      pair.client.expect(cm_unreachable, pair.caller, -ETIMEDOUT);
      pair.wire.carry_all();
      CHECK(pair.server.accept(pair.called, 1) == EINVAL);
      CHECK(pair.server.hears_nothing());
    }
  }
  SUBCASE("To a request, of a host that is dead") {
    for (const bool after_a_while : {false, true}) {
      Pair pair(Hosts::two);
      pair.come_to(Stage::requested);
      pair.wire.silent_ns = after_a_while ? 9'000'000'000 : 70'000'000'000;
      pair.two.cm().expire(in_seconds(60));
      CHECK(pair.client.hears_nothing());
      pair.two.cm().expire(in_seconds(70));
      if (after_a_while) {
        CHECK(pair.client.hears_nothing());
        pair.wire.silent_ns += 61'000'000'000;
        pair.two.cm().expire(in_seconds(131));
      }
      pair.client.expect(cm_unreachable, pair.caller, -ETIMEDOUT);
      CHECK_FALSE(pair.two.cm().waits());
    }
  }
  SUBCASE("To a reply, of a host that is dead") {
    Pair pair(Hosts::two);
    pair.come_to(Stage::accepted);
    pair.wire.silent_ns = 70'000'000'000;
    pair.one.cm().expire(in_seconds(70));
    pair.server.expect(cm_unreachable, pair.called, -ETIMEDOUT);
  }
  SUBCASE("To a request of datagrams") {
    Pair pair(Hosts::two, RDMA_PS_UDP);
    pair.come_to(Stage::requested);
    pair.two.cm().expire(in_seconds(59));
    CHECK(pair.client.hears_nothing());
    pair.two.cm().expire(in_seconds(61));
    pair.client.expect(cm_unreachable, pair.caller, -ETIMEDOUT);
  }
  SUBCASE("To a reply") {
    Pair pair(Hosts::two);
    pair.come_to(Stage::accepted);
    pair.one.cm().expire(in_seconds(15 * 60));
    CHECK(pair.server.hears_nothing());
    pair.one.cm().expire(in_seconds(17 * 60));
    pair.server.expect(cm_unreachable, pair.called, -ETIMEDOUT);
    pair.wire.carry_all();
    pair.client.expect(cm_rejected, pair.caller, 4);
    CHECK(pair.client.ready(pair.caller) == EINVAL);
  }
  SUBCASE("To the wish to end it") {
    Pair pair(Hosts::two);
    pair.come_to(Stage::established);
    REQUIRE(pair.client.disconnect(pair.caller) == 0);
    pair.wire.waiting.clear();
    pair.two.cm().expire(in_seconds(6));
    pair.client.expect(cm_disconnected, pair.caller, -ETIMEDOUT);
    pair.two.cm().expire(in_seconds(7));
    pair.client.expect(cm_timewait_exit, pair.caller);
    CHECK_FALSE(pair.two.cm().waits());
  }
  SUBCASE("All at the end of time") {
    Pair pair(Hosts::one);
    pair.come_to(Stage::accepted);
    pair.one.cm().expire(~std::uint64_t{0});
    pair.server.expect(cm_unreachable, pair.called, -ETIMEDOUT);
    pair.client.expect(cm_rejected, pair.caller, 4);
    CHECK_FALSE(pair.one.cm().waits());
  }
}

TEST_CASE("The alarm is set for what comes first, and again for what comes next") {
  Pair pair(Hosts::two);
  std::vector<std::uint64_t> alarms;
  pair.two.cm().set_alarm([&](std::uint64_t at) { alarms.push_back(at); });
  pair.call();
  const std::size_t after_call = alarms.size();
  CHECK(after_call >= 1);
  CHECK(alarms.back() == pair.two.cm().deadlines().begin()->first);
  const CmId second = pair.client.create();
  REQUIRE(pair.client.resolve(second, v4(10, 0, 0, 9, 5000)) == 0);
  CHECK(alarms.back() == pair.two.cm().deadlines().begin()->first);
  CHECK(alarms.size() == after_call + 1);
  pair.two.cm().expire(in_seconds(2));
  CHECK(alarms.back() == pair.two.cm().deadlines().begin()->first);
  CHECK(pair.two.cm().deadlines().size() == 1);
}

TEST_CASE("Other hosts are asked who has an address, and each answer counts once") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)});
  struct Post final : ConnectionManager::Post {
    std::vector<std::pair<std::uint32_t, CmMessage>> told;
    void tell(std::uint32_t to, const CmMessage& message) override { told.emplace_back(to, message); }
    std::vector<std::uint32_t> may{5, 6};
    std::vector<std::uint32_t> who_may_have(const CmAddress&) override { return may; }
    std::uint64_t silent_ns(std::uint32_t) override { return 0; }
  } post;
  host.cm().use(&post);
  const CmId id = a.create();
  REQUIRE(a.resolve(id, v4(10, 0, 0, 9, 5000)) == 0);
  REQUIRE(post.told.size() == 2);
  CHECK(post.told[0].second.kind == CmKind::who_has);
  CHECK(a.resolve(id, v4(10, 0, 0, 9, 5000)) == EINVAL);  // it is being asked
  CmMessage no{}, yes{};
  no.kind = yes.kind = CmKind::has;
  no.to = yes.to = id.id;
  no.status = ENOENT;
  host.cm().arrived(5, no);
  host.cm().arrived(5, no);   // said already
  host.cm().arrived(5, yes);  // too late
  host.cm().arrived(7, no);   // not asked
  host.cm().arrived(7, yes);
  host.cm().lost(7);          // it has just come
  host.cm().lost(5);
  CHECK(a.hears_nothing());
  SUBCASE("The last one has it") {
    host.cm().arrived(6, yes);
    a.expect(cm_address_resolved, id);
    CHECK(a.at(id).host == 6);
  }
  SUBCASE("Nobody has it") {
    host.cm().arrived(6, no);
    a.expect(cm_address_error, id, -EHOSTUNREACH);
  }
  SUBCASE("The last one begins anew, and is asked again") {
    host.cm().lost(6);
    CHECK(a.hears_nothing());
    REQUIRE(post.told.size() == 3);
    CHECK(post.told[2].first == 6);
    CHECK(post.told[2].second.kind == CmKind::who_has);
    host.cm().arrived(6, yes);
    a.expect(cm_address_resolved, id);
  }
  SUBCASE("The last one is lost") {
    post.may.clear();
    host.cm().lost(6);
    a.expect(cm_address_error, id, -EHOSTUNREACH);
  }
  CHECK_FALSE(host.cm().waits());
  host.cm().arrived(6, yes);
  CHECK(a.hears_nothing());
  host.cm().use(nullptr);
}

TEST_CASE("Who is connected with a host that is lost hears of it, in each state") {
  for (const Stage stage : {Stage::requested, Stage::accepted, Stage::established, Stage::disconnecting}) {
    CAPTURE(static_cast<int>(stage));
    Pair pair(Hosts::two);
    pair.come_to(stage);
    if (stage == Stage::disconnecting) REQUIRE(pair.client.disconnect(pair.caller) == 0);
    pair.wire.lose();
    if (stage == Stage::established || stage == Stage::disconnecting) {
      pair.client.expect(cm_disconnected, pair.caller);
      pair.server.expect(cm_disconnected, pair.called);
    } else {
      pair.client.expect(cm_unreachable, pair.caller, -ETIMEDOUT);
      if (stage == Stage::requested) CHECK(pair.server.accept(pair.called, 1) == EINVAL);
      else pair.server.expect(cm_unreachable, pair.called, -ETIMEDOUT);
    }
    CHECK(pair.client.hears_nothing());
    CHECK(pair.server.hears_nothing());
    pair.server.destroy(pair.called);
    pair.client.destroy(pair.caller);
    CHECK(pair.wire.waiting.empty());  // nobody is told of what is over
  }
  Pair local(Hosts::one);
  local.come_to(Stage::established);
  local.one.cm().lost(2);
  CHECK(local.client.hears_nothing());
  CHECK(local.server.hears_nothing());
}

TEST_CASE("Another host has no say in connections that are not its own") {
  Pair pair(Hosts::one);
  pair.come_to(Stage::established);
  for (std::uint32_t kind = 0; kind < 12; ++kind)
    for (const CmId& id : {pair.listener, pair.called, pair.caller})
      for (const std::uint32_t from : {0u, pair.called.id, pair.caller.id, 12345u}) {
        CmMessage message{};
        message.kind = static_cast<CmKind>(kind);
        message.to = id.id;
        message.from = from;
        pair.one.cm().arrived(2, message);
      }
  CHECK(pair.client.hears_nothing());
  CHECK(pair.server.hears_nothing());
  CHECK(pair.client.state(pair.caller) == CmState::established);
  CHECK(pair.server.state(pair.called) == CmState::established);
}
