// Programs whose main thread closes the channel of rdma_cm below the thread that reads its events, as rping's does.
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <rdma/rdma_user_cm.h>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

template <class Command, class Answer>
long say(int channel, std::uint32_t command, Command body, Answer& answer) {
  struct {
    rdma_ucm_cmd_hdr head;
    Command body;
  } whole{{command, sizeof(Command), sizeof(Answer)}, body};
  whole.body.response = reinterpret_cast<std::uintptr_t>(&answer);
  return ::write(channel, &whole, sizeof(whole));
}

class Channel {
 public:
  Channel() : fd(::open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC)) {
    REQUIRE(fd >= 0);
    rdma_ucm_create_id create{};
    create.uid = 1;  // without one it has no events
    create.ps = RDMA_PS_TCP;
    rdma_ucm_create_id_resp created{};
    REQUIRE(say(fd, RDMA_USER_CM_CMD_CREATE_ID, create, created) > 0);
    rdma_ucm_resolve_ip resolve{};
    resolve.id = created.id;
    resolve.timeout_ms = 1000;
    resolve.dst_addr.sin6_family = AF_INET;
    reinterpret_cast<sockaddr_in&>(resolve.dst_addr).sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct {
      rdma_ucm_cmd_hdr head;
      rdma_ucm_resolve_ip body;
    } asked{{RDMA_USER_CM_CMD_RESOLVE_IP, sizeof(resolve), 0}, resolve};
    REQUIRE(::write(fd, &asked, sizeof(asked)) > 0);
  }

  long next_event() const {
    rdma_ucm_event_resp event{};
    return say(fd, RDMA_USER_CM_CMD_GET_EVENT, rdma_ucm_get_event{}, event);
  }

  const int fd;
};

}  // namespace

TEST_CASE("A channel is not closed before the thread that has its last event asks for the next one, which waits for ever") {
  Service service;
  service.start();
  const Channel channel;
  std::atomic<int> step = 0;  // 1: it has the event, 2: the channel is being closed, 3: it asks for the next one
  std::thread reader([&] {
    REQUIRE(channel.next_event() > 0);
    step = 1;
    while (step != 2) std::this_thread::yield();
    step = 3;
    (void)channel.next_event();
    FAIL("a closed channel has answered");
  });
  eventually("the event is there", [&] { return step == 1; });
  step = 2;
  REQUIRE(::close(channel.fd) == 0);
  CHECK(step == 3);
  REQUIRE(pthread_cancel(reader.native_handle()) == 0);  // it is a cancellation point, as write(2) is
  reader.join();
}

TEST_CASE("A channel is closed at once when the thread that had its last event is gone, or is the one that closes") {
  Service service;
  service.start();
  const Channel other, own;
  std::thread([&] { REQUIRE(other.next_event() > 0); }).join();
  REQUIRE(own.next_event() > 0);
  for (const int fd : {other.fd, own.fd}) {
    REQUIRE(::close(fd) == 0);
    CHECK(::fcntl(fd, F_GETFD) == -1);
  }
}
