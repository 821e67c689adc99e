// Who has which port and address.
#include <random>

#include "vmkernel_svc/cm/test_pair.hpp"

using namespace vrdma;
using namespace vrdma::svc;
using namespace vrdma::svc::test;
using namespace vrdma::control;

TEST_CASE("A port is one's alone at each address, and at all of them for who has any") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1), v4(10, 0, 0, 2), v6(1)}), b(host, 1, {v4(10, 0, 0, 1), v4(10, 0, 0, 2), v6(1)});
  const auto binds = [&](TestGuest& who, const CmAddress& address, std::uint16_t space = RDMA_PS_TCP) { return who.bind(who.create(space), address); };
  CHECK(binds(a, v4(10, 0, 0, 1, 5000)) == 0);
  CHECK(binds(b, v4(10, 0, 0, 1, 5000)) == EADDRINUSE);
  CHECK(binds(b, v4(10, 0, 0, 2, 5000)) == 0);
  CHECK(binds(b, any_v4(5000)) == EADDRNOTAVAIL);
  CHECK(binds(b, any_v6(5000)) == EADDRNOTAVAIL);    // any of IPv4, too
  CHECK(binds(b, v6(1, 5000)) == 0);
  CHECK(binds(b, v4(10, 0, 0, 1, 5000), RDMA_PS_UDP) == 0);  // another port
  CHECK(binds(a, any_v6(5001)) == 0);
  CHECK(binds(b, any_v4(5001)) == EADDRNOTAVAIL);
  CHECK(binds(b, v4(10, 0, 0, 2, 5001)) == EADDRNOTAVAIL);
  CHECK(binds(b, v4(10, 0, 0, 9, 5002)) == EADDRNOTAVAIL);
  CHECK(binds(b, CmAddress{17, 5002, 0, {}}) == EAFNOSUPPORT);
  CHECK(binds(b, a.mapped(5002)) == EADDRNOTAVAIL);
  CHECK(binds(b, b.mapped(5002)) == 0);
  CHECK(binds(b, v4(127, 0, 0, 1, 5002)) == 0);
  CHECK(binds(a, v4(127, 0, 0, 1, 5002)) == EADDRINUSE);

  TestGuest elsewhere(host, 2, {v4(10, 0, 0, 1)});
  CHECK(binds(elsewhere, v4(10, 0, 0, 1, 5000)) == 0);
}

TEST_CASE("A program may have more addresses than are said at once, and says them anew when they change") {
  TestHost host;
  TestGuest a(host, 1, {});
  const auto say = [&](std::uint32_t first, std::uint32_t count, bool more) {
    CmPlaceRequest place{1, count, more, {}};
    for (std::uint32_t i = 0; i < count; ++i) place.addresses[i] = v4(10, 1, static_cast<std::uint8_t>((first + i) >> 8), static_cast<std::uint8_t>(first + i));
    return a.cm().place(a.guest(), place);
  };
  const auto binds = [&](std::uint8_t third, std::uint8_t last) { return a.bind(a.create(), v4(10, 1, third, last, 0)) == 0; };
  for (std::uint32_t first = 0; first < cm_addresses_max; first += cm_addresses_at_once) REQUIRE(say(first, cm_addresses_at_once, first != 0));
  CHECK(say(0, 1, true).error() == Errno{EINVAL});
  for (const std::uint32_t one : {1u, 64u, 1000u, cm_addresses_max - 1}) CHECK(binds(static_cast<std::uint8_t>(one >> 8), static_cast<std::uint8_t>(one)));
  REQUIRE(say(64, 1, false));
  CHECK(binds(0, 64));
  CHECK(!binds(0, 65));
}

TEST_CASE("Any of IPv6 leaves IPv4's to others when its program says so") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1), v6(1)});
  const CmId six = a.create();
  REQUIRE(a.cm().set_option(a.guest(), {six, cm_option_only_ipv6, 1}));
  CHECK(a.bind(six, any_v6(5000)) == 0);
  CHECK(a.listen(six) == 0);
  const CmId four = a.create();
  CHECK(a.bind(four, any_v4(5000)) == 0);
  CHECK(a.listen(four) == 0);
  // What the option would make two of the same cannot be taken back by then.
  CHECK(TestGuest::error_of(a.cm().set_option(a.guest(), {six, cm_option_only_ipv6, 0})) == EINVAL);
}

