// Programs in a virtual machine: whether the service that they use is the one by which they reach the host.
#pragma once

#include <string>

namespace vrdma::cli {

// Whether vrdma-guestd listens there, as far as that can be seen.
bool served_by_agent(const std::string& socket);
struct Apart {
  std::string why;  // empty: they do, or this machine has no device for it
  std::string remedy;
};
// Why programs at the service of this socket (empty: there is none) do not reach the host's, as this machine's device would have them.
Apart apart_from_host(const std::string& socket);
// A machine that could have such a device.
bool is_virtual();

}  // namespace vrdma::cli
