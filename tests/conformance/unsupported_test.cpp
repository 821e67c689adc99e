// Verbs outside the device's abilities answer EOPNOTSUPP, so that programs and suites skip instead of fail.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

// NULL and EOPNOTSUPP, or the real thing (then `undo` gets it).
template <class T, class Undo>
void real_or_unsupported(const char* what, T* object, int error, Undo undo) {
  if (object) {
    undo(object);
  } else if (error != EOPNOTSUPP) {
    fail(__FILE__, __LINE__, text(what, ": NULL and ", errno_name(error), ", expected EOPNOTSUPP"));
  }
}
#define REAL_OR_UNSUPPORTED(call, undo) \
  do {                                  \
    errno = 0;                          \
    auto* const object = (call);        \
    real_or_unsupported(#call, object, errno, undo); \
  } while (false)

}  // namespace

CONFORMANCE(UnsupportedVerbsAnswerEopnotsupp, "OBJ-15 MR-25", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 8);
  REAL_OR_UNSUPPORTED(ibv_alloc_mw(pd, IBV_MW_TYPE_1), [](ibv_mw* x) { ibv_dealloc_mw(x); });
  REAL_OR_UNSUPPORTED(ibv_alloc_mw(pd, IBV_MW_TYPE_2), [](ibv_mw* x) { ibv_dealloc_mw(x); });
  REAL_OR_UNSUPPORTED(ibv_alloc_null_mr(pd), [](ibv_mr* x) { ibv_dereg_mr(x); });
  ibv_alloc_dm_attr dm{};
  dm.length = 64;
  REAL_OR_UNSUPPORTED(ibv_alloc_dm(dev.ctx, &dm), [](ibv_dm* x) { ibv_free_dm(x); });
  ibv_xrcd_init_attr xrcd{};
  xrcd.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
  xrcd.fd = -1;
  xrcd.oflags = O_CREAT;
  REAL_OR_UNSUPPORTED(ibv_open_xrcd(dev.ctx, &xrcd), [](ibv_xrcd* x) { ibv_close_xrcd(x); });
  ibv_td_init_attr td{};
  REAL_OR_UNSUPPORTED(ibv_alloc_td(dev.ctx, &td), [](ibv_td* x) { ibv_dealloc_td(x); });
  ibv_parent_domain_init_attr domain{};
  domain.pd = pd;
  REAL_OR_UNSUPPORTED(ibv_alloc_parent_domain(dev.ctx, &domain), [](ibv_pd* x) { ibv_dealloc_pd(x); });
  ibv_wq_init_attr wq{};
  wq.wq_type = IBV_WQT_RQ;
  wq.max_wr = 1;
  wq.max_sge = 1;
  wq.pd = pd;
  wq.cq = cq;
  REAL_OR_UNSUPPORTED(ibv_create_wq(dev.ctx, &wq), [](ibv_wq* x) { ibv_destroy_wq(x); });
  ibv_cq_init_attr_ex cq_ex{};
  cq_ex.cqe = 4;
  cq_ex.wc_flags = IBV_WC_EX_WITH_BYTE_LEN;
  REAL_OR_UNSUPPORTED(ibv_create_cq_ex(dev.ctx, &cq_ex), [](ibv_cq_ex* x) { ibv_destroy_cq(ibv_cq_ex_to_cq(x)); });
  ibv_qp_init_attr_ex qp_ex{};
  qp_ex.send_cq = cq;
  qp_ex.recv_cq = cq;
  qp_ex.qp_type = IBV_QPT_RC;
  qp_ex.cap = {1, 1, 1, 1, 0};
  qp_ex.pd = pd;
  qp_ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  qp_ex.send_ops_flags = IBV_QP_EX_WITH_SEND;
  REAL_OR_UNSUPPORTED(ibv_create_qp_ex(dev.ctx, &qp_ex), [](ibv_qp* x) { ibv_destroy_qp(x); });

  // A descriptor that is no dmabuf: without support EOPNOTSUPP, with it some other refusal, never a registration.
  const int no_dmabuf = ::open("/dev/zero", O_RDWR | O_CLOEXEC);
  errno = 0;
  ibv_mr* mr = ibv_reg_dmabuf_mr(pd, 0, 4096, 0, no_dmabuf, IBV_ACCESS_LOCAL_WRITE);
  EXPECT(mr == nullptr);
  EXPECT_NE(errno, ENOSYS);
  ::close(no_dmabuf);

  ibv_flow_attr flow{};
  flow.type = IBV_FLOW_ATTR_NORMAL;
  flow.size = sizeof(flow);
  flow.port = dev.port_num;
  Qp qp(pd, cq, cq);
  errno = 0;
  ibv_flow* made = ibv_create_flow(qp, &flow);
  EXPECT(made == nullptr);  // never on an RC QP
  EXPECT_NE(errno, ENOSYS);
}

