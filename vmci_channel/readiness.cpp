#include "vmci_channel/readiness.hpp"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

namespace vmci {

namespace {

// Nobody there, or too slow: it was only told.
void tell_manager(std::string_view status) {
  const char* const path = std::getenv("NOTIFY_SOCKET");
  sockaddr_un address{};
  if (path == nullptr || (path[0] != '/' && path[0] != '@')) return;
  const std::size_t length = std::strlen(path);
  if (length < 2 || length >= sizeof(address.sun_path)) return;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';  // an abstract one
  const UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket) return;
  const std::string message = "READY=1\nSTATUS=" + std::string(status) + "\n";
  [[maybe_unused]] const auto sent = ::sendto(socket.get(), message.data(), message.size(), MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&address),
                                              static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length));
}

}  // namespace

void Readiness::serves(std::string_view status) {
  if (!named_) return tell_manager(status);
  if (!descriptor_) return;
  const char ready = 1;
  [[maybe_unused]] const auto written = ::write(descriptor_.get(), &ready, 1);
  descriptor_.reset();
}

void Readiness::waits(std::string_view status) const {
  if (!named_) tell_manager(status);
}

}  // namespace vmci
