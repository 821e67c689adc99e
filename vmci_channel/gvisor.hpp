// Whether this process runs under gVisor (runsc), whose kernel passes no shared memory to a service of the host: what it answers instead
// (EPERM, EPROTO) names no cause.
#pragma once

#include <sys/utsname.h>

#include <string_view>

namespace vmci {

// It says so in newer releases; older ones are known by the day on which gVisor's Linux was built for good.
inline bool is_gvisor(std::string_view release, std::string_view version) {
  return release.find("gvisor") != std::string_view::npos || version == "#1 SMP Sun Jan 10 15:06:54 PST 2016";
}
inline bool runs_under_gvisor() {
  utsname name{};
  return ::uname(&name) == 0 && is_gvisor(name.release, name.version);
}

}  // namespace vmci
