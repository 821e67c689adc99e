// Asks the service what it has (the JSON behind `vrdma show` and `vrdma run --stats`).
#pragma once

#include <nlohmann/json.hpp>

#include "cli/service.hpp"

namespace vrdma::cli {

// Throws std::runtime_error with a message for a person.
nlohmann::json query(const Service& service);

}  // namespace vrdma::cli
