#include "vmkernel_svc/machines/plain.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "vmci_channel/backoff.hpp"
#include "vmci_channel/given_descriptors.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/memory/bus_guard.hpp"
#include "vmkernel_svc/watching.hpp"

namespace vrdma::svc {

namespace {

// A process of the machine that finds the shard asleep waits for the end of a nap; so does one that connects.
constexpr std::uint64_t nap_ns_least = 50'000, nap_ns_processes = 1'000'000, nap_ns_most = 10'000'000;
constexpr std::uint64_t patience_ns = std::uint64_t{vm::agent_patience_ms} * 1'000'000;

// The one descriptor that a launcher sends with its first byte. EAGAIN: it is not there yet.
Result<vmci::UniqueFd> receive_ram(int launcher, const std::shared_ptr<vmci::Closer>& closer) {
  std::byte word[8];
  auto got = vmci::receive_given(launcher, word, closer);
  if (!got) return got.error();
  if (got->descriptors_missing) return Errno{EMFILE};
  if (got->bytes == 0 || got->descriptors.size() != 1) return Errno{EPROTO};
  auto ram = got->descriptors.front().take_memory();
  if (!ram) return Errno{EMEDIUMTYPE};
  // Pages of another file system might be somebody's who never hands them out.
  struct statfs filesystem;
  struct stat status;
  if (::fstatfs(ram->get(), &filesystem) != 0 || ::fstat(ram->get(), &status) != 0) return last_error();
  if (filesystem.f_type != TMPFS_MAGIC || !S_ISREG(status.st_mode)) return Errno{EMEDIUMTYPE};
  return std::move(*ram);
}

}  // namespace

Plain::Plain(boost::asio::io_context& io, std::string machine, std::string folder, uid_t tenant, std::uint64_t bar_bytes, Events events,
             std::function<LinkActivity()> look)
    : machine_(std::move(machine)), folder_(std::move(folder)), events_(std::move(events)), look_at_link_(std::move(look)), door_(io, machine_),
      launcher_(io), nap_(io) {
  for (auto& event : events_fds_) {
    event.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!event) throw std::runtime_error(fmt::format("machine {}: cannot create its doorbells ({}): raise the limit of open files", machine_, std::strerror(errno)));
  }
  open_bar(tenant, bar_bytes);
  std::atomic_ref(header().service.flags).store(vm::service_polls, std::memory_order_relaxed);  // the rest, the port adds
  // Of whom this was left by, nothing has been heard yet.
  seen_.boot = std::atomic_ref(header().agent.boot).load(std::memory_order_acquire);
  seen_.heartbeat = std::atomic_ref(header().agent.heartbeat).load(std::memory_order_relaxed);
  seen_.doorbells = std::atomic_ref(header().agent.doorbells).load(std::memory_order_relaxed);
  nap_ns_ = nap_ns_most;
  // Last: who finds it finds all of the rest.
  try {
    door_.open(folder_ + "/" + launcher_name, tenant, [this](vmci::GivenFd launcher) { take(std::move(launcher)); });
  } catch (...) {
    BusGuard::remove(bar_.data());
    throw;
  }
  nap();
}

Plain::~Plain() {
  *alive_ = false;
  let_go();
  BusGuard::remove(bar_.data());
}

void Plain::open_bar(uid_t tenant, std::uint64_t bytes) {
  const std::string path = folder_ + "/" + bar_name;
  const auto fail = [&](const char* what, int error) {
    throw std::runtime_error(fmt::format("machine {}: cannot {} {} ({})", machine_, what, path, std::strerror(error)));
  };
  bar_file_.reset(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  struct stat status;
  if (!bar_file_ || ::fstat(bar_file_.get(), &status) != 0) fail("open", errno);
  if (!S_ISREG(status.st_mode)) fail("use", EINVAL);
  if (static_cast<std::uint64_t>(status.st_size) != bytes && ::ftruncate(bar_file_.get(), static_cast<off_t>(bytes)) != 0) fail("give its size to", errno);
  // The machine runs as the tenant.
  if (tenant != status.st_uid && ::fchown(bar_file_.get(), tenant, static_cast<gid_t>(-1)) != 0)
    log::warn("{} cannot be given to uid {} ({}): give vrdmad CAP_CHOWN, or run the machine as root or as vrdmad's user", path, tenant, std::strerror(errno));
  auto mapping = vmci::Mapping::map(bar_file_.get(), 0, bytes, vmci::Writable::yes);
  if (!mapping) fail("map", value(mapping.error()));
  bar_ = std::move(*mapping);
  // Its owner may make it smaller.
  if (!BusGuard::add(bar_.data(), bytes, vm::page_bytes, bar_file_.get(), 0)) fail("guard", ENOMEM);
}

void Plain::ring_service() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(events_fds_[vm::link_vector].get(), &one, sizeof(one));
}

