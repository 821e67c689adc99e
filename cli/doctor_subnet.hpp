// What `vrdma doctor` says of the subnet that this host is of.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "cli/doctor.hpp"

namespace vrdma::cli {

// state: what the service shows. Whether the subnet lets this host give LIDs to new guests. None where it does, or of a service that is no
// host of a managed subnet: it gives its own.
std::vector<Finding> examine_lease(const nlohmann::json& state);

// What is amiss with this host as a manager of the subnet.
std::vector<Finding> examine_manager(const nlohmann::json& state);

// In one finding: who leads, and whether the others are reached. None of a service that is no host of a managed subnet, or whose programs get no
// LIDs: of that one is said more than this.
std::vector<Finding> examine_subnet(const nlohmann::json& state);

// Whether the address that others know this host by is still one of it. None where it is, or where no others are.
std::vector<Finding> examine_own_address(const nlohmann::json& state);

// Of hosts that the configuration lists: which are connected. None of a service without such, or of a managed subnet.
std::vector<Finding> examine_listed_hosts(const nlohmann::json& state);

}  // namespace vrdma::cli
