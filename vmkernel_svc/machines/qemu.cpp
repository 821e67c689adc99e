#include "vmkernel_svc/machines/qemu.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "vmkernel_svc/machines/listening.hpp"
#include "vmkernel_svc/watching.hpp"

namespace vrdma::svc {

namespace {

// One message of the ivshmem protocol (QEMU, docs/specs/ivshmem-spec.txt): a number, perhaps with a descriptor.
Status send_message(int socket, std::int64_t number, int descriptor = -1) {
  iovec data{&number, sizeof(number)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &descriptor, sizeof(descriptor));
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL) == sizeof(number) ? ok() : Status(last_error());
}

}  // namespace

Qemu::Qemu(boost::asio::io_context& io, std::string machine, std::string folder, uid_t tenant, Events events)
    : machine_(std::move(machine)), folder_(std::move(folder)), events_(std::move(events)), listener_(io), qemu_(io), monitor_listener_(io), monitor_(io) {
  const auto cannot = [&](const std::string& what, int error) {
    return std::runtime_error(fmt::format("machine {}: cannot {} ({})", machine_, what, std::strerror(error)));
  };
  auto bar = vmci::Segment::create("vrdma-bar", vm::bar_bytes);
  if (!bar) throw cannot("create shared memory", value(bar.error()));
  bar_ = std::move(*bar);
  for (auto* const side : {service_events_, machine_events_})
    for (std::uint32_t i = 0; i < vm::vectors; ++i) {
      side[i].reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
      if (!side[i]) throw cannot("create its doorbells", errno);
    }
  for (const auto& [listener, name] : {std::pair{&listener_, "ivshmem.sock"}, {&monitor_listener_, "monitor.sock"}}) {
    const std::string path = folder_ + "/" + name;
    auto listening = listen_stream(path, tenant);
    if (!listening) throw cannot("listen at " + path, value(listening.error()));
    listener->assign(listening->release());
  }
  accept_next();
  accept_monitor();
}

Qemu::~Qemu() {
  *alive_ = false;
  for (auto* const watched : {&listener_, &qemu_, &monitor_listener_, &monitor_}) stop_watching(*watched);
  for (const char* name : {"/ivshmem.sock", "/monitor.sock"}) ::unlink((folder_ + name).c_str());
}

void Qemu::ring(const vmci::UniqueFd& event) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(event.get(), &one, sizeof(one));  // full: it is readable all the more
}

void Qemu::accept_next() {
  listener_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive) return;
    vmci::UniqueFd fd(::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) take(std::move(fd));
    accept_next();
  });
}

void Qemu::take(vmci::UniqueFd fd) {
  // The end of the one before may be the next that we hear of.
  if (char byte; qemu_.is_open() && ::recv(qemu_.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) lose();
  if (qemu_.is_open()) {
    spdlog::warn("machine {}: a second QEMU wants to be it: refused", machine_);
    return;
  }
  if (const auto introduced = introduce(fd.get()); !introduced) {
    spdlog::warn("machine {}: QEMU hung up ({})", machine_, std::strerror(value(introduced.error())));
    return;
  }
  boost::system::error_code error;
  if (qemu_.assign(fd.get(), error)) return;
  fd.release();
  spdlog::info("machine {}: QEMU is connected", machine_);
  await_end();
  events_.came();
}

Status Qemu::introduce(int qemu) const {
  constexpr std::int64_t protocol_version = 0, shared_memory = -1;
  if (Status sent = send_message(qemu, protocol_version); !sent) return sent;
  if (Status sent = send_message(qemu, vm::machine_peer); !sent) return sent;
  if (Status sent = send_message(qemu, shared_memory, bar_.fd()); !sent) return sent;
  for (const auto& event : service_events_)
    if (Status sent = send_message(qemu, vm::service_peer, event.get()); !sent) return sent;
  for (const auto& event : machine_events_)
    if (Status sent = send_message(qemu, vm::machine_peer, event.get()); !sent) return sent;
  return ok();
}

// QEMU says nothing on this socket; it hangs up when it ends.
void Qemu::await_end() {
  qemu_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive) return;
    std::byte ignored[64];
    const ssize_t got = ::recv(qemu_.native_handle(), ignored, sizeof(ignored), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return lose();
    await_end();
  });
}

void Qemu::lose() {
  spdlog::info("machine {}: QEMU has gone", machine_);
  stop_watching(qemu_);
  events_.went();
}

// A machine that is reset says nothing itself, and its memory is soon somebody else's: QEMU's monitor tells (QEMU Machine Protocol).
void Qemu::accept_monitor() {
  monitor_listener_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive) return;
    vmci::UniqueFd fd(::accept4(monitor_listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    constexpr std::string_view hello = "{\"execute\":\"qmp_capabilities\"}\n";  // without it there are no events
    if (fd && ::send(fd.get(), hello.data(), hello.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(hello.size())) {
      stop_watching(monitor_);  // of a QEMU that has gone
      news_.clear();
      boost::system::error_code refused;
      if (!monitor_.assign(fd.get(), refused)) fd.release(), await_news();
    }
    accept_monitor();
  });
}

void Qemu::await_news() {
  monitor_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive || !monitor_.is_open()) return;
    std::array<char, 4096> text;
    const ssize_t got = ::recv(monitor_.native_handle(), text.data(), text.size(), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return stop_watching(monitor_);
    if (got > 0 && !take_news({text.data(), static_cast<std::size_t>(got)})) return stop_watching(monitor_);
    await_news();
  });
}

bool Qemu::take_news(std::string_view text) {
  constexpr std::size_t line_bytes_max = 64 * 1024;
  for (const char c : text) {
    if (c != '\n') {
      news_ += c;
      continue;
    }
    const auto event = nlohmann::json::parse(std::exchange(news_, {}), nullptr, /*allow_exceptions=*/false);
    const auto name = event.is_object() ? event.find("event") : event.end();
    if (!event.is_object() || name == event.end() || *name != "RESET") continue;
    spdlog::info("machine {}: is reset", machine_);
    events_.reset();
  }
  return news_.size() <= line_bytes_max;
}

}  // namespace vrdma::svc
