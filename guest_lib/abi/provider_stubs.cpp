// The interface between libibverbs and its hardware providers (IBVERBS_PRIVATE_34; in other releases of rdma-core
// 22, 25, 33, 57, 59, 64, 65: that in which it was new).
// libmlx5 and libefa are linked into programs for their direct verbs and bind every name at start, but none of our devices is
// theirs: a provider here registers, is never matched with a device, and finds that no command reaches a kernel.
#include <infiniband/verbs.h>

#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "guest_lib/abi/export.hpp"

namespace {

int no_kernel() { return errno = EOPNOTSUPP; }

// The head of libibverbs' ioctl command buffer, as the providers' inlines lay it out on their stack.
struct CommandBuffer {
  CommandBuffer* next;
  std::byte* attribute_end;
  std::byte* attribute_limit;
  std::byte flags_and_header[32];
  std::byte attributes[];  // 16 bytes each
};
static_assert(offsetof(CommandBuffer, attributes) == 0x38);
constexpr std::ptrdiff_t attribute_bytes = 16;

}  // namespace

// A data symbol that libmlx5 imports: whether a destroy command may fail because the kernel device is gone. No command
// of ours reaches a kernel.
extern "C" {
extern VRDMA_VISIBLE bool verbs_allow_disassociate_destroy;
bool verbs_allow_disassociate_destroy = false;
}

