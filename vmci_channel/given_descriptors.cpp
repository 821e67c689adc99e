#include "vmci_channel/given_descriptors.hpp"

#include <fcntl.h>
#include <sys/prctl.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>

namespace vmci {

using vrdma::Errno;
using vrdma::Result;

namespace {

constexpr std::size_t descriptors_in_a_packet = 253;  // SCM_MAX_FD: no packet brings more

Result<ssize_t> receive(int socket, msghdr& message, int flags) {
  ssize_t got;
  do {
    got = ::recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return vrdma::last_error();
  return got;
}

// What has been looked at (MSG_PEEK), from a queue that has no other reader: there is nothing in it that this could be the last to close.
vrdma::Status take_out(int socket, std::span<std::byte> seen) {
  iovec part{seen.data(), seen.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  auto got = receive(socket, message, 0);
  if (!got) return got.error();
  return vrdma::ok();
}

}  // namespace

// Its thread has one: there is none, and none could be made.
Closer::~Closer() {
  for (auto& fd : waiting_) fd.release();
}

void Closer::close(UniqueFd fd) noexcept {
  if (!fd) return;
  const std::lock_guard lock(mutex_);
  pending_.fetch_add(1, std::memory_order_relaxed);
  try {
    waiting_.push_back(std::move(fd));
  } catch (const std::bad_alloc&) {
    fd.release();  // rather open than waited for
    return;
  }
  if (running_) return;
  try {
    std::thread([self = shared_from_this()] { self->run(); }).detach();
    running_ = true;
  } catch (const std::system_error&) {  // no thread can be made: the next one who comes tries again
  } catch (const std::bad_alloc&) {
  }
}

void Closer::run() {
  ::prctl(PR_SET_NAME, "closer");
  std::unique_lock lock(mutex_);
  while (!waiting_.empty()) {
    UniqueFd fd = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    fd.reset();
    pending_.fetch_sub(1, std::memory_order_relaxed);
    lock.lock();
  }
  running_ = false;
}

void GivenFd::reset() {
  if (closer_ && fd_ && !is_memory()) closer_->close(std::move(fd_));
  fd_.reset();
}

// The kernel looks at what the file is, and asks no file system.
bool GivenFd::is_memory() const { return ::fcntl(fd_.get(), F_GET_SEALS) >= 0; }

std::optional<UniqueFd> GivenFd::take_memory() {
  if (!is_memory()) return std::nullopt;
  return std::move(fd_);
}

// The descriptors are looked at before the packet is taken out of the queue: of those for which there is no room, the queue has the last copy as
// long as it stays there.
Result<Given> receive_given(int socket, std::span<std::byte> buffer, const std::shared_ptr<Closer>& closer) {
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(descriptors_in_a_packet * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  Given given{};
  given.descriptors.reserve(descriptors_in_a_packet);  // before any is there, which would stay open
  const auto got = receive(socket, message, MSG_PEEK);
  if (!got) return got.error();
  given.bytes = static_cast<std::size_t>(*got);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_CREDENTIALS) {
      ucred sender;
      std::memcpy(&sender, CMSG_DATA(header), sizeof(sender));
      given.sender = sender.pid;
    }
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      given.descriptors.emplace_back(UniqueFd(fd), closer);
    }
  }
  if ((message.msg_flags & MSG_TRUNC) != 0 || given.descriptors.size() > packet_descriptors_max) return Errno{EMSGSIZE};
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    given.descriptors.clear();
    given.descriptors_missing = true;
    return given;
  }
  if (const auto taken = take_out(socket, buffer.first(given.bytes)); !taken) return taken.error();
  return given;
}

}  // namespace vmci
