// A context's tables of functions, by which libibverbs' inline functions reach us.
#pragma once

#include <infiniband/verbs.h>

namespace vrdma::guest {

// Callers check most of verbs_context's own entries for NULL, which says EOPNOTSUPP, but none of those in ibv_context_ops.
void fill_operation_tables(verbs_context& verbs);

}  // namespace vrdma::guest