VRDMA_EXPORT void verbs_register_driver_34(const void*) {}
#ifndef VRDMA_ONE_VERSION
#define VRDMA_REGISTERS(version)                                          \
  VRDMA_EXPORT void verbs_register_driver_##version(const void*) {} \
  __asm__(".symver verbs_register_driver_" #version ", verbs_register_driver_" #version "@@@IBVERBS_PRIVATE_" #version)
VRDMA_REGISTERS(22);
VRDMA_REGISTERS(25);
VRDMA_REGISTERS(33);
VRDMA_REGISTERS(57);
VRDMA_REGISTERS(59);
VRDMA_REGISTERS(64);
VRDMA_REGISTERS(65);
#endif

VRDMA_EXPORT ibv_context* verbs_open_device(ibv_device*, void*) {
  errno = EOPNOTSUPP;
  return nullptr;
}

VRDMA_EXPORT void* _verbs_init_and_alloc_context(ibv_device*, int, std::size_t, void*, std::uint32_t) {
  errno = EOPNOTSUPP;
  return nullptr;
}

// Both act on contexts that _verbs_init_and_alloc_context() would have made.
VRDMA_EXPORT void verbs_uninit_context(void*) {}
VRDMA_EXPORT void verbs_set_ops(void*, const void*) {}

VRDMA_EXPORT void verbs_init_cq(ibv_cq* cq, ibv_context* context, ibv_comp_channel* channel,
                                void* cq_context) {
  cq->context = context;
  cq->channel = channel;
  cq->cq_context = cq_context;
  cq->comp_events_completed = 0;
  cq->async_events_completed = 0;
  pthread_mutex_init(&cq->mutex, nullptr);
  pthread_cond_init(&cq->cond, nullptr);
  if (channel == nullptr) return;
  pthread_mutex_lock(&context->mutex);
  ++channel->refcnt;
  pthread_mutex_unlock(&context->mutex);
}

// Providers explain themselves to the person who debugs a device; there is none.
VRDMA_EXPORT void __verbs_log(void*, std::uint32_t, const char*, ...) {}

VRDMA_EXPORT int ibv_read_ibdev_sysfs_file(char*, std::size_t, const void* sysfs_device, const char*, ...) {
  errno = sysfs_device == nullptr ? EINVAL : EOPNOTSUPP;
  return -1;
}

// The caller reserves stack for this many attributes, so the answer must be right although the command goes nowhere.
VRDMA_EXPORT unsigned __ioctl_final_num_attrs(unsigned attribute_count, CommandBuffer* link) {
  for (; link != nullptr; link = link->next)
    attribute_count += static_cast<unsigned>((link->attribute_end - link->attributes) / attribute_bytes);
  return attribute_count;
}

VRDMA_EXPORT int execute_ioctl(ibv_context*, CommandBuffer*) { return no_kernel(); }

VRDMA_EXPORT int ibv_cmd_poll_cq(ibv_cq*, int, ibv_wc*) {
  errno = EOPNOTSUPP;
  return -1;
}

// The arguments differ and none is looked at.
#define VRDMA_NO_KERNEL(name)                     \
  VRDMA_EXPORT int name() { return no_kernel(); } \
  VRDMA_OTHER_RELEASES_TOO(name);
VRDMA_NO_KERNEL(ibv_cmd_advise_mr)
VRDMA_NO_KERNEL(ibv_cmd_alloc_dm)
VRDMA_NO_KERNEL(ibv_cmd_alloc_dmah)  // since 59, as free_dmah and reg_mr_ex
VRDMA_NO_KERNEL(ibv_cmd_alloc_mw)
VRDMA_NO_KERNEL(ibv_cmd_alloc_pd)
VRDMA_NO_KERNEL(ibv_cmd_attach_mcast)
VRDMA_NO_KERNEL(ibv_cmd_close_xrcd)
VRDMA_NO_KERNEL(ibv_cmd_create_ah)
VRDMA_NO_KERNEL(ibv_cmd_create_counters)
VRDMA_NO_KERNEL(ibv_cmd_create_cq)
VRDMA_NO_KERNEL(ibv_cmd_create_cq_ex)
VRDMA_NO_KERNEL(ibv_cmd_create_cq_ex2)  // since rdma-core 56
VRDMA_NO_KERNEL(ibv_cmd_create_flow)
VRDMA_NO_KERNEL(ibv_cmd_create_flow_action_esp)
VRDMA_NO_KERNEL(ibv_cmd_create_qp)
VRDMA_NO_KERNEL(ibv_cmd_create_qp_ex)
VRDMA_NO_KERNEL(ibv_cmd_create_qp_ex2)
VRDMA_NO_KERNEL(ibv_cmd_create_rwq_ind_table)
VRDMA_NO_KERNEL(ibv_cmd_create_srq)
VRDMA_NO_KERNEL(ibv_cmd_create_srq_ex)
VRDMA_NO_KERNEL(ibv_cmd_create_wq)
VRDMA_NO_KERNEL(ibv_cmd_dealloc_mw)
VRDMA_NO_KERNEL(ibv_cmd_dealloc_pd)
VRDMA_NO_KERNEL(ibv_cmd_dereg_mr)
VRDMA_NO_KERNEL(ibv_cmd_destroy_ah)
VRDMA_NO_KERNEL(ibv_cmd_destroy_counters)
VRDMA_NO_KERNEL(ibv_cmd_destroy_cq)
VRDMA_NO_KERNEL(ibv_cmd_destroy_flow)
VRDMA_NO_KERNEL(ibv_cmd_destroy_flow_action)
VRDMA_NO_KERNEL(ibv_cmd_destroy_qp)
VRDMA_NO_KERNEL(ibv_cmd_destroy_rwq_ind_table)
VRDMA_NO_KERNEL(ibv_cmd_destroy_srq)
VRDMA_NO_KERNEL(ibv_cmd_destroy_wq)
VRDMA_NO_KERNEL(ibv_cmd_detach_mcast)
VRDMA_NO_KERNEL(ibv_cmd_export_dmabuf_fd)  // since 62, as query_port_speed
VRDMA_NO_KERNEL(ibv_cmd_free_dm)
VRDMA_NO_KERNEL(ibv_cmd_free_dmah)
VRDMA_NO_KERNEL(ibv_cmd_get_context)
VRDMA_NO_KERNEL(ibv_cmd_modify_cq)
VRDMA_NO_KERNEL(ibv_cmd_modify_flow_action_esp)
VRDMA_NO_KERNEL(ibv_cmd_modify_qp)
VRDMA_NO_KERNEL(ibv_cmd_modify_qp_ex)
VRDMA_NO_KERNEL(ibv_cmd_modify_srq)
VRDMA_NO_KERNEL(ibv_cmd_modify_wq)
VRDMA_NO_KERNEL(ibv_cmd_open_qp)
VRDMA_NO_KERNEL(ibv_cmd_open_xrcd)
VRDMA_NO_KERNEL(ibv_cmd_post_recv)
VRDMA_NO_KERNEL(ibv_cmd_post_send)
VRDMA_NO_KERNEL(ibv_cmd_post_srq_recv)
VRDMA_NO_KERNEL(ibv_cmd_query_context)
VRDMA_NO_KERNEL(ibv_cmd_query_device)  // until 33, as query_device_ex
VRDMA_NO_KERNEL(ibv_cmd_query_device_any)
VRDMA_NO_KERNEL(ibv_cmd_query_device_ex)
VRDMA_NO_KERNEL(ibv_cmd_query_mr)
VRDMA_NO_KERNEL(ibv_cmd_query_port)
VRDMA_NO_KERNEL(ibv_cmd_query_port_speed)
VRDMA_NO_KERNEL(ibv_cmd_query_qp)
VRDMA_NO_KERNEL(ibv_cmd_query_srq)
VRDMA_NO_KERNEL(ibv_cmd_read_counters)
VRDMA_NO_KERNEL(ibv_cmd_reg_dm_mr)
VRDMA_NO_KERNEL(ibv_cmd_reg_dmabuf_mr)
VRDMA_NO_KERNEL(ibv_cmd_reg_mr)
VRDMA_NO_KERNEL(ibv_cmd_reg_mr_ex)
VRDMA_NO_KERNEL(ibv_cmd_req_notify_cq)
VRDMA_NO_KERNEL(ibv_cmd_rereg_mr)
VRDMA_NO_KERNEL(ibv_cmd_resize_cq)
// Since 65: completion counters.
VRDMA_NO_KERNEL(ibv_cmd_create_comp_cntr)
VRDMA_NO_KERNEL(ibv_cmd_destroy_comp_cntr)
VRDMA_NO_KERNEL(ibv_cmd_inc_comp_cntr)
VRDMA_NO_KERNEL(ibv_cmd_inc_err_comp_cntr)
VRDMA_NO_KERNEL(ibv_cmd_qp_attach_comp_cntr)
VRDMA_NO_KERNEL(ibv_cmd_query_comp_cntr_caps)
VRDMA_NO_KERNEL(ibv_cmd_read_comp_cntr)
VRDMA_NO_KERNEL(ibv_cmd_read_err_comp_cntr)
VRDMA_NO_KERNEL(ibv_cmd_set_comp_cntr)
VRDMA_NO_KERNEL(ibv_cmd_set_err_comp_cntr)
VRDMA_NO_KERNEL(ibv_dmabuf_heap_destroy)  // since 64, as the others of that name
VRDMA_NO_KERNEL(ibv_dmabuf_heap_free)
VRDMA_NO_KERNEL(ibv_get_fw_ver)  // 25 to 32
#undef VRDMA_NO_KERNEL
VRDMA_EXPORT void* ibv_dmabuf_heap_alloc() { return no_kernel(), nullptr; }
VRDMA_EXPORT void* ibv_dmabuf_heap_cc_shared_init() { return no_kernel(), nullptr; }

// <infiniband/verbs.h> declares it since 56, with these texts.
VRDMA_EXPORT const char* ibv_wr_opcode_str(ibv_wr_opcode opcode) {
  static constexpr const char* texts[] = {"rdma-write", "rdma-write-with-imm", "send", "send-with-imm", "rdma-read",
                                          "atomic-cmp-and-swp", "atomic-fetch-and-add", "local-inv", "bind-mw", "send-with-inv",
                                          "tso", "driver1", nullptr, nullptr, "flush", "atomic-write"};
  const auto which = static_cast<unsigned>(opcode);
  return which < std::size(texts) && texts[which] != nullptr ? texts[which] : "unknown";
}

VRDMA_OTHER_RELEASES_TOO(__ioctl_final_num_attrs);
VRDMA_OTHER_RELEASES_TOO(__verbs_log);
VRDMA_OTHER_RELEASES_TOO(_verbs_init_and_alloc_context);
VRDMA_OTHER_RELEASES_TOO(execute_ioctl);
VRDMA_OTHER_RELEASES_TOO(ibv_cmd_poll_cq);
VRDMA_OTHER_RELEASES_TOO(ibv_read_ibdev_sysfs_file);
VRDMA_OTHER_RELEASES_TOO(verbs_allow_disassociate_destroy);
VRDMA_OTHER_RELEASES_TOO(verbs_init_cq);
VRDMA_OTHER_RELEASES_TOO(verbs_open_device);
VRDMA_OTHER_RELEASES_TOO(verbs_set_ops);
VRDMA_OTHER_RELEASES_TOO(verbs_uninit_context);
VRDMA_OTHER_RELEASES_TOO(ibv_dmabuf_heap_alloc);
VRDMA_OTHER_RELEASES_TOO(ibv_dmabuf_heap_cc_shared_init);
VRDMA_OTHER_RELEASES_TOO(ibv_wr_opcode_str);
