// Memory windows (ibv_alloc_mw(3), ibv_bind_mw(3), IBV_WR_BIND_MW, IBV_WR_LOCAL_INV): the service binds and invalidates them when that is posted;
// the request then completes in its turn, with what came of it.
//
// Not in virtual machines (vmkernel_svc/control/windows.cpp).
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "vrdma/result.hpp"

namespace vrdma::guest {

class Attachment;
struct Qp;

bool offers_windows(const Attachment& attachment);

ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type);
int dealloc_mw(ibv_mw* mw);
int bind_mw(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* wanted);

// Of a request of either of the two opcodes: how it will complete (enum ibv_wc_status), or why it cannot be posted. send_lock is held.
Result<std::uint32_t> carry_out_window(Qp& qp, const ibv_send_wr& wr);

}  // namespace vrdma::guest
