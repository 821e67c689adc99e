#include "guest_agent/keeper.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <string>

#include "guest_agent/log.hpp"
#include "vmci_channel/backoff.hpp"
#include "vmci_channel/vm_link.hpp"

namespace vrdma::agent {

Keeper::Keeper(const Device& device) : agent_(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0))) {
  // As fork(), but with one table of descriptors for both: what the agent opens later, the keeper has open as well.
  if (agent_) pid_ = static_cast<pid_t>(::syscall(SYS_clone, CLONE_FILES | SIGCHLD, nullptr, nullptr, nullptr, nullptr));
  if (pid_ < 0) throw std::runtime_error(std::string("cannot start the process that outlives this one (") + std::strerror(errno) + "): raise the limit of processes");
  if (pid_ == 0) keep(device, agent_.get());
}

Keeper::~Keeper() {
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Keeper::keep(const Device& device, int agent) {
  // Whoever ends a group of processes means the agent.
  ::setsid();
  sigset_t all;
  sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  ::prctl(PR_SET_NAME, "vrdma-keeper");
  pollfd ended{agent, POLLIN, 0};
  while (::poll(&ended, 1, -1) < 1) {
  }
  const auto& service = reinterpret_cast<vm::LinkHeader*>(device.bar)->service;
  auto& mine = reinterpret_cast<vm::LinkHeader*>(device.bar)->agent;
  const auto load = [](const std::uint64_t& word) { return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire); };
  if (std::atomic_ref(const_cast<std::uint32_t&>(service.magic)).load(std::memory_order_relaxed) != vm::magic) ::_exit(1);  // another program's device
  device.mark_page_dead();
  const std::uint64_t epoch = load(service.service_epoch);
  std::uint64_t boot = 0;
  while (boot == 0)
    if (::getrandom(&boot, sizeof(boot), 0) != sizeof(boot)) boot = 0;
  std::atomic_ref(mine.boot).store(0, std::memory_order_release);
  const vmci::VmLinkEnd link(device.bar, vmci::VmLinkEnd::Who::agent);  // zeroes our cursor
  // Pairs with the service's acquire of `boot`, as in Session::begin.
  std::atomic_ref(mine.boot).store(boot, std::memory_order_release);
  device.ring(vm::link_vector);
  // For as long as it takes: a service that is stopped may go on. One that has gone touches nothing.
  std::uint64_t heartbeat = load(service.heartbeat), seen_ns = vmci::monotonic_ns();
  while (load(service.accepted) != boot && load(service.service_epoch) == epoch && epoch != 0) {
    const timespec nap{0, 1'000'000};
    ::nanosleep(&nap, nullptr);
    if (const std::uint64_t now = load(service.heartbeat); now != heartbeat) heartbeat = now, seen_ns = vmci::monotonic_ns();
    if (vmci::monotonic_ns() - seen_ns > 60'000'000'000) break;
  }
  say("the agent has ended without notice: the host has let go of this machine's memory");
  ::_exit(1);
}

}  // namespace vrdma::agent
