#include "vmkernel_svc/engine/qp_state.hpp"

#include <cstring>

namespace vrdma::engine {

namespace {

constexpr std::uint32_t pk = qp_attr_pkey_index, pt = qp_attr_port, qk = qp_attr_qkey, af = qp_attr_access_flags, av = qp_attr_av,
                        mtu = qp_attr_path_mtu, dq = qp_attr_dest_qpn, rp = qp_attr_rq_psn, sp = qp_attr_sq_psn,
                        dra = qp_attr_max_dest_rd_atomic, rnt = qp_attr_min_rnr_timer, to = qp_attr_timeout,
                        rc_ = qp_attr_retry_cnt, rr = qp_attr_rnr_retry, qra = qp_attr_max_qp_rd_atomic, ap = qp_attr_alt_path,
                        cs = qp_attr_cur_state, pm = qp_attr_path_mig_state, en = qp_attr_en_sqd_async_notify;

struct Transition {
  QpState from, to;
  struct Masks {
    bool legal;
    std::uint32_t required, optional;
  } ud, uc, rc;
};

using enum QpState;
// Any → RESET and any → ERR are legal for all, with the state alone.
constexpr Transition transitions[] = {
    {reset, init, {true, pk | pt | qk, 0}, {true, pk | pt | af, 0}, {true, pk | pt | af, 0}},
    {init, init, {true, 0, pk | pt | qk}, {true, 0, pk | pt | af}, {true, 0, pk | pt | af}},
    {init, rtr, {true, 0, pk | qk}, {true, av | mtu | dq | rp, ap | af | pk},
     {true, av | mtu | dq | rp | dra | rnt, ap | af | pk}},
    {rtr, rts, {true, sp, cs | qk}, {true, sp, cs | ap | af | pm},
     {true, to | rc_ | rr | sp | qra, cs | ap | af | rnt | pm}},
    {rts, rts, {true, 0, cs | qk}, {true, 0, cs | af | ap | pm}, {true, 0, cs | af | ap | pm | rnt}},
    {rts, sqd, {true, 0, en}, {true, 0, en}, {true, 0, en}},
    {sqd, rts, {true, 0, cs | qk}, {true, 0, cs | ap | af | pm}, {true, 0, cs | ap | af | rnt | pm}},
    {sqd, sqd, {true, 0, pk | qk}, {true, 0, av | ap | af | pk | pm},
     {true, 0, pt | av | to | rc_ | rr | qra | dra | ap | af | pk | rnt | pm}},
    {sqe, rts, {true, 0, cs | qk}, {true, 0, cs | af}, {false, 0, 0}},
};

// An XRC initiator is an RC queue pair without a receive half, its target one without a send half: what is of the other half is not theirs
// (the kernel's qp_state_table[]).
constexpr std::uint32_t not_of(QpType type) {
  return type == QpType::xrc_send ? dra | rnt : type == QpType::xrc_recv ? rc_ | rr | qra : 0;
}

constexpr bool known(QpState state) { return state <= err; }

bool path_ok(const AddressVector& path, const PortLimits& limits) {
  if (path.port_num != 1) return false;
  if (limits.ethernet && path.is_global == 0) return false;
  if (path.is_global == 0) return true;
  return path.sgid_index < limits.gid_count && ((limits.gids_present >> path.sgid_index) & 1) != 0;
}

}  // namespace

TransitionMasks transition_masks(QpType type, QpState from, QpState next) {
  if (next == reset || next == err) return {known(from), 0, 0};
  for (const auto& transition : transitions) {
    if (transition.from != from || transition.to != next) continue;
    const auto& masks = type == QpType::ud ? transition.ud : type == QpType::uc ? transition.uc : transition.rc;
    const std::uint32_t none = not_of(type);
    return {masks.legal, masks.required & ~none, masks.optional & ~none};
  }
  return {false, 0, 0};
}

Status modify(QpType type, QpAttributes& attributes, const QpAttributes& wanted, std::uint32_t mask, const PortLimits& limits) {
  const Errno invalid{EINVAL};
  mask &= ~not_of(type);  // what programs set for both ends alike is dropped, as uverbs does (modify_qp_mask())
  auto from = static_cast<QpState>(attributes.state);
  // IBV_QP_CUR_STATE: what the caller believes; honoured where the state may have moved by itself.
  if (mask & qp_attr_cur_state) {
    const auto believed = static_cast<QpState>(wanted.cur_state);
    if (believed != rtr && believed != rts && believed != sqd && believed != sqe) return invalid;
    if (believed != from) return invalid;
  }
  if ((mask & qp_attr_state) && wanted.state > static_cast<std::uint32_t>(err)) return invalid;
  const auto next = (mask & qp_attr_state) ? static_cast<QpState>(wanted.state) : from;
  const auto masks = transition_masks(type, from, next);
  if (!masks.legal) return invalid;
  if ((mask & masks.required) != masks.required) return invalid;
  if ((mask & ~(masks.required | masks.optional | qp_attr_state)) != 0) return invalid;

  if ((mask & pt) && wanted.port_num != 1) return invalid;
  if ((mask & pk) && wanted.pkey_index >= limits.pkey_count) return invalid;
  if ((mask & av) && !path_ok(wanted.path, limits)) return invalid;
  if ((mask & ap) && (wanted.alt_port_num != 1 || wanted.alt_pkey_index >= limits.pkey_count || wanted.alt_timeout > 31 ||
                      !path_ok(wanted.alt_path, limits) || limits.ethernet))  // paths migrate on InfiniBand (the kernel's _ib_modify_qp())
    return invalid;
  if ((mask & mtu) && (wanted.path_mtu < 1 || wanted.path_mtu > limits.max_mtu)) return invalid;
  if ((mask & to) && wanted.timeout > 31) return invalid;
  if ((mask & qra) && wanted.max_rd_atomic > limits.max_rd_atomic) return invalid;
  if ((mask & dra) && wanted.max_dest_rd_atomic > limits.max_rd_atomic) return invalid;
  if ((mask & pm) && wanted.path_mig_state > 2) return invalid;

  // What does not fit the field is cut off, as adapters' drivers do (mlx5): there are programs that ask for 10 retries.
  constexpr std::uint8_t count_mask = 7, timer_mask = 31;
  QpAttributes& a = attributes;
  if (next == reset) {  // wiped, but for what the queue pair was created with
    QpAttributes fresh{};
    fresh.max_send_wr = a.max_send_wr;
    fresh.max_recv_wr = a.max_recv_wr;
    fresh.max_send_sge = a.max_send_sge;
    fresh.max_recv_sge = a.max_recv_sge;
    fresh.max_inline_data = a.max_inline_data;
    a = fresh;
  }
  if (mask & pk) a.pkey_index = wanted.pkey_index;
  if (mask & pt) a.port_num = wanted.port_num;
  if (mask & qk) a.qkey = wanted.qkey;
  if (mask & af) a.access_flags = wanted.access_flags;
  if (mask & av) a.path = wanted.path;
  if (mask & mtu) a.path_mtu = wanted.path_mtu;
  if (mask & dq) a.dest_qp_num = wanted.dest_qp_num & psn_mask;
  if (mask & rp) a.rq_psn = wanted.rq_psn & psn_mask;
  if (mask & sp) a.sq_psn = wanted.sq_psn & psn_mask;
  if (mask & dra) a.max_dest_rd_atomic = wanted.max_dest_rd_atomic;
  if (mask & rnt) a.min_rnr_timer = wanted.min_rnr_timer & timer_mask;
  if (mask & to) a.timeout = wanted.timeout;
  if (mask & rc_) a.retry_cnt = wanted.retry_cnt & count_mask;
  if (mask & rr) a.rnr_retry = wanted.rnr_retry & count_mask;
  if (mask & qra) a.max_rd_atomic = wanted.max_rd_atomic;
  if (mask & ap) {
    a.alt_path = wanted.alt_path;
    a.alt_pkey_index = wanted.alt_pkey_index;
    a.alt_port_num = wanted.alt_port_num;
    a.alt_timeout = wanted.alt_timeout;
  }
  if (mask & pm) a.path_mig_state = wanted.path_mig_state;
  // Asked for with each way to SQD; what an earlier one asked for is over.
  if (from == rts && next == sqd) a.en_sqd_async_notify = (mask & en) != 0 && wanted.en_sqd_async_notify != 0;
  a.state = static_cast<std::uint32_t>(next);
  a.cur_state = a.state;
  return ok();
}

}  // namespace vrdma::engine
