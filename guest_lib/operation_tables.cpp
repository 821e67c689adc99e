#include "guest_lib/operation_tables.hpp"

#include <cerrno>
#include <cstddef>

#include "guest_lib/cq_ex.hpp"
#include "guest_lib/device.hpp"
#include "guest_lib/device_memory.hpp"
#include "guest_lib/domains.hpp"
#include "guest_lib/memory_window.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/on_demand.hpp"
#include "guest_lib/xrc.hpp"

namespace vrdma::guest {

namespace {

void* no_object() {
  errno = EOPNOTSUPP;
  return nullptr;
}

void fill(ibv_context_ops& ops) {
  ops = {};
  // The slots that libibverbs filled with its provider's functions before they became exported functions; nobody calls them.
  void* (**const slots[])(void) = {&ops._compat_alloc_pd,     &ops._compat_dealloc_pd,   &ops._compat_reg_mr,
                                   &ops._compat_rereg_mr,     &ops._compat_dereg_mr,     &ops._compat_create_cq,
                                   &ops._compat_cq_event,     &ops._compat_resize_cq,    &ops._compat_destroy_cq,
                                   &ops._compat_create_srq,   &ops._compat_modify_srq,   &ops._compat_query_srq,
                                   &ops._compat_destroy_srq,  &ops._compat_create_qp,    &ops._compat_query_qp,
                                   &ops._compat_modify_qp,    &ops._compat_destroy_qp,   &ops._compat_create_ah,
                                   &ops._compat_destroy_ah,   &ops._compat_attach_mcast, &ops._compat_detach_mcast,
                                   &ops._compat_async_event};
  for (auto* slot : slots) *slot = no_object;
  ops._compat_query_device = query_device;
  ops._compat_query_port = [](ibv_context* of, std::uint8_t port, _compat_ibv_port_attr* attributes) {
    return query_port(of, port, reinterpret_cast<ibv_port_attr*>(attributes), offsetof(ibv_port_attr, port_cap_flags2));
  };
  ops.alloc_mw = alloc_mw;
  ops.bind_mw = bind_mw;
  ops.dealloc_mw = dealloc_mw;
  ops.poll_cq = poll_cq;
  ops.req_notify_cq = req_notify_cq;
  ops.post_send = post_send;
  ops.post_recv = post_recv;
  ops.post_srq_recv = post_srq_recv;
}

}  // namespace

void fill_operation_tables(verbs_context& verbs) {
  fill(verbs.context.ops);
  verbs.query_port = query_port;
  verbs.query_device_ex = query_device_ex;
  verbs.alloc_td = alloc_td;
  verbs.dealloc_td = dealloc_td;
  verbs.alloc_parent_domain = alloc_parent_domain;
  verbs.create_cq_ex = create_cq_ex;
  verbs.query_rt_values = query_rt_values;
  verbs.alloc_dm = alloc_dm;
  verbs.free_dm = free_dm;
  verbs.reg_dm_mr = reg_dm_mr;
  verbs.advise_mr = advise_mr;
  verbs.create_qp_ex = create_qp_ex;
  verbs.open_xrcd = open_xrcd;
  verbs.close_xrcd = close_xrcd;  // its callers do not check for NULL
  verbs.create_srq_ex = create_srq_ex;
  verbs.open_qp = open_qp;
  verbs.get_srq_num = [](ibv_srq* srq, std::uint32_t* number) {
    *number = Srq::of(srq).srq_num;
    return 0;
  };
}

}  // namespace vrdma::guest
