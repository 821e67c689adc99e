// How a shard sleeps, says that it does, and is woken (DESIGN.md D4).
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>

#include "vmkernel_svc/direct/direct_desk.hpp"
#include "vmkernel_svc/events.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

void Shard::make_descriptors() {
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !wake_) throw std::runtime_error("cannot create the shard's descriptors: too many open files?");
  if (!watch(wake_.get())) throw std::runtime_error("cannot watch the shard's wake-up descriptor");
}

Status Shard::watch(int fd, bool* came) {
  // Edge-triggered and never read: a guest could otherwise make the read block (DESIGN.md D4).
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.ptr = came;
  return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0 ? ok() : Status(last_error());
}

void Shard::unwatch(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Shard::wake() {
  vmci::store_load_fence();  // S1: pairs with S2 in sleep(): either it sees what was pushed or we see it asleep
  if (!asleep_.load(std::memory_order_relaxed)) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
}

bool Shard::anything_waiting() {
  if (stopping_.load(std::memory_order_acquire) || !tasks_.empty() || !jobs_.empty() || !apart_.empty() || !leaving_.empty() || runnable_count_ != 0) return true;
  if (far_ != nullptr && far_->anything_waiting()) return true;
  // Of all, also those that turns seldom look at.
  for (Guest* guest : guests_) {
    if (guest->broken && guest->socket) return true;  // to be expelled
    if (guest->is_heard() && (guest->doorbell.any() || (guest->control_held && guest->held_since_ns == 0))) return true;
  }
  return false;
}

void Shard::say_asleep(bool asleep) {
  // Counted, as guests of several shards may share a line.
  if (asleep) {
    for (std::size_t line = 0; line < on_line_.size(); ++line)
      if (on_line_[line] != 0) asleep_on_.set(line), std::atomic_ref(page_.shards[line].sleeping).fetch_add(1, std::memory_order_relaxed);
  } else {
    for (std::size_t line = 0; line < on_line_.size(); ++line)
      if (asleep_on_[line]) std::atomic_ref(page_.shards[line].sleeping).fetch_sub(1, std::memory_order_relaxed);
    asleep_on_.reset();
  }
  for (control::ServicePage* mirror : mirrors_) std::atomic_ref(mirror->shards[0].sleeping).store(asleep, std::memory_order_relaxed);
}

void Shard::mirror(control::ServicePage& page) {
  mirrors_.push_back(&page);
  std::atomic_ref(page.device_generation).store(fabric_.device_generation, std::memory_order_release);
}

void Shard::devices_changed() {
  ++fabric_.device_generation;
  // Who sees it asks by a request, which the shard answers after this: it needs no order.
  std::atomic_ref(page_.device_generation).store(fabric_.device_generation, std::memory_order_release);
  for (control::ServicePage* mirror : mirrors_) std::atomic_ref(mirror->device_generation).store(fabric_.device_generation, std::memory_order_release);
}

void Shard::sleep() {
  shards_.turnstile.enter(number_);
  park_all();
  asleep_.store(true, std::memory_order_relaxed);
  say_asleep(true);
  if (far_ != nullptr) far_->prepare_to_sleep();
  vmci::store_load_fence();  // S2: pairs with S1, and with the guests' fence between a doorbell bit and this flag
  while (!anything_waiting() && wait_for_events()) {
  }
  say_asleep(false);
  asleep_.store(false, std::memory_order_relaxed);
  silent_looked_ = 0;  // whoever woke it may be one of those; from the first on, or one that is swapped for another is passed over
  next_silent_ = attended_;
  shards_.turnstile.leave(number_);
  backoff_.reset();
}

// False: something may have happened. True: nothing has, but that it was time to look at direct connections.
bool Shard::wait_for_events() {
  timespec timeout{};
  bool timed = false;
  const std::uint64_t now = vmci::monotonic_ns();
  std::uint64_t until = timers_.first_ns();
  const auto no_later_than = [&until](std::uint64_t ns) {
    if (until == 0 || ns < until) until = ns;
  };
  if (const std::uint64_t far = far_ != nullptr ? far_->next_wake_ns() : 0; far != 0) no_later_than(far);
  bool held = direct_ && direct_->waiting();
  for (Guest* guest : guests_) {
    held |= flush_events(*guest);
    if (guest->frozen) continue;
    held |= fabric_.vmci.flush(*guest);
    held |= guest->held_since_ns != 0 && !guest->broken && !guest->ended;
  }
  if (held) no_later_than(now + held_events_patience_ns);  // a request that waits, too
  const std::uint64_t look = direct_ && direct_->watching() ? now + DirectDesk::look_interval_ns : 0;
  if (look != 0) no_later_than(look);
  if (until != 0) {
    const std::uint64_t wait = until > now ? until - now : 0;
    timeout.tv_sec = static_cast<time_t>(wait / 1'000'000'000);
    timeout.tv_nsec = static_cast<long>(wait % 1'000'000'000);
    timed = true;
  }
  epoll_event events[16];
  ++counters_.sleeps;
  int happened = 0;
  shards_.turnstile.leave(number_);
  // epoll_pwait2 (Linux 5.11) waits in nanoseconds; without it, whole milliseconds, rounded up.
  if (!timed) {
    happened = ::epoll_wait(epoll_.get(), events, 16, -1);
  } else if ((happened = ::epoll_pwait2(epoll_.get(), events, 16, &timeout, nullptr)) < 0 && errno == ENOSYS) {
    const int timeout_ms = static_cast<int>(timeout.tv_sec * 1000 + (timeout.tv_nsec + 999'999) / 1'000'000);
    happened = ::epoll_wait(epoll_.get(), events, 16, timeout_ms);
  }
  shards_.turnstile.enter(number_);
  for (int i = 0; i < happened; ++i)
    if (bool* const came = static_cast<bool*>(events[i].data.ptr)) *came = true;
  return happened == 0 && until == look && look != 0 && !direct_->look(vmci::monotonic_ns());
}

}  // namespace vrdma::svc
