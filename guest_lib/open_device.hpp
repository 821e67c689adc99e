// What open(2) of a character device below /dev/infiniband does (paths.cpp): a descriptor, or -1 with errno.
#pragma once

namespace vrdma {
int open_connection_manager(int flags);   // rdma_cm
int open_management_datagrams(int flags); // umad0
}
