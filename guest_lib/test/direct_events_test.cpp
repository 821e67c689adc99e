// Completion channels in direct mode: the posting thread raises the events, of its peer's queues and of its own.
#include <fcntl.h>

#include <atomic>

#include "guest_lib/test/direct_pair.hpp"

using namespace vrdma::test;

namespace {

int drain_events(ibv_comp_channel* channel, ibv_cq* of = nullptr) {
  int events = 0;
  while (readable(channel->fd)) {
    ibv_cq* cq;
    void* context;
    REQUIRE(ibv_get_cq_event(channel, &cq, &context) == 0);
    if (of != nullptr) CHECK(cq == of);
    ibv_ack_cq_events(cq, 1);
    ++events;
  }
  return events;
}

// One message, whose completions are polled. What it raises is there afterwards, whoever has carried it out.
void message(const Pair& pair, unsigned flags = 0) {
  REQUIRE(pair.receive(1, 4096, 64) == 0);
  REQUIRE(pair.post(pair.a.get(), IBV_WR_SEND, 2, pair.near.sge(0, 64), 0, 0, flags) == 0);
  CHECK(collect(pair.b_cq.get(), 1).front().status == IBV_WC_SUCCESS);
  CHECK(collect(pair.a_cq.get(), 1).front().status == IBV_WC_SUCCESS);
}

// All memory that messages need is mapped, and the connection is direct.
bool ready(const Pair& pair) {
  if (!pair.become_direct()) return false;
  message(pair);
  eventually("it is direct with all it needs", [&] { return mode_of(pair.a.get()) == "direct"; });
  return true;
}

}  // namespace

TEST_CASE("the posting thread raises one event for each arm, none without, and only of solicited messages where that was asked for") {
  Service service;
  service.start(with_direct);
  Pair pair(Channels::of_both_ends);
  if (!ready(pair)) return;
  const Stopped stopped(service);
  for (int round = 0; round < 50; ++round) {
    message(pair);
    CHECK(drain_events(pair.b_channel.get()) == 0);
    REQUIRE(ibv_req_notify_cq(pair.b_cq.get(), 0) == 0);
    REQUIRE(ibv_req_notify_cq(pair.b_cq.get(), 1) == 0);  // does not weaken the other
    message(pair);
    message(pair);
    CHECK(drain_events(pair.b_channel.get(), pair.b_cq.get()) == 1);
    REQUIRE(ibv_req_notify_cq(pair.b_cq.get(), 1) == 0);
    message(pair);
    CHECK(drain_events(pair.b_channel.get()) == 0);
    message(pair, IBV_SEND_SOLICITED);
    CHECK(drain_events(pair.b_channel.get(), pair.b_cq.get()) == 1);
    message(pair, IBV_SEND_SOLICITED);
    CHECK(drain_events(pair.b_channel.get()) == 0);
    // Its own completions: any of them where next was asked for; none is solicited.
    REQUIRE(ibv_req_notify_cq(pair.a_cq.get(), 1) == 0);
    message(pair, IBV_SEND_SOLICITED);
    CHECK(drain_events(pair.a_channel.get()) == 0);
    REQUIRE(ibv_req_notify_cq(pair.a_cq.get(), 0) == 0);
    REQUIRE(pair.post(pair.a.get(), IBV_WR_RDMA_WRITE, 1, pair.near.sge(0, 8), 0) == 0);
    CHECK(drain_events(pair.a_channel.get(), pair.a_cq.get()) == 1);
    CHECK(collect(pair.a_cq.get(), 1).size() == 1);
    CHECK(drain_events(pair.b_channel.get()) == 0);
  }
}

TEST_CASE("who arms after a poll is told of what came in between, and who polls after the arm finds it") {
  Service service;
  service.start(with_direct);
  Pair pair(Channels::of_both_ends);
  if (!ready(pair)) return;
  const Stopped stopped(service);
  ibv_cq* const cq = pair.b_cq.get();
  ibv_wc wc;
  for (int round = 0; round < 50; ++round) {
    CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
    REQUIRE(pair.receive(1, 0, 64) == 0);
    REQUIRE(pair.send(2, 0, 64) == 0);
    CHECK(collect(pair.a_cq.get(), 1).size() == 1);
    REQUIRE(ibv_req_notify_cq(cq, 0) == 0);
    CHECK(drain_events(pair.b_channel.get(), cq) == 1);  // without another poll: UCX sleeps now
    REQUIRE(ibv_req_notify_cq(cq, 0) == 0);
    CHECK(ibv_poll_cq(cq, 1, &wc) == 1);
    CHECK(drain_events(pair.b_channel.get()) == 0);
    message(pair);
    CHECK(drain_events(pair.b_channel.get(), cq) == 1);
  }
}

