// What the agent's one thread waits for: epoll, with names instead of pointers, so that an event of something that has gone
// meanwhile finds nothing.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

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

  // -1: for ever. A signal ends it, with nothing.
  template <class Found>
  void wait(int timeout_ms, Found&& found) {
    const int count = ::epoll_wait(fd_.get(), events_.data(), static_cast<int>(events_.size()), timeout_ms);
    for (int i = 0; i < count; ++i)
      found(Source{static_cast<std::uint32_t>(events_[i].data.u64 >> 32), static_cast<std::uint32_t>(events_[i].data.u64)});
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
  std::array<epoll_event, 64> events_;
};

}  // namespace vrdma::agent
