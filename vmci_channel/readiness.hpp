// Tells whoever started a service that it serves: a byte on the descriptor that was named, which is closed; or, where none was, the service
// manager that waits at $NOTIFY_SOCKET (sd_notify(3), Type=notify of systemd.service(5)). With neither, nobody.
//
// Who names a descriptor is the service's own parent, and the manager that its environment speaks of is that parent's: not told, then.
#pragma once

#include <string_view>

#include "vmci_channel/unique_fd.hpp"

namespace vmci {

class Readiness {
 public:
  explicit Readiness(int descriptor) : descriptor_(descriptor), named_(descriptor >= 0) {}

  void serves(std::string_view status);
  // The manager's start ends here as well: what this service waits for may never come, and a boot must not wait with it.
  void waits(std::string_view status) const;

 private:
  UniqueFd descriptor_;  // none: -1
  bool named_;
};

}  // namespace vmci
