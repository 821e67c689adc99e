// What an application sees when the service is gone: every outstanding work request flushed, one fatal event, one event for
// every armed completion queue, errors from control verbs, clean destruction, and no wait without an end.
#include <fcntl.h>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

void set_nonblocking(int fd) { REQUIRE(::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK) == 0); }

}  // namespace

TEST_CASE("whoever only polls learns that the service is gone, killed or asked to leave") {
  for (const int how : {SIGKILL, SIGTERM}) {
    CAPTURE(how);
    Service service;
    service.start();
    Device device;
    CqPtr cq = make_cq(device, 16);
    QpPtr qp = make_qp(device, cq.get());
    connect(qp.get(), qp->qp_num);
    REQUIRE(post_recv(device, qp.get(), 7) == 0);
    service.kill_now(how);
    const auto flushed = collect(cq.get(), 1);
    REQUIRE(flushed.size() == 1);
    CHECK(flushed[0].wr_id == 7);
    CHECK(flushed[0].status == IBV_WC_WR_FLUSH_ERR);
  }
}

TEST_CASE("a dead service flushes what is outstanding, in order, and says so once") {
  Service service;
  service.start();
  Device device;
  set_nonblocking(device.context->async_fd);
  ChannelPtr channel(ibv_create_comp_channel(device.context));
  REQUIRE(channel != nullptr);
  CqPtr cq = make_cq(device, 256, channel.get());
  CqPtr idle_cq = make_cq(device, 16, channel.get());
  QpPtr qp = make_qp(device, cq.get()), peer = make_qp(device, cq.get());
  connect(qp.get(), peer->qp_num);
  connect(peer.get(), qp->qp_num);
  REQUIRE(post_recv(device, peer.get(), 50) == 0);
  REQUIRE(post_recv(device, peer.get(), 51) == 0);
  REQUIRE(post_recv(device, peer.get(), 52) == 0);
  REQUIRE(ibv_req_notify_cq(cq.get(), 0) == 0);
  REQUIRE(post_send(device, qp.get(), 10) == 0);  // completes before the service dies, and is polled after it
  eventually("the message has arrived", [&] { return readable(channel->fd); });
  ibv_cq* event_cq = nullptr;
  void* event_context = nullptr;
  REQUIRE(ibv_get_cq_event(channel.get(), &event_cq, &event_context) == 0);
  ibv_ack_cq_events(event_cq, 1);
  REQUIRE(ibv_req_notify_cq(cq.get(), 0) == 0);

  ibv_async_event event;
  CHECK(ibv_get_async_event(device.context, &event) == -1);
  CHECK(errno == EAGAIN);
  service.kill_now();

  eventually("the asynchronous event is readable", [&] { return readable(device.context->async_fd); });
  REQUIRE(ibv_get_async_event(device.context, &event) == 0);
  CHECK(event.event_type == IBV_EVENT_DEVICE_FATAL);
  ibv_ack_async_event(&event);
  CHECK_FALSE(readable(device.context->async_fd));
  CHECK(ibv_get_async_event(device.context, &event) == -1);
  CHECK(errno == EAGAIN);

  eventually("the armed completion queue has an event", [&] { return readable(channel->fd); });
  REQUIRE(ibv_get_cq_event(channel.get(), &event_cq, &event_context) == 0);
  CHECK(event_cq == cq.get());
  ibv_ack_cq_events(event_cq, 1);
  set_nonblocking(channel->fd);
  // The arming above may have been answered more than once before the service died; after that there is nothing more.
  while (ibv_get_cq_event(channel.get(), &event_cq, &event_context) == 0) ibv_ack_cq_events(event_cq, 1);
  CHECK(errno == EAGAIN);
  CHECK_FALSE(readable(channel->fd));

  // Requests posted after the death are flushed too.
  CHECK(post_send(device, qp.get(), 11) == 0);
  REQUIRE(ibv_req_notify_cq(cq.get(), 0) == 0);
  CHECK(readable(channel->fd));
  REQUIRE(ibv_get_cq_event(channel.get(), &event_cq, &event_context) == 0);
  ibv_ack_cq_events(event_cq, 1);

  std::vector<std::uint64_t> receives, sends;
  for (const ibv_wc& wc : collect(cq.get(), 5)) {
    if (wc.qp_num == peer->qp_num) {
      receives.push_back(wc.wr_id);
      CHECK((wc.wr_id == 50 || wc.status == IBV_WC_WR_FLUSH_ERR));
    } else {
      sends.push_back(wc.wr_id);
      CHECK((wc.wr_id == 10 || wc.status == IBV_WC_WR_FLUSH_ERR));
    }
  }
  CHECK(receives == std::vector<std::uint64_t>{50, 51, 52});
  CHECK(sends == std::vector<std::uint64_t>{10, 11});
  ibv_wc wc;
  CHECK(ibv_poll_cq(cq.get(), 1, &wc) == 0);
  CHECK(ibv_poll_cq(idle_cq.get(), 1, &wc) == 0);

  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  CHECK(ibv_modify_qp(qp.get(), &attributes, IBV_QP_STATE) == EIO);
  CHECK(ibv_alloc_pd(device.context) == nullptr);
  CHECK(errno == EIO);
  ibv_port_attr port;
  CHECK(ibv_query_port(device.context, 1, &port) == EIO);
}  // destruction of everything succeeds: the deleters check