TEST_CASE("Who lets others have its port shares it with those who do, too, but who listens has it alone") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1), v4(10, 0, 0, 2)});
  CmId ids[6];
  for (CmId& id : ids) id = a.create();
  const auto let = [&](const CmId& id, std::uint32_t value) { return TestGuest::error_of(a.cm().set_option(a.guest(), {id, cm_option_reuse_address, value})); };
  for (int i : {0, 1, 3, 4, 5}) REQUIRE(let(ids[i], 1) == 0);
  CHECK(a.bind(ids[0], any_v4(5000)) == 0);
  CHECK(a.bind(ids[1], v4(10, 0, 0, 1, 5000)) == 0);
  CHECK(a.bind(ids[2], any_v4(5000)) == EADDRNOTAVAIL);
  CHECK(a.bind(ids[2], v4(10, 0, 0, 1, 5000)) == EADDRINUSE);
  CHECK(a.bind(ids[3], v4(10, 0, 0, 1, 5000)) == 0);
  CHECK(a.bind(ids[4], v4(10, 0, 0, 2, 5000)) == 0);
  // Nobody listens beside another one who has it, whether that listens or not.
  CHECK(a.listen(ids[0]) == EADDRNOTAVAIL);
  CHECK(a.listen(ids[1]) == EADDRINUSE);
  a.destroy(ids[3]);
  CHECK(a.listen(ids[1]) == EADDRNOTAVAIL);  // beside any
  a.destroy(ids[0]);
  CHECK(a.listen(ids[1]) == 0);
  CHECK(a.listen(ids[4]) == 0);  // at another address
  CHECK(a.bind(ids[5], any_v4(5000)) == EADDRNOTAVAIL);
  CHECK(a.bind(ids[5], v4(10, 0, 0, 1, 5000)) == EADDRINUSE);
  // It is let before one listens, and not taken back once there is an address.
  CHECK(let(ids[1], 1) == EINVAL);
  CHECK(a.bind(ids[5], any_v4(5001)) == 0);
  CHECK(let(ids[5], 0) == EINVAL);
}

TEST_CASE("Ports that were given by chance are all given back") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)});
  std::vector<CmId> ids;
  for (;;) {
    const CmId id = a.create();
    const int error = a.bind(id, any_v4(0));
    if (error != 0) {
      CHECK(error == EADDRNOTAVAIL);
      break;
    }
    CHECK(a.at(id).source.port >= 32768);
    ids.push_back(id);
  }
  CHECK(ids.size() == 60999 - 32768 + 1);
  // The only one that is free is found, wherever the last one was.
  for (const std::size_t which : {ids.size() / 2, std::size_t{0}, ids.size() - 1, std::size_t{9071}, std::size_t{9072}}) {
    const std::uint16_t port = a.at(ids[which]).source.port;
    a.destroy(ids[which]);
    ids[which] = a.create();
    CHECK(a.bind(ids[which], any_v4(0)) == 0);
    CHECK(a.at(ids[which]).source.port == port);
  }
  a.close(a.channel);
  a.channel = a.open();
  CHECK(a.bind(a.create(), any_v4(0)) == 0);
}

TEST_CASE("However many have a port, each has it at its own address, and all give it back") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)});
  const auto own = [](std::uint32_t i) { return v4(127, static_cast<std::uint8_t>(i >> 14), static_cast<std::uint8_t>(i >> 7 & 127), static_cast<std::uint8_t>(i & 127), 5000); };
  for (int again = 0; again < 2; ++again) {
    for (std::uint32_t i = 1; i <= 20'000; ++i) {
      const CmId id = a.create();
      REQUIRE(a.cm().bind(a.guest(), {id, own(i)}));
      REQUIRE(a.cm().listen(a.guest(), {id, 0, 0}));
    }
    CHECK(a.bind(a.create(), own(7000)) == EADDRINUSE);
    CHECK(a.bind(a.create(), any_v4(5000)) == EADDRNOTAVAIL);
    a.close(a.channel);
    a.channel = a.open();
  }
  CHECK(a.bind(a.create(), any_v4(5000)) == 0);
}

namespace {

bool overlap(const CmIdentifier& a, const CmIdentifier& b) {
  if (a.source.family == AF_IB || b.source.family == AF_IB) return a.source.family == b.source.family && a.guest == b.guest;
  if (!a.source.is_any() && !b.source.is_any()) return a.source.same_host(b.source);
  if (a.source.family == b.source.family) return true;
  const CmIdentifier& six = a.source.family == AF_INET6 ? a : b;
  return six.source.is_any() && !six.only_ipv6;
}

}  // namespace

