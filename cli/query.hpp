// What tools ask the service.
#pragma once

#include <nlohmann/json.hpp>

#include "cli/service.hpp"
#include "vrdma/control.hpp"

namespace vrdma::cli {

// What it has: the JSON behind `vrdma show` and `vrdma run --stats`. Throws std::runtime_error with a message for a person.
nlohmann::json query(const Service& service);

// The link layer of guests that do not wish for one, as VRDMA_LINK_LAYER names it. Empty: it does not say, as older services.
std::string link_layer_of(const Service& service);

// Of that JSON: whether the service can tell this user from others. In a user namespace it cannot tell those whom that does not map.
bool knows_user(const nlohmann::json& state);

// Whether guests may be direct, from now on. Throws likewise where it does not answer; the errors are the service's.
Result<control::SetDirectReply> set_direct(const Service& service, const control::SetDirectRequest& request);

}  // namespace vrdma::cli
