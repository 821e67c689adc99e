#include "vmci_channel/packet_socket.hpp"

#include <dirent.h>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "vmci_channel/control_exchange.hpp"

using vmci::PacketSocket;
using vmci::UniqueFd;

namespace {

struct Pair {
  Pair() {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    a = PacketSocket(UniqueFd(ends[0]));
    b = PacketSocket(UniqueFd(ends[1]));
  }
  PacketSocket a, b;
};

struct Directory {
  Directory() {
    char name[] = "/tmp/vmci-socket-test-XXXXXX";
    REQUIRE(::mkdtemp(name) != nullptr);
    path = name;
  }
  ~Directory() { std::filesystem::remove_all(path); }
  std::string socket() const { return path + "/s"; }
  std::string path;
};

std::size_t open_descriptors() {
  std::size_t count = 0;
  DIR* const directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

// The limit of descriptors with which so many are free.
int limit_with(int free) {
  for (int fd = 0;; ++fd)
    if (::fcntl(fd, F_GETFD) < 0 && free-- == 0) return fd;
}

std::array<std::byte, 256> buffer;

template <std::size_t N>
auto bytes(const char (&text)[N]) {
  return std::as_bytes(std::span(text, N - 1));
}

}  // namespace

TEST_CASE("Packets keep their borders and their bytes") {
  Pair pair;
  REQUIRE(pair.a.send(bytes("one")).has_value());
  REQUIRE(pair.a.send(bytes("second")).has_value());
  auto first = pair.b.receive(buffer);
  REQUIRE(first.has_value());
  CHECK(first->bytes == 3);
  CHECK(std::memcmp(buffer.data(), "one", 3) == 0);
  auto second = pair.b.receive(buffer, 1000);
  REQUIRE(second.has_value());
  CHECK(second->bytes == 6);
  CHECK(second->descriptors.empty());
}

TEST_CASE("Descriptors travel along, are the same files, and close on exec") {
  Pair pair;
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  UniqueFd read_end(ends[0]), write_end(ends[1]);
  const int given[] = {read_end.get(), write_end.get()};
  REQUIRE(pair.a.send(bytes("fds"), given).has_value());
  auto received = pair.b.receive(buffer);
  REQUIRE(received.has_value());
  REQUIRE(received->descriptors.size() == 2);
  CHECK(received->descriptors[0].get() != read_end.get());
  for (const auto& fd : received->descriptors) CHECK((::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK(::write(received->descriptors[1].get(), "x", 1) == 1);
  char got = 0;
  CHECK(::read(read_end.get(), &got, 1) == 1);
  CHECK(got == 'x');
}

TEST_CASE("As many descriptors as a packet takes arrive; one more is refused by the sender") {
  Pair pair;
  const std::vector<int> eight(vmci::packet_descriptors_max, pair.a.fd());
  REQUIRE(pair.a.send(bytes("8"), eight).has_value());
  auto received = pair.b.receive(buffer);
  REQUIRE(received.has_value());
  CHECK(received->descriptors.size() == vmci::packet_descriptors_max);
  const std::vector<int> nine(vmci::packet_descriptors_max + 1, pair.a.fd());
  CHECK(value(pair.a.send(bytes("9"), nine).error()) == EMSGSIZE);
}

TEST_CASE("A packet longer than the buffer is refused and its descriptors are closed") {
  Pair pair;
  const int given[] = {pair.a.fd(), pair.a.fd(), pair.a.fd()};
  const std::size_t before = open_descriptors();
  for (int i = 0; i < 50; ++i) {
    REQUIRE(pair.a.send(bytes("longer than eight"), given).has_value());
    auto received = pair.b.receive(std::span(buffer).first(8));
    REQUIRE(!received);
    CHECK(value(received.error()) == EMSGSIZE);
  }
  CHECK(open_descriptors() == before);
  REQUIRE(pair.a.send(bytes("next")).has_value());  // the packet after it is not hurt
  CHECK(pair.b.receive(buffer)->bytes == 4);
}

TEST_CASE("More descriptors than a packet may carry are refused by the receiver and none stays open") {
  Pair pair;
  const std::size_t before = open_descriptors();
  // A peer that does not use this class: twelve descriptors in one packet.
  constexpr std::size_t count = 12;
  alignas(cmsghdr) char control[CMSG_SPACE(count * sizeof(int))] = {};
  char text[] = "many";
  iovec part{text, 4};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(count * sizeof(int));
  std::array<int, count> fds;
  fds.fill(pair.a.fd());
  std::memcpy(CMSG_DATA(header), fds.data(), sizeof(fds));
  REQUIRE(::sendmsg(pair.a.fd(), &message, 0) == 4);
  auto received = pair.b.receive(buffer);
  REQUIRE(!received);
  CHECK(value(received.error()) == EMSGSIZE);
  CHECK(open_descriptors() == before);
}

TEST_CASE("A packet whose descriptors this process may not open is told from others, has its bytes, and the next one is not hurt") {
  Pair pair;
  const int given[] = {pair.a.fd(), pair.a.fd()};
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const std::size_t open_before = open_descriptors();
  for (const int free : {0, 1}) {
    CAPTURE(free);
    REQUIRE(pair.a.send(bytes("wanted"), given).has_value());
    REQUIRE(pair.a.send(bytes("next")).has_value());
    buffer.fill(std::byte{});
    const rlimit none_left{static_cast<rlim_t>(limit_with(free)), before.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &none_left) == 0);
    auto received = pair.b.receive(buffer);
    auto next = pair.b.receive(std::span(buffer).subspan(100));
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
    REQUIRE(received.has_value());
    CHECK(received->descriptors_missing);
    CHECK(received->descriptors.empty());
    CHECK(received->bytes == 6);
    CHECK(std::memcmp(buffer.data(), "wanted", 6) == 0);
    REQUIRE(next.has_value());
    CHECK(!next->descriptors_missing);
    CHECK(next->bytes == 4);
    CHECK(open_descriptors() == open_before);
  }
  // Longer than the buffer all the same: nobody answers to what he has read a part of.
  REQUIRE(pair.a.send(bytes("longer than eight"), given).has_value());
  const rlimit none_left{static_cast<rlim_t>(limit_with(0)), before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &none_left) == 0);
  auto received = pair.b.receive(std::span(buffer).first(8));
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  REQUIRE(!received);
  CHECK(value(received.error()) == EMSGSIZE);
}

TEST_CASE("A closed peer is zero bytes to a reader and EPIPE to a writer, without a signal") {
  Pair pair;
  pair.a = {};
  auto received = pair.b.receive(buffer);
  REQUIRE(received.has_value());
  CHECK(received->bytes == 0);
  CHECK(value(pair.b.send(bytes("x")).error()) == EPIPE);
}

TEST_CASE("A timed receive gives up in time, also where signals keep interrupting it") {
  Pair pair;
  CHECK(value(pair.b.receive(buffer, 0).error()) == ETIMEDOUT);
  struct sigaction interrupt {};
  struct sigaction before {};
  interrupt.sa_handler = [](int) {};
  REQUIRE(::sigaction(SIGALRM, &interrupt, &before) == 0);
  const itimerval every{{0, 5'000}, {0, 5'000}};
  REQUIRE(::setitimer(ITIMER_REAL, &every, nullptr) == 0);
  const auto timed_out = pair.b.receive(buffer, 60);  // must return at all: the watchdog of the test is the limit
  const itimerval off{};
  ::setitimer(ITIMER_REAL, &off, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  REQUIRE(!timed_out);
  CHECK(value(timed_out.error()) == ETIMEDOUT);
}

TEST_CASE("Who waits for an answer gives up on a peer that is stopped, and not on one that is slow") {
  Directory directory;
  auto listener = vmci::listen_packets(directory.socket(), 0600);
  REQUIRE(listener.has_value());
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {  // its own listener: a socket's peer is who listens
    auto own = vmci::listen_packets(directory.socket() + "2", 0600);
    if (!own || ::fcntl(own->get(), F_SETFL, 0) != 0) ::_exit(1);
    auto ready = PacketSocket::connect(directory.socket());
    const PacketSocket slow(UniqueFd(::accept4(own->get(), nullptr, nullptr, SOCK_CLOEXEC)));
    std::array<std::byte, 8> word;
    if (!ready || !slow.receive(word)) ::_exit(1);
    ::raise(SIGSTOP);
    const timespec longer{0, 100'000'000};  // than the other waits for one that is stopped
    ::nanosleep(&longer, nullptr);
    ::_exit(slow.send(bytes("answer")) && slow.receive(word) ? 0 : 1);
  }
  pollfd waiting{listener->get(), POLLIN, 0};
  REQUIRE(::poll(&waiting, 1, 30'000) == 1);
  auto asker = PacketSocket::connect(directory.socket() + "2");
  REQUIRE(asker.has_value());
  CHECK(asker->peer()->pid == child);
  REQUIRE(asker->send(bytes("ask")).has_value());
  int status = 0;
  REQUIRE(::waitpid(child, &status, WUNTRACED) == child);
  REQUIRE(WIFSTOPPED(status));
  auto given_up = vmci::receive_answer(*asker, buffer, {10});
  REQUIRE(!given_up);
  CHECK(value(given_up.error()) == ETIMEDOUT);
  REQUIRE(::kill(child, SIGCONT) == 0);
  auto answered = vmci::receive_answer(*asker, buffer, {10});
  REQUIRE(answered.has_value());
  CHECK(answered->bytes == 6);
  // It runs, waiting for us, and says nothing any more.
  auto silent = vmci::receive_answer(*asker, buffer, {10, 50});
  REQUIRE(!silent);
  CHECK(value(silent.error()) == ETIMEDOUT);
  REQUIRE(asker->send(bytes("end")).has_value());
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("A full non-blocking socket says EAGAIN") {
  Pair pair;
  REQUIRE(::fcntl(pair.a.fd(), F_SETFL, O_NONBLOCK) == 0);
  vrdma::Status sent = vrdma::ok();
  for (int i = 0; i < 100'000 && sent; ++i) sent = pair.a.send(bytes("fill"));
  REQUIRE(!sent);
  CHECK(value(sent.error()) == EAGAIN);
}

TEST_CASE("Each end knows who the other is, and has a handle on its process") {
  Directory directory;
  auto listener = vmci::listen_packets(directory.socket(), 0600);
  REQUIRE(listener.has_value());
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    auto socket = PacketSocket::connect(directory.socket());
    if (!socket) ::_exit(1);
    std::array<std::byte, 8> one;
    (void)socket->receive(one);  // until the parent closes
    ::_exit(0);
  }
  pollfd waiting{listener->get(), POLLIN, 0};
  REQUIRE(::poll(&waiting, 1, 10'000) == 1);
  PacketSocket accepted(UniqueFd(::accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC)));
  REQUIRE(accepted.fd() >= 0);
  auto peer = accepted.peer();
  REQUIRE(peer.has_value());
  CHECK(peer->pid == child);
  CHECK(peer->uid == ::getuid());
  CHECK(peer->gid == ::getgid());
  auto pidfd = accepted.peer_pidfd();
  REQUIRE(pidfd.has_value());
  pollfd exited{pidfd->get(), POLLIN, 0};
  CHECK(::poll(&exited, 1, 0) == 0);
  accepted = {};
  CHECK(::poll(&exited, 1, 10'000) == 1);
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("Who listens and accepts nobody does not hold up those who connect") {
  Directory directory;
  auto listener = vmci::listen_packets(directory.socket(), 0600);
  REQUIRE(listener.has_value());
  std::vector<PacketSocket> queued;
  auto next = PacketSocket::connect(directory.socket(), 20);
  for (; next && queued.size() < 10'000; next = PacketSocket::connect(directory.socket(), 20)) queued.push_back(std::move(*next));
  REQUIRE(!next);
  CHECK(value(next.error()) == ETIMEDOUT);
  auto second = vmci::listen_packets(directory.socket(), 0600);
  REQUIRE(!second);
  CHECK(value(second.error()) == EADDRINUSE);
}

TEST_CASE("A socket file that nobody serves is replaced; one that is served is EADDRINUSE") {
  Directory directory;
  {
    auto first = vmci::listen_packets(directory.socket(), 0640);
    REQUIRE(first.has_value());
    struct stat status;
    REQUIRE(::stat(directory.socket().c_str(), &status) == 0);
    CHECK((status.st_mode & 0777) == 0640);
    auto second = vmci::listen_packets(directory.socket(), 0600);
    REQUIRE(!second);
    CHECK(value(second.error()) == EADDRINUSE);
    CHECK(PacketSocket::connect(directory.socket()).has_value());
  }
  CHECK(value(PacketSocket::connect(directory.socket()).error()) == ECONNREFUSED);  // the file is still there
  auto again = vmci::listen_packets(directory.socket(), 0600);
  REQUIRE(again.has_value());
  CHECK(PacketSocket::connect(directory.socket()).has_value());
}

TEST_CASE("A file that is no socket is never removed") {
  Directory directory;
  std::ofstream(directory.socket()) << "precious";
  auto listening = vmci::listen_packets(directory.socket(), 0600);
  REQUIRE(!listening);
  CHECK(value(listening.error()) == ENOTSOCK);
  std::string content;
  std::ifstream(directory.socket()) >> content;
  CHECK(content == "precious");
}

TEST_CASE("Paths that cannot be are refused with their reason") {
  Directory directory;
  CHECK(value(PacketSocket::connect(directory.path + "/none").error()) == ENOENT);
  CHECK(value(PacketSocket::connect(std::string(200, 'x')).error()) == ENAMETOOLONG);
  CHECK(value(vmci::listen_packets(std::string(200, 'x'), 0600).error()) == ENAMETOOLONG);
  CHECK(value(vmci::listen_packets(directory.path + "/no/such/s", 0600).error()) == ENOENT);
}
