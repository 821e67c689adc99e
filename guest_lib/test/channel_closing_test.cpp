// Programs whose main thread closes the channel of rdma_cm below the thread that reads its events, as rping's does.
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <array>
#include <iterator>

#include "guest_lib/test/cm_channel.hpp"
#include "guest_lib/test/service_fixture.hpp"
#include "vmci_channel/unique_fd.hpp"

using namespace vrdma::test;

namespace {

// With an event to come.
struct Channel : CmChannel {
  Channel() { resolve(create(1)); }
};

// What a child of fork(2) or vfork(2) ended with.
int code_of(pid_t child) {
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("Who waits for an event of a channel that is closed, or has one and asks for the next, waits for ever, and can be cancelled") {
  Service service;
  service.start();
  for (const bool asks_later : {false, true}) {
    CAPTURE(asks_later);
    const Channel channel;
    std::atomic<pid_t> thread = 0;
    std::atomic<bool> closed = false, answered = false;
    std::thread reader([&] {
      const bool has_one = channel.next_event() > 0;
      thread = ::gettid();
      while (asks_later && !closed) std::this_thread::yield();
      answered = channel.next_event() != -2 || !has_one;
    });
    eventually("the event is there", [&] { return thread != 0; });
    if (!asks_later) eventually("it waits for the next", [&] { return answered || sleeps(thread); });
    REQUIRE(::close(channel.fd) == 0);
    closed = true;
    eventually("it waits", [&] { return answered || sleeps(thread); });
    CHECK_FALSE(answered);
    REQUIRE(pthread_cancel(reader.native_handle()) == 0);
    reader.join();
  }
}

TEST_CASE("What else a thread writes to a closed descriptor, when it has read events, fails") {
  Service service;
  service.start();
  const Channel channel;
  std::atomic<int> failed = 0;
  std::thread reader([&] {
    if (channel.next_event() <= 0 || ::close(channel.fd) != 0) return;
    // The length that comes first has the number of the command that asks for an event.
    const struct {
      std::uint32_t length;
      char text[12];
    } message{12, "hello world"};
    if (::write(channel.fd, &message, sizeof(message)) < 0 && errno == EBADF) ++failed;
    rdma_ucm_event_resp event{};
    if (ask(channel.fd + 1000, RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{}, event) < 0 && errno == EBADF) ++failed;
    failed += 10;
  });
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (failed < 10 && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(failed == 12);
  if (failed < 10) pthread_cancel(reader.native_handle());
  reader.join();
}

TEST_CASE("A descriptor that is closed by another way than close(2) gives back its channel") {
  Service service;
  service.start(R"({"quota": {"objects": 8}})");
  for (int i = 0; i < 20; ++i) {
    const int fd = ::open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0);
    REQUIRE(::syscall(SYS_close_range, fd, fd, 0) == 0);
  }
}

TEST_CASE("Children close what is theirs, and have nothing of their parent's channel") {
  Service service;
  service.start();
  const Channel channel;
  const pid_t neighbour = ::vfork();
  if (neighbour == 0) {
    ::close(channel.fd);
    ::_exit(0);
  }
  CHECK(code_of(neighbour) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool refused = channel.next_event() < 0 && errno == EIO;
    const bool closed = ::close(channel.fd) == 0 && ::fcntl(channel.fd, F_GETFD) < 0;
    const bool reused = ::dup2(::open("/dev/null", O_RDWR), channel.fd) == channel.fd;
    ::_exit(refused && closed && reused && ::write(channel.fd, "x", 1) == 1 ? 0 : 1);
  }
  CHECK(code_of(child) == 0);
  CHECK(channel.next_event() > 0);
  CHECK(::close(channel.fd) == 0);
}

TEST_CASE("What a child of vfork(2) opens before its end leaves its parent what it has closed") {
  Service service;
  service.start(R"({"quota": {"objects": 4}})");
  const auto open = [] { return ::open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC); };
  const std::array<int, 3> fds{open(), open(), open()};
  const pid_t visitor = ::vfork();
  if (visitor == 0) ::_exit(open() >= 0 ? 0 : 1);
  CHECK(code_of(visitor) == 0);
  for (const int fd : fds) CHECK(::close(fd) == 0);
  const int fd = open();  // EDQUOT if the memory passes for the child's, which has closed nothing
  CHECK(fd >= 0);
  ::close(fd);
}

TEST_CASE("A channel whose identifiers have been told that the service is gone is not readable any more, and who asks is told so at once") {
  Service service;
  service.start();
  const CmChannel channel;
  channel.create(1);
  channel.create(2);
  const auto readable = [&] {
    pollfd one{channel.fd, POLLIN, 0};
    return ::poll(&one, 1, 0) == 1;
  };
  const vmci::UniqueFd watching(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event told{.events = EPOLLIN, .data = {}};
  REQUIRE(::epoll_ctl(watching.get(), EPOLL_CTL_ADD, channel.fd, &told) == 0);
  CHECK_FALSE(readable());
  const pid_t child = ::fork();  // has the same open file
  if (child == 0) ::prctl(PR_SET_PDEATHSIG, SIGKILL), ::pause(), ::_exit(0);
  service.kill_now();
  eventually("it is readable", readable);
  for (int i = 0; i < 2; ++i) {
    CHECK(readable());
    CHECK(::epoll_wait(watching.get(), &told, 1, 0) == 1);
    CHECK(channel.next_event() > 0);
  }
  CHECK_FALSE(readable());  // rsockets' thread, which asks after each event, would spin
  CHECK(::epoll_wait(watching.get(), &told, 1, 0) == 0);
  CHECK(channel.next_event() < 0);
  CHECK(errno == EIO);
  CHECK_FALSE(readable());
  CHECK(::epoll_ctl(watching.get(), EPOLL_CTL_DEL, channel.fd, nullptr) == 0);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  CHECK(::close(channel.fd) == 0);
}

TEST_CASE("Of the service's end, who was connected hears that the connection has ended, and who was rejected after all does not") {
  for (const bool rejects : {false, true}) {
    CAPTURE(rejects);
    Service service;
    service.start();
    const CmChannel channel;
    constexpr std::uint64_t listens = 1, calls = 2, called = 3;
    const auto at = [](sockaddr_in6& to) {
      auto& address = reinterpret_cast<sockaddr_in&>(to);
      address.sin_family = AF_INET;
      address.sin_port = htons(5000);
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    };
    const auto expect = [&](std::uint32_t event, std::uint64_t uid) {
      rdma_ucm_event_resp told{};
      REQUIRE(channel.next_event(told) > 0);
      CHECK(told.event == event);
      CHECK(told.uid == uid);
      return told.id;
    };
    rdma_ucm_bind_ip bind{};
    bind.id = channel.create(listens);
    at(bind.addr);
    REQUIRE(say(channel.fd, RDMA_USER_CM_CMD_BIND_IP, bind) > 0);
    rdma_ucm_listen listen{};
    listen.id = bind.id;
    REQUIRE(say(channel.fd, RDMA_USER_CM_CMD_LISTEN, listen) > 0);
    rdma_ucm_resolve_ip resolve{};
    resolve.id = channel.create(calls);
    resolve.timeout_ms = 1000;
    at(resolve.dst_addr);
    REQUIRE(say(channel.fd, RDMA_USER_CM_CMD_RESOLVE_IP, resolve) > 0);
    expect(0, calls);  // RDMA_CM_EVENT_ADDR_RESOLVED
    rdma_ucm_resolve_route route{};
    route.id = resolve.id;
    route.timeout_ms = 1000;
    REQUIRE(say(channel.fd, RDMA_USER_CM_CMD_RESOLVE_ROUTE, route) > 0);
    expect(2, calls);  // _ROUTE_RESOLVED
    rdma_ucm_connect connect{};
    connect.id = resolve.id;
    connect.conn_param.valid = 1;
    REQUIRE(say(channel.fd, RDMA_USER_CM_CMD_CONNECT, connect) > 0);
    rdma_ucm_accept accept{};
    accept.id = expect(4, listens);  // _CONNECT_REQUEST
    accept.uid = called;
    accept.conn_param.valid = 1;
    REQUIRE(say(channel.fd, RDMA_USER_CM_CMD_ACCEPT, accept) > 0);
    expect(5, calls);  // _CONNECT_RESPONSE
    rdma_ucm_reject reject{};
    reject.id = accept.id;
    if (rejects) REQUIRE(say(channel.fd, RDMA_USER_CM_CMD_REJECT, reject) > 0);
    if (rejects) expect(8, calls);  // _REJECTED
    service.kill_now();
    int ends = 0, removals = 0;
    rdma_ucm_event_resp told{};
    while (channel.next_event(told) > 0) ++(told.event == 10 ? ends : removals);  // _DISCONNECTED
    CHECK(errno == EIO);
    CHECK(ends == !rejects);
    CHECK(removals == 3);
    CHECK(::close(channel.fd) == 0);
  }
}
