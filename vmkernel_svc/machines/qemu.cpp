#include "vmkernel_svc/machines/qemu.hpp"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "vmci_channel/descriptor_passing.hpp"
#include "vmci_channel/given_descriptors.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/watching.hpp"

namespace vrdma::svc {

namespace {

// Four times at once, and then once a second.
constexpr std::chrono::seconds keep_every{1}, keep_in_advance{3};

// One message of the ivshmem protocol (QEMU, docs/specs/ivshmem-spec.txt): a number, perhaps with a descriptor.
Status send_message(int socket, std::int64_t number, int descriptor = -1) {
  return vmci::send_with_descriptors(socket, std::as_bytes(std::span(&number, 1)), std::span(&descriptor, descriptor >= 0 ? 1 : 0));
}

}  // namespace

Qemu::Qemu(boost::asio::io_context& io, std::string machine, std::string folder, uid_t tenant, std::uint32_t vectors, std::uint64_t bar_bytes, Events events, Monitor::Handler news)
    : machine_(std::move(machine)), kept_as_(Keeper::name_of(machine_, tenant)), events_(std::move(events)), keeper_(std::filesystem::path(folder).parent_path()), machine_events_(std::make_shared<Interrupts>(vectors)),
      link_door_(io, machine_), monitor_door_(io, machine_), qemu_(io), monitor_(io, machine_, std::move(news)), keeping_(io) {
  const auto cannot = [&](const char* what, int error) {
    return std::runtime_error(fmt::format("machine {}: cannot {} ({})", machine_, what, std::strerror(error)));
  };
  if (!can_signal_eventfds())
    log::warn("machine {}: no asynchronous I/O here ({}): its programs' events take a longer way, and a QEMU that means harm can stop the service; raise "
                 "fs.aio-max-nr", machine_, std::strerror(errno));
  if (!find_again(bar_bytes)) {
    auto bar = vmci::Segment::create("vrdma-bar", bar_bytes);
    if (!bar) throw cannot("create shared memory", value(bar.error()));
    bar_ = std::move(*bar);
    for (const auto side : doorbells())
      for (auto& event : side) {
        event.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        if (!event) throw cannot("create its doorbells", errno);
      }
  }
  link_door_.open(folder + "/ivshmem.sock", tenant, [this](vmci::GivenFd fd) { take(std::move(fd)); });
  monitor_door_.open(folder + "/monitor.sock", tenant, [this](vmci::GivenFd fd) { take_monitor(std::move(fd)); });
}

Qemu::~Qemu() {
  *alive_ = false;
  link_door_.closer()->close(unwatched(qemu_));
}

bool Qemu::ended() const {
  char byte;
  auto& socket = const_cast<boost::asio::posix::stream_descriptor&>(qemu_);
  return socket.is_open() && ::recv(socket.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

void Qemu::take(vmci::GivenFd fd) {
  vmci::let_descriptors_in(fd.get(), false);
  if (ended()) lose();  // that of the one before may be the next that we hear of
  if (qemu_.is_open()) {
    if (!std::exchange(refused_, true))
      log::warn("machine {}: a second QEMU wants to be it: refused; add another machine for it, or end the first one", machine_);
    // One that is just hung up on here reads on for ever, and says nothing; one that is told of a version it does not know says so and ends.
    [[maybe_unused]] const Status told = send_message(fd.get(), -EBUSY);
    return;
  }
  if (const auto introduced = introduce(fd.get()); !introduced) {
    log::warn("machine {}: QEMU hung up ({})", machine_, std::strerror(value(introduced.error())));
    return;
  }
  boost::system::error_code error;
  if (qemu_.assign(fd.get(), error)) return;
  fd.release();
  refused_ = false;
  log::info("machine {}: QEMU is connected", machine_);
  keep_soon();
  await_end();
  events_.came();
}

// What of a QEMU is kept, in this order: its socket, the BAR, the service's doorbells, its own, and its monitor if it has one.
void Qemu::keep() {
  std::vector<int> descriptors{qemu_.native_handle(), bar_.fd()};
  for (const auto side : doorbells())
    for (const auto& event : side) descriptors.push_back(event.get());
  if (monitor_.descriptor() >= 0) descriptors.push_back(monitor_.descriptor());
  if (const Status kept = keeper_.keep(kept_as_, descriptors); !kept)
    log::warn("machine {}: a vrdmad that is started anew will not find it ({})", machine_, std::strerror(value(kept.error())));
}

// The server waits for the keeper: who connects and hangs up without end makes it wait no more often than this.
void Qemu::keep_soon() {
  if (keep_waits_) return;
  const auto now = std::chrono::steady_clock::now();
  kept_until_ = std::max(kept_until_, now) + keep_every;
  if (kept_until_ - now <= keep_every + keep_in_advance) return keep();
  keep_waits_ = true;
  keeping_.expires_at(kept_until_ - keep_every - keep_in_advance);
  keeping_.async_wait([this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive) return;
    keep_waits_ = false;
    if (connected()) keep();
  });
}

bool Qemu::find_again(std::uint64_t bar_bytes) {
  const std::size_t without_monitor = 2 + vm::fixed_vectors + machine_events_->size();
  auto taken = keeper_.take(kept_as_);
  if (!taken) log::warn("machine {}: cannot tell whether its QEMU runs already ({}): if so, start that anew", machine_, std::strerror(value(taken.error())));
  if (!taken || taken->empty()) return false;
  auto& kept = *taken;
  boost::system::error_code refused = boost::asio::error::invalid_argument;
  if (kept.size() == without_monitor || kept.size() == without_monitor + 1)
    if (auto bar = vmci::Segment::adopt(std::move(kept[1]), bar_bytes, vmci::Writable::yes); bar && !qemu_.assign(kept[0].get(), refused))
      bar_ = std::move(*bar);
  if (refused) {
    log::warn("machine {}: what an earlier vrdmad has left of its QEMU is of another version: start it anew", machine_);
    keeper_.drop(kept_as_);
    return false;
  }
  kept[0].release();
  auto event = kept.begin() + 2;
  for (const auto side : doorbells())
    for (auto& ours : side) ours = std::move(*event++);
  if (event != kept.end()) monitor_.talk_to(vmci::GivenFd(std::move(*event), monitor_door_.closer()));
  log::info("machine {}: QEMU runs, and is found again", machine_);
  await_end();
  return true;
}

Status Qemu::introduce(int qemu) const {
  constexpr std::int64_t protocol_version = 0, shared_memory = -1;
  if (Status sent = send_message(qemu, protocol_version); !sent) return sent;
  if (Status sent = send_message(qemu, vm::machine_peer); !sent) return sent;
  if (Status sent = send_message(qemu, shared_memory, bar_.fd()); !sent) return sent;
  for (const auto& event : service_events_)
    if (Status sent = send_message(qemu, vm::service_peer, event.get()); !sent) return sent;
  for (const auto& event : *machine_events_)
    if (Status sent = send_message(qemu, vm::machine_peer, event.get()); !sent) return sent;
  return ok();
}

// QEMU says nothing on this socket; it hangs up when it ends.
void Qemu::await_end() {
  qemu_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive) return;
    std::byte ignored[64];
    const auto got = vmci::receive_given(qemu_.native_handle(), ignored, link_door_.closer());
    if (got ? got->bytes == 0 || got->descriptors_missing : value(got.error()) != EAGAIN) return lose();
    await_end();
  });
}

void Qemu::lose() {
  monitor_.drain();  // its last words count
  monitor_.hang_up();
  log::info("machine {}: QEMU has gone", machine_);
  link_door_.closer()->close(unwatched(qemu_));
  refused_ = false;
  events_.went();
}

void Qemu::take_monitor(vmci::GivenFd fd) {
  vmci::let_descriptors_in(fd.get(), false);
  if (ended()) lose();
  monitor_.drain();  // the one before may have hung up
  if (monitor_.there()) {
    if (!std::exchange(refused_, true)) log::warn("machine {}: a second monitor beside the one that stands: refused", machine_);
    return;
  }
  refused_ = false;
  monitor_.talk_to(std::move(fd));
  if (connected()) keep_soon();
}

}  // namespace vrdma::svc
