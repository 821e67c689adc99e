// A listening socket that only hosts of the subnet can connect to: packets from other addresses never reach it, by a filter of the kernel's.
#pragma once

#include <string>
#include <vector>

namespace vrdma::remote {

// Lets only packets from `addresses` (numeric, of either family) reach the socket. False: the kernel does not.
bool accept_only(int socket, const std::vector<std::string>& addresses);

}  // namespace vrdma::remote
