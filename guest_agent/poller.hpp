// What the agent's one thread waits for: epoll, with names instead of pointers, so that an event of something that has gone
// meanwhile finds nothing.
#pragma once

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

#ifndef SYS_epoll_pwait2
#define SYS_epoll_pwait2 441
#endif

namespace vrdma::agent {

struct Source {
  std::uint32_t connection;  // 0: the agent itself
  std::uint32_t item;
};

class Poller {
 public:
  Poller() : fd_(::epoll_create1(EPOLL_CLOEXEC)) {
    if (!fd_) throw std::runtime_error("cannot make an epoll descriptor: raise the limit of open files");
  }

  int fd() const { return fd_.get(); }
  Status add(int fd, std::uint32_t events, Source source) { return control(EPOLL_CTL_ADD, fd, events, source); }
  // Before closing: who else has the same file open would keep it here.
  void remove(int fd) { [[maybe_unused]] const auto gone = control(EPOLL_CTL_DEL, fd, 0, {}); }

  // A signal ends it, with nothing.
  template <class Found>
  void wait(std::uint64_t timeout_ns, Found&& found) {
    const timespec timeout{static_cast<time_t>(timeout_ns / 1'000'000'000), static_cast<long>(timeout_ns % 1'000'000'000)};
    std::array<epoll_event, 64> events;  // of this call: what is found may look for more
    long count = ::syscall(SYS_epoll_pwait2, fd_.get(), events.data(), static_cast<int>(events.size()), &timeout, nullptr, 0);
    if (count < 0 && errno == ENOSYS)  // before Linux 5.11
      count = ::epoll_wait(fd_.get(), events.data(), static_cast<int>(events.size()), static_cast<int>((timeout_ns + 999'999) / 1'000'000));
    for (long i = 0; i < count; ++i)
      found(Source{static_cast<std::uint32_t>(events[i].data.u64 >> 32), static_cast<std::uint32_t>(events[i].data.u64)});
  }

 private:
  Status control(int operation, int fd, std::uint32_t events, Source source) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = std::uint64_t{source.connection} << 32 | source.item;
    if (::epoll_ctl(fd_.get(), operation, fd, &event) != 0) return last_error();
    return ok();
  }

  vmci::UniqueFd fd_;
};

}  // namespace vrdma::agent
