// Extended reliable connections (IBA annex A14): domains, the SRQs in them, and the queue pairs that receive for those.
#pragma once

#include <infiniband/verbs.h>

#include "vrdma/result.hpp"

namespace vrdma::guest {

// The functions of a verbs_context of the same names; a null pointer, or the value, says errno.
ibv_xrcd* open_xrcd(ibv_context* context, ibv_xrcd_init_attr* wanted);
int close_xrcd(ibv_xrcd* xrcd);
ibv_qp* open_qp(ibv_context* context, ibv_qp_open_attr* wanted);
ibv_srq* create_srq_ex(ibv_context* context, ibv_srq_init_attr_ex* wanted);

// IBV_QPT_XRC_RECV: of the attributes the domain and the context count.
Result<ibv_qp*> create_xrc_target(ibv_qp_init_attr_ex& wanted);

}  // namespace vrdma::guest
