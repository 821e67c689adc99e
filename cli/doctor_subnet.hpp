// What `vrdma doctor` says of the subnet that this host is of.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "cli/doctor.hpp"

namespace vrdma::cli {

// state: what the service shows. In one finding: who leads, and whether the others are reached. None of a service that is no host of a managed
// subnet, or whose programs get no LIDs: of that one is said more than this.
std::vector<Finding> examine_subnet(const nlohmann::json& state);

}  // namespace vrdma::cli
