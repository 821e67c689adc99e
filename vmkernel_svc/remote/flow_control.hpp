// Priority flow control of a network interface, which RoCE wants on its way (IEEE 802.1Qbb), as dcb(8) of iproute2 asks for it.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace vrdma::remote {

// The priorities that have it ("3,4"), "off", or "unknown": the interface does not say.
std::string priority_flow_control(const std::string& interface);
// What the kernel's answer to that says.
std::string priority_flow_control_in(std::span<const std::byte> answer);

}  // namespace vrdma::remote
