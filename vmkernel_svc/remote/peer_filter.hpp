// Sockets that only hosts of the subnet can connect to. UCX's own connection set-up trusts whoever connects: a few bytes that it does
// not expect end the process (tcp_sockcm_ep.c of 1.13 asserts). So its listening sockets get a filter of the kernel's: packets from
// other addresses never reach them. Programs of the subnet's hosts do: docs/hosts.md says what to do about that.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace vrdma::remote {

// The process's sockets that listen for TCP connections, by descriptor.
std::set<int> listening_sockets();

// Lets only packets from `addresses` (numeric, of either family) reach the socket. False: the kernel does not.
bool accept_only(int socket, const std::vector<std::string>& addresses);

}  // namespace vrdma::remote
