// Queue pair attributes as they travel in control requests: struct ibv_qp_attr with fixed widths. Units and encodings are the
// specification's (IBA 11.2.5.2): path_mtu 1..5 = 256..4096 bytes, timeout = 4.096 µs · 2^n (0: none), min_rnr_timer by table 45.
#pragma once

#include <cstdint>

#include "vrdma/wire.hpp"

namespace vrdma {

struct AddressVector {
  std::uint8_t dgid[16];
  std::uint32_t flow_label;
  std::uint16_t dlid;
  std::uint8_t sgid_index;
  std::uint8_t hop_limit;
  std::uint8_t traffic_class;
  std::uint8_t sl;
  std::uint8_t src_path_bits;
  std::uint8_t static_rate;
  std::uint8_t is_global;
  std::uint8_t port_num;
  std::uint8_t reserved[2];
};

struct QpAttributes {
  std::uint32_t state;      // enum ibv_qp_state
  std::uint32_t cur_state;
  std::uint32_t path_mtu;   // enum ibv_mtu
  std::uint32_t path_mig_state;
  std::uint32_t qkey;
  std::uint32_t rq_psn;
  std::uint32_t sq_psn;
  std::uint32_t dest_qp_num;
  std::uint32_t access_flags;  // enum ibv_access_flags
  std::uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
  AddressVector path;
  AddressVector alt_path;
  std::uint16_t pkey_index;
  std::uint16_t alt_pkey_index;
  std::uint8_t en_sqd_async_notify;
  std::uint8_t sq_draining;
  std::uint8_t max_rd_atomic;
  std::uint8_t max_dest_rd_atomic;
  std::uint8_t min_rnr_timer;
  std::uint8_t port_num;
  std::uint8_t timeout;
  std::uint8_t retry_cnt;
  std::uint8_t rnr_retry;
  std::uint8_t alt_port_num;
  std::uint8_t alt_timeout;
  std::uint8_t reserved;
  std::uint32_t rate_limit;
};
static_assert(WireRecord<AddressVector> && WireRecord<QpAttributes>);

// enum ibv_qp_attr_mask
enum QpAttributeMask : std::uint32_t {
  qp_attr_state = 1u << 0,
  qp_attr_cur_state = 1u << 1,
  qp_attr_en_sqd_async_notify = 1u << 2,
  qp_attr_access_flags = 1u << 3,
  qp_attr_pkey_index = 1u << 4,
  qp_attr_port = 1u << 5,
  qp_attr_qkey = 1u << 6,
  qp_attr_av = 1u << 7,
  qp_attr_path_mtu = 1u << 8,
  qp_attr_timeout = 1u << 9,
  qp_attr_retry_cnt = 1u << 10,
  qp_attr_rnr_retry = 1u << 11,
  qp_attr_rq_psn = 1u << 12,
  qp_attr_max_qp_rd_atomic = 1u << 13,
  qp_attr_alt_path = 1u << 14,
  qp_attr_min_rnr_timer = 1u << 15,
  qp_attr_sq_psn = 1u << 16,
  qp_attr_max_dest_rd_atomic = 1u << 17,
  qp_attr_path_mig_state = 1u << 18,
  qp_attr_cap = 1u << 19,
  qp_attr_dest_qpn = 1u << 20,
  qp_attr_rate_limit = 1u << 25,
};

}  // namespace vrdma
