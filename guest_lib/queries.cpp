// Device, port, GID and P_Key queries: answered from what the service last told this process, with a request only after it
// said that something changed.
#include <algorithm>
#include <cstring>

#include "guest_lib/abi/export.hpp"
#include "guest_lib/cq_ex.hpp"
#include "guest_lib/device.hpp"
#include "guest_lib/device_memory.hpp"
#include "guest_lib/memory_window.hpp"
#include "guest_lib/objects.hpp"
#include "guest_lib/on_demand.hpp"
#include "guest_lib/port_interface.hpp"
#include "guest_lib/verbs_result.hpp"
#include "vrdma/limits.hpp"

namespace vrdma::guest {

namespace {

// Where nothing else would be true: a link of 100 Gb/s (4X EDR).
constexpr std::uint8_t width_4x = 2;
constexpr std::uint8_t speed_edr = 32;
constexpr std::uint8_t physical_link_up = 5;
constexpr std::uint8_t virtual_lanes_one = 1;
constexpr std::uint8_t subnet_timeout = 18;   // 4.096 µs · 2^18, what subnet managers use
// A number that no manufacturer of adapters reports; what identifies the device is its name and firmware version.
constexpr std::uint32_t vendor_id = 0x56524d;  // "VRM"
constexpr std::uint32_t vendor_part_id = 1;
constexpr std::uint64_t device_atomic_write = 1ull << 40;  // IB_UVERBS_DEVICE_ATOMIC_WRITE of headers from Linux 6.2 on

bool empty(const control::GidEntry& entry) { return entry.gid == Gid{}; }

void fill(const control::DeviceReply& reply, ibv_device_attr& to) {
  to = {};
  std::memcpy(to.fw_ver, reply.fw_version, sizeof(reply.fw_version));
  to.fw_ver[sizeof(reply.fw_version)] = '\0';
  to.node_guid = reply.node_guid;
  to.sys_image_guid = reply.sys_image_guid;
  to.max_mr_size = reply.mr_bytes_max;
  to.page_size_cap = ~std::uint64_t{0} << 12;  // 4 KiB and every larger power of two
  to.vendor_id = vendor_id;
  to.vendor_part_id = vendor_part_id;
  to.hw_ver = 1;
  to.max_qp = static_cast<int>(reply.qp_max);
  to.max_qp_wr = static_cast<int>(reply.qp_wr_max);
  to.device_cap_flags = IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_SYS_IMAGE_GUID |
                        IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_BAD_PKEY_CNTR | IBV_DEVICE_BAD_QKEY_CNTR | IBV_DEVICE_XRC;
  to.max_sge = static_cast<int>(reply.sge_max);
  to.max_sge_rd = static_cast<int>(reply.sge_max);
  to.max_cq = static_cast<int>(reply.cq_max);
  to.max_cqe = static_cast<int>(reply.cqe_max);
  to.max_mr = static_cast<int>(reply.mr_max);
  to.max_pd = static_cast<int>(reply.pd_max);
  to.max_qp_rd_atom = static_cast<int>(reply.rd_atomic_max);
  to.max_qp_init_rd_atom = static_cast<int>(reply.rd_atomic_max);
  to.max_res_rd_atom = static_cast<int>(std::min<std::uint64_t>(std::uint64_t{reply.rd_atomic_max} * reply.qp_max, INT32_MAX));
  to.atomic_cap = IBV_ATOMIC_HCA;
  to.max_mcast_grp = static_cast<int>(limits::mcast_groups_max);
  to.max_mcast_qp_attach = static_cast<int>(limits::mcast_qp_attach_max);
  to.max_total_mcast_qp_attach = static_cast<int>(limits::mcast_groups_max * limits::mcast_qp_attach_max);
  to.max_ah = static_cast<int>(limits::ah_max);
  to.max_srq = static_cast<int>(reply.srq_max);
  to.max_srq_wr = static_cast<int>(reply.srq_wr_max);
  to.max_srq_sge = static_cast<int>(reply.sge_max);
  to.max_pkeys = limits::pkey_table;
  to.local_ca_ack_delay = 15;
  to.phys_port_cnt = 1;
}

void add_windows(ibv_device_attr& to) {
  to.max_mw = static_cast<int>(limits::mw_max);
  to.device_cap_flags |= IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
}

void fill(const control::DeviceReply& reply, ibv_port_attr& to) {
  const bool ethernet = reply.link_layer == control::link_layer_ethernet;
  to = {};
  to.state = static_cast<ibv_port_state>(reply.port_state);
  to.max_mtu = static_cast<ibv_mtu>(reply.max_mtu);
  to.active_mtu = static_cast<ibv_mtu>(reply.active_mtu);
  to.gid_tbl_len = static_cast<int>(limits::gid_table);
  static_assert(limits::ethernet_port_capabilities == (IBV_PORT_SYS_IMAGE_GUID_SUP | IBV_PORT_EXTENDED_SPEEDS_SUP | IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS));
  to.port_cap_flags = ethernet ? limits::ethernet_port_capabilities : limits::port_capabilities;
  to.max_msg_sz = limits::message_bytes_max;
  to.pkey_tbl_len = limits::pkey_table;
  to.lid = reply.lid;
  to.sm_lid = reply.sm_lid;
  to.max_vl_num = virtual_lanes_one;
  to.sm_sl = reply.sm_sl;
  to.subnet_timeout = ethernet ? 0 : subnet_timeout;
  to.active_width = width_4x;
  to.active_speed = speed_edr;
  to.phys_state = physical_link_up;
  to.link_layer = static_cast<std::uint8_t>(reply.link_layer);
}

ibv_gid_entry entry_at(const control::DeviceReply& reply, std::uint32_t index) {
  ibv_gid_entry entry{};
  std::memcpy(entry.gid.raw, reply.gids[index].gid.data(), sizeof(entry.gid.raw));
  entry.gid_index = index;
  entry.port_num = only_port;
  entry.gid_type = reply.gids[index].type;
  entry.ndev_ifindex = port_interface();
  return entry;
}

}  // namespace

int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes, std::size_t bytes) {
  return as_int([&]() -> Status {
    if (port != only_port) return Errno{EINVAL};
    auto reply = Context::of(context).device();
    if (!reply) return reply.error();
    ibv_port_attr all;
    fill(*reply, all);
    std::memset(attributes, 0, bytes);
    std::memcpy(attributes, &all, std::min(bytes, sizeof(all)));
    return ok();
  });
}

