// Descriptors that somebody else has made, and sockets by which he passes them: to close one may wait for as long as he likes. So does a TCP
// socket that lingers (SO_LINGER, socket(7)), a file of a FUSE file system (its FLUSH is answered by a process), and a unix socket in which a
// packet that brings such a thing is unread. recvmsg(2) closes, too, what it has no room for.
//
//     receive_given() ──▶ GivenFd ── memory? ──▶ closed here
//                                 └─ else ─────▶ Closer: closed by a thread, of whoever has given it
//
// Any thread; nothing here waits for a stranger but that thread. What it still has to close at the process's end, the kernel closes then.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "vmci_channel/descriptor_passing.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"

namespace vmci {

// One for each whose descriptors may hold up one another. Its thread is there while there is something to close.
class Closer : public std::enable_shared_from_this<Closer> {
 public:
  Closer() = default;
  Closer(const Closer&) = delete;
  Closer& operator=(const Closer&) = delete;
  ~Closer();

  void close(UniqueFd fd) noexcept;  // returns at once
  // How many are not closed yet: whoever has many is to be given no opportunity for more.
  std::size_t pending() const { return pending_.load(std::memory_order_relaxed); }

 private:
  void run();

  std::mutex mutex_;
  std::deque<UniqueFd> waiting_;
  bool running_ = false;
  std::atomic<std::size_t> pending_{0};
};

class GivenFd {
 public:
  GivenFd() = default;
  // Without a closer it is closed like any other.
  explicit GivenFd(UniqueFd fd, std::shared_ptr<Closer> closer = nullptr) : fd_(std::move(fd)), closer_(std::move(closer)) {}
  GivenFd(GivenFd&&) noexcept = default;
  GivenFd& operator=(GivenFd&& other) noexcept {
    if (this == &other) return *this;
    reset();
    fd_ = std::move(other.fd_);
    closer_ = std::move(other.closer_);
    return *this;
  }
  ~GivenFd() { reset(); }

  int get() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  const std::shared_ptr<Closer>& closer() const { return closer_; }
  void reset();
  int release() { return fd_.release(); }  // whoever has it then sees to how it is closed

  // A file of memory (a memfd, or a file of tmpfs or hugetlbfs): to close it, and to ask what it is, waits for nobody.
  bool is_memory() const;
  // That, from now on like any other descriptor; none where it is something else.
  std::optional<UniqueFd> take_memory();

 private:
  UniqueFd fd_;
  std::shared_ptr<Closer> closer_;
};

struct Given {
  std::size_t bytes;  // 0: the other end is closed
  pid_t sender = 0;   // where the socket tells (SO_PASSCRED)
  std::vector<GivenFd> descriptors;
  bool descriptors_missing = false;  // there are some, and this process may not open all of them: it has none, and the packet is still unread
};

// As receive_with_descriptors(), from a socket with a stranger at its other end; in EMSGSIZE the packet is still unread. One reader at a time.
vrdma::Result<Given> receive_given(int socket, std::span<std::byte> buffer, const std::shared_ptr<Closer>& closer);

// Nobody can send descriptors to this socket, or to what is accepted from it, before they are let in again. False: they can, before Linux 6.16
// (SO_PASSRIGHTS).
inline bool let_descriptors_in(int socket, bool in) {
  constexpr int so_passrights = 83;
  const int value = in ? 1 : 0;
  return ::setsockopt(socket, SOL_SOCKET, so_passrights, &value, sizeof(value)) == 0;
}

}  // namespace vmci
