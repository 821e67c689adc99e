// Memory windows (ibv_alloc_mw(3), ibv_bind_mw(3), IBV_WR_BIND_MW, IBV_WR_LOCAL_INV): the service binds and invalidates them when that is posted;
// the request then completes in its turn, with what came of it.
//
// Not in virtual machines (vmkernel_svc/control/windows.cpp).
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstdint>

#include "vrdma/result.hpp"

namespace vrdma::guest {

class Attachment;
struct Qp;

bool offers_windows(const Attachment& attachment);
// By the work request, when its turn comes; older services by a request when it is posted.
bool changes_windows_in_turn(const Attachment& attachment);

ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type);
int dealloc_mw(ibv_mw* mw);
int bind_mw(ibv_qp* qp, ibv_mw* mw, ibv_mw_bind* wanted);

// 0, or the errno value for a request of either of the two opcodes that cannot be posted.
int check_window(const Qp& qp, const ibv_send_wr& wr);
// Of such a request, for an older service: how it will complete (enum ibv_wc_status), or EIO. send_lock is held; no claim of direct mode is, for which the service
// may be waiting.
Result<std::uint32_t> carry_out_window(Qp& qp, const ibv_send_wr& wr);
// How many windows there are: without any, nobody has such requests. Asked with every post, hence not behind a call.
inline std::atomic<std::uint32_t> windows_made{0};
inline bool windows_in_use() { return windows_made.load(std::memory_order_relaxed) != 0; }

}  // namespace vrdma::guest
