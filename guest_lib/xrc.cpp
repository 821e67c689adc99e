#include "guest_lib/xrc.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <span>

#include "guest_lib/objects.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest {

namespace {

Result<ibv_xrcd*> open(ibv_context* context, const ibv_xrcd_init_attr& wanted) {
  constexpr std::uint32_t needed = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
  if (wanted.comp_mask != needed) return Errno{(wanted.comp_mask & ~needed) != 0 ? EOPNOTSUPP : EINVAL};
  auto attachment = Context::of(context).usable();
  if (!attachment) return attachment.error();
  if ((*attachment)->service_minor() < control::minor_of_xrc) return Errno{EOPNOTSUPP};
  control::OpenXrcdRequest request{};
  request.context = Context::of(context).handle;
  if (wanted.oflags & O_CREAT) request.flags |= control::xrcd_create;
  if (wanted.oflags & O_EXCL) request.flags |= control::xrcd_exclusive;
  std::span<const int> file;
  if (wanted.fd != -1) {
    struct stat status;
    if (::fstat(wanted.fd, &status) != 0) return last_error();
    request.flags |= control::xrcd_file;
    if (!(*attachment)->in_machine()) file = {&wanted.fd, 1};
    else request.device = status.st_dev, request.inode = status.st_ino;
  }
  auto xrcd = std::make_unique<Xrcd>();
  auto reply = (*attachment)->call_on_socket<control::Request::open_xrcd>(request, file);
  if (!reply) return reply.error();
  xrcd->verbs.context = context;
  xrcd->attachment = *attachment;
  xrcd->handle = reply->body.handle;
  return &xrcd.release()->verbs;
}

Status close(Xrcd& xrcd) {
  if (xrcd.users.load(std::memory_order_relaxed) != 0) return Errno{EBUSY};
  if (xrcd.cq != nullptr)
    if (const int error = ibv_destroy_cq(xrcd.cq); error != 0) return Errno{error};
  xrcd.cq = nullptr;
  if (xrcd.pd != nullptr)
    if (const int error = ibv_dealloc_pd(xrcd.pd); error != 0) return Errno{error};
  xrcd.pd = nullptr;
  if (!xrcd.attachment->liveness().gone()) {
    auto gone = xrcd.attachment->call<control::Request::close_xrcd>({xrcd.handle, 0});
    if (!gone && value(gone.error()) != EIO) return gone.error();
  }
  delete &xrcd;
  return ok();
}

// An SRQ becomes one of the domain's by a queue pair that completes for it.
Result<ibv_srq*> create(ibv_context* context, ibv_srq_init_attr_ex& wanted) {
  constexpr std::uint32_t known = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
  if ((wanted.comp_mask & ~known) != 0) return Errno{EOPNOTSUPP};
  if ((wanted.comp_mask & IBV_SRQ_INIT_ATTR_PD) == 0 || wanted.pd == nullptr || wanted.pd->context != context) return Errno{EINVAL};
  const ibv_srq_type type = (wanted.comp_mask & IBV_SRQ_INIT_ATTR_TYPE) != 0 ? wanted.srq_type : IBV_SRQT_BASIC;
  if (type != IBV_SRQT_BASIC && type != IBV_SRQT_XRC) return Errno{EOPNOTSUPP};
  if (type == IBV_SRQT_XRC && (wanted.comp_mask != known || wanted.xrcd == nullptr || wanted.cq == nullptr)) return Errno{EINVAL};
  ibv_srq_init_attr plain{wanted.srq_context, wanted.attr};
  const auto srq = create_srq(wanted.pd, plain);
  if (!srq) return srq;
  wanted.attr = plain.attr;
  if (type == IBV_SRQT_BASIC) return srq;
  ibv_qp_init_attr completions{};
  completions.send_cq = completions.recv_cq = wanted.cq;
  completions.srq = *srq;
  completions.qp_type = IBV_QPT_RC;
  const auto made = create_qp(wanted.pd, completions, &Xrcd::of(wanted.xrcd));
  if (!made) {
    (void)ibv_destroy_srq(*srq);
    return made.error();
  }
  Srq::of(*srq).completions = *made;
  Srq::of(*srq).srq_num = (*made)->qp_num;
  return srq;
}

Status equip(Xrcd& xrcd) {
  std::lock_guard lock(xrcd.equipping);
  if (xrcd.pd == nullptr && (xrcd.pd = ibv_alloc_pd(xrcd.verbs.context)) == nullptr) return last_error();
  if (xrcd.cq == nullptr && (xrcd.cq = ibv_create_cq(xrcd.verbs.context, 1, nullptr, nullptr, 0)) == nullptr) return last_error();
  return ok();
}

// A new target queue pair, or, of a number, another handle of one.
Result<ibv_qp*> make_target(Xrcd& xrcd, void* qp_context, std::uint32_t number) {
  if (Status equipped = equip(xrcd); !equipped) return equipped.error();
  ibv_qp_init_attr plain{};
  plain.qp_context = qp_context;
  plain.send_cq = plain.recv_cq = xrcd.cq;
  plain.qp_type = IBV_QPT_XRC_RECV;
  return create_qp(xrcd.pd, plain, &xrcd, number);
}

}  // namespace

ibv_xrcd* open_xrcd(ibv_context* context, ibv_xrcd_init_attr* wanted) {
  return as_ptr([&] { return open(context, *wanted); });
}

int close_xrcd(ibv_xrcd* xrcd) {
  return as_int([&] { return close(Xrcd::of(xrcd)); });
}

ibv_srq* create_srq_ex(ibv_context* context, ibv_srq_init_attr_ex* wanted) {
  return as_ptr([&] { return create(context, *wanted); });
}

ibv_qp* open_qp(ibv_context* context, ibv_qp_open_attr* wanted) {
  return as_ptr([&]() -> Result<ibv_qp*> {
    constexpr std::uint32_t needed = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
    if ((wanted->comp_mask & ~(needed | IBV_QP_OPEN_ATTR_CONTEXT)) != 0) return Errno{EOPNOTSUPP};
    if ((wanted->comp_mask & needed) != needed || wanted->xrcd == nullptr || wanted->xrcd->context != context || wanted->qp_num == 0) return Errno{EINVAL};
    if (wanted->qp_type != IBV_QPT_XRC_RECV) return Errno{EINVAL};
    return make_target(Xrcd::of(wanted->xrcd), (wanted->comp_mask & IBV_QP_OPEN_ATTR_CONTEXT) != 0 ? wanted->qp_context : nullptr, wanted->qp_num);
  });
}

Result<ibv_qp*> create_xrc_target(ibv_qp_init_attr_ex& wanted) {
  if ((wanted.comp_mask & IBV_QP_INIT_ATTR_XRCD) == 0 || wanted.xrcd == nullptr) return Errno{EINVAL};
  if ((wanted.comp_mask & (IBV_QP_INIT_ATTR_SEND_OPS_FLAGS | IBV_QP_INIT_ATTR_CREATE_FLAGS)) != 0) return Errno{EOPNOTSUPP};
  const auto made = make_target(Xrcd::of(wanted.xrcd), wanted.qp_context, 0);
  if (!made) return made;
  wanted.cap = {};
  if ((wanted.comp_mask & IBV_QP_INIT_ATTR_PD) != 0) (*made)->pd = wanted.pd;  // librdmacm takes its own from there
  return made;
}

}  // namespace vrdma::guest