int query_device(ibv_context* context, ibv_device_attr* attributes) {
  return as_int([&]() -> Status {
    auto reply = Context::of(context).device();
    if (!reply) return reply.error();
    fill(*reply, *attributes);
    if (auto attachment = Context::of(context).usable(); attachment && offers_windows(**attachment)) add_windows(*attributes);
    return ok();
  });
}

int query_device_ex(ibv_context* context, const ibv_query_device_ex_input* input, ibv_device_attr_ex* attributes,
                    std::size_t bytes) {
  return as_int([&]() -> Status {
    if (input != nullptr && input->comp_mask != 0) return Errno{EINVAL};
    if (bytes < sizeof(ibv_device_attr)) return Errno{EOPNOTSUPP};
    auto reply = Context::of(context).device();
    if (!reply) return reply.error();
    ibv_device_attr_ex all{};
    fill(*reply, all.orig_attr);
    auto attachment = Context::of(context).usable();
    if (attachment && offers_windows(**attachment)) add_windows(all.orig_attr);
    all.device_cap_flags_ex = all.orig_attr.device_cap_flags | device_atomic_write;
    all.phys_port_cnt_ex = all.orig_attr.phys_port_cnt;
    all.max_dm_size = device_memory_bytes_max;
    if (attachment && offers_on_demand(**attachment)) report_on_demand(all);
    if (attachment && offers_times(**attachment)) all.completion_timestamp_mask = UINT64_MAX, all.hca_core_clock = clock_khz;
    std::memset(attributes, 0, bytes);
    std::memcpy(attributes, &all, std::min(bytes, sizeof(all)));
    return ok();
  });
}

}  // namespace vrdma::guest

using namespace vrdma;
using namespace vrdma::guest;

VRDMA_EXPORT int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  return query_device(context, attributes);
}

// The exported function knows the port attributes as they were before port_cap_flags2.
#undef ibv_query_port
VRDMA_EXPORT int ibv_query_port(ibv_context* context, std::uint8_t port, _compat_ibv_port_attr* attributes) {
  return query_port(context, port, reinterpret_cast<ibv_port_attr*>(attributes), 48);
}

