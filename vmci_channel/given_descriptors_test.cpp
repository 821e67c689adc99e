#include "vmci_channel/given_descriptors.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "vmci_channel/test/lingering.hpp"

using vmci::Closer;
using vmci::GivenFd;
using vmci::UniqueFd;
using vmci::test::Lingering;

namespace {

struct Pair {
  Pair() {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    theirs.reset(ends[0]);
    ours.reset(ends[1]);
  }
  UniqueFd theirs, ours;
};

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

// Until the process's watchdog ends it.
void await_all(const Closer& closer) {
  while (closer.pending() != 0) ::sched_yield();
}

std::span<const std::byte> bytes(const char* text) { return std::as_bytes(std::span(text, std::strlen(text))); }

std::array<std::byte, 64> buffer;

}  // namespace

TEST_CASE("What waits when it is closed is closed by another thread, and so is what comes after it; memory is closed at once") {
  const auto closer = std::make_shared<Closer>();
  Lingering slow;
  REQUIRE(slow);
  GivenFd(slow.take(), closer).reset();
  CHECK(closer->pending() == 1);
  UniqueFd memory(::memfd_create("given", MFD_CLOEXEC));
  const int number = memory.get();
  GivenFd(std::move(memory), closer).reset();
  CHECK(!is_open(number));
  CHECK(closer->pending() == 1);
  GivenFd(UniqueFd(::eventfd(0, EFD_CLOEXEC)), closer).reset();
  CHECK(closer->pending() == 2);
  slow.end();
  await_all(*closer);
}

TEST_CASE("Only memory is taken out of a closer's hands") {
  const auto closer = std::make_shared<Closer>();
  GivenFd event(UniqueFd(::eventfd(0, EFD_CLOEXEC)), closer);
  CHECK(!event.take_memory());
  CHECK(event);
  GivenFd memory(UniqueFd(::memfd_create("given", MFD_CLOEXEC)), closer);
  const auto taken = memory.take_memory();
  REQUIRE(taken.has_value());
  CHECK(!memory);
  CHECK(is_open(taken->get()));
}

TEST_CASE("A stranger's packet brings what it says and its descriptors, whatever closing them does") {
  Pair pair;
  const auto closer = std::make_shared<Closer>();
  Lingering slow;
  REQUIRE(slow);
  REQUIRE(slow.pass(pair.theirs.get(), bytes("first")).has_value());
  REQUIRE(vmci::send_with_descriptors(pair.theirs.get(), bytes("second"), {}).has_value());
  {
    const auto first = vmci::receive_given(pair.ours.get(), buffer, closer);
    REQUIRE(first.has_value());
    CHECK(first->bytes == 5);
    CHECK(first->descriptors.size() == 1);
    const auto second = vmci::receive_given(pair.ours.get(), buffer, closer);
    REQUIRE(second.has_value());
    CHECK(second->bytes == 6);
    CHECK(second->descriptors.empty());
    CHECK(value(vmci::receive_given(pair.ours.get(), buffer, closer).error()) == EAGAIN);
  }
  CHECK(closer->pending() == 1);
  slow.end();
  await_all(*closer);
  pair.theirs.reset();
  const auto end = vmci::receive_given(pair.ours.get(), buffer, closer);
  REQUIRE(end.has_value());
  CHECK(end->bytes == 0);
}

TEST_CASE("What is refused stays in the socket, which is closed by another thread") {
  Pair pair;
  const auto closer = std::make_shared<Closer>();
  Lingering slow;
  REQUIRE(slow);
  SUBCASE("longer than the buffer") {
    REQUIRE(slow.pass(pair.theirs.get(), bytes("longer than eight")).has_value());
    CHECK(value(vmci::receive_given(pair.ours.get(), std::span(buffer).first(8), closer).error()) == EMSGSIZE);
  }
  SUBCASE("more descriptors than a packet may bring") {
    constexpr std::size_t count = 200;
    std::array<int, count> fds;
    fds.fill(slow.get());
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(fds))] = {};
    iovec part{buffer.data(), 4};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(fds));
    std::memcpy(CMSG_DATA(header), fds.data(), sizeof(fds));
    REQUIRE(::sendmsg(pair.theirs.get(), &message, 0) == 4);
    slow.take().reset();  // the packet has it
    CHECK(value(vmci::receive_given(pair.ours.get(), buffer, closer).error()) == EMSGSIZE);
  }
  await_all(*closer);
  closer->close(std::move(pair.ours));
  CHECK(closer->pending() == 1);
  slow.end();
  await_all(*closer);
}

TEST_CASE("A packet whose descriptors this process may not open is told by what it says, and stays until it may") {
  Pair pair;
  const auto closer = std::make_shared<Closer>();
  Lingering slow;
  REQUIRE(slow);
  REQUIRE(slow.pass(pair.theirs.get(), bytes("packet")).has_value());
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  int used = 0;
  while (is_open(used)) ++used;
  const rlimit none_left{static_cast<rlim_t>(used), before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none_left) == 0);
  const auto refused = vmci::receive_given(pair.ours.get(), buffer, closer);
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  REQUIRE(refused.has_value());
  CHECK(refused->descriptors_missing);
  CHECK(refused->descriptors.empty());
  CHECK(refused->bytes == 6);
  CHECK(std::memcmp(buffer.data(), "packet", 6) == 0);
  {
    const auto taken = vmci::receive_given(pair.ours.get(), buffer, closer);
    REQUIRE(taken.has_value());
    CHECK(!taken->descriptors_missing);
    CHECK(taken->descriptors.size() == 1);
  }
  slow.end();
  await_all(*closer);
}

TEST_CASE("A packet says who has sent it where the socket tells") {
  Pair pair;
  const int yes = 1;
  REQUIRE(::setsockopt(pair.ours.get(), SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)) == 0);
  REQUIRE(vmci::send_with_descriptors(pair.theirs.get(), bytes("packet"), {}).has_value());
  const auto received = vmci::receive_given(pair.ours.get(), buffer, nullptr);
  REQUIRE(received.has_value());
  CHECK(received->bytes == 6);
  CHECK(received->sender == ::getpid());
  CHECK(value(vmci::receive_given(pair.ours.get(), buffer, nullptr).error()) == EAGAIN);
}
