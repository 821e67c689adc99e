// What verbs and commands that succeed leave in errno: what was there before, as those of rdma-core and the kernel do. Programs clean up after an
// error, and say that one then.
#include <cerrno>

#include "guest_lib/test/cm_channel.hpp"
#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

bool is_success(int result) { return result == 0; }
bool is_success(long bytes) { return bytes > 0; }
template <class Object>
bool is_success(const Object* made) { return made != nullptr; }

template <class Verb>
auto keeps_errno(const char* text, Verb verb) {
  INFO(std::string(text));
  errno = ENOTTY;
  const auto result = verb();
  const int after = errno;
  CHECK(after == ENOTTY);
  REQUIRE(is_success(result));
  return result;
}
#define KEEPS_ERRNO(...) keeps_errno(#__VA_ARGS__, [&] { return __VA_ARGS__; })

}  // namespace

TEST_CASE("Verbs that succeed leave errno as it was") {
  Service service;
  service.start();
  ibv_device** const list = KEEPS_ERRNO(ibv_get_device_list(nullptr));
  ibv_context* const context = KEEPS_ERRNO(ibv_open_device(list[0]));
  ibv_free_device_list(list);
  ibv_device_attr device{};
  ibv_port_attr port{};
  ibv_gid gid{};
  KEEPS_ERRNO(ibv_query_device(context, &device));
  KEEPS_ERRNO(ibv_query_port(context, 1, &port));
  KEEPS_ERRNO(ibv_query_gid(context, 1, 0, &gid));
  ibv_pd* const pd = KEEPS_ERRNO(ibv_alloc_pd(context));
  ibv_comp_channel* const channel = KEEPS_ERRNO(ibv_create_comp_channel(context));
  ibv_cq* const cq = KEEPS_ERRNO(ibv_create_cq(context, 8, nullptr, channel, 0));
  KEEPS_ERRNO(ibv_resize_cq(cq, 16));
  ibv_cq_init_attr_ex of_cq{};  // all that mlx5 takes
  of_cq.cqe = 8;
  of_cq.wc_flags = IBV_CREATE_CQ_SUP_WC_FLAGS;
  of_cq.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
  of_cq.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
  ibv_cq_ex* const steps = KEEPS_ERRNO(ibv_create_cq_ex(context, &of_cq));
  KEEPS_ERRNO(ibv_destroy_cq(ibv_cq_ex_to_cq(steps)));
  std::vector<char> memory(1 << 16);
  const int access = IBV_ACCESS_LOCAL_WRITE, more_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  ibv_mr* const mr = KEEPS_ERRNO(ibv_reg_mr(pd, memory.data(), memory.size(), access));
  KEEPS_ERRNO(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, pd, memory.data(), memory.size(), more_access));
  ibv_mw* const mw = KEEPS_ERRNO(ibv_alloc_mw(pd, IBV_MW_TYPE_2));
  KEEPS_ERRNO(ibv_dealloc_mw(mw));

  ibv_srq_init_attr of_srq{};
  of_srq.attr = {8, 1, 0};
  ibv_srq* const srq = KEEPS_ERRNO(ibv_create_srq(pd, &of_srq));
  ibv_qp_init_attr of_qp{};
  of_qp.send_cq = of_qp.recv_cq = cq;
  of_qp.srq = srq;
  of_qp.qp_type = IBV_QPT_RC;
  of_qp.cap = {4, 0, 1, 0, 0};
  ibv_qp* const qp = KEEPS_ERRNO(ibv_create_qp(pd, &of_qp));
  errno = ENOTTY;
  connect(qp, qp->qp_num);
  CHECK(errno == ENOTTY);
  ibv_qp_attr attributes{};
  KEEPS_ERRNO(ibv_query_qp(qp, &attributes, IBV_QP_STATE, &of_qp));

  // Events that are waited for, and there at once.
  for (int round = 0; round < 3; ++round) {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory.data()), 8, mr->lkey};
    ibv_recv_wr receive{1, nullptr, &sge, 1}, *bad_receive = nullptr;
    ibv_send_wr send{}, *bad_send = nullptr;
    send.sg_list = &sge, send.num_sge = 1, send.opcode = IBV_WR_SEND, send.send_flags = IBV_SEND_SIGNALED;
    KEEPS_ERRNO(ibv_post_srq_recv(srq, &receive, &bad_receive));
    ibv_srq_attr limit{0, 0, 1};
    KEEPS_ERRNO(ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
    KEEPS_ERRNO(ibv_query_srq(srq, &limit));
    KEEPS_ERRNO(ibv_req_notify_cq(cq, 0));
    std::thread sender([&] {
      if (round == 0) eventually("who waits for an event sleeps", [] { return sleeps(::getpid()); });
      CHECK(ibv_post_send(qp, &send, &bad_send) == 0);
    });
    ibv_cq* of = nullptr;
    void* its = nullptr;
    KEEPS_ERRNO(ibv_get_cq_event(channel, &of, &its));
    sender.join();
    ibv_ack_cq_events(of, 1);
    ibv_async_event event{};
    KEEPS_ERRNO(ibv_get_async_event(context, &event));
    CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED);
    ibv_ack_async_event(&event);
    errno = ENOTTY;
    collect(cq, 2);
    CHECK(errno == ENOTTY);
  }

  of_qp.srq = nullptr;
  of_qp.qp_type = IBV_QPT_UD;
  of_qp.cap = {1, 1, 1, 1, 0};
  ibv_qp* const datagrams = KEEPS_ERRNO(ibv_create_qp(pd, &of_qp));
  attributes = {};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = 1;
  KEEPS_ERRNO(ibv_modify_qp(datagrams, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
  ibv_gid group{};
  group.raw[0] = 0xff, group.raw[1] = 0x12, group.raw[2] = 0x40, group.raw[3] = 0x1b, group.raw[15] = 9;
  KEEPS_ERRNO(ibv_attach_mcast(datagrams, &group, 0xc001));
  KEEPS_ERRNO(ibv_detach_mcast(datagrams, &group, 0xc001));
  ibv_ah_attr to{};
  to.dlid = port.lid;
  to.port_num = 1;
  ibv_ah* const ah = KEEPS_ERRNO(ibv_create_ah(pd, &to));
  KEEPS_ERRNO(ibv_destroy_ah(ah));
  KEEPS_ERRNO(ibv_destroy_qp(datagrams));

  KEEPS_ERRNO(ibv_destroy_qp(qp));
  KEEPS_ERRNO(ibv_destroy_srq(srq));
  KEEPS_ERRNO(ibv_destroy_cq(cq));
  KEEPS_ERRNO(ibv_destroy_comp_channel(channel));
  KEEPS_ERRNO(ibv_dereg_mr(mr));
  KEEPS_ERRNO(ibv_dealloc_pd(pd));
  KEEPS_ERRNO(ibv_close_device(context));
}

TEST_CASE("Commands of rdma_cm that succeed leave errno as it was") {
  Service service;
  service.start();
  const CmChannel channel;
  rdma_ucm_create_id create{};
  create.uid = 1;
  create.ps = RDMA_PS_TCP;
  rdma_ucm_create_id_resp made{};
  KEEPS_ERRNO(ask(channel.fd, RDMA_USER_CM_CMD_CREATE_ID, create, made));
  errno = ENOTTY;
  channel.resolve(made.id);
  CHECK(errno == ENOTTY);
  KEEPS_ERRNO(channel.next_event());
  rdma_ucm_resolve_route route{};
  route.id = made.id;
  route.timeout_ms = 1000;
  KEEPS_ERRNO(say(channel.fd, RDMA_USER_CM_CMD_RESOLVE_ROUTE, route));
  rdma_ucm_destroy_id destroy{};
  destroy.id = made.id;
  rdma_ucm_destroy_id_resp gone{};
  KEEPS_ERRNO(ask(channel.fd, RDMA_USER_CM_CMD_DESTROY_ID, destroy, gone));
  ::close(channel.fd);
}
