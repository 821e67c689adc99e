#include "vmkernel_svc/eventfd_signal.hpp"

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "vmci_channel/unique_fd.hpp"

namespace vrdma::svc {

namespace {

// A file of which a byte is always there.
int zeros() {
  static const vmci::UniqueFd file(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
  return file.get();
}

class AioContext {
 public:
  AioContext() {
    if (zeros() >= 0 && ::syscall(SYS_io_setup, requests, &context_) != 0) context_ = 0;
  }
  ~AioContext() { close(); }
  AioContext(const AioContext&) = delete;
  AioContext& operator=(const AioContext&) = delete;

  explicit operator bool() const { return context_ != 0; }

  bool signal(int eventfd) {
    char byte;
    iocb request{};
    request.aio_lio_opcode = IOCB_CMD_PREAD;  // over when the call returns
    request.aio_fildes = static_cast<std::uint32_t>(zeros());
    request.aio_buf = reinterpret_cast<std::uintptr_t>(&byte);
    request.aio_nbytes = 1;
    request.aio_flags = IOCB_FLAG_RESFD;
    request.aio_resfd = static_cast<std::uint32_t>(eventfd);
    iocb* const list[] = {&request};
    if (++unread_ >= requests) forget_results();
    for (int tries = 0; tries < 2; ++tries) {
      if (::syscall(SYS_io_submit, context_, 1, list) == 1) return true;
      if (errno == EBADF || errno == EINVAL) return true;  // no eventfd: nobody waits for it
      if (errno != EAGAIN) {  // forbidden: by write(2), the next time
        close();
        return false;
      }
      forget_results();
    }
    return false;
  }

 private:
  static constexpr long requests = 64;

  void close() {
    if (context_ != 0) ::syscall(SYS_io_destroy, context_);
    context_ = 0;
  }

  void forget_results() {
    io_event results[requests];
    timespec at_once{};
    ::syscall(SYS_io_getevents, context_, 0, requests, results, &at_once);
    unread_ = 0;
  }

  aio_context_t context_ = 0;
  long unread_ = 0;
};

AioContext& of_this_thread() {
  thread_local AioContext context;
  return context;
}

}  // namespace

bool can_signal_eventfds() { return static_cast<bool>(of_this_thread()); }

bool signal_eventfd(int eventfd) {
  if (AioContext& context = of_this_thread()) return context.signal(eventfd);
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(eventfd, &one, sizeof(one));  // full is as good as rung
  return true;
}

}  // namespace vrdma::svc
