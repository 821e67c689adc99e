#include "vmkernel_svc/machines/listening.hpp"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/watching.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

namespace {

constexpr std::chrono::milliseconds between_two{20}, full_pause{100};
constexpr std::size_t closing_max = 16;

Result<vmci::UniqueFd> listen_stream(const std::string& path, uid_t tenant) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return Errno{ENAMETOOLONG};
  std::memcpy(address.sun_path, path.c_str(), path.size());
  ::unlink(path.c_str());
  vmci::UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // The file is made with the mode of the socket, less the umask: nothing is changed by its name, at which there could be another one by then.
  if (!fd || ::fchmod(fd.get(), 0600) != 0) return last_error();
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return last_error();
  if (::listen(fd.get(), 4) != 0) return last_error();
  // Who runs the machine runs as the tenant.
  if (tenant != ::geteuid() && ::lchown(path.c_str(), tenant, static_cast<gid_t>(-1)) != 0)
    log::warn("{} cannot be given to uid {} ({}): give vrdmad CAP_CHOWN, or run the machine as root or as vrdmad's user", path, tenant, std::strerror(errno));
  return fd;
}

}  // namespace

Listener::Listener(boost::asio::io_context& io, std::string machine) : machine_(std::move(machine)), listener_(io), pause_(io) {}

Listener::~Listener() {
  *alive_ = false;
  file_.remove();
  closer_->close(unwatched(listener_));  // with who was not accepted, and what he has passed
}

void Listener::open(const std::string& path, uid_t tenant, Handler take) {
  auto listening = listen_stream(path, tenant);
  if (!listening) throw std::runtime_error(fmt::format("machine {}: cannot listen at {} ({})", machine_, path, std::strerror(value(listening.error()))));
  path_ = path;
  file_ = vmci::SocketFile(path);
  take_ = std::move(take);
  listener_.assign(listening->release());
  accept_next();
}

void Listener::accept_next() {
  listener_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive) return;
    if (closer_->pending() > closing_max) return accept_after(full_pause);
    vmci::GivenFd fd(vmci::UniqueFd(::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)), closer_);
    if (fd) {
      take_(std::move(fd));
      if (!*alive) return;
      // Nobody connects often; who does it all the same keeps nobody else waiting.
      return accept_after(between_two);
    }
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
      // Out of descriptors: who waits gets in when others have left.
      log::warn("machine {}: cannot accept who connects to {} ({}): raise the limit of open files", machine_, path_, std::strerror(errno));
      return accept_after(full_pause);
    }
    accept_next();
  });
}

void Listener::accept_after(std::chrono::milliseconds pause) {
  pause_.expires_after(pause);
  pause_.async_wait([this, alive = alive_](const boost::system::error_code& error) {
    if (!error && *alive) accept_next();
  });
}

}  // namespace vrdma::svc
