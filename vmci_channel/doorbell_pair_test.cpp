#include "vmci_channel/doorbell_pair.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

using vmci::DoorbellEnd;

namespace {
struct Pair {
  Pair() {
    auto made = vmci::make_doorbell_pair();
    REQUIRE(made.has_value());
    a = DoorbellEnd(std::move(made->first));
    b = DoorbellEnd(std::move(made->second));
  }
  DoorbellEnd a, b;
};
bool readable(const DoorbellEnd& end) { return (end.wait(POLLIN, 0) & POLLIN) != 0; }
bool writable(const DoorbellEnd& end) { return (end.wait(POLLOUT, 0) & POLLOUT) != 0; }
}  // namespace

TEST_CASE("A ring makes the other end readable until its token is of the past") {
  Pair pair;
  CHECK(!readable(pair.b));
  pair.a.ring(5);
  CHECK(readable(pair.b));
  CHECK(!readable(pair.a));
  pair.b.drain(5);
  CHECK(readable(pair.b));  // the token that answers the current arming stays
  pair.b.drain(6);
  CHECK(!readable(pair.b));
}

TEST_CASE("The closing token stays for ever and is told of") {
  Pair pair;
  pair.a.ring(1);
  pair.a.ring(DoorbellEnd::closing_token);
  for (std::uint32_t arming = 2; arming < 10; ++arming) {
    const auto drained = pair.b.drain(arming);
    CHECK(drained.closing);
    CHECK(!drained.hung_up);
    CHECK(readable(pair.b));
  }
}

TEST_CASE("A clogged end is not writable until the other side drains, and rings go through all the same") {
  Pair pair;
  CHECK(writable(pair.a));
  for (int round = 0; round < 5; ++round) {
    REQUIRE(pair.a.clog());
    CHECK(!writable(pair.a));
    REQUIRE(pair.a.clog());  // again: no more packets
    CHECK(writable(pair.b));
    for (std::uint32_t token = 1; token <= 4; ++token) pair.a.ring(token);
    pair.b.drain(4);
    CHECK(writable(pair.a));
    CHECK(readable(pair.b));  // token 4 came through behind the clog
    pair.b.drain(5);
    CHECK(!readable(pair.b));
  }
}

TEST_CASE("An end that closes hangs up the other, also where a copy of it lives on and is shut down") {
  Pair closed;
  closed.b.close();
  CHECK((closed.a.wait(POLLIN, 0) & POLLHUP) != 0);
  CHECK(closed.a.drain(1).hung_up);
  CHECK(!closed.a.clog());

  Pair shut;
  vmci::UniqueFd copy(::fcntl(shut.a.fd(), F_DUPFD_CLOEXEC, 0));
  REQUIRE(::shutdown(copy.get(), SHUT_RDWR) == 0);
  CHECK((shut.a.wait(POLLIN, 0) & POLLHUP) != 0);
  CHECK((shut.b.wait(POLLIN, 0) & POLLHUP) != 0);
  CHECK(shut.b.drain(1).hung_up);
}

TEST_CASE("A peer that floods its end with anything blocks nobody") {
  Pair pair;
  char junk[4096] = {};
  while (::send(pair.a.fd(), junk, sizeof(junk), MSG_DONTWAIT) > 0) {
  }
  for (int i = 0; i < 100; ++i) pair.a.ring(static_cast<std::uint32_t>(i));  // full: dropped, never blocking
  CHECK(readable(pair.b));
  pair.b.drain(1000);
  CHECK(!readable(pair.b));
  CHECK(writable(pair.a));
}
