// What open(2) of a character device below /dev/infiniband does (paths.cpp): a descriptor, or -1 with errno.
#pragma once

#include <sys/stat.h>

namespace vrdma {
int open_connection_manager(int flags);   // rdma_cm
int open_management_datagrams(int flags); // umad0

// What fstat(2) says more of such a descriptor (fstat_interpose.cpp); nothing of another file's.
void stat_character_device(int fd, struct stat* status);
}
