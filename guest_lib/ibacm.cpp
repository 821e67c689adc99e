// connect(2) in front of libc's, for one address: that of a host's ibacm, of which librdmacm asks for the path to an IP address. It would tell
// that of a physical port, by GIDs that nobody has here, and programs would try these first. So there is none.
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <string_view>

#include "guest_lib/next_function.hpp"
#include "guest_lib/paths.hpp"

namespace vrdma {
namespace {

using Connect = int(int, const sockaddr*, socklen_t);
constinit NextFunction<Connect> next_connect{"connect"};
__attribute__((constructor)) void look_up() { next_connect.get(); }

bool is_ibacm(const sockaddr* address, socklen_t bytes) {
  constexpr std::size_t path_at = offsetof(sockaddr_un, sun_path);
  if (address == nullptr || bytes <= path_at || address->sa_family != AF_UNIX) return false;
  std::string_view path(reinterpret_cast<const char*>(address) + path_at, bytes - path_at);
  path = path.substr(0, path.find('\0'));
  return path == "/run/ibacm.sock" || path == "/var/run/ibacm.sock";
}

}  // namespace
}  // namespace vrdma

using namespace vrdma;

VRDMA_INTERPOSE(int, connect, int fd, const sockaddr* address, socklen_t bytes) {
  if (is_ibacm(address, bytes)) [[unlikely]] return paths::fail(ECONNREFUSED, -1);
  auto* const next = next_connect.get();
  return next != nullptr ? next(fd, address, bytes) : static_cast<int>(::syscall(SYS_connect, fd, address, bytes));
}
