// Event records as verbs read them: from the pipe that the service writes to, and, before that, from what was taken out of the
// pipe when an object was destroyed and belongs to others. Destroying an object thereby takes its unread events along
// (ibv_destroy_cq(3)): the descriptor that the application polls is readable only while there is an event.
//
// Where direct mode is offered the records of a channel come by a second pipe, too, to which peers write.
//
// In a virtual machine the records of a channel may come by a ring instead (control::EventRing), and an eventfd that an interrupt of the
// machine's device rings: what is taken at an interrupt is kept, too.
//
// Any thread.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>

#include "guest_lib/descriptors.hpp"
#include "guest_lib/kept_records.hpp"
#include "guest_lib/own_fd.hpp"
#include "vmci_channel/event_ring.hpp"
#include "vrdma/control.hpp"

namespace vrdma::guest {

inline std::uint32_t object_of(const control::CompletionRecord& record) { return record.cq; }
inline std::uint32_t object_of(const control::AsyncRecord& record) { return record.handle; }

template <class Record>
class EventSource {
 public:
  enum class Next { record, empty, end };

  // Before anything else, and once. interrupt: an eventfd that does not block, and is watched by what the application polls.
  Status use_ring(control::EventRing* ring, int interrupt)
    requires std::is_same_v<Record, control::CompletionRecord>
  {
    if (!kept_.make_room(control::event_records)) return Errno{ENOMEM};
    ring_.emplace(ring);
    interrupt_ = interrupt;
    return ok();
  }

  // Likewise: a pipe that does not block, never ends, and is watched by what the application polls.
  Status use_peers(int pipe) {
    if (!kept_.make_room(kept_at_a_time + 1)) return Errno{ENOMEM};
    peers_ = pipe;
    return ok();
  }

  // The descriptor by which event_fd is readable while something is kept. Where the program is told that it cannot be made, rather than not told of
  // an event; else it is made when something is.
  Status prepare_to_keep(int event_fd) {
    vmci::UniqueFd ready(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!ready) return last_error();
    ready_.reset(std::move(ready));
    return watch_pipe(event_fd, ready_.get());
  }

  // An event of our own of each has room from now on.
  bool make_room_for(std::size_t objects) {
    std::lock_guard lock(mutex_);
    return kept_.make_room(objects - std::min(objects, kept_.count()));
  }

  // quick: may find nothing where there is something, if what the application polls is readable then.
  enum class Look { quick, thorough };
  // end: the service has closed the pipe. event_fd: what the application polls.
  Next next(int event_fd, int pipe, Record& record, Look look = Look::thorough) {
    std::lock_guard lock(mutex_);
    if (!kept_.empty()) {
      if (peers_ >= 0 && ++served_ % kept_at_a_time == 0) keep_what_waits(pipe);
      take_kept(record);
      if (kept_.empty()) make_unreadable();
      return Next::record;
    }
    const bool quick = ring_ && look == Look::quick;
    if (quick && !ring_->interrupt_due()) return Next::empty;
    if (take_interrupt()) take_ring();  // nothing is kept: there is room
    if (kept_.empty()) {
      if (quick) return Next::empty;
      const Next next = peers_ >= 0 ? keep_what_waits(pipe) : read(pipe, record);
      if (peers_ < 0 && (next != Next::end || !ring_)) return next;
      if (ring_) take_ring();  // what the service has left behind
      if (kept_.empty()) return next;
    }
    take_kept(record);
    if (!kept_.empty()) make_readable(event_fd);
    return Next::record;
  }

  // The program has closed the descriptors, by bare system calls: what was taken from them before is all that there is.
  void lose_descriptors() {
    std::lock_guard lock(mutex_);
    peers_ = interrupt_ = -1;
    if (!ready_.intact()) ready_.reset();
  }

  // In a fork's child: what the parent's had kept, and its lock, which a thread of the parent's may have held, are left as they were.
  void begin_anew() {
    ready_.reset();
    std::construct_at(this);
  }

