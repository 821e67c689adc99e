// Programs in a virtual machine: whether the service that they use is the one by which they reach the host.
#pragma once

#include <string>

namespace vrdma::cli {

// Whether vrdma-guestd listens there, as far as that can be seen.
bool served_by_agent(const std::string& socket);
// Empty, or why programs at the service of this socket do not reach the host's, as this machine's device would have them. Empty: at none.
std::string apart_from_host(const std::string& socket);
constexpr const char* apart_remedy = "as root: systemctl start vrdma-guestd, or vrdma-guestd &; a private vrdmad leaves ten seconds after its last program";
// A machine that could have such a device.
bool is_virtual();

}  // namespace vrdma::cli
