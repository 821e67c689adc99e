// Event records as verbs read them: from the pipe that the service writes to, and, before that, from what was taken out of the
// pipe when an object was destroyed and belongs to others. Destroying an object thereby takes its unread events along
// (ibv_destroy_cq(3)): the descriptor that the application polls is readable only while there is an event.
//
// Any thread.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <mutex>

#include "guest_lib/descriptors.hpp"
#include "vrdma/control.hpp"

namespace vrdma::guest {

inline std::uint32_t object_of(const control::CompletionRecord& record) { return record.cq; }
inline std::uint32_t object_of(const control::AsyncRecord& record) { return record.handle; }

template <class Record>
class EventSource {
 public:
  enum class Next { record, empty, end };

  // end: the service has closed the pipe.
  Next next(int pipe, Record& record) {
    std::lock_guard lock(mutex_);
    if (kept_.empty()) return read(pipe, record);
    record = kept_.front();
    kept_.pop_front();
    if (kept_.empty()) {
      std::uint64_t count;
      [[maybe_unused]] const auto got = ::read(ready_.get(), &count, sizeof(count));
    }
    return Next::record;
  }

  // An event of our own.
  void add(int event_fd, const Record& record) {
    std::lock_guard lock(mutex_);
    kept_.push_back(record);
    if (kept_.size() == 1) make_readable(event_fd);
  }

  // Forgets the unread events of an object about which the service raises no more. event_fd: what the application polls.
  void purge(int event_fd, int pipe, std::uint32_t object) {
    std::lock_guard lock(mutex_);
    const bool had_kept = !kept_.empty();
    for (Record record; read(pipe, record) == Next::record;) kept_.push_back(record);
    std::erase_if(kept_, [object](const Record& record) { return object_of(record) == object; });
    if (had_kept == !kept_.empty()) return;
    if (!kept_.empty()) return make_readable(event_fd);
    std::uint64_t count;
    [[maybe_unused]] const auto got = ::read(ready_.get(), &count, sizeof(count));
  }

 private:
  void make_readable(int event_fd) {
    if (!ready_) {
      ready_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
      (void)watch_pipe(event_fd, ready_.get());
    }
    const std::uint64_t count = 1;
    [[maybe_unused]] const auto written = ::write(ready_.get(), &count, sizeof(count));
  }

  static Next read(int pipe, Record& record) {
    ssize_t got;
    do got = ::read(pipe, &record, sizeof(record));
    while (got < 0 && errno == EINTR);
    if (got == static_cast<ssize_t>(sizeof(record))) return Next::record;
    return got < 0 && errno == EAGAIN ? Next::empty : Next::end;
  }

  std::mutex mutex_;
  std::deque<Record> kept_;
  vmci::UniqueFd ready_;  // an eventfd in the application's descriptor: readable while something is kept
};

}  // namespace vrdma::guest