TEST_CASE("who arms on each event, and polls when there is no more, is not told of the service's death for ever") {
  Service service;
  service.start();
  Device device;
  ChannelPtr channel(ibv_create_comp_channel(device.context));
  REQUIRE(channel != nullptr);
  set_nonblocking(channel->fd);
  CqPtr cq = make_cq(device, 16, channel.get());
  QpPtr qp = make_qp(device, cq.get());
  connect(qp.get(), qp->qp_num);
  REQUIRE(post_recv(device, qp.get(), 1) == 0);
  REQUIRE(ibv_req_notify_cq(cq.get(), 0) == 0);
  service.kill_now();
  const auto events = [&] {
    int count = 0;
    for (ibv_cq* event_cq = nullptr; count < 10; ++count) {
      void* context = nullptr;
      if (ibv_get_cq_event(channel.get(), &event_cq, &context) != 0) break;
      ibv_ack_cq_events(event_cq, 1);
      REQUIRE(ibv_req_notify_cq(event_cq, 0) == 0);
    }
    return count;
  };
  eventually("the channel is readable", [&] { return readable(channel->fd); });
  CHECK(events() == 1);
  CHECK_FALSE(readable(channel->fd));
  CHECK(collect(cq.get(), 1)[0].status == IBV_WC_WR_FLUSH_ERR);
  // It has polled: what it posts now is news again.
  REQUIRE(post_recv(device, qp.get(), 2) == 0);
  CHECK(readable(channel->fd));
  CHECK(events() == 1);
  CHECK(collect(cq.get(), 1)[0].wr_id == 2);
}

TEST_CASE("threads that wait for events are woken when the service dies") {
  Service service;
  service.start();
  Device device;
  ChannelPtr channel(ibv_create_comp_channel(device.context));
  REQUIRE(channel != nullptr);
  CqPtr cq = make_cq(device, 16, channel.get());
  REQUIRE(ibv_req_notify_cq(cq.get(), 1) == 0);
  std::thread completion_waiter([&] {
    ibv_cq* event_cq = nullptr;
    void* event_context = nullptr;
    CHECK(ibv_get_cq_event(channel.get(), &event_cq, &event_context) == 0);
    CHECK(event_cq == cq.get());
    ibv_ack_cq_events(event_cq, 1);
  });
  std::thread async_waiter([&] {
    ibv_async_event event;
    CHECK(ibv_get_async_event(device.context, &event) == 0);
    CHECK(event.event_type == IBV_EVENT_DEVICE_FATAL);
    ibv_ack_async_event(&event);
  });
  service.kill_now();
  completion_waiter.join();
  async_waiter.join();
}

TEST_CASE("a control verb that waits for its answer ends when the service is killed") {
  Service service;
  service.start();
  Device device;
  ::kill(service.pid(), SIGSTOP);
  int status = 0;
  REQUIRE(::waitpid(service.pid(), &status, WUNTRACED) == service.pid());  // from here on nobody answers
  REQUIRE(WIFSTOPPED(status));
  std::atomic<bool> asked{false};
  int outcome = 0;
  std::thread asker([&] {
    asked = true;
    outcome = ibv_alloc_pd(device.context) == nullptr ? errno : 0;
  });
  eventually("the request was made", [&] { return asked.load(); });
  service.kill_now();
  asker.join();
  CHECK(outcome == EIO);
}

TEST_CASE("after a restart of the service the device can be opened again beside the dead one") {
  Service service;
  service.start();
  Device dead;
  service.kill_now();
  service.start();
  Device alive;
  CqPtr cq = make_cq(alive);
  QpPtr a = make_qp(alive, cq.get()), b = make_qp(alive, cq.get());
  connect(a.get(), b->qp_num);
  connect(b.get(), a->qp_num);
  REQUIRE(post_recv(alive, b.get(), 1) == 0);
  REQUIRE(post_send(alive, a.get(), 2) == 0);
  for (const ibv_wc& wc : collect(cq.get(), 2)) CHECK(wc.status == IBV_WC_SUCCESS);
  CHECK(ibv_alloc_pd(dead.context) == nullptr);
}

TEST_CASE("a service that is stopped does not hold up who wants to attach") {
  Service service;
  service.start();
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  REQUIRE(count == 1);
  REQUIRE(::kill(service.pid(), SIGSTOP) == 0);
  CHECK(ibv_open_device(list[0]) == nullptr);
  CHECK(errno == ETIMEDOUT);
  REQUIRE(::kill(service.pid(), SIGCONT) == 0);
  ibv_context* context = ibv_open_device(list[0]);
  REQUIRE(context != nullptr);
  CHECK(ibv_close_device(context) == 0);
  ibv_free_device_list(list);
}
