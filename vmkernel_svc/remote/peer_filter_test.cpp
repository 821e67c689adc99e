// Which packets a filter of many hosts lets through, with sockets of UDP on this machine: they come in the order in which they were sent, so
// that nobody need wait to see that one does not come.
#include "vmkernel_svc/remote/peer_filter.hpp"

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <random>
#include <set>

#include "vmci_channel/packet_socket.hpp"

using namespace vrdma;
using namespace vrdma::remote;

namespace {

struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  Address(const std::string& text, std::uint16_t port) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(storage);
    auto& v6 = reinterpret_cast<sockaddr_in6&>(storage);
    if (::inet_pton(AF_INET, text.c_str(), &v4.sin_addr) == 1) {
      v4.sin_family = AF_INET;
      v4.sin_port = htons(port);
      bytes = sizeof(v4);
    } else {
      REQUIRE(::inet_pton(AF_INET6, text.c_str(), &v6.sin6_addr) == 1);
      v6.sin6_family = AF_INET6;
      v6.sin6_port = htons(port);
      bytes = sizeof(v6);
    }
  }
  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

vmci::UniqueFd socket_at(const std::string& text) {
  const Address here(text, 0);
  vmci::UniqueFd socket(::socket(here.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket || ::bind(socket.get(), here.generic(), here.bytes) != 0) return {};
  return socket;
}

class Receiver {
 public:
  explicit Receiver(const std::string& address) : address_(address), socket_(socket_at(address)) {
    if (!socket_) return;
    sockaddr_in6 here{};
    socklen_t bytes = sizeof(here);
    REQUIRE(::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&here), &bytes) == 0);
    port_ = ntohs(here.sin6_port);  // lies where sockaddr_in has it
  }
  explicit operator bool() const { return static_cast<bool>(socket_); }
  int get() const { return socket_.get(); }
  void send(const std::string& from, char saying) const {
    const vmci::UniqueFd sender = socket_at(from);
    REQUIRE(sender);
    const Address there(address_, port_);
    REQUIRE(::sendto(sender.get(), &saying, 1, 0, there.generic(), there.bytes) == 1);
  }
  char receive() const {
    pollfd readable{socket_.get(), POLLIN, 0};
    REQUIRE(::poll(&readable, 1, 60'000) == 1);
    char said = 0;
    REQUIRE(::recv(socket_.get(), &said, 1, 0) == 1);
    return said;
  }

 private:
  std::string address_;
  vmci::UniqueFd socket_;
  std::uint16_t port_ = 0;
};

// Anywhere, but for this machine's own.
std::vector<std::string> hosts(bool v6, std::size_t count) {
  std::mt19937 random(7);
  std::set<std::string> made;
  while (made.size() < count) {
    if (v6) made.insert(fmt::format("{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}", 0x2000 | random() % 0x2000, random() % 0x10000, random() % 0x10000, random() % 0x10000,
                                    random() % 0x10000, random() % 0x10000, random() % 0x10000, random() % 0x10000));
    else made.insert(fmt::format("{}.{}.{}.{}", 1 + random() % 126, random() % 256, random() % 256, random() % 256));
  }
  return {made.begin(), made.end()};
}

std::vector<std::string> with(std::vector<std::string> all, const std::string& one) {
  all.insert(all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2), one);
  return all;
}

// Newer kernels ask for CAP_NET_ADMIN.
bool filters_are_allowed() {
  const vmci::UniqueFd socket = socket_at("127.0.0.1");
  if (accept_only(socket.get(), {"127.0.0.1"}) != 0) return true;
  REQUIRE(errno == EPERM);
  MESSAGE("skipped: this process may not filter its sockets");
  return false;
}

}  // namespace

TEST_CASE("AThousandHostsReachAPortAndNobodyElseDoes") {
  if (!filters_are_allowed()) return;
  for (const std::size_t count : {0, 1, 64, 65, 1000}) {
    CAPTURE(count);
    const Receiver there("127.0.0.1");
    const unsigned bits = accept_only(there.get(), with(hosts(false, count), "127.0.0.6"));
    CHECK(bits >= 8);  // on a machine with very little room those of its network do, too
    if (bits >= 24) there.send("127.0.1.6", 'x');
    there.send("127.0.0.6", 'a');
    CHECK(there.receive() == 'a');
  }
  for (const std::size_t count : {0, 1, 64, 65, 1000}) {
    CAPTURE(count);
    const Receiver there("::1");
    if (!there) {
      MESSAGE("skipped: no IPv6 here");
      return;
    }
    CHECK(accept_only(there.get(), with(hosts(true, count), "::1")) != 0);
    there.send("::1", 'a');
    CHECK(there.receive() == 'a');
    REQUIRE(accept_only(there.get(), hosts(true, count)) != 0);
    there.send("::1", 'x');
    REQUIRE(accept_only(there.get(), {"::1"}) == 128);
    there.send("::1", 'b');
    CHECK(there.receive() == 'b');
  }
}

// A filter that is too large leaves the one before it where it is, unless that is seen to.
TEST_CASE("WhoJoinsIsLetInHoweverManyHostsThereAre") {
  if (!filters_are_allowed()) return;
  for (const bool v6 : {false, true}) {
    CAPTURE(v6);
    const Receiver there(v6 ? "::1" : "127.0.0.1");
    if (!there) {
      MESSAGE("skipped: no IPv6 here");
      return;
    }
    const std::string one = v6 ? "::1" : "127.0.0.6";
    REQUIRE(accept_only(there.get(), {v6 ? "2001:db8::5" : "127.0.0.5"}) == address_bits(v6));
    const unsigned bits = accept_only(there.get(), with(hosts(v6, 50'000), one));
    CHECK(bits < address_bits(v6));
    there.send(one, 'a');
    CHECK(there.receive() == 'a');
    REQUIRE(accept_only(there.get(), {one}) == address_bits(v6));  // and back
    there.send(one, 'b');
    CHECK(there.receive() == 'b');
  }
}
