// Descriptors that outlive the service. A QEMU is given its link once, when it starts; so that the next vrdmad finds the machines that
// run, however this one ended, a small process of its own, the keeper, holds a copy of what connects them. The service starts it with
// its first machine; it ends when the last of those QEMUs has.
//
//   vrdmad ── keeper.sock ──► vrdmad --keeper …: per machine its descriptors, the first of them the socket whose other end is QEMU's
//
// Only who runs as the same user is listened to. The server's thread, which waits for the answer: three seconds at most while guests are
// served (a heart that stands still for five costs machines their sessions), but for the keeper's start.
#pragma once

#include <sys/types.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

class Keeper {
 public:
  // machines: their folder; the keeper's socket stands there.
  explicit Keeper(const std::string& machines) : path_(machines + "/keeper.sock") {}

  // What a machine is kept as: one of that name that is another tenant's by now is another one.
  static std::string name_of(const std::string& machine, uid_t tenant) { return machine + "@" + std::to_string(tenant); }

  // From now on until the other end of the first of them is closed; in place of what was kept under that name. At most 64.
  // ETIMEDOUT: the keeper does not answer; or what posix_spawn(3) and connect(2) say.
  Status keep(std::string_view machine, std::span<const int> descriptors) const;
  // Copies; they stay kept. Empty: there are none, or no keeper. Waits for half a minute: who takes silence for "none" has lost a machine.
  // ETIMEDOUT, EPROTO, EMFILE: there may be some.
  Result<std::vector<vmci::UniqueFd>> take(std::string_view machine) const;
  void drop(std::string_view machine) const;

  // The process itself: serves at `path`, in the background once it can be connected to. Returns its exit code.
  static int serve(const std::string& path);

 private:
  Status start() const;
  Result<std::vector<vmci::UniqueFd>> try_to_take(std::string_view machine) const;

  std::string path_;
};

}  // namespace vrdma::svc
