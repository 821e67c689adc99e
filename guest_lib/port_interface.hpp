// The network interface that the GIDs of an Ethernet port name. A RoCE adapter has one, and UCX from 1.22 on asks the kernel's routes whether it
// leads to the peer's GID. Here it is the one by which this network namespace would send to the addresses that the GIDs stand for; the
// loopback's where there is none.
#pragma once

#include <cstdint>

#include "vrdma/control.hpp"

namespace vrdma::guest {

// Looks, and has others told from then on. The index; 0: the port is InfiniBand's. One thread at a time.
std::uint32_t find_port_interface(const control::DeviceReply& reply);

// What was found last. Any thread.
std::uint32_t port_interface();

}  // namespace vrdma::guest
