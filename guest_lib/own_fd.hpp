// The descriptors that this library keeps for itself, and that no program was ever given: the service's socket, doorbells, pipes of events,
// files of memory. Programs close what they do not know (closefrom(3), close_range(2), a loop up to the limit of descriptors), and the
// numbers would be their own files' next. So
//
//   closing_interpose.cpp   leaves these numbers out of what a program closes, and has no other file put in their place;
//   OwnFd                   has them where programs have none, and finds out at its end, and when it is asked, whether the number is another
//                           file's: of a program that closes by bare system calls. Such a file is left alone.
//
// A file is known by the signal that it would send (F_SETSIG): none that is kept here sends any, a file of the program's says 0, and to ask
// costs a third of fstat(2), which cannot tell two eventfds from each other. Other processes that have the same open file are not concerned.
//
// Any thread; no locks, no memory: also for signal handlers.
#pragma once

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "guest_lib/own_process.hpp"
#include "vmci_channel/unique_fd.hpp"

namespace vrdma {

class OwnNumbers {
 public:
  using Serial = std::uint32_t;  // of who has a number, from 1: whose file was closed may see it become another one of ours

  // Whether it may be one of them: all that to close another file costs.
  static bool may_hold(int fd) { return static_cast<unsigned>(fd) < owners_.size() && owners_[static_cast<unsigned>(fd)].load(std::memory_order_relaxed) != 0; }
  // Whether it is one of this process's: not in a vfork's child, nor where the number is another file's by now, which is then forgotten.
  static bool holds(int fd) {
    if (!may_hold(fd) || OwnProcess::is_visitor()) return false;
    const auto index = static_cast<unsigned>(fd);
    Serial owner = owners_[index].load(std::memory_order_relaxed);
    if (owner != 0 && is_marked(fd)) return true;
    if (owner != 0) owners_[index].compare_exchange_strong(owner, 0, std::memory_order_relaxed);
    return false;
  }
  // Every one is below.
  static int end() { return end_.load(std::memory_order_relaxed); }

  static Serial hold(int fd) {
    mark(fd);
    Serial serial = last_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (serial == 0) serial = last_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (static_cast<unsigned>(fd) >= owners_.size()) return serial;  // not left out of anything, but known
    int before = end_.load(std::memory_order_relaxed);
    while (before <= fd && !end_.compare_exchange_weak(before, fd + 1, std::memory_order_relaxed)) {}
    owners_[static_cast<unsigned>(fd)].store(serial, std::memory_order_relaxed);
    return serial;
  }
  static bool is_held(int fd, Serial serial) {
    return fd >= 0 && is_marked(fd) && (static_cast<unsigned>(fd) >= owners_.size() || owners_[static_cast<unsigned>(fd)].load(std::memory_order_relaxed) == serial);
  }
  // True: the caller closes it, at once.
  static bool let_go(int fd, Serial serial) {
    const bool held = is_held(fd, serial);
    if (static_cast<unsigned>(fd) < owners_.size()) owners_[static_cast<unsigned>(fd)].compare_exchange_strong(serial, 0, std::memory_order_relaxed);
    return held;
  }

  // Of files that the program was given, too: whether the number is still that file's. It may have closed it and have got the number again.
  static void mark(int fd) {
    if (::syscall(SYS_fcntl, fd, F_SETSIG, signal_of_ours) != 0) cannot_tell_.store(true, std::memory_order_relaxed);
  }
  static bool is_marked(int fd) {
    const int before = errno;
    const bool marked = ::syscall(SYS_fcntl, fd, F_GETSIG) == signal_of_ours || cannot_tell_.load(std::memory_order_relaxed);
    errno = before;
    return marked;
  }
  static void close_marked(int fd) {
    if (is_marked(fd)) ::close(fd);
  }

 private:
  static constexpr int signal_of_ours = 62;  // a real-time signal's number, and not the first or the last, which others choose
  static inline constinit std::array<std::atomic<Serial>, 65536> owners_{};
  static inline constinit std::atomic<int> end_{0};
  static inline constinit std::atomic<Serial> last_{0};
  static inline constinit std::atomic<bool> cannot_tell_{false};  // something other than Linux: every number is taken for what it was
};

// One such descriptor. It is not where it was: high, and never 0 to 2, which a daemon puts /dev/null at. Others may call get()
// while one thread changes it.
class OwnFd {
 public:
  static constexpr int first_high = 600;  // programs expect the lowest numbers, use select(), or put files at numbers that they choose

  OwnFd() = default;
  explicit OwnFd(vmci::UniqueFd fd) { reset(std::move(fd)); }
  OwnFd(OwnFd&& other) noexcept : fd_(other.fd_.exchange(-1, std::memory_order_relaxed)), serial_(other.serial_) {}
  OwnFd& operator=(OwnFd&& other) noexcept {
    if (this == &other) return *this;
    reset();
    serial_ = other.serial_;
    fd_.store(other.fd_.exchange(-1, std::memory_order_relaxed), std::memory_order_relaxed);
    return *this;
  }
  ~OwnFd() { reset(); }

  int get() const { return fd_.load(std::memory_order_relaxed); }  // -1: none
  explicit operator bool() const { return get() >= 0; }
  // Whether the number is still this file's. By one system call: to be asked before a long wait, or before something dear.
  bool intact() const { return OwnNumbers::is_held(get(), serial_); }

  void reset(vmci::UniqueFd fd = {}) {
    const int old = fd_.exchange(-1, std::memory_order_relaxed);
    if (old >= 0 && OwnNumbers::let_go(old, serial_)) ::close(old);
    if (!fd) return;
    move_high(fd);
    serial_ = OwnNumbers::hold(fd.get());
    fd_.store(fd.release(), std::memory_order_relaxed);
  }

  // Where the limit of descriptors allows it.
  static void move_high(vmci::UniqueFd& fd) {
    if (fd.get() >= first_high || fd.get() < 0) return;
    long high = ::syscall(SYS_fcntl, fd.get(), F_DUPFD_CLOEXEC, first_high);
    if (high < 0 && fd.get() <= STDERR_FILENO) high = ::syscall(SYS_fcntl, fd.get(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (high >= 0) fd.reset(static_cast<int>(high));
  }

 private:
  std::atomic<int> fd_{-1};
  OwnNumbers::Serial serial_ = 0;
};

}  // namespace vrdma
