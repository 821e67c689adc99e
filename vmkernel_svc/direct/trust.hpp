// Whether two processes could reach each other's memory anyway (DESIGN.md D3): same user, groups, capabilities, namespaces and seccomp
// state, and both dumpable. Known from /proc, never by trying ptrace. Any thread; reads some twenty small files.
//
// /proc tells of the process that connected, which may run another program by now, of other rights (set-user-ID, sudo), while somebody else
// holds its socket: so it must have the ids that the kernel noted when it connected.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>

#include "vmci_channel/packet_socket.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace vrdma::svc {

// What is compared, by its name as messages give it; `problem` is set where something could not be found out, or rules out trust.
struct TrustFacts {
  std::map<std::string, std::string> values;
  std::string problem;
  pid_t own_pid = 0;  // in its own pid namespace

  // pidfd: of the process that connected; it is looked at after /proc/PID was opened, so that the folder is that process's own.
  static TrustFacts of(const vmci::Credentials& connected, const vmci::UniqueFd& pidfd);
};

// Empty: they could. Else why not, as part of a sentence.
std::string why_apart(const TrustFacts& one, const TrustFacts& other);

}  // namespace vrdma::svc