// In units of 100 Mbit/s (ibv_query_port_speed(3), since rdma-core 62): four lanes of EDR.
extern "C" VRDMA_VISIBLE int ibv_query_port_speed(ibv_context* context, std::uint32_t port, std::uint64_t* speed);
int ibv_query_port_speed(ibv_context* context, std::uint32_t port, std::uint64_t* speed) {
  return as_int([&]() -> Status {
    if (port != only_port) return Errno{EINVAL};
    if (auto reply = Context::of(context).device(); !reply) return reply.error();
    *speed = 1000;
    return ok();
  });
}

VRDMA_EXPORT int ibv_query_gid(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) {
  return as_minus_one([&]() -> Status {
    if (port != only_port || index < 0 || static_cast<std::uint32_t>(index) >= limits::gid_table) return Errno{EINVAL};
    auto reply = Context::of(context).device();
    if (!reply) return reply.error();
    *gid = entry_at(*reply, static_cast<std::uint32_t>(index)).gid;
    return ok();
  });
}

VRDMA_EXPORT int _ibv_query_gid_ex(ibv_context* context, std::uint32_t port, std::uint32_t index, ibv_gid_entry* entry,
                                   std::uint32_t flags, std::size_t entry_bytes) {
  return as_int([&]() -> Status {
    if (flags != 0 || port != only_port || index >= limits::gid_table) return Errno{EINVAL};
    auto reply = Context::of(context).device();
    if (!reply) return reply.error();
    if (empty(reply->gids[index])) return Errno{ENODATA};
    const ibv_gid_entry found = entry_at(*reply, index);
    std::memset(entry, 0, entry_bytes);
    std::memcpy(entry, &found, std::min(entry_bytes, sizeof(found)));
    return ok();
  });
}

VRDMA_EXPORT ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, std::size_t max_entries,
                                          std::uint32_t flags, std::size_t entry_bytes) {
  ssize_t count = 0;
  const int error = as_int([&]() -> Status {
    if (flags != 0) return Errno{EINVAL};
    auto reply = Context::of(context).device();
    if (!reply) return reply.error();
    if (static_cast<std::size_t>(std::ranges::count_if(reply->gids, [](const auto& e) { return !empty(e); })) > max_entries)
      return Errno{EINVAL};
    auto* to = reinterpret_cast<std::byte*>(entries);
    for (std::uint32_t index = 0; index < limits::gid_table; ++index) {
      if (empty(reply->gids[index])) continue;
      const ibv_gid_entry found = entry_at(*reply, index);
      std::memset(to, 0, entry_bytes);
      std::memcpy(to, &found, std::min(entry_bytes, sizeof(found)));
      to += entry_bytes;
      ++count;
    }
    return ok();
  });
  return error != 0 ? -error : count;
}

// The numbers are those of the sysfs file: InfiniBand and RoCE v1 are one type there.
enum SysfsGidType { sysfs_ib_or_roce_v1, sysfs_roce_v2 };
VRDMA_EXPORT int ibv_query_gid_type(ibv_context* context, std::uint8_t port, unsigned int index, int* type) {
  return as_minus_one([&]() -> Status {
    if (port != only_port || index >= limits::gid_table) return Errno{EINVAL};
    auto reply = Context::of(context).device();
    if (!reply) return reply.error();
    *type = reply->gids[index].type == IBV_GID_TYPE_ROCE_V2 ? sysfs_roce_v2 : sysfs_ib_or_roce_v1;
    return ok();
  });
}
VRDMA_OTHER_RELEASES_TOO(ibv_query_gid_type);

VRDMA_EXPORT int ibv_query_pkey(ibv_context* context, std::uint8_t port, int index, __be16* pkey) {
  return as_minus_one([&]() -> Status {
    if (port != only_port || index < 0 || static_cast<std::uint32_t>(index) >= limits::pkey_table) return Errno{EINVAL};
    auto reply = Context::of(context).device();
    if (!reply) return reply.error();
    *pkey = reply->pkeys[index];
    return ok();
  });
}

VRDMA_EXPORT int ibv_get_pkey_index(ibv_context* context, std::uint8_t port, __be16 pkey) {
  int found = -1;
  const int rc = as_minus_one([&]() -> Status {
    if (port != only_port) return Errno{EINVAL};
    auto reply = Context::of(context).device();
    if (!reply) return reply.error();
    const auto* at = std::ranges::find(reply->pkeys, pkey);
    if (at == std::end(reply->pkeys)) return Errno{ENOENT};
    found = static_cast<int>(at - reply->pkeys);
    return ok();
  });
  return rc == 0 ? found : -1;
}
