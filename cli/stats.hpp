// `vrdma run --stats`: what the program did, from the service's account of guests that have left.
#pragma once

#include <sys/types.h>

#include "cli/service.hpp"

namespace vrdma::cli {

void print_stats(const Service& service, const std::string& command, pid_t pid);

}  // namespace vrdma::cli
