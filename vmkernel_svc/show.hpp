// What `vrdma show` and the metrics see: the service's objects as JSON, written to a memfd that travels with the reply. A tool sees
// the objects of its own uid; root and the service's user see all. Runs on the shard's thread.
#pragma once

#include <vector>

#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

void answer_show(Shard& shard, const vmci::PacketSocket& socket, const control::Head& head, const std::vector<std::byte>& packet);

}  // namespace vrdma::svc
