// Where whoever runs a machine connects to the service.
#pragma once

#include <sys/types.h>

#include <string>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

// A stream socket for that user. Who else serves the folder of machines serves another socket of guests, too: what stands there is a
// leftover.
Result<vmci::UniqueFd> listen_stream(const std::string& path, uid_t tenant);

}  // namespace vrdma::svc
