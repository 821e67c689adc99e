// The entries of a context's tables that answer EOPNOTSUPP, and the extended verbs that exist.
// Callers check most of verbs_context's entries for NULL, but none of the data verbs in ibv_context_ops.
#pragma once

#include <infiniband/verbs.h>

namespace vrdma::guest {

void set_unsupported_ops(ibv_context_ops& ops);
void set_extended_ops(verbs_context& verbs);

}  // namespace vrdma::guest
