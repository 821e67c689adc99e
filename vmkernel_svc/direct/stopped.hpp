// Whether a process is stopped, by a signal or a debugger, with all its threads: then none of them runs until somebody lets it.
#pragma once

#include <sys/types.h>

namespace vrdma::svc {

// Reads /proc. False also where that cannot be known. The caller knows by its pidfd that the number is still that process's.
bool is_stopped(pid_t pid);

}  // namespace vrdma::svc
