// Tells the paths that clients read (synthetic_tree.hpp) what the service says about the device. One thread at a time.
#pragma once

#include "vrdma/control.hpp"

namespace vrdma::guest {

void show_device_in_paths(const control::DeviceReply& reply);

}  // namespace vrdma::guest