void Plain::nap() {
  nap_.expires_after(std::chrono::nanoseconds(nap_ns_));
  nap_.async_wait([this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive) return;
    look();
    nap();
  });
}

void Plain::look() {
  const auto& agent = header().agent;
  vm::AgentLine now{};
  now.boot = std::atomic_ref(const_cast<std::uint64_t&>(agent.boot)).load(std::memory_order_acquire);
  now.heartbeat = std::atomic_ref(const_cast<std::uint64_t&>(agent.heartbeat)).load(std::memory_order_relaxed);
  // Pairs with the agent's release: the bit in the process's bitmap is set.
  now.doorbells = std::atomic_ref(const_cast<std::uint64_t&>(agent.doorbells)).load(std::memory_order_acquire);
  const std::uint64_t now_ns = vmci::monotonic_ns();
  if (now.boot != seen_.boot || now.heartbeat != seen_.heartbeat) {
    const bool came = !connected();
    alive_until_ns_ = now_ns + patience_ns;
    if (came) log::info("machine {}: its agent is there", machine_), events_.came();
  } else if (now_ns > alive_until_ns_ && alive_until_ns_ != 0) {
    alive_until_ns_ = 0;
    if (!connected()) log::info("machine {}: its agent's heart stands still: it has gone", machine_), events_.went();
  }
  bool active = now.boot != seen_.boot;
  if (now.doorbells != seen_.doorbells && events_fds_[vm::doorbell_vector]) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(events_fds_[vm::doorbell_vector].get(), &one, sizeof(one));
    active = true;
  }
  seen_ = now;
  const LinkActivity found = connected() ? look_at_link_() : LinkActivity::none;
  active |= found == LinkActivity::traffic;
  nap_ns_ = active ? nap_ns_least : std::min(nap_ns_ * 2, found == LinkActivity::processes ? nap_ns_processes : nap_ns_most);
}

void Plain::let_go() { door_.closer()->close(unwatched(launcher_)); }

void Plain::take(vmci::GivenFd launcher) {
  if (launcher_.is_open()) {
    log::warn("machine {}: a second launcher wants to be it: refused", machine_);
    return;
  }
  boost::system::error_code error;
  if (launcher_.assign(launcher.get(), error)) return;
  launcher.release();
  await_end();
}

// First it brings the RAM. It says nothing afterwards, and hangs up when the machine has ended.
void Plain::await_end() {
  launcher_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive || !launcher_.is_open()) return;
    if (!ram_) {
      auto ram = receive_ram(launcher_.native_handle(), door_.closer());
      if (!ram && value(ram.error()) == EAGAIN) return await_end();
      if (!ram) {
        log::warn("machine {}: its launcher brings no memory ({}): User Mode Linux keeps it on a tmpfs, see its TMPDIR", machine_, std::strerror(value(ram.error())));
        return let_go();
      }
      ram_ = std::move(*ram);
      log::info("machine {}: it is started", machine_);
      events_.came();
      return await_end();
    }
    std::byte ignored[64];
    const auto got = vmci::receive_given(launcher_.native_handle(), ignored, door_.closer());
    if (got ? got->bytes != 0 && !got->descriptors_missing : value(got.error()) == EAGAIN) return await_end();
    log::info("machine {}: it has ended", machine_);
    let_go();
    ram_.reset();
    alive_until_ns_ = 0;
    events_.went();
  });
}

}  // namespace vrdma::svc
