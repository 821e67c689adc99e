// What the subnet says of itself: nodes, records, groups, traffic.
#include "vmkernel_svc/mad/test_program.hpp"

namespace vrdma::svc::test {
namespace {

TEST_CASE("Fields are bits of big-endian words, and hold no more than they can") {
  std::array<std::uint8_t, 12> bytes{};
  put(bytes, {4, 12}, 0xabc);
  CHECK(bytes[0] == 0x0a);
  CHECK(bytes[1] == 0xbc);
  put(bytes, {28, 64}, 0x0123456789abcdef);
  CHECK(get(bytes, {28, 64}) == 0x0123456789abcdef);
  CHECK(get(bytes, {4, 12}) == 0xabc);
  put(bytes, {16, 4}, 0x55);
  CHECK(get(bytes, {16, 4}) == 0xf);
}

TEST_CASE("Directed routes lead from a port to the switch, and from there to each adapter that is on it") {
  TestHost host;
  Program one(host), other(host);
  const auto agent = one.agent(class_directed_route);
  const auto self = one.ask(agent, 0xffff, directed(one, attribute_node_info, {}));
  CHECK(get(std::span(self.bytes).subspan(smp_data), {96, 64}) == one.guest.guid);
  CHECK(self.head.from.lid == 0xffff);
  CHECK((self.bytes[4] & 0x80) != 0);  // the direction bit
  const auto above = one.ask(agent, 0xffff, directed(one, attribute_node_info, {1}));
  CHECK(above.bytes[smp_data + 2] == 2);
  const std::uint8_t own_port = above.bytes[smp_data + 36];
  CHECK(above.bytes[return_path + 1] == own_port);
  // The port by which it came is told, whichever is asked for.
  const auto port = one.ask(agent, 0xffff, directed(one, attribute_port_info, {1}, 3));
  CHECK(port.bytes[smp_data + 28] == own_port);
  CHECK((port.bytes[smp_data + 32] & 0xf) == 1);  // nobody is there: down
  std::size_t found = 0;
  for (std::uint8_t p = 1; p <= 36; ++p) {
    const auto info = one.ask(agent, 0xffff, directed(one, attribute_port_info, {1}, p));
    if ((info.bytes[smp_data + 32] & 0xf) != 4) continue;
    ++found;
    const auto node = one.ask(agent, 0xffff, directed(one, attribute_node_info, {1, p}));
    CHECK(get(std::span(node.bytes).subspan(smp_data), {96, 64}) == (p == own_port ? one.guest.guid : other.guest.guid));
  }
  CHECK(found == 2);
  // Beyond an adapter there is nothing, nor behind a port of the switch where nobody is.
  REQUIRE(one.send(agent, 0xffff, directed(one, attribute_node_info, {1, own_port, 1})));
  CHECK_FALSE(one.receive());
  REQUIRE(one.send(agent, 0xffff, directed(one, attribute_node_info, {1, 30})));
  CHECK_FALSE(one.receive());
}

TEST_CASE("Nothing of a node can be set, and what it does not have is an error") {
  TestHost host;
  Program one(host);
  const auto agent = one.agent(class_lid_routed);
  const auto status = [&](std::uint16_t lid, std::uint8_t method, std::uint16_t attribute, std::uint32_t modifier = 0) {
    return status_of(one.ask(agent, lid, one.request(class_lid_routed, method, attribute, modifier)).bytes);
  };
  CHECK(status(one.guest.lid, method_get, attribute_port_info, 1) == status_ok);
  CHECK(status(one.guest.lid, method_get, attribute_port_info, 2) == status_bad_value);
  CHECK(status(subnet_manager_lid, method_get, attribute_port_info, 36) == status_ok);
  CHECK(status(subnet_manager_lid, method_get, attribute_port_info, 37) == status_bad_value);
  CHECK(status(one.guest.lid, method_get, attribute_switch_info) == status_bad_attribute);
  CHECK(status(one.guest.lid, method_set, attribute_port_info, 1) == status_bad_attribute);
  CHECK(status(one.guest.lid, method_get, 0x7777) == status_bad_attribute);
  // A trap is heard by the subnet manager, and by nobody else.
  REQUIRE(one.send(agent, one.guest.lid, one.request(class_lid_routed, method_trap, 0x0002)));
  CHECK_FALSE(one.receive());
  REQUIRE(one.send(agent, subnet_manager_lid, one.request(class_lid_routed, method_trap, 0x0002)));
  const auto heard = one.receive();
  REQUIRE(heard);
  CHECK(heard->bytes[3] == method_repress);
}

TEST_CASE("Forwarding tables lead to every LID, also of those that come later") {
  TestHost host;
  Program one(host);
  const auto agent = one.agent(class_lid_routed);
  std::vector<std::unique_ptr<Program>> more;
  for (int i = 0; i < 40; ++i) more.push_back(std::make_unique<Program>(host));
  std::set<std::uint8_t> ports;
  for (const auto& each : more) {
    const std::uint16_t lid = each->guest.lid;
    const auto block = one.ask(agent, subnet_manager_lid, one.request(class_lid_routed, method_get, attribute_forwarding_table, lid / 64));
    ports.insert(block.bytes[smp_data + lid % 64]);
  }
  CHECK(ports.size() == more.size());
  CHECK_FALSE(ports.contains(0xff));
  // 41 adapters are more than 36 ports.
  const auto info = one.ask(agent, subnet_manager_lid, one.request(class_lid_routed, method_get, attribute_node_info));
  CHECK(info.bytes[smp_data + 3] == 72);
}

TEST_CASE("Records are found by whatever a request gives of them") {
  TestHost host;
  Program one(host), other(host);
  const auto agent = one.agent(class_administration, 2);
  const auto nodes = one.ask(agent, subnet_manager_lid, one.request(class_administration, method_get_table, attribute_node_record, 0, 2));
  CHECK(records_in(nodes) == 3);
  Mad by_lid = one.request(class_administration, method_get, attribute_node_record, 0, 2);
  put(by_lid.bytes, {384, 64}, 1);
  put(by_lid.data(administration_data, 108), {0, 16}, other.guest.lid);
  const auto found = one.ask(agent, subnet_manager_lid, by_lid);
  CHECK(status_of(found.bytes) == status_ok);
  CHECK(get(std::span(found.bytes).subspan(administration_data), {192, 64}) == other.guest.guid);
  put(by_lid.data(administration_data, 108), {0, 16}, 0x7000);
  put(by_lid.bytes, {96, 32}, 77);
  CHECK(status_of(one.ask(agent, subnet_manager_lid, by_lid).bytes) == status_no_records);
  CHECK(status_of(one.ask(agent, subnet_manager_lid, one.request(class_administration, method_get, attribute_node_record, 0, 2)).bytes) == status_too_many_records);

  Mad path = one.request(class_administration, method_get, attribute_path_record, 0, 2);
  put(path.bytes, {384, 64}, 1 << 2 | 1 << 3);
  std::copy(other.guest.gids[0].gid.begin(), other.guest.gids[0].gid.end(), path.bytes.begin() + administration_data + 8);
  std::copy(one.guest.gids[0].gid.begin(), one.guest.gids[0].gid.end(), path.bytes.begin() + administration_data + 24);
  const auto way = one.ask(agent, subnet_manager_lid, path);
  CHECK(status_of(way.bytes) == status_ok);
  CHECK(get(std::span(way.bytes).subspan(administration_data), {320, 16}) == other.guest.lid);
  CHECK(get(std::span(way.bytes).subspan(administration_data), {336, 16}) == one.guest.lid);
}

TEST_CASE("Ports of the switch are kept, run out, and are had by others when they are free") {
  TestHost host;
  Program one(host);
  const auto agent = one.agent(class_lid_routed);
  const auto port_of = [&](const Program& who) {
    const std::uint16_t lid = who.guest.lid;
    return one.ask(agent, subnet_manager_lid, one.request(class_lid_routed, method_get, attribute_forwarding_table, lid / 64)).bytes[smp_data + lid % 64];
  };
  std::vector<std::unique_ptr<Program>> more;
  for (int i = 0; i < 260; ++i) more.push_back(std::make_unique<Program>(host));
  std::set<std::uint8_t> ports{port_of(one)};
  std::vector<std::size_t> without;
  for (std::size_t i = 0; i < more.size(); ++i) {
    const std::uint8_t port = port_of(*more[i]);
    if (port == 0xff) without.push_back(i);
    else CHECK(ports.insert(port).second);
  }
  CHECK(ports.size() == 254);
  REQUIRE(without.size() == 7);
  const auto leaving = std::find_if(more.begin(), more.end(), [&](const auto& each) { return port_of(*each) != 0xff; });
  const std::uint8_t freed = port_of(**leaving);
  host.fabric.management->leave((*leaving)->guest);
  host.fabric.guests.erase((*leaving)->guest.id.value);
  CHECK(std::count_if(without.begin(), without.end(), [&](std::size_t i) { return port_of(*more[i]) == freed; }) == 1);
  // Those without have their records, and a LID as all.
  CHECK(status_of(one.ask(agent, more[without.back()]->guest.lid, one.request(class_lid_routed, method_get, attribute_node_info)).bytes) == status_ok);
}

TEST_CASE("A path is in a partition that both ends have, and in the one that is asked for") {
  TestHost host;
  Program one(host), other(host, 1001);
  one.guest.tenant->pkeys = {0xffff, 0x8005};
  other.guest.tenant->pkeys = {0x8005, 0xffff};
  const auto agent = one.agent(class_administration, 2);
  const auto path = [&](std::uint16_t pkey, std::optional<std::uint16_t> to = std::nullopt) {
    Mad mad = one.request(class_administration, method_get, attribute_path_record, 0, 2);
    // With what makes no difference: a service, a class of traffic.
    put(mad.bytes, {384, 64}, 1 << 1 | 1 << 4 | 1 << 5 | 1 << 10 | (pkey != 0 ? 1 << 13 : 0));
    const auto record = mad.data(administration_data, 64);
    put(record, {8, 56}, 0x106);
    put(record, {320, 16}, to.value_or(other.guest.lid)), put(record, {336, 16}, one.guest.lid);
    put(record, {384, 8}, 3);
    put(record, {400, 16}, pkey);
    return one.ask(agent, subnet_manager_lid, mad);
  };
  const auto any = path(0), fifth = path(0x8005);
  CHECK(get(std::span(any.bytes).subspan(administration_data), {400, 16}) == 0xffff);
  CHECK(get(std::span(fifth.bytes).subspan(administration_data), {400, 16}) == 0x8005);
  CHECK(get(std::span(fifth.bytes).subspan(administration_data), {384, 8}) == 3);
  CHECK(status_of(path(0x8006).bytes) == status_no_records);
  // Two limited members do not reach each other, but the subnet manager.
  one.guest.tenant->pkeys = other.guest.tenant->pkeys = {0x7fff};
  CHECK(status_of(path(0).bytes) == status_no_records);
  CHECK(status_of(path(0, subnet_manager_lid).bytes) == status_ok);
}

TEST_CASE("A table of paths has those of ports with a partition in common, each once; more than a table holds are none") {
  TestHost host;
  std::vector<std::unique_ptr<Program>> all;
  const auto add = [&](uid_t uid, const hosts::PkeyTable& pkeys) {
    all.push_back(std::make_unique<Program>(host, uid));
    all.back()->guest.tenant->pkeys = pkeys;
  };
  Program& one = (add(1000, {0x8001, 0x8002, 0x0003}), *all.front());
  add(1001, {0x8002, 0x8001}), add(1002, {0x0003, 0x0001}), add(1003, {0x0001}), add(1004, {0x8003});
  const auto agent = one.agent(class_administration, 2);
  const auto table = [&](std::uint16_t pkey = 0) {
    Mad mad = one.request(class_administration, method_get_table, attribute_path_record, 0, 2);
    put(mad.bytes, {384, 64}, pkey != 0 ? 1 << 13 | 1 << 7 : 0);  // and what is reserved, which means nothing
    put(mad.data(administration_data, 64), {400, 16}, pkey);
    put(mad.data(administration_data, 64), {353, 3}, 5);
    return one.ask(agent, subnet_manager_lid, mad);
  };
  const auto pairs = [&](std::uint16_t pkey) {
    std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t> found;
    const auto answer = table(pkey);
    CHECK(status_of(answer.bytes) == status_ok);
    for (std::size_t i = 0; i < records_in(answer); ++i) {
      const auto record = std::span(answer.bytes).subspan(administration_data + i * 64, 64);
      CHECK(found.emplace(std::pair(get(record, {336, 16}), get(record, {320, 16})), get(record, {400, 16})).second);
    }
    return found;
  };
  const auto joined = [](const Guest& from, const Guest& to) -> std::uint64_t {
    for (const std::uint16_t mine : from.tenant->pkeys)
      for (const std::uint16_t theirs : to.tenant->pkeys)
        if (hosts::pkeys_match(mine, theirs)) return mine;
    return 0;
  };
  const auto of_any = pairs(0), of_third = pairs(0x8003);
  std::size_t paths = 1;  // the switch's to itself
  for (const auto& from : all) {
    CHECK(of_any.contains({from->guest.lid, subnet_manager_lid}));
    CHECK(of_any.contains({subnet_manager_lid, from->guest.lid}));
    paths += 2;
    for (const auto& to : all) {
      CAPTURE(from->guest.lid);
      CAPTURE(to->guest.lid);
      const auto found = of_any.find({from->guest.lid, to->guest.lid});
      const std::uint64_t pkey = joined(from->guest, to->guest);
      CHECK((found != of_any.end() ? found->second : 0) == pkey);
      paths += pkey != 0;
    }
  }
  CHECK(of_any.size() == paths);
  // Two limited members do not reach each other, the full one reaches all and itself; with the switch both ways.
  CHECK(of_third.size() == 1 + 4 + 2 * 3);
  CHECK(pairs(0x8004).empty());
  CHECK(pairs(0x8000).empty());  // of no partition, not of any
  // Very many, of whom no two reach each other, but two of the first.
  for (uid_t uid = 2000; uid < 3000; ++uid) host.put(uid).tenant->pkeys = {0x0001};
  CHECK(pairs(0x8001).size() == 2 * 1004 + 1002 * 2 + 2 * 1004);
  for (auto& [uid, tenant] : host.fabric.tenants) tenant.pkeys = {0x8001};
  CHECK(status_of(table().bytes) == status_no_resources);
}

TEST_CASE("Groups count among their user's memberships") {
  TestHost host;
  Program one(host), other(host, 1001);
  one.guest.tenant->quota.memberships = 2;
  const auto agent = one.agent(class_administration, 2), others = other.agent(class_administration, 2);
  for (std::uint8_t i = 0; i < 3; ++i) {
    const auto status = status_of(one.ask(agent, subnet_manager_lid, member_request(one, method_set, Gid{0xff, 0x12, i}, all_to_create)).bytes);
    CHECK(status == (i < 2 ? status_ok : status_no_resources));
  }
  CHECK(host.fabric.management->groups().all().size() == 2);
  CHECK(status_of(other.ask(others, subnet_manager_lid, member_request(other, method_set, Gid{0xff, 0x12, 9}, all_to_create)).bytes) == status_ok);
  host.fabric.management->leave(one.guest);
  CHECK(one.guest.tenant->memberships == 0);
}

TEST_CASE("A group is there from the first full member that says what it is to be like until the last one goes") {
  TestHost host;
  Program one(host), other(host);
  const auto agent = one.agent(class_administration, 2), others = other.agent(class_administration, 2);
  const Gid group{0xff, 0x12, 0, 1};
  const auto& groups = host.fabric.management->groups();
  CHECK(status_of(one.ask(agent, subnet_manager_lid, member_request(one, method_set, group, all_to_create & ~4u)).bytes) == status_insufficient_components);
  const auto made = one.ask(agent, subnet_manager_lid, member_request(one, method_set, group, all_to_create));
  CHECK(status_of(made.bytes) == status_ok);
  CHECK(get(std::span(made.bytes).subspan(administration_data), {288, 16}) == multicast_lid(group));
  // Whoever joins later is told what it is like, and may not want another one.
  const auto joined = other.ask(others, subnet_manager_lid, member_request(other, method_set, group, 1 << 0 | 1 << 1 | 1 << 16, 0));
  CHECK(status_of(joined.bytes) == status_ok);
  CHECK(get(std::span(joined.bytes).subspan(administration_data), {256, 32}) == 0x11111111);
  CHECK(status_of(other.ask(others, subnet_manager_lid, member_request(other, method_set, group, all_to_create, 5)).bytes) == status_request_invalid);
  Mad for_another = member_request(other, method_delete, group, all_to_create);
  std::copy(one.guest.gids[0].gid.begin(), one.guest.gids[0].gid.end(), for_another.bytes.begin() + administration_data + 16);
  CHECK(status_of(other.ask(others, subnet_manager_lid, for_another).bytes) == status_bad_gid);
  CHECK(status_of(one.ask(agent, subnet_manager_lid, member_request(one, method_delete, group, all_to_create)).bytes) == status_ok);
  CHECK(status_of(one.ask(agent, subnet_manager_lid, member_request(one, method_delete, group, all_to_create)).bytes) == status_request_invalid);
  CHECK(groups.all().size() == 1);
  host.fabric.management->leave(other.guest);
  CHECK(groups.all().empty());
}

TEST_CASE("Who has no partition in common sees nothing of the other one") {
  TestHost host;
  Program one(host), stranger(host, 1001);
  stranger.guest.tenant->pkeys = {0x8001};
  const auto agent = one.agent(class_lid_routed), records = one.agent(class_administration, 2);
  REQUIRE(one.send(agent, stranger.guest.lid, one.request(class_lid_routed, method_get, attribute_node_info)));
  CHECK_FALSE(one.receive());
  CHECK(records_in(one.ask(records, subnet_manager_lid, one.request(class_administration, method_get_table, attribute_node_record, 0, 2))) == 2);
  // In one partition, another user's name is not told.
  stranger.guest.tenant->pkeys = {hosts::pkey_default};
  const auto text = one.ask(agent, stranger.guest.lid, one.request(class_lid_routed, method_get, attribute_node_description));
  CHECK(std::string(reinterpret_cast<const char*>(text.bytes.data() + smp_data)) == "vrdma0");
}

TEST_CASE("Counters count from where their user has reset them") {
  TestHost host;
  Program one(host), other(host, 1001);
  CountersReply now{4000, 10, 800, 2};
  host.fabric.management->use_traffic([&](const Guest& guest) { return &guest == &one.guest ? now : CountersReply{}; });
  const auto agent = one.agent(class_performance), others = other.agent(class_performance);
  const auto counters = [&](Program& who, std::uint32_t by, std::uint8_t method, std::uint16_t lid, std::uint8_t port = 1) {
    Mad mad = who.request(class_performance, method, attribute_port_counters_extended);
    put(mad.data(performance_data, 192), {8, 8}, port);
    put(mad.data(performance_data, 192), {16, 16}, 0xffff);
    return who.ask(by, lid, mad);
  };
  const auto sent_words = [](const Program::Received& answer) { return get(std::span(answer.bytes).subspan(performance_data), {64, 64}); };
  CHECK(sent_words(counters(one, agent, method_get, one.guest.lid)) == 1000);
  CHECK(status_of(counters(other, others, method_set, one.guest.lid).bytes) == status_bad_attribute);
  CHECK(sent_words(counters(one, agent, method_set, one.guest.lid)) == 0);
  now.sent_bytes += 400;
  CHECK(sent_words(counters(one, agent, method_get, one.guest.lid)) == 100);
  // What an adapter sends its switch receives.
  const auto at_switch = counters(one, agent, method_get, subnet_manager_lid, 0xff);
  CHECK(get(std::span(at_switch.bytes).subspan(performance_data), {128, 64}) == 100);
  CHECK(status_of(counters(one, agent, method_get, one.guest.lid, 2).bytes) == status_bad_value);
}

TEST_CASE("Where a uid may be several users' names and counters are those of the own process") {
  TestHost host;
  Program one(host), of_its_process(host), of_another(host);
  one.guest.tenant->several_users = true;
  one.guest.credentials.pid = of_its_process.guest.credentials.pid = 70;
  of_another.guest.credentials.pid = 71;
  host.fabric.management->use_traffic([](const Guest&) { return CountersReply{4000, 10, 800, 2}; });
  const auto routed = one.agent(class_lid_routed), counting = one.agent(class_performance);
  const auto name_of = [&](Program& whose) {
    const auto text = one.ask(routed, whose.guest.lid, one.request(class_lid_routed, method_get, attribute_node_description));
    return std::string(reinterpret_cast<const char*>(text.bytes.data() + smp_data));
  };
  const auto sent_words_of = [&](Program& whose) {
    Mad mad = one.request(class_performance, method_get, attribute_port_counters_extended);
    put(mad.data(performance_data, 192), {8, 8}, 1);
    const auto answer = one.ask(counting, whose.guest.lid, mad);
    return get(std::span(answer.bytes).subspan(performance_data), {64, 64});
  };
  CHECK(name_of(of_its_process) == of_its_process.guest.name + " vrdma0");
  CHECK(sent_words_of(of_its_process) == 1000);
  CHECK(name_of(of_another) == "vrdma0");
  CHECK(sent_words_of(of_another) == 0);
}

}  // namespace
}  // namespace vrdma::svc::test
