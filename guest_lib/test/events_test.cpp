// Completion and asynchronous events: acknowledgement, descriptors, and what a fork's child may do.
#include <fcntl.h>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

struct Pair {
  Device& device;
  ChannelPtr channel{ibv_create_comp_channel(device.context)};
  CqPtr send_cq = make_cq(device), receive_cq = make_cq(device, 64, channel.get());
  QpPtr sender = make_qp(device, send_cq.get()), receiver = make_qp(device, receive_cq.get());

  explicit Pair(Device& on) : device(on) {
    connect(sender.get(), receiver->qp_num);
    connect(receiver.get(), sender->qp_num);
  }
  void message(unsigned flags = IBV_SEND_SIGNALED) {
    REQUIRE(post_recv(device, receiver.get(), 1) == 0);
    REQUIRE(post_send(device, sender.get(), 2, flags) == 0);
    collect(send_cq.get(), 1);
  }
};

int drain_events(ibv_comp_channel* channel) {
  int events = 0;
  while (readable(channel->fd)) {
    ibv_cq* cq;
    void* context;
    REQUIRE(ibv_get_cq_event(channel, &cq, &context) == 0);
    ibv_ack_cq_events(cq, 1);
    ++events;
  }
  return events;
}

}  // namespace

TEST_CASE("one event for each arm, none without, and a solicited arm does not weaken a full one") {
  Service service;
  service.start();
  Device device;
  Pair pair(device);
  pair.message();
  CHECK(drain_events(pair.channel.get()) == 0);
  REQUIRE(ibv_req_notify_cq(pair.receive_cq.get(), 0) == 0);
  REQUIRE(ibv_req_notify_cq(pair.receive_cq.get(), 1) == 0);
  pair.message();
  pair.message();
  eventually("an event", [&] { return readable(pair.channel->fd); });
  CHECK(drain_events(pair.channel.get()) == 1);
  REQUIRE(ibv_req_notify_cq(pair.receive_cq.get(), 1) == 0);
  pair.message();
  CHECK(drain_events(pair.channel.get()) == 0);
  pair.message(IBV_SEND_SIGNALED | IBV_SEND_SOLICITED);
  eventually("an event", [&] { return readable(pair.channel->fd); });
  CHECK(drain_events(pair.channel.get()) == 1);
  CHECK(collect(pair.receive_cq.get(), 5).size() == 5);
}