namespace {

// As ib_send_lat -e: two CQs on one channel, and the event that follows a send is that of the send.
struct Side {
  explicit Side(const Device& device) : channel(ibv_create_comp_channel(device.context)) {
    send_cq = make_cq(device, 64, channel.get()), receive_cq = make_cq(device, 64, channel.get());
    ibv_qp_init_attr init{};
    init.send_cq = send_cq.get(), init.recv_cq = receive_cq.get();
    init.qp_type = IBV_QPT_RC;
    init.cap = {16, 16, 1, 1, 0};
    qp.reset(ibv_create_qp(device.pd, &init));
    REQUIRE(qp != nullptr);
  }
  int post_receive(const Pages& pages) const {
    ibv_sge sge = pages.sge(0, 8);
    ibv_recv_wr wr{1, nullptr, &sge, 1}, *bad = nullptr;
    return ibv_post_recv(qp.get(), &wr, &bad);
  }
  int post_send(const Pages& pages) const {
    ibv_sge sge = pages.sge(64, 8);
    ibv_send_wr wr{}, *bad = nullptr;
    wr.sg_list = &sge, wr.num_sge = 1, wr.opcode = IBV_WR_SEND, wr.send_flags = IBV_SEND_SIGNALED;
    return ibv_post_send(qp.get(), &wr, &bad);
  }
  // Sleeps. False: the event was of the other CQ, or for nothing.
  bool await(ibv_cq* wanted) const {
    ibv_cq* cq;
    void* context;
    if (ibv_get_cq_event(channel.get(), &cq, &context) != 0) return false;
    ibv_ack_cq_events(cq, 1);
    ibv_wc wc;
    return cq == wanted && ibv_req_notify_cq(cq, 0) == 0 && ibv_poll_cq(wanted, 1, &wc) == 1 && wc.status == IBV_WC_SUCCESS;
  }
  bool send(const Pages& pages) const { return post_send(pages) == 0 && await(send_cq.get()); }
  bool receive(const Pages& pages) const { return await(receive_cq.get()) && post_receive(pages) == 0; }

  ChannelPtr channel;
  CqPtr send_cq, receive_cq;
  QpPtr qp;
};

}  // namespace

TEST_CASE("two threads that sleep between their messages wake one another, and no event is for nothing") {
  Service service;
  service.start(with_direct);
  Device device;
  const Pages pages(device);
  Side a(device), b(device);
  connect(a.qp.get(), b.qp->qp_num);
  connect(b.qp.get(), a.qp->qp_num);
  for (const Side* side : {&a, &b}) {
    for (int i = 0; i < 16; ++i) REQUIRE(side->post_receive(pages) == 0);
    REQUIRE(ibv_req_notify_cq(side->send_cq.get(), 0) == 0);
    REQUIRE(ibv_req_notify_cq(side->receive_cq.get(), 0) == 0);
  }
  constexpr int turns = 2000;
  std::atomic<bool> wrong{false};
  // Both to the error state: what is outstanding is flushed, so that the other side does not wait for ever.
  const auto fail = [&] {
    wrong = true;
    ibv_qp_attr error{};
    error.qp_state = IBV_QPS_ERR;
    for (const Side* side : {&a, &b}) (void)ibv_modify_qp(side->qp.get(), &error, IBV_QP_STATE);
  };
  std::thread other([&] {
    for (int i = 0; i < turns && !wrong; ++i)
      if (!b.receive(pages) || !b.send(pages)) fail();
  });
  for (int i = 0; i < turns && !wrong; ++i)
    if (!a.send(pages) || !a.receive(pages)) fail();
  other.join();
  CHECK_FALSE(wrong);
}

TEST_CASE("completion queues of direct and of mediated queue pairs share a channel: each arm has its event, read or not") {
  Service service;
  service.start(with_direct);
  Pair pair(Channels::of_both_ends);
  if (!ready(pair)) return;
  Device& device = pair.device;
  ibv_comp_channel* const channel = pair.b_channel.get();
  // Another direct connection and one whose end is its own, which stays the service's; all three complete on the one channel.
  const CqPtr sends = make_cq(device), second_cq = make_cq(device, 256, channel), own_cq = make_cq(device, 256, channel);
  const QpPtr second_a = make_qp(device, sends.get()), second_b = make_qp(device, second_cq.get()), own = make_qp(device, own_cq.get());
  connect(second_a.get(), second_b->qp_num);
  connect(second_b.get(), second_a->qp_num);
  connect(own.get(), own->qp_num);
  eventually("the second is direct", [&] { return mode_of(second_a.get()) == "direct"; });
  CHECK(mode_of(own.get()) == "mediated");
  for (int round = 0; round < 100; ++round) {
    for (ibv_cq* cq : {pair.b_cq.get(), second_cq.get(), own_cq.get()}) REQUIRE(ibv_req_notify_cq(cq, 0) == 0);
    REQUIRE(post_recv(device, second_b.get(), 1) == 0);
    REQUIRE(post_recv(device, own.get(), 1) == 0);
    REQUIRE(post_send(device, own.get(), 2) == 0);
    message(pair);
    REQUIRE(post_send(device, second_a.get(), 2) == 0);
    CHECK(collect(sends.get(), 1).size() == 1);
    int seen[3] = {};
    for (int event = 0; event < 3; ++event) {
      ibv_cq* cq;
      void* context;
      REQUIRE(ibv_get_cq_event(channel, &cq, &context) == 0);
      ibv_ack_cq_events(cq, 1);
      ++seen[cq == pair.b_cq.get() ? 0 : cq == second_cq.get() ? 1 : 2];
    }
    for (const int events : seen) CHECK(events == 1);
    CHECK(collect(second_cq.get(), 1).size() == 1);
    CHECK(collect(own_cq.get(), 2).size() == 2);
  }
  CHECK(drain_events(channel) == 0);
}