TEST_CASE("Who gets a port, and may listen, is what a look at everybody says") {
  const std::uint64_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t bound) { return random() % bound; };
  TestHost host;
  const auto addresses = {v4(10, 0, 0, 1), v4(10, 0, 0, 2), v6(1), v6(2)};
  TestGuest a(host, 1, addresses), b(host, 1, addresses);
  ConnectionManager& cm = host.cm();
  const auto why_taken = [&](const CmIdentifier& wanted, bool to_listen) {
    int why = 0;
    for (const auto& [id, each] : cm.identifiers()) {
      const CmIdentifier& other = *each;
      if (other.id == wanted.id || !other.holding || other.source.port != wanted.source.port || !overlap(other, wanted)) continue;
      if (other.state != CmState::listening && (to_listen ? !wanted.reuse_address : other.reuse_address && wanted.reuse_address)) continue;
      if (!other.source.is_any() && !wanted.source.is_any()) return EADDRINUSE;
      why = EADDRNOTAVAIL;
    }
    return why;
  };
  for (int step = 0; step < 20'000; ++step) {
    CAPTURE(step);
    TestGuest& who = below(2) != 0 ? a : b;
    const auto port = static_cast<std::uint16_t>(5000 + below(2));
    const CmAddress at[] = {any_v4(port), any_v6(port), any_v6(port), v4(10, 0, 0, static_cast<std::uint8_t>(1 + below(2)), port), v6(static_cast<std::uint8_t>(1 + below(2)), port), any_gid(port), who.gid(port)};
    std::vector<CmId> ids;
    for (const auto& [id, one] : cm.identifiers())
      if (one->guest == &who.guest()) ids.push_back({id, who.channel});
    if (ids.size() < 12) ids.push_back(who.create());
    const CmId id = ids[below(ids.size())];
    const CmIdentifier& one = who.at(id);
    switch (below(6)) {
      case 0: (void)cm.set_option(who.guest(), {id, cm_option_reuse_address, below(4) != 0}); break;
      case 1: (void)cm.set_option(who.guest(), {id, cm_option_only_ipv6, static_cast<std::uint32_t>(below(2))}); break;
      case 2: who.destroy(id); break;
      case 3: {
        if (one.state != CmState::bound) break;
        const int expected = why_taken(one, true);
        REQUIRE(who.listen(id) == expected);
        break;
      }
      default: {
        if (one.state != CmState::idle) break;
        CmIdentifier wanted = one;
        wanted.source = at[below(std::size(at))];
        const int expected = why_taken(wanted, false);
        REQUIRE(who.bind(id, wanted.source) == expected);
      }
    }
  }
}

TEST_CASE("What could not be bound has neither address nor device") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)});
  a.listener(any_v4(5000));
  const CmId id = a.create();
  CHECK(a.bind(id, v4(10, 0, 0, 1, 5000)) == EADDRNOTAVAIL);
  CHECK(a.cm().query(a.guest(), id)->has_device == 0);
  CHECK(TestGuest::error_of(a.cm().attributes(a.guest(), {id, 1, 0})) == EINVAL);
  CHECK(a.bind(id, v4(10, 0, 0, 1, 5001)) == 0);
  CHECK(a.cm().query(a.guest(), id)->has_device == 1);
}

TEST_CASE("Nobody calls from an address that is not its own") {
  TestHost host;
  TestGuest a(host, 1, {v4(10, 0, 0, 1)}), b(host, 2, {v4(10, 0, 0, 2)});
  b.listener(any_v4(5000));
  CHECK(a.resolve(a.create(), v4(10, 0, 0, 2, 5000), v4(10, 0, 0, 77)) == EADDRNOTAVAIL);
  const CmId bound = a.create();
  CHECK(a.bind(bound, any_v4(0)) == 0);
  CHECK(a.resolve(bound, v4(10, 0, 0, 2, 5000), v4(10, 0, 0, 77)) == EADDRNOTAVAIL);
  CHECK(a.resolve(bound, v4(10, 0, 0, 2, 5000), v4(10, 0, 0, 1)) == 0);
  CHECK(a.at(bound).source.same_host(v4(10, 0, 0, 1)));
  a.expect(cm_address_resolved, bound);
  // Of another family: it stays any.
  const CmId other = a.create();
  CHECK(a.bind(other, any_v4(0)) == 0);
  CHECK(a.resolve(other, v4(10, 0, 0, 2, 5000), v6(1)) == 0);
  CHECK(a.at(other).source.is_any());
}