TEST_CASE("destroying a completion queue waits for the acknowledgement of events that were read, and of no others") {
  Service service;
  service.start();
  Device device;
  ChannelPtr channel(ibv_create_comp_channel(device.context));
  ibv_cq* cq = ibv_create_cq(device.context, 16, nullptr, channel.get(), 0);
  REQUIRE(cq != nullptr);
  {
    QpPtr a = make_qp(device, cq), b = make_qp(device, cq);
    connect(a.get(), b->qp_num);
    connect(b.get(), a->qp_num);
    for (int event = 0; event < 2; ++event) {  // the second is never read
      REQUIRE(ibv_req_notify_cq(cq, 0) == 0);
      REQUIRE(post_recv(device, b.get(), 1) == 0);
      REQUIRE(post_send(device, a.get(), 2) == 0);
      collect(cq, 2);
      eventually("an event", [&] { return readable(channel->fd); });
      if (event == 0) {
        ibv_cq* of;
        void* context;
        REQUIRE(ibv_get_cq_event(channel.get(), &of, &context) == 0);
        CHECK(of == cq);
      }
    }
  }
  destroy_waits_for_acknowledgement(cq, [&] { CHECK(ibv_destroy_cq(cq) == 0); });
  // The unread event of the destroyed queue is skipped.
  REQUIRE(::fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
  ibv_cq* of;
  void* context;
  CHECK(ibv_get_cq_event(channel.get(), &of, &context) == -1);
  CHECK(errno == EAGAIN);
}

TEST_CASE("a queue pair's error is an asynchronous event on it, and its destruction waits for the acknowledgement") {
  Service service;
  service.start();
  Device device;
  CqPtr cq = make_cq(device);
  QpPtr a = make_qp(device, cq.get()), b = make_qp(device, cq.get());
  connect(a.get(), b->qp_num);
  connect(b.get(), a->qp_num);
  ibv_sge sge = device.sge();
  ibv_send_wr wr{};
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.wr.rdma.remote_addr = sge.addr;
  wr.wr.rdma.rkey = device.mr->rkey + 1;
  ibv_send_wr* bad = nullptr;
  REQUIRE(ibv_post_send(a.get(), &wr, &bad) == 0);
  CHECK(collect(cq.get(), 1)[0].status == IBV_WC_REM_ACCESS_ERR);
  ibv_async_event event;
  REQUIRE(ibv_get_async_event(device.context, &event) == 0);
  CHECK(event.event_type == IBV_EVENT_QP_ACCESS_ERR);
  CHECK(event.element.qp == b.get());
  std::atomic<bool> acknowledged{false}, destroyed_after{false};
  std::thread destroyer([&] {
    b.reset();
    destroyed_after = acknowledged.load();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // as above
  acknowledged = true;
  ibv_ack_async_event(&event);
  destroyer.join();
  CHECK(destroyed_after);
}

TEST_CASE("objects in use are not destroyed") {
  Service service;
  service.start();
  Device device;
  ChannelPtr channel(ibv_create_comp_channel(device.context));
  CqPtr cq = make_cq(device, 16, channel.get());
  QpPtr qp = make_qp(device, cq.get());
  CHECK(ibv_dealloc_pd(device.pd) == EBUSY);
  CHECK(ibv_destroy_cq(cq.get()) == EBUSY);
  CHECK(ibv_destroy_comp_channel(channel.get()) == EBUSY);
}

// As with rdma-core, where it is a file of its own.
TEST_CASE("a completion channel may outlive its device") {
  Service service;
  service.start();
  const Device device;
  ibv_context* const context = ibv_open_device(device.context->device);
  REQUIRE(context != nullptr);
  ibv_comp_channel* const channel = ibv_create_comp_channel(context);
  REQUIRE(channel != nullptr);
  const int fd = channel->fd;
  CHECK(ibv_close_device(context) == 0);
  CHECK(ibv_destroy_comp_channel(channel) == 0);
  CHECK(::fcntl(fd, F_GETFD) == -1);
}

TEST_CASE("a fork's child makes its own objects on the parent's context and cannot touch the parent's rings") {
  Service service;
  service.start();
  Device device;
  Pair pair(device);
  pair.message();
  const pid_t child = ::fork();
  if (child == 0) {
    int wrong = 0;
    ibv_wc wc;
    wrong |= ibv_poll_cq(pair.send_cq.get(), 1, &wc) >= 0 ? 1 : 0;
    wrong |= post_send(device, pair.sender.get(), 3) != EIO ? 2 : 0;
    wrong |= post_recv(device, pair.receiver.get(), 3) != EIO ? 4 : 0;
    ibv_pd* pd = ibv_alloc_pd(device.context);
    wrong |= pd == nullptr ? 8 : 0;
    static char memory[4096];
    const int local_write = IBV_ACCESS_LOCAL_WRITE;
    ibv_mr* mr = pd != nullptr ? ibv_reg_mr(pd, memory, sizeof(memory), local_write) : nullptr;
    wrong |= mr == nullptr ? 16 : 0;
    ibv_mr* on_parents_pd = ibv_reg_mr(device.pd, memory, sizeof(memory), local_write);
    wrong |= on_parents_pd == nullptr ? 32 : 0;
    ibv_cq* cq = ibv_create_cq(device.context, 16, nullptr, nullptr, 0);
    wrong |= cq == nullptr || ibv_poll_cq(cq, 1, &wc) != 0 ? 64 : 0;
    ibv_port_attr port{};
    wrong |= ibv_query_port(device.context, 1, &port) != 0 || port.state != IBV_PORT_ACTIVE ? 128 : 0;
    ::_exit(wrong);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  pair.message();  // the parent has noticed nothing
  CHECK(collect(pair.receive_cq.get(), 2).size() == 2);
}

TEST_CASE("a fork's child has the address that its parent has told others, also when the parent has gone") {
  Service service;
  service.start();
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    const pid_t origin = ::getpid();
    Device device;
    ibv_port_attr port{}, later{};
    ibv_gid gid{}, gid_later{};
    bool same = ibv_query_port(device.context, 1, &port) == 0 && ibv_query_gid(device.context, 1, 0, &gid) == 0;
    for (const bool daemon : {false, true}) {
      const pid_t child = ::fork();
      if (child != 0 && !daemon) ::waitpid(child, nullptr, 0);
      if (child != 0) continue;
      while (daemon && ::getppid() == origin) ::usleep(1000);
      same &= ibv_query_port(device.context, 1, &later) == 0 && ibv_query_gid(device.context, 1, 0, &gid_later) == 0;
      same &= later.lid == port.lid && port.lid != 0 && std::memcmp(&gid, &gid_later, sizeof(gid)) == 0;
      ibv_pd* const pd = ibv_alloc_pd(device.context);
      static char memory[4096];
      const int access = IBV_ACCESS_LOCAL_WRITE;
      same &= pd != nullptr && ibv_reg_mr(pd, memory, sizeof(memory), access) != nullptr;
      const char answer = same ? 'y' : 'n';
      [[maybe_unused]] const auto written = ::write(ends[1], &answer, 1);
      ::_exit(0);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  REQUIRE(::waitpid(parent, nullptr, 0) == parent);
  std::string answers(2, ' ');
  for (char& answer : answers) REQUIRE(::read(ends[0], &answer, 1) == 1);
  ::close(ends[0]);
  CHECK(answers == "yy");
}

TEST_CASE("who arms after a poll is told of what came in between, who arms before it is not told twice") {
  Service service;
  service.start();
  Device device;
  Pair pair(device);
  ibv_cq* const cq = pair.receive_cq.get();
  ibv_wc wc;
  CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
  pair.message();
  REQUIRE(ibv_req_notify_cq(cq, 0) == 0);
  // Without another poll: UCX sleeps now. Not always at once: who announces the completion may have seen the arm, and be about to write.
  eventually("an event", [&] { return readable(pair.channel->fd); });
  CHECK(drain_events(pair.channel.get()) == 1);
  REQUIRE(ibv_req_notify_cq(cq, 0) == 0);
  CHECK(ibv_poll_cq(cq, 1, &wc) == 1);
  CHECK(drain_events(pair.channel.get()) == 0);
  pair.message();
  eventually("an event", [&] { return readable(pair.channel->fd); });
  CHECK(drain_events(pair.channel.get()) == 1);
  CHECK(collect(cq, 1).size() == 1);
}

namespace {

// As ib_send_lat -e: two CQs on one channel, a send queue of one, and the event that follows a send is that of the send.
struct Side {
  Device& device;
  ChannelPtr channel{ibv_create_comp_channel(device.context)};
  CqPtr send_cq = make_cq(device, 1, channel.get()), receive_cq = make_cq(device, 64, channel.get());
  QpPtr qp;

  explicit Side(Device& on) : device(on) {
    ibv_qp_init_attr init{};
    init.send_cq = send_cq.get();
    init.recv_cq = receive_cq.get();
    init.qp_type = IBV_QPT_RC;
    init.cap = {1, 64, 1, 1, 0};
    qp.reset(ibv_create_qp(device.pd, &init));
    REQUIRE(qp != nullptr);
    REQUIRE(ibv_req_notify_cq(send_cq.get(), 0) == 0);
    REQUIRE(ibv_req_notify_cq(receive_cq.get(), 0) == 0);
  }
  void connect_to(const Side& peer) {
    connect(qp.get(), peer.qp->qp_num);
    for (std::uint64_t i = 0; i < 64; ++i) REQUIRE(post_recv(device, qp.get(), i) == 0);
  }

  // False: the event was of the other CQ, or for nothing.
  bool await(ibv_cq* wanted) {
    ibv_cq* cq;
    void* context;
    if (ibv_get_cq_event(channel.get(), &cq, &context) != 0) return false;
    ibv_ack_cq_events(cq, 1);
    ibv_wc wc;
    return ibv_req_notify_cq(cq, 0) == 0 && ibv_poll_cq(wanted, 1, &wc) == 1 && wc.status == IBV_WC_SUCCESS;
  }
  bool send() { return post_send(device, qp.get(), 1) == 0 && await(send_cq.get()); }
  bool receive() { return await(receive_cq.get()) && post_recv(device, qp.get(), 1) == 0; }
};

}  // namespace

TEST_CASE("no event comes for a completion that was already polled, however close they follow one another") {
  Service service;
  service.start();
  Device device;
  Side a(device), b(device);
  a.connect_to(b);
  b.connect_to(a);
  constexpr int turns = 3000;
  std::atomic<bool> wrong{false};
  // Both queue pairs to the error state: what is outstanding is flushed, so that the other side does not wait for ever.
  const auto fail = [&](Side& side) {
    wrong = true;
    ibv_qp_attr error{};
    error.qp_state = IBV_QPS_ERR;
    (void)ibv_modify_qp(side.qp.get(), &error, IBV_QP_STATE);
  };
  std::thread other([&] {
    for (int i = 0; i < turns && !wrong; ++i)
      if (!b.receive() || !b.send()) {
        fail(a);
        fail(b);
      }
  });
  for (int i = 0; i < turns && !wrong; ++i)
    if (!a.send() || !a.receive()) {
      fail(a);
      fail(b);
    }
  other.join();
  CHECK_FALSE(wrong);
}
