// What one thread does beside another one that is inside a verb: an object is destroyed while its events are waited for, a process forks while
// a lock is held.
#include <fcntl.h>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

// A thread that waits for an event that never comes. Cancelled at its end.
class Waiter {
 public:
  explicit Waiter(const std::function<void()>& wait)
      : thread_([this, wait] {
          id_ = ::gettid();
          wait();
          returned_ = true;
        }) {
    asleep();
  }
  void asleep() {
    eventually("it sleeps", [&] { return returned_ || (id_ != 0 && sleeps(id_)); });
  }
  bool returned() const { return returned_; }
  ~Waiter() {
#ifdef __SANITIZE_THREAD__  // which loses sight of a thread that is cancelled in a system call
    if (!returned_) thread_.detach();
#endif
    if (thread_.joinable() && !returned_) pthread_cancel(thread_.native_handle());
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::atomic<pid_t> id_ = 0;
  std::atomic<bool> returned_ = false;
  std::thread thread_;
};

ibv_context* open_another(const Device& device) {
  ibv_context* const context = ibv_open_device(device.context->device);
  REQUIRE(context != nullptr);
  return context;
}

ibv_qp_ex* make_extended(const Device& device, ibv_cq* cq) {
  ibv_qp_init_attr_ex init{};
  init.send_cq = init.recv_cq = cq;
  init.qp_type = IBV_QPT_RC;
  init.cap = {16, 16, 2, 2, 64};
  init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  init.pd = device.pd;
  init.send_ops_flags = IBV_QP_EX_WITH_SEND;
  ibv_qp* const qp = ibv_create_qp_ex(device.context, &init);
  REQUIRE(qp != nullptr);
  return ibv_qp_to_qp_ex(qp);
}

// An extended queue pair that is connected to itself.
struct ExtendedLoop {
  Service service;
  Device device = (service.start(), Device());
  CqPtr cq = make_cq(device);
  ibv_qp_ex* qp = make_extended(device, cq.get());

  ExtendedLoop() { connect(&qp->qp_base, qp->qp_base.qp_num); }
};

}  // namespace

TEST_CASE("a channel that is destroyed while a thread waits for its events takes nothing else along") {
  Service service;
  service.start();
  Device device;
  const ChannelPtr other(ibv_create_comp_channel(device.context));
  for (int round = 0; round < 20; ++round) {
    ibv_comp_channel* const channel = ibv_create_comp_channel(device.context);
    REQUIRE(channel != nullptr);
    Waiter waiter([channel] {
      ibv_cq* cq;
      void* context;
      ibv_get_cq_event(channel, &cq, &context);
    });
    REQUIRE(ibv_destroy_comp_channel(channel) == 0);
    const CqPtr cq = make_cq(device, 16, other.get());
    const QpPtr qp = make_qp(device, cq.get());
    connect(qp.get(), qp->qp_num);
    REQUIRE(post_recv(device, qp.get(), 1) == 0);
    REQUIRE(post_send(device, qp.get(), 2) == 0);
    CHECK(collect(cq.get(), 2).size() == 2);
    waiter.asleep();
    CHECK_FALSE(waiter.returned());
  }
}

TEST_CASE("a context that is closed while a thread waits for its events leaves the others open") {
  Service service;
  service.start();
  Device device;
  for (int round = 0; round < 20; ++round) {
    ibv_context* const context = open_another(device);
    Waiter waiter([context] {
      ibv_async_event event;
      ibv_get_async_event(context, &event);
    });
    REQUIRE(ibv_close_device(context) == 0);
    const CqPtr cq = make_cq(device);
    ibv_port_attr port{};
    CHECK(ibv_query_port(device.context, 1, &port) == 0);
    waiter.asleep();
    CHECK_FALSE(waiter.returned());
  }
}

TEST_CASE("a fork's child closes a context that it has made its own, though a thread of its parent's waits for the events of that") {
  Service service;
  service.start();
  Device device;
  const auto descriptors = [] {
    int count = 0;
    for (int fd = 0; fd < 1024; ++fd) count += ::fcntl(fd, F_GETFD) >= 0;
    return count;
  };
  ibv_context* const context = open_another(device);
  Waiter waiter([context] {
    ibv_async_event event;
    ibv_get_async_event(context, &event);
  });
  CHECK(in_child([&] {
          ::alarm(60);
          ibv_pd* const pd = ibv_alloc_pd(context);
          if (pd == nullptr || ibv_dealloc_pd(pd) != 0) return 1;
          const int before = descriptors();
          if (ibv_close_device(context) != 0) return 2;
          return before - descriptors() >= 3 ? 0 : 4;  // the program's two, and the pipe of events
        }) == 0);
  CHECK_FALSE(waiter.returned());
  CHECK(ibv_close_device(context) == 0);
}

