// The commands of the kernel's rdma_cm, as librdmacm writes them: <rdma/rdma_user_cm.h>. Any thread.
#pragma once

#include <cstddef>

#include "guest_lib/cm/files.hpp"

namespace vrdma::guest::cm {

// As write(2) to the kernel's: `bytes`, or -1 with errno.
long write_command(const std::shared_ptr<File>& file, const void* command, std::size_t bytes);

}  // namespace vrdma::guest::cm