CONFORMANCE(UnsupportedQpTypesAndFlagsAreRefused, "OBJ-15 QP-13", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 8);
  for (const ibv_qp_type type : {IBV_QPT_RAW_PACKET, IBV_QPT_XRC_SEND}) {
    const Note note("qp_type ", type);
    ibv_qp_init_attr init = init_attr(cq, cq, {.type = type});
    errno = 0;
    ibv_qp* qp = ibv_create_qp(pd, &init);
    const int error = errno;
    if (qp) {
      EXPECT_OK(ibv_destroy_qp(qp));
    } else {
      // A raw packet QP may also lack the privilege.
      EXPECT(error == EOPNOTSUPP || (type == IBV_QPT_RAW_PACKET && error == EPERM));
    }
  }
  ibv_qp_init_attr nonsense = init_attr(cq, cq, {.type = static_cast<ibv_qp_type>(77)});
  errno = 0;
  EXPECT(ibv_create_qp(pd, &nonsense) == nullptr);
  EXPECT(errno == EOPNOTSUPP || errno == EINVAL);

  ibv_qp_init_attr_ex init{};
  init.send_cq = cq;
  init.recv_cq = cq;
  init.qp_type = IBV_QPT_RC;
  init.cap = {1, 1, 1, 1, 0};
  init.pd = pd;
  init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
  init.create_flags = IBV_QP_CREATE_CVLAN_STRIPPING;  // means nothing for RC
  errno = 0;
  EXPECT(ibv_create_qp_ex(dev.ctx, &init) == nullptr);
  EXPECT(errno == EOPNOTSUPP || errno == EINVAL);
}

CONFORMANCE(CreateQpExWithOnlyAPdIsCreateQp, "QP-12 QP-13", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 8);
  for (const ibv_qp_type type : {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD}) {
    const Note note("qp_type ", type);
    ibv_qp_init_attr plain = init_attr(cq, cq, {.type = type});
    ibv_qp_init_attr_ex init{};
    init.send_cq = cq;
    init.recv_cq = cq;
    init.qp_type = type;
    init.cap = plain.cap;
    init.pd = pd;
    init.comp_mask = IBV_QP_INIT_ATTR_PD;
    ibv_qp* a = ibv_create_qp(pd, &plain);
    ibv_qp* b = ibv_create_qp_ex(dev.ctx, &init);
    EXPECT(a && b);
    EXPECT_EQ(plain.cap.max_send_wr, init.cap.max_send_wr);
    EXPECT_EQ(plain.cap.max_recv_wr, init.cap.max_recv_wr);
    EXPECT_EQ(plain.cap.max_send_sge, init.cap.max_send_sge);
    EXPECT_EQ(plain.cap.max_recv_sge, init.cap.max_recv_sge);
    EXPECT_EQ(plain.cap.max_inline_data, init.cap.max_inline_data);
    EXPECT(b->pd == pd.p && b->send_cq == cq.p && b->recv_cq == cq.p);
    EXPECT_EQ(b->qp_type, type);
    EXPECT_EQ(b->state, IBV_QPS_RESET);
    EXPECT(ibv_qp_to_qp_ex(a) == nullptr);
    EXPECT(ibv_qp_to_qp_ex(b) == nullptr);
    EXPECT_OK(ibv_destroy_qp(a));
    EXPECT_OK(ibv_destroy_qp(b));
  }
}

}  // namespace vrdma::conformance