TEST_CASE("events that nobody reads fill the pipe, and none is lost") {
  Service service;
  service.start(with_direct);
  Pair pair(Channels::of_both_ends);
  if (!ready(pair)) return;
  constexpr int arms = 4096 + 300;  // what a pipe takes, and more
  for (int i = 0; i < arms; ++i) {
    REQUIRE(ibv_req_notify_cq(pair.b_cq.get(), 0) == 0);
    message(pair);
    // Where the service has carried it out, the completion is there before the arm is claimed: what is asked afterwards comes after that.
    ibv_pd* const pd = ibv_alloc_pd(pair.device.context);
    REQUIRE(pd != nullptr);
    REQUIRE(ibv_dealloc_pd(pd) == 0);
  }
  for (int event = 0; event < arms; ++event) {
    ibv_cq* cq;
    void* context;
    REQUIRE(ibv_get_cq_event(pair.b_channel.get(), &cq, &context) == 0);
    REQUIRE(cq == pair.b_cq.get());
    ibv_ack_cq_events(cq, 1);
  }
  CHECK(drain_events(pair.b_channel.get()) == 0);
}

TEST_CASE("resizing and destroying a queue whose events a poster raises") {
  Service service;
  service.start(with_direct);
  Pair pair(Channels::of_both_ends);
  if (!ready(pair)) return;
  REQUIRE(ibv_resize_cq(pair.b_cq.get(), 512) == 0);
  eventually("it is direct again", [&] { return message(pair), mode_of(pair.a.get()) == "direct"; });
  REQUIRE(ibv_req_notify_cq(pair.b_cq.get(), 0) == 0);
  message(pair);
  ibv_cq* cq;
  void* context;
  REQUIRE(ibv_get_cq_event(pair.b_channel.get(), &cq, &context) == 0);
  CHECK(cq == pair.b_cq.get());
  REQUIRE(ibv_req_notify_cq(pair.b_cq.get(), 0) == 0);
  message(pair);  // its event is never read
  CHECK(readable(pair.b_channel->fd));
  pair.b.reset();
  destroy_waits_for_acknowledgement(cq, [&] { pair.b_cq.reset(); });
  CHECK_FALSE(readable(pair.b_channel->fd));
}

TEST_CASE("the service's death is an event for whoever has armed, once, also where a poster has raised the last one") {
  Service service;
  service.start(with_direct);
  Pair pair(Channels::of_both_ends);
  if (!ready(pair)) return;
  REQUIRE(ibv_req_notify_cq(pair.b_cq.get(), 0) == 0);
  message(pair);
  service.kill_now();
  // One that was raised before, and was not read.
  ibv_cq* cq;
  void* context;
  REQUIRE(ibv_get_cq_event(pair.b_channel.get(), &cq, &context) == 0);
  ibv_ack_cq_events(cq, 1);
  const int flags = ::fcntl(pair.b_channel->fd, F_GETFL);
  REQUIRE(::fcntl(pair.b_channel->fd, F_SETFL, flags | O_NONBLOCK) == 0);
  CHECK(ibv_get_cq_event(pair.b_channel.get(), &cq, &context) == -1);
  CHECK(errno == EAGAIN);
  REQUIRE(::fcntl(pair.b_channel->fd, F_SETFL, flags) == 0);
  REQUIRE(pair.receive(7, 0, 64) == 0);
  REQUIRE(ibv_req_notify_cq(pair.b_cq.get(), 0) == 0);
  REQUIRE(ibv_get_cq_event(pair.b_channel.get(), &cq, &context) == 0);
  CHECK(cq == pair.b_cq.get());
  ibv_ack_cq_events(cq, 1);
  CHECK(collect(pair.b_cq.get(), 1).front().status == IBV_WC_WR_FLUSH_ERR);
}
