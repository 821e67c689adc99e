// Extended completion queues, and the times that completions carry there (ibv_create_cq_ex(3), IBV_WC_EX_WITH_COMPLETION_TIMESTAMP).
//
// A time is nanoseconds of the service's monotonic clock as it wrote the completion, however much later that is polled; queue pairs that
// complete on such a queue stay mediated. In a virtual machine the service is asked how late it is, and by the machine's own clock is told which
// of the times is meant that a completion's 40 bits may be.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

namespace vrdma::guest {

class Attachment;

constexpr std::uint64_t clock_khz = 1'000'000;

bool offers_times(const Attachment& attachment);
ibv_cq_ex* create_cq_ex(ibv_context* context, ibv_cq_init_attr_ex* wanted);
int query_rt_values(ibv_context* context, ibv_values_ex* values);  // ibv_query_rt_values_ex(3)

}  // namespace vrdma::guest
