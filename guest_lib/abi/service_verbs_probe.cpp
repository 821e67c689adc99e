// Test only: what libvrdma_probe.so has in place of the verbs that need the host service, so that the exported surface
// and clients' start-up can be tested without one. It has one device, vrdma0, which cannot be opened.
#include <infiniband/verbs.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/open_device.hpp"
#include "guest_lib/synthetic_tree.hpp"

namespace {

// struct verbs_device of the providers' interface begins with ibv_device and is 712 bytes.
struct alignas(16) ProbeDevice {
  ibv_device device;
  std::byte verbs_device_rest[712 - sizeof(ibv_device)];
};
ProbeDevice probe{};

}  // namespace

VRDMA_EXPORT ibv_device** ibv_get_device_list(int* count) {
  probe.device.node_type = IBV_NODE_CA;
  probe.device.transport_type = IBV_TRANSPORT_IB;
  std::strcpy(probe.device.name, "vrdma0");
  std::strcpy(probe.device.dev_name, "uverbs0");
  std::strcpy(probe.device.dev_path, "/sys/class/infiniband_verbs/uverbs0");
  std::strcpy(probe.device.ibdev_path, "/sys/class/infiniband/vrdma0");
  auto** list = static_cast<ibv_device**>(std::calloc(2, sizeof(ibv_device*)));
  if (list != nullptr) list[0] = &probe.device;
  if (count != nullptr) *count = 1;
  return list;
}
VRDMA_EXPORT void ibv_free_device_list(ibv_device** list) { std::free(list); }
VRDMA_EXPORT const char* ibv_get_device_name(ibv_device* device) { return device->name; }
VRDMA_EXPORT __be64 ibv_get_device_guid(ibv_device*) {
  return __builtin_bswap64(vrdma::default_synthetic_device().node_guid);
}
VRDMA_EXPORT int ibv_get_device_index(ibv_device*) { return 0; }
namespace vrdma {
int open_connection_manager(int) {
  errno = ENODEV;
  return -1;
}
int open_management_datagrams(int flags) { return open_connection_manager(flags); }
void stat_character_device(int, struct stat*) {}
}  // namespace vrdma

// By assembler name, out of reach of verbs.h's declarations and macros; the arguments are not looked at.
#define PROBE_VERB(result, name, value)                                   \
  extern "C" VRDMA_VISIBLE result probe_##name() noexcept __asm__(#name); \
  extern "C" result probe_##name() noexcept {                             \
    errno = EOPNOTSUPP;                                                   \
    return value;                                                         \
  }
PROBE_VERB(void*, ibv_open_device, nullptr)
PROBE_VERB(void*, ibv_alloc_pd, nullptr)
PROBE_VERB(void*, ibv_reg_mr, nullptr)
PROBE_VERB(void*, ibv_reg_mr_iova, nullptr)
PROBE_VERB(void*, ibv_reg_mr_iova2, nullptr)
PROBE_VERB(void*, ibv_create_comp_channel, nullptr)
PROBE_VERB(void*, ibv_create_cq, nullptr)
PROBE_VERB(void*, ibv_create_srq, nullptr)
PROBE_VERB(void*, ibv_create_qp, nullptr)
PROBE_VERB(void*, ibv_create_ah, nullptr)
PROBE_VERB(void*, ibv_create_ah_from_wc, nullptr)
PROBE_VERB(void*, ibv_qp_to_qp_ex, nullptr)
PROBE_VERB(int, _ibv_query_gid_ex, EOPNOTSUPP)
PROBE_VERB(int, _ibv_query_gid_table, EOPNOTSUPP)
PROBE_VERB(int, ibv_ack_async_event, EOPNOTSUPP)
PROBE_VERB(int, ibv_ack_cq_events, EOPNOTSUPP)
PROBE_VERB(int, ibv_attach_mcast, EOPNOTSUPP)
PROBE_VERB(int, ibv_close_device, EOPNOTSUPP)
PROBE_VERB(int, ibv_dealloc_pd, EOPNOTSUPP)
PROBE_VERB(int, ibv_dereg_mr, EOPNOTSUPP)
PROBE_VERB(int, ibv_destroy_ah, EOPNOTSUPP)
PROBE_VERB(int, ibv_destroy_comp_channel, EOPNOTSUPP)
PROBE_VERB(int, ibv_destroy_cq, EOPNOTSUPP)
PROBE_VERB(int, ibv_destroy_qp, EOPNOTSUPP)
PROBE_VERB(int, ibv_destroy_srq, EOPNOTSUPP)
PROBE_VERB(int, ibv_detach_mcast, EOPNOTSUPP)
PROBE_VERB(int, ibv_get_async_event, EOPNOTSUPP)
PROBE_VERB(int, ibv_get_cq_event, EOPNOTSUPP)
PROBE_VERB(int, ibv_get_pkey_index, EOPNOTSUPP)
PROBE_VERB(int, ibv_init_ah_from_wc, EOPNOTSUPP)
PROBE_VERB(int, ibv_modify_qp, EOPNOTSUPP)
PROBE_VERB(int, ibv_modify_srq, EOPNOTSUPP)
PROBE_VERB(int, ibv_query_device, EOPNOTSUPP)
PROBE_VERB(int, ibv_query_gid, EOPNOTSUPP)
PROBE_VERB(int, ibv_query_gid_type, EOPNOTSUPP)
PROBE_VERB(int, ibv_query_pkey, EOPNOTSUPP)
PROBE_VERB(int, ibv_query_port, EOPNOTSUPP)
PROBE_VERB(int, ibv_query_qp, EOPNOTSUPP)
PROBE_VERB(int, ibv_query_srq, EOPNOTSUPP)
PROBE_VERB(int, ibv_rereg_mr, EOPNOTSUPP)
PROBE_VERB(int, ibv_resize_cq, EOPNOTSUPP)
