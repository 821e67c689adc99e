#include "vmkernel_svc/machines/listening.hpp"

#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

namespace vrdma::svc {

Result<vmci::UniqueFd> listen_stream(const std::string& path, uid_t tenant) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return Errno{ENAMETOOLONG};
  std::memcpy(address.sun_path, path.c_str(), path.size());
  ::unlink(path.c_str());
  vmci::UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd || ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return last_error();
  if (::chmod(path.c_str(), 0600) != 0 || ::listen(fd.get(), 4) != 0) return last_error();
  // Who runs the machine runs as the tenant.
  if (tenant != ::geteuid() && ::chown(path.c_str(), tenant, static_cast<gid_t>(-1)) != 0)
    spdlog::warn("{} cannot be given to uid {} ({}): run the machine as root, or as vrdmad's user", path, tenant, std::strerror(errno));
  return fd;
}

}  // namespace vrdma::svc
