// The addresses of a guest's virtual HCA and what a device query answers. GUIDs derive from the host's identity and the guest's
// name or number, so a named guest keeps its own.
#pragma once

#include "vmkernel_svc/objects.hpp"

namespace vrdma::svc {

// Sets guid and the GID table from guest.name, id, lid and link_layer.
void assign_addresses(Guest& guest);
control::DeviceReply device_reply(const Guest& guest, const Config& config);

}  // namespace vrdma::svc
