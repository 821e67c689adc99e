// What exists once per process: its current attachment, every attachment and descriptor that a fork's child must let go of.
// Never destroyed, because verbs are called from other libraries' exit handlers.
#pragma once

#include <time.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "guest_lib/attachment.hpp"
#include "guest_lib/own_fd.hpp"

namespace vrdma::guest {

struct Process {
  static Process& instance();

  // Guards everything here, and each context's choice of attachment. Held while attaching; locked across a fork, so that the
  // child finds it consistent. Never taken while a lock of an object is held. Not of the heap, as no mutex of a lazily made instance here is: a program's ThreadSanitizer
  // sees the allocation, and nothing that orders it before another thread's lock.
  static inline constinit std::mutex mutex;
  std::shared_ptr<Attachment> attachment;
  std::vector<std::weak_ptr<Attachment>> attachments;  // that may still be in use
  // By which this process and its fork's children have one address (control::ShareAddressRequest); zeros: none could be had.
  std::array<std::uint8_t, 16> address_secret{};
  std::set<OwnFd*> private_descriptors;                // of contexts and channels: closed in a child

  void remember(const std::shared_ptr<Attachment>& made);
  // Registers the fork handlers, once. The mutex is held.
  void watch_forks();

 private:
  bool watching_forks_ = false;
};

// A descriptor that a fork's child must not keep. Does not move.
class PrivateFd {
 public:
  explicit PrivateFd(vmci::UniqueFd fd) : fd_(std::move(fd)) {
    std::lock_guard lock(Process::instance().mutex);
    Process::instance().private_descriptors.insert(&fd_);
  }
  ~PrivateFd() {
    std::lock_guard lock(Process::instance().mutex);
    Process::instance().private_descriptors.erase(&fd_);
  }
  PrivateFd(const PrivateFd&) = delete;
  PrivateFd& operator=(const PrivateFd&) = delete;
  int get() const { return fd_.get(); }
  // Not at each wait, where events may be microseconds apart: a system call more, or a limit to the wait, is 3 % of one. Once per tick
  // of the kernel's clock, so that only who waited a moment before it closed everything, and has its own files already, waits in vain.
  bool due_for_a_look() {
    timespec now;
    ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    const std::int64_t tick = now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
    if (looked_.load(std::memory_order_relaxed) == tick) return false;
    looked_.store(tick, std::memory_order_relaxed);
    return true;
  }
  // True, once: the program has closed it, by a bare system call, and the number may be its own file's. From then on there is none.
  bool found_lost() {
    if (!fd_ || fd_.intact()) return false;
    std::lock_guard lock(Process::instance().mutex);
    fd_.reset();
    return true;
  }

 private:
  OwnFd fd_;
  std::atomic<std::int64_t> looked_{0};
};

}  // namespace vrdma::guest