  // An event of our own, if `claimed` gives one. False: there is no memory, and it was not asked.
  template <class Claimed>
  bool add(int event_fd, const Claimed& claimed) {
    std::lock_guard lock(mutex_);
    if (!kept_.make_room(1)) return false;
    const std::optional<Record> record = claimed();
    if (!record) return true;
    kept_.put(*record);
    if (kept_.count() == 1) make_readable(event_fd);
    return true;
  }

  // Forgets the unread events of an object about which the service raises no more. event_fd: what the application polls. What there is no
  // memory for is left where it is: who reads it finds that the object is gone.
  void purge(int event_fd, int pipe, std::uint32_t object) {
    std::lock_guard lock(mutex_);
    const bool had_kept = !kept_.empty();
    if (ring_ && kept_.make_room(control::event_records)) await_interrupt();
    keep_all_of(pipe);
    if (peers_ >= 0) keep_all_of(peers_);
    kept_.erase_if([object](const Record& record) { return object_of(record) == object; });
    if (had_kept == !kept_.empty()) return;
    if (!kept_.empty()) return make_readable(event_fd);
    make_unreadable();
  }

 private:
  void take_kept(Record& record) { record = kept_.take(); }

  // As far as there is memory, with room for so many more. How reading ended, or record.
  Next keep_all_of(int pipe, std::size_t more = 0) {
    Record record;
    Next next = Next::record;
    while (kept_.make_room(1 + more) && (next = read(pipe, record)) == Next::record) kept_.put(record);
    return next;
  }

  // What comes by one way does not wait for ever behind another. What peers told is read first, and put last: what the service has told
  // came before what a peer did because of it, and ib_send_lat -e counts on that. How reading the service's pipe ended.
  Next keep_what_waits(int pipe) {
    Record records[kept_at_a_time];
    std::size_t told = 0;
    while (told < kept_at_a_time && kept_.make_room(told + 1) && read(peers_, records[told]) == Next::record) ++told;
    const Next next = keep_all_of(pipe, told);
    for (std::size_t i = 0; i < told; ++i) kept_.put(records[i]);
    return next;
  }

  // System calls are made directly, here and below: read(2) and write(2) are cancellation points, and a thread that is cancelled in one
  // would take along what it has in hand, be it the interrupt or a record.
  bool take_interrupt() {
    std::uint64_t count;
    return ring_ && ::syscall(SYS_read, interrupt_, &count, sizeof(count)) == static_cast<long>(sizeof(count));
  }

  void take_ring() {
    if constexpr (std::is_same_v<Record, control::CompletionRecord>)
      ring_->take([this](const Record& record) { kept_.put(record); });
  }

  // One that is on its way would come for records that are gone. It takes microseconds; that of a service that has ended meanwhile may
  // never come.
  void await_interrupt() {
    constexpr timespec patience{0, 100'000'000};
    pollfd interrupt{interrupt_, POLLIN, 0};
    if (ring_->interrupt_due()) ::syscall(SYS_ppoll, &interrupt, 1, &patience, nullptr, 0);
    if (take_interrupt() || ring_->interrupt_due()) take_ring();
  }

  void make_unreadable() {
    std::uint64_t count;
    ::syscall(SYS_read, ready_.get(), &count, sizeof(count));
  }

  void make_readable(int event_fd) {
    if (!ready_) (void)prepare_to_keep(event_fd);
    const std::uint64_t count = 1;
    ::syscall(SYS_write, ready_.get(), &count, sizeof(count));
  }

  static Next read(int pipe, Record& record) {
    long got;
    do got = ::syscall(SYS_read, pipe, &record, sizeof(record));
    while (got < 0 && errno == EINTR);
    if (got == static_cast<long>(sizeof(record))) return Next::record;
    return got < 0 && errno == EAGAIN ? Next::empty : Next::end;
  }

  std::mutex mutex_;
  KeptRecords<Record> kept_;
  std::optional<vmci::EventRingReader> ring_;
  int interrupt_ = -1;
  int peers_ = -1;
  static constexpr std::size_t kept_at_a_time = 8;
  std::size_t served_ = 0;  // of what was kept
  OwnFd ready_;  // an eventfd in the application's descriptor: readable while something is kept
};

}  // namespace vrdma::guest
