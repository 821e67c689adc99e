// What `vrdma show` and the metrics see: the service's objects as JSON, written to a memfd that travels with the reply. A tool sees
// the objects of its own uid; root and the service's user see all. Runs on the shard's thread.
#pragma once

#include <vector>

#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

// Who asks: root and the service's own user see all, others what is theirs; a machine's root what is the machine's, its users theirs.
struct Viewer {
  uid_t uid = static_cast<uid_t>(-1);
  bool all = false;
  std::string machine;  // empty: on this host

  static Viewer at(const vmci::PacketSocket& socket);
  static Viewer in(const std::string& machine, uid_t uid) { return {uid, uid == 0, machine}; }
  bool sees(const Guest& guest) const;
};

void answer_show(Shard& shard, const vmci::PacketSocket& socket, const control::Head& head, const Viewer& viewer);

}  // namespace vrdma::svc