TEST_CASE("a fork's child waits for no lock that a thread of its parent holds") {
  ExtendedLoop loop;
  Device& device = loop.device;
  ibv_qp_ex* const qp = loop.qp;
  ibv_cq_init_attr_ex wanted{};
  wanted.cqe = 16;
  ibv_cq_ex* const steps = ibv_create_cq_ex(device.context, &wanted);
  REQUIRE(steps != nullptr);
  const QpPtr polled = make_qp(device, ibv_cq_ex_to_cq(steps));
  connect(polled.get(), polled->qp_num);
  REQUIRE(post_recv(device, polled.get(), 1) == 0);
  REQUIRE(post_send(device, polled.get(), 2) == 0);
  ibv_poll_cq_attr none{};
  eventually("a completion", [&] { return ibv_start_poll(steps, &none) == 0; });  // it has the queue to itself from here on
  ibv_wr_start(qp);                                                               // and this one, too
  CHECK(in_child([&] {
          ::alarm(60);
          ibv_qp_attr attributes{};
          ibv_qp_init_attr init{};
          attributes.qp_state = IBV_QPS_ERR;
          int wrong = 0;
          wrong |= ibv_modify_qp(&qp->qp_base, &attributes, IBV_QP_STATE) != EIO ? 1 : 0;
          wrong |= ibv_query_qp(&qp->qp_base, &attributes, IBV_QP_STATE, &init) != EIO ? 2 : 0;
          ibv_wr_start(qp);
          wrong |= ibv_wr_complete(qp) == 0 ? 4 : 0;
          wrong |= ibv_start_poll(steps, &none) != EIO ? 8 : 0;
          wrong |= ibv_destroy_qp(&qp->qp_base) != 0 ? 16 : 0;
          return wrong;
        }) == 0);
  ibv_wr_abort(qp);
  ibv_end_poll(steps);
  CHECK(ibv_destroy_qp(&qp->qp_base) == 0);
  ibv_qp_attr reset{};
  reset.qp_state = IBV_QPS_RESET;
  CHECK(ibv_modify_qp(polled.get(), &reset, IBV_QP_STATE) == 0);
}

TEST_CASE("unread events of a parent and of its child have nothing to do with each other") {
  Service service;
  service.start();
  Device device;
  REQUIRE(::fcntl(device.context->async_fd, F_SETFL, O_NONBLOCK) == 0);
  // Two queue pairs of an SRQ are told of their last receive, and the first one's event goes with it.
  const auto keep_one_event = [&](ibv_pd* pd) {
    ibv_cq* const cq = ibv_create_cq(device.context, 16, nullptr, nullptr, 0);
    ibv_srq_init_attr shared{};
    shared.attr = {8, 1, 0};
    ibv_srq* const srq = ibv_create_srq(pd, &shared);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.srq = srq;
    init.qp_type = IBV_QPT_RC;
    init.cap = {4, 0, 1, 0, 0};
    ibv_qp* ends[2];
    for (ibv_qp*& qp : ends) {
      qp = ibv_create_qp(pd, &init);
      connect(qp, qp->qp_num);
      ibv_qp_attr to_err{};
      to_err.qp_state = IBV_QPS_ERR;
      ibv_modify_qp(qp, &to_err, IBV_QP_STATE);
    }
    ibv_destroy_qp(ends[0]);
    return ends[1];
  };
  const auto is_of = [&](ibv_qp* qp) {
    ibv_async_event event{};
    eventually("an event", [&] { return readable(device.context->async_fd); });
    if (ibv_get_async_event(device.context, &event) != 0) return false;
    ibv_ack_async_event(&event);
    return event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && event.element.qp == qp;
  };
  ibv_qp* const mine = keep_one_event(device.pd);
  CHECK(in_child([&] {
          ::alarm(60);
          ibv_pd* const pd = ibv_alloc_pd(device.context);
          if (pd == nullptr) return 1;
          return is_of(keep_one_event(pd)) && !readable(device.context->async_fd) ? 0 : 2;
        }) == 0);
  CHECK(is_of(mine));
  CHECK_FALSE(readable(device.context->async_fd));
  ibv_srq* const srq = mine->srq;
  ibv_cq* const cq = mine->send_cq;
  CHECK(ibv_destroy_qp(mine) == 0);
  CHECK(ibv_destroy_srq(srq) == 0);
  CHECK(ibv_destroy_cq(cq) == 0);
}

TEST_CASE("who polls between ibv_wr_start and ibv_wr_complete does not wait for itself, also when the service has gone") {
  ExtendedLoop loop;
  ibv_qp_ex* const qp = loop.qp;
  REQUIRE(post_recv(loop.device, &qp->qp_base, 1) == 0);
  loop.service.kill_now();
  ibv_wr_start(qp);
  ibv_wc wc;
  eventually("the receive is flushed", [&] { return ibv_poll_cq(loop.cq.get(), 1, &wc) == 1; });
  CHECK(wc.wr_id == 1);
  ibv_wr_abort(qp);
  CHECK(ibv_destroy_qp(&qp->qp_base) == 0);
}

TEST_CASE("what is shared with the service is in no core dump") {
  Service service;
  service.start();
  Device device;
  const CqPtr cq = make_cq(device);
  const QpPtr qp = make_qp(device, cq.get());
  connect(qp.get(), qp->qp_num);
  std::ifstream file("/proc/self/smaps");
  std::string line, name;
  int large = 0;
  for (std::uint64_t kib = 0; std::getline(file, line);) {
    if (line[0] < 'A' || line[0] > 'Z') name = line;  // addresses begin a mapping, names what is said of it
    if (line.starts_with("Size:")) kib = std::stoull(line.substr(5));
    if (!line.starts_with("VmFlags:") || kib < 64 << 10 || name.find("memfd:") == name.npos) continue;
    ++large;
    CHECK_MESSAGE(line.find(" dd") != line.npos, name);
  }
  CHECK(large > 0);
}
