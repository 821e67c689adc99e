// What a tool says to the vrdmads of other hosts, with certificates of its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/doctor.hpp"
#include "vmkernel_svc/hosts/messages.hpp"
#include "vmkernel_svc/hosts/tls.hpp"

namespace vrdma::cli {

// Has the subnet's leader take a host out, and let nobody in by the certificate `serial` (empty: not known). Whether that host was the only one that could
// lead. Throws std::runtime_error with a message for a person.
bool ask_removal(hosts::Tls& tls, const std::string& address, std::uint16_t port, const std::string& name, const std::string& serial);
// Has the subnet's leader change a partition (or only tell), and returns what partitions there are then. Throws likewise.
hosts::Partitions ask_partitions(hosts::Tls& tls, const std::string& address, std::uint16_t port, const hosts::ChangePartition& change);

// Whether `target` ("10.0.0.2", with a port or without) and this host reach each other. `here`: at what address and port this
// host's vrdmad listens for others; port 0: it is not known, and only one direction is tried.
std::vector<Finding> examine_host(const std::string& folder, const std::string& target, const std::string& here, std::uint16_t port);

}  // namespace vrdma::cli
