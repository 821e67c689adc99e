// Starting a private service where none answers: one for each user, and one without direct mode beside it, which leave when nobody uses them.
#pragma once

#include "cli/service.hpp"

namespace vrdma::cli {

// As find_service(), starting a private vrdmad if none answers. Throws std::runtime_error with a message for a person.
Service find_or_start_service();
// The private vrdmad that offers no direct mode, beside the other one. Throws likewise, and where VRDMA_SOCKET names another service.
Service find_or_start_mediated_service();

}  // namespace vrdma::cli
