// A listening socket that only hosts of the subnet can connect to: packets from other addresses do not reach it, by a filter of the kernel's.
// Whoever does must prove who he is all the same (handshake.hpp).
//
// The kernel's room for a filter is bounded (net.core.optmem_max, and 4096 instructions). Where all addresses do not fit, as many of their
// first bits are compared as do; where nothing fits, there is no filter: none of `addresses` is ever kept out.
#pragma once

#include <string>
#include <vector>

namespace vrdma::remote {

constexpr unsigned address_bits(bool v6) { return v6 ? 128 : 32; }

// Lets only packets from `addresses` (numeric; those of the socket's family count) reach the socket. How many bits of an address are compared;
// 0: none, every packet reaches it, and errno says why.
unsigned accept_only(int socket, const std::vector<std::string>& addresses);

}  // namespace vrdma::remote
