// Management datagrams as guests' programs send and receive them, to a service of one host.
#include "vmkernel_svc/mad/management.hpp"

#include <fcntl.h>
#include <poll.h>

#include <cstring>

#include "vmkernel_svc/cm/test_guests.hpp"

namespace vrdma::svc::test {
namespace {

using namespace control;
using namespace mad;

class Program {
 public:
  Program(TestHost& host, uid_t uid = 1000, std::uint32_t link_layer = link_layer_infiniband) : management_(*host.fabric.management), guest(host.put(uid, link_layer)) {
    int ends[2];
    REQUIRE(::pipe2(ends, O_NONBLOCK) == 0);
    pipe_.reset(ends[0]);
    const auto opened = management_.open(guest, vmci::UniqueFd(ends[1]));
    if (opened) channel = opened->channel;
  }

  std::uint32_t agent(std::uint8_t of_class, std::uint8_t version = 1, std::uint64_t methods = 0, std::uint32_t oui = 0) {
    MadRegisterRequest request{};
    request.channel = channel;
    request.qpn = is_subnet_management(of_class) ? 0 : 1;
    request.management_class = of_class;
    request.class_version = version;
    request.oui = oui;
    request.methods[0] = methods;
    const auto added = management_.add_agent(guest, request);
    REQUIRE(added);
    return added->agent;
  }

  Mad request(std::uint8_t of_class, std::uint8_t method, std::uint16_t attribute, std::uint32_t modifier = 0, std::uint8_t version = 1) {
    Mad mad({});
    mad.bytes[0] = 1, mad.bytes[1] = of_class, mad.bytes[2] = version, mad.bytes[3] = method;
    put(mad.bytes, {96, 32}, ++last_transaction_);
    put(mad.bytes, {128, 16}, attribute);
    put(mad.bytes, {160, 32}, modifier);
    return mad;
  }
  Status send(std::uint32_t by, std::uint16_t to, const Mad& mad, std::uint32_t timeout_ms = 100) {
    MadSendRequest out{};
    out.by = {channel, by};
    out.to.lid = to;
    out.to.qpn = is_subnet_management(mad.management_class()) ? 0 : 1;
    out.timeout_ms = timeout_ms;
    out.bytes = static_cast<std::uint32_t>(mad.bytes.size());
    std::copy(mad.bytes.begin(), mad.bytes.end(), out.data.begin());
    return management_.send(guest, out);
  }
  bool is_told() const {
    pollfd readable{pipe_.get(), POLLIN, 0};
    return ::poll(&readable, 1, 0) == 1;
  }
  struct Received {
    MadTakeReply head;
    std::vector<std::uint8_t> bytes;
  };
  // As guest_lib/mad/file.cpp does.
  std::optional<Received> receive(std::uint32_t room = 1 << 20) {
    Received out{};
    for (std::uint32_t offset = 0;;) {
      const auto taken = management_.take(guest, {channel, room, offset, 0});
      REQUIRE(taken);
      if (taken->last != 0) {
        AsyncRecord record;
        REQUIRE(::read(pipe_.get(), &record, sizeof(record)) == sizeof(record));
      }
      if (taken->found == 0) return std::nullopt;
      if (offset == 0) out.head = *taken;
      out.bytes.insert(out.bytes.end(), taken->data.begin(), taken->data.begin() + taken->bytes);
      offset += taken->bytes;
      if (offset == taken->total_bytes || taken->total_bytes > room) return out;
    }
  }
  Received ask(std::uint32_t by, std::uint16_t to, const Mad& mad) {
    REQUIRE(send(by, to, mad));
    CHECK(is_told());
    auto answer = receive();
    REQUIRE(answer);
    CHECK(answer->head.status == 0);
    CHECK(get(answer->bytes, {96, 32}) == get(mad.bytes, {96, 32}));
    CHECK((answer->bytes[3] & method_is_response) != 0);
    CHECK_FALSE(is_told());
    return *answer;
  }
  void close() { REQUIRE(management_.close(guest, channel)); }

 private:
  Management& management_;

 public:
  Guest& guest;
  std::uint32_t channel = 0;

 private:
  vmci::UniqueFd pipe_;
  std::uint32_t last_transaction_ = 0x1000;
};

std::uint16_t status_of(std::span<const std::uint8_t> mad) { return static_cast<std::uint16_t>(get(mad, {32, 16}) & 0x7fff); }
std::size_t records_in(const Program::Received& answer) {
  const std::uint64_t bytes = get(answer.bytes, {352, 16}) * 8;
  return bytes == 0 ? 0 : (answer.bytes.size() - administration_data) / bytes;
}

Mad directed(Program& from, std::uint16_t attribute, std::initializer_list<std::uint8_t> path, std::uint32_t modifier = 0) {
  Mad mad = from.request(class_directed_route, method_get, attribute, modifier);
  put(mad.bytes, {256, 32}, 0xffffffff);
  mad.bytes[7] = static_cast<std::uint8_t>(path.size());
  std::copy(path.begin(), path.end(), mad.bytes.begin() + initial_path + 1);
  return mad;
}

Mad member_request(Program& from, std::uint8_t method, const Gid& group, std::uint64_t mask, std::uint32_t qkey = 0x11111111) {
  Mad mad = from.request(class_administration, method, attribute_member_record, 0, 2);
  put(mad.bytes, {384, 64}, mask);
  const auto record = mad.data(administration_data, 52);
  std::copy(group.begin(), group.end(), record.begin());
  std::copy(from.guest.gids[0].gid.begin(), from.guest.gids[0].gid.end(), record.begin() + 16);
  put(record, {256, 32}, qkey);
  put(record, {320, 16}, 0xffff);
  put(record, {388, 4}, 1);
  return mad;
}
constexpr std::uint64_t all_to_create = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 6 | 1 << 7 | 1 << 12 | 1 << 13 | 1 << 16;

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
  const auto path = [&](std::uint16_t pkey) {
    Mad mad = one.request(class_administration, method_get, attribute_path_record, 0, 2);
    // With what makes no difference: a service, a class of traffic.
    put(mad.bytes, {384, 64}, 1 << 1 | 1 << 4 | 1 << 5 | 1 << 10 | (pkey != 0 ? 1 << 13 : 0));
    const auto record = mad.data(administration_data, 64);
    put(record, {8, 56}, 0x106);
    put(record, {320, 16}, other.guest.lid), put(record, {336, 16}, one.guest.lid);
    put(record, {384, 8}, 3);
    put(record, {400, 16}, pkey);
    return one.ask(agent, subnet_manager_lid, mad);
  };
  const auto any = path(0), fifth = path(0x8005);
  CHECK(get(std::span(any.bytes).subspan(administration_data), {400, 16}) == 0xffff);
  CHECK(get(std::span(fifth.bytes).subspan(administration_data), {400, 16}) == 0x8005);
  CHECK(get(std::span(fifth.bytes).subspan(administration_data), {384, 8}) == 3);
  CHECK(status_of(path(0x8006).bytes) == status_no_records);
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
  CHECK(value(one.send(agent + 1, 1, one.request(class_lid_routed, method_get, attribute_node_info)).error()) == EINVAL);
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
