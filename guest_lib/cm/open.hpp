// What open(2) of /dev/infiniband/rdma_cm does (paths.cpp): a descriptor, or -1 with errno.
#pragma once

namespace vrdma {
int open_connection_manager(int flags);
}
