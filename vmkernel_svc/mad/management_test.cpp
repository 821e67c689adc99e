// How datagrams get where they are for, and what becomes of those that do not.
#include "vmkernel_svc/mad/test_program.hpp"

namespace vrdma::svc::test {
namespace {

TEST_CASE("A table that is longer than a piece is taken piece by piece, and stays where it does not fit") {
  TestHost host;
  Program one(host);
  std::vector<std::unique_ptr<Program>> more;
  for (int i = 0; i < 100; ++i) more.push_back(std::make_unique<Program>(host));
  const auto agent = one.agent(class_administration, 2);
  REQUIRE(one.send(agent, subnet_manager_lid, one.request(class_administration, method_get_table, attribute_node_record, 0, 2)));
  const auto too_long = one.receive(mad_bytes);
  REQUIRE(too_long);
  CHECK(too_long->head.total_bytes == administration_data + 102 * 112);
  CHECK(one.is_told());
  const auto whole = one.receive(too_long->head.total_bytes);
  REQUIRE(whole);
  CHECK(whole->bytes.size() == too_long->head.total_bytes);
  CHECK(records_in(*whole) == 102);
  std::set<std::uint64_t> lids;
  for (std::size_t i = 0; i < 102; ++i) lids.insert(get(std::span(whole->bytes).subspan(administration_data + i * 112), {0, 16}));
  CHECK(lids.size() == 102);
  CHECK_FALSE(one.receive());
}

TEST_CASE("Answers that nobody reads are kept, and no more are asked for") {
  TestHost host;
  Program one(host);
  const auto agent = one.agent(class_lid_routed), records = one.agent(class_administration, 2);
  std::size_t sent = 0;
  while (one.send(agent, one.guest.lid, one.request(class_lid_routed, method_get, attribute_node_info))) ++sent;
  CHECK(sent == 1024);
  for (std::size_t i = 0; i < sent; ++i) REQUIRE(one.receive());
  CHECK_FALSE(one.receive());
  // Tables: as many as there is room for, then a word that there is none.
  std::vector<std::unique_ptr<Program>> more;
  for (int i = 0; i < 1000; ++i) more.push_back(std::make_unique<Program>(host));
  for (int i = 0; i < 20; ++i) REQUIRE(one.send(records, subnet_manager_lid, one.request(class_administration, method_get_table, attribute_node_record, 0, 2)));
  std::size_t whole = 0, refused = 0;
  while (const auto got = one.receive()) ++(status_of(got->bytes) == status_ok ? whole : refused);
  CHECK(whole == 9);
  CHECK(refused == 11);
}

TEST_CASE("What nobody asked for is lost where too much of it waits, and nothing else is") {
  TestHost host;
  Program sender(host), server(host);
  const auto asks = sender.agent(0x30, 1, 0, 7), server_asks = server.agent(class_lid_routed);
  server.agent(0x30, 1, 1 << method_get, 7);
  Mad large = sender.request(0x30, method_get, 0);
  put(large.bytes, {296, 24}, 7);
  large.bytes.resize(mad_bytes_max);
  for (int i = 0; i < 1000; ++i) {
    put(large.bytes, {96, 32}, static_cast<unsigned>(i));
    REQUIRE(sender.send(asks, server.guest.lid, large, 0));
  }
  REQUIRE(server.send(server_asks, server.guest.lid, server.request(class_lid_routed, method_get, attribute_node_info)));
  std::size_t requests = 0, answers = 0;
  while (const auto got = server.receive()) ++(got->head.agent == server_asks ? answers : requests);
  CHECK(answers == 1);
  CHECK(requests == (512 << 10) / mad_bytes_max);
}

TEST_CASE("A class that nobody takes there is refused at once") {
  TestHost host;
  Program one(host), other(host);
  const auto agent = one.agent(0x09);
  CHECK(status_of(one.ask(agent, other.guest.lid, one.request(0x09, method_get, 1)).bytes) == status_bad_attribute);
}

TEST_CASE("A request reaches the agent that takes its class and method, and only its sender gets the answer") {
  TestHost host;
  Program client(host), server(host), third(host);
  constexpr std::uint8_t vendor_class = 0x32;
  constexpr std::uint32_t oui = 0x1405;
  const auto asks = client.agent(vendor_class, 1, 0, oui);
  server.agent(vendor_class, 1, 1 << method_set, oui);
  server.agent(vendor_class, 1, 1 << method_get, oui + 1);
  const auto answers = server.agent(vendor_class, 1, 1 << method_get, oui);
  Mad ping = client.request(vendor_class, method_get, 0);
  put(ping.bytes, {296, 24}, oui);
  REQUIRE(client.send(asks, server.guest.lid, ping));
  CHECK_FALSE(third.is_told());
  auto got = server.receive();
  REQUIRE(got);
  CHECK(got->head.agent == answers);
  CHECK(got->head.from.lid == client.guest.lid);
  Mad pong(got->bytes);
  pong.bytes[3] |= method_is_response;
  // Who has not been asked cannot answer: not with another number, and not a second time.
  Mad guessed = pong;
  put(guessed.bytes, {64, 32}, get(pong.bytes, {64, 32}) + 1);
  REQUIRE(server.send(answers, client.guest.lid, guessed, 0));
  CHECK_FALSE(client.is_told());
  REQUIRE(third.send(third.agent(vendor_class, 1, 0, oui), client.guest.lid, pong, 0));
  CHECK_FALSE(client.is_told());
  REQUIRE(server.send(answers, client.guest.lid, pong, 0));
  const auto back = client.receive();
  REQUIRE(back);
  CHECK(back->head.from.lid == server.guest.lid);
  REQUIRE(server.send(answers, client.guest.lid, pong, 0));
  CHECK_FALSE(client.is_told());
  CHECK(host.fabric.management->waiting_answers() == 0);
}

TEST_CASE("A request that nobody answers comes back when its time and that of its retries is over") {
  TestHost host;
  Program one(host);
  std::uint64_t alarm_ns = 0;
  host.fabric.management->set_alarm([&](std::uint64_t at_ns) { alarm_ns = at_ns; });
  const auto agent = one.agent(class_lid_routed);
  const Mad lost = one.request(class_lid_routed, method_get, attribute_node_info);
  REQUIRE(one.send(agent, 0x6fff, lost));
  CHECK_FALSE(one.receive());
  REQUIRE(alarm_ns != 0);
  host.fabric.management->expire(alarm_ns - 1);
  CHECK_FALSE(one.is_told());
  host.fabric.management->expire(alarm_ns);
  const auto back = one.receive();
  REQUIRE(back);
  CHECK(back->head.status == ETIMEDOUT);
  CHECK(back->bytes.size() == mad_head_bytes);
  CHECK(get(back->bytes, {96, 32}) == lost.transaction());
  // An agent that has gone waits for nothing.
  REQUIRE(one.send(agent, 0x6fff, one.request(class_lid_routed, method_get, attribute_node_info)));
  REQUIRE(host.fabric.management->remove_agent(one.guest, {one.channel, agent}));
  CHECK(host.fabric.management->waiting_answers() == 0);
  host.fabric.management->expire(~0ull);
  CHECK_FALSE(one.receive());
}

TEST_CASE("Nothing is left of a guest that goes, and bad requests are errors") {
  TestHost host;
  {
    Program ethernet(host, 1000, link_layer_ethernet);
    CHECK(ethernet.channel == 0);
  }
  Program one(host), other(host);
  const auto before = one.guest.tenant->objects;
  const auto agent = one.agent(class_lid_routed);
  Management& management = *host.fabric.management;
  CHECK(value(management.close(other.guest, one.channel).error()) == EINVAL);
  for (const auto& [number, error] : {std::pair{agent + 1, EIO}, {31u, EIO}, {32u, EINVAL}, {~0u, EINVAL}})
    CHECK(value(one.send(number, 1, one.request(class_lid_routed, method_get, attribute_node_info)).error()) == error);
  MadRegisterRequest twice{one.channel, 1, 0x32, 1, 0, 0x1405, {2, 0}};
  REQUIRE(management.add_agent(one.guest, twice));
  CHECK(value(management.add_agent(one.guest, twice).error()) == EINVAL);
  twice.oui = 0;
  CHECK(value(management.add_agent(one.guest, twice).error()) == EINVAL);
  REQUIRE(one.send(agent, 0x6fff, one.request(class_lid_routed, method_get, attribute_node_info)));
  management.leave(one.guest);
  CHECK(management.channel_count() == 1);
  CHECK(management.waiting_answers() == 0);
  CHECK(one.guest.tenant->objects == before - 1);
}

}  // namespace
}  // namespace vrdma::svc::test
