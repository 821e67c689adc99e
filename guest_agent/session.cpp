#include "guest_agent/session.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "guest_agent/log.hpp"
#include "vmci_channel/arch.hpp"
#include "vrdma/control.hpp"

namespace vrdma::agent {

using vm::Frame;

namespace {

constexpr std::uint64_t arena_bytes_max = std::uint64_t{1} << 40;  // of vrdmad's configuration
// For pages that may be lent. Nobody is served meanwhile but with doorbells.
constexpr std::uint64_t search_ns = 10'000'000'000;
constexpr int exchanges_max = 16;  // where the machine has no more to spare for ballast
constexpr std::uint64_t ballast_ns = 8'000'000'000;  // kept after that: who asks next goes on from there

template <class Word>
Word load(const Word& word, std::memory_order order = std::memory_order_relaxed) {
  return std::atomic_ref(const_cast<Word&>(word)).load(order);
}

std::uint64_t random_number() {
  for (std::uint64_t number = 0;;)
    if (::getrandom(&number, sizeof(number), 0) == sizeof(number) && number != 0) return number;
}

vm::LinkHeader& header_of(const Device& device) { return *reinterpret_cast<vm::LinkHeader*>(device.bar); }

pthread_mutex_t* alive_mutex(control::ServicePage* page) {
  static_assert(sizeof(pthread_mutex_t) <= sizeof(control::ServicePage::alive_mutex));
  return reinterpret_cast<pthread_mutex_t*>(page->alive_mutex);
}

std::string text_of(const char (&field)[32]) { return std::string(field, ::strnlen(field, sizeof(field))); }

}  // namespace

Session::ServiceNow Session::service() const {
  const vm::ServiceLine& line = header_of(device_).service;
  ServiceNow now{};
  // S1: pairs with the service's release of its epoch, after the rest of the line, and of `accepted`, after its cursor.
  now.epoch = load(line.service_epoch, std::memory_order_acquire);
  now.accepted = load(line.accepted, std::memory_order_acquire);
  now.magic = load(line.magic);
  now.major = load(line.major);
  now.minor = load(line.minor);
  now.heartbeat = load(line.heartbeat);
  return now;
}

// Nobody else writes there; the moment is as good as a count. S4: pairs with the service's acquire: whose heart it sees beat has written `boot`.
void Session::beat(std::uint64_t now_ns) const { std::atomic_ref(header_of(device_).agent.heartbeat).store(now_ns, std::memory_order_release); }

Session::News Session::look(std::uint64_t now_ns) {
  if (now_ns >= ballast_until_ns_) ballast_.release();
  const ServiceNow now = service();
  const bool ours = now.magic == vm::magic;  // else it may be another program's device, and nothing is written there
  const bool ready = ours && now.epoch != 0;
  const State before = state_;
  const bool too_early = before == State::absent && now_ns < not_before_ns_;
  if (before == State::absent && ready && !too_early) begin();
  if (ours) beat(now_ns);
  switch (before) {
    case State::absent:
      return too_early ? News::none : say_that_it_waits(now_ns);
    case State::asked: {
      const News news = say_that_it_waits(now_ns);
      // A service that is stopped here is waited for: it sees `boot` when it goes on. A new one is asked anew.
      if (!ready || now.epoch != epoch_) {
        state_ = State::absent;
        return news;
      }
      if (now.accepted != boot_) return news;
      if (!to_leave_) greet();
      return News::accepted;
    }
    default:
      break;
  }
  // A machine that has itself been stopped does not know what it has missed.
  const bool away = now_ns > last_look_ns_ + patience_ns_ / 2;
  last_look_ns_ = now_ns;
  if (now.heartbeat != heartbeat_ || away) heartbeat_ = now.heartbeat, heartbeat_ns_ = now_ns;
  const bool same = ready && now.epoch == epoch_;
  if (same && now_ns <= heartbeat_ns_ + patience_ns_) return News::none;
  say(same ? "the host service does not answer any more: programs that use it get errors"
           : "the host service has started anew, or does not know this machine again: programs that used it get errors");
  lose();
  return News::lost;
}

// Once for each time that there is no service, when it takes long: a machine may boot before its host's service is up.
Session::News Session::say_that_it_waits(std::uint64_t now_ns) {
  if (!waiting_since_ns_) waiting_since_ns_ = now_ns;
  if (now_ns < *waiting_since_ns_ + patience_ns_ || std::exchange(said_that_it_waits_, true)) return News::none;
  if (service().magic != vm::magic)
    say("the device has nothing of vrdma's in its memory, and nothing is written there: it is another program's, or of a machine that the host's vrdmad does not know; "
        "give the other one by --device, or start this machine with what \"vrdma vm show\" prints on the host; waiting");
  else
    say("the host service does not answer, waiting for it: start vrdmad on the host; if it runs, see \"vrdma vm list\" there: a machine that was removed or "
        "added anew while it ran has to be switched off and started with what \"vrdma vm show\" prints; if this machine's kernel has removed and found the device again, start vrdma-guestd anew");
  return News::waits;
}

void Session::begin(bool to_leave) {
  to_leave_ = to_leave;
  const ServiceNow now = service();
  state_ = State::absent;
  if (now.magic != vm::magic || now.epoch == 0) return;
  if (now.major != vm::version_major) {
    char text[200];
    std::snprintf(text, sizeof(text),
                  "the host service speaks version %u.%u of the link, this agent %u.%u: install the vrdma-guestd that belongs to the "
                  "host's vrdmad",
                  now.major, now.minor, vm::version_major, vm::version_minor);
    throw Unsuitable(text);
  }
  epoch_ = now.epoch;
  boot_ = random_number();
  // Nobody takes a cursor that goes back for a broken one: between two sessions there is none.
  std::atomic_ref boot(header_of(device_).agent.boot);
  boot.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  link_.emplace(device_.bar, vmci::VmLinkEnd::Who::agent);  // zeroes our cursor
  // S2: pairs with the service's acquire of `boot`: our cursor is zero.
  boot.store(boot_, std::memory_order_release);
  device_.ring(vm::link_vector);
  state_ = State::asked;
}

// The machine's copy of the ServicePage.
std::optional<std::uint64_t> Session::make_page() {
  if (in_bar_) {
    auto page = bar_->take(sizeof(control::ServicePage));
    auto to_read = page ? bar_->descriptor(*page, vmci::Writable::no) : Result<vmci::UniqueFd>(page.error());
    if (!to_read)
      throw std::runtime_error(std::string("cannot take a page of the device's BAR (") + std::strerror(value(to_read.error())) +
                               "): give this machine a bigger one (vrdma vm add --bar)");
    bar_pages_.push_back(std::move(*page));
    page_to_read_ = std::move(*to_read);
    page_ = reinterpret_cast<control::ServicePage*>(bar_pages_.back().data());
    return bar_pages_.back().offset() / vm::page_bytes;
  }
  constexpr std::uint64_t bytes = sizeof(control::ServicePage);
  auto page = lendable("vrdma-service-page", bytes, vm::page_bytes, vmci::HandedOut::read_only);
  if (!page && value(page.error()) == EFAULT) return std::nullopt;
  if (!page)
    throw std::runtime_error(std::string("cannot pin a page of memory (") + std::strerror(value(page.error())) +
                             "): run vrdma-guestd as root, with io_uring allowed (sysctl kernel.io_uring_disabled=0)");
  pinned_page_ = std::move(*page);
  page_ = pinned_page_.memory.at<control::ServicePage>(0);
  // The seal keeps everybody from mapping it for writing; that the descriptor cannot be written to says so at once.
  page_to_read_.reset(::open(("/proc/self/fd/" + std::to_string(pinned_page_.memory.fd())).c_str(), O_RDONLY | O_CLOEXEC));
  if (!page_to_read_) throw std::runtime_error(std::string("cannot open /proc/self/fd (") + std::strerror(errno) + "): mount /proc");
  return pinned_page_.runs.front().page;
}

bool Session::admits(uid_t user) {
  if (!in_bar_ || user == 0) return true;
  if (!bar_user_) bar_user_ = user;
  return *bar_user_ == user;
}

void Session::greet() {
  waiting_since_ns_.reset();
  said_that_it_waits_ = false;
  in_bar_ = device_.service_lends_bar();
  if (in_bar_ && !bar_) {
    if (device_.bar_file < 0)
      throw Unsuitable("this machine's RAM is its own, and programs cannot map the BAR of its device: do without kernel lockdown");
    if (device_.bar_bytes < vm::lent_bar_bytes_min)
      throw Unsuitable("this machine's RAM is its own, and its device's BAR has no room for memory of programs: start it with exactly the QEMU arguments "
                       "that \"vrdma vm add --private-ram\" prints");
    device_.mark_page_dead();  // of an agent that nobody has outlived
    bar_ = std::make_unique<BarPages>(device_);
    bar_user_ = bar_->user_before();
    say("this machine's RAM is its own: %llu MiB of the device's BAR are lent to programs", static_cast<unsigned long long>(bar_->bytes() >> 20));
  }
  const auto page = make_page();
  if (!page) {
    state_ = State::absent;
    not_before_ns_ = vmci::monotonic_ns() + patience_ns_;
    return;
  }

  vm::Hello hello{};
  hello.major = vm::version_major;
  hello.minor = vm::version_minor;
  hello.flags = (device_.interrupt >= 0 ? vm::hello_interrupts : 0) | (in_bar_ ? vm::hello_bar : 0);
  if (!in_bar_) {
    std::ifstream iomem("/proc/iomem");
    const RamExtent extent = RamExtent::of(iomem);
    hello.low_end = extent.low_end;
    hello.high_bytes = extent.high_bytes;
  }
  hello.page = *page;
  hello.proof = random_number();
  std::snprintf(hello.version, sizeof(hello.version), "%s", VRDMA_VERSION);
  std::memcpy(static_cast<void*>(page_), &hello.proof, sizeof(hello.proof));
  heartbeat_ = service().heartbeat;
  heartbeat_ns_ = last_look_ns_ = vmci::monotonic_ns();  // pinning can take its time
  state_ = State::greeted;
  // S3: pairs with the link's publication of the bytes of hello: the proof is there before.
  link_->send(Frame::hello, 0, std::as_bytes(std::span(&hello, 1)).first(vm::hello_bytes(service().minor)));
}

bool Session::take_welcome(std::span<const std::byte> body, std::uint64_t now_ns) {
  vm::Welcome welcome{};
  if (state_ != State::greeted || body.size() < vm::welcome_bytes(0)) return false;
  std::memcpy(static_cast<void*>(&welcome), body.data(), std::min(body.size(), sizeof(welcome)));
  switch (welcome.status) {
    case 0:
      break;
    case ENODEV:
      if (not_before_ns_ == 0)
        say("the host service has no memory of this machine to reach it by: give QEMU the memory backend that \"vrdma vm add\" prints "
            "(share=on); asking again");
      lose();
      not_before_ns_ = now_ns + patience_ns_;
      return true;
    case EPROTONOSUPPORT:
      throw Unsuitable("the host service (vrdma " + text_of(welcome.version) + ") refuses this agent (vrdma " VRDMA_VERSION
                       "): install the vrdma-guestd that belongs to the host's vrdmad");
    case EFAULT:
      if (!in_bar_ && believe_plugged_in(pinned_page_.runs.front().page)) {
        lose();
        return true;
      }
      throw Unsuitable("the host service does not find this machine's pages in the memory that it was given: start the machine with exactly "
                       "the QEMU arguments that \"vrdma vm add\" prints");
    default:
      throw Unsuitable(std::string("the host service refuses this machine (") + std::strerror(welcome.status) + "): its log says more");
  }
  if (welcome.arena_bytes == 0 || welcome.arena_bytes > arena_bytes_max || welcome.arena_bytes % vm::page_bytes != 0) return false;
  if (welcome.ram_page_bytes < vm::page_bytes || !std::has_single_bit(welcome.ram_page_bytes)) return false;
  arena_bytes_ = welcome.arena_bytes;
  ram_page_bytes_ = welcome.ram_page_bytes;
  said_plugged_in_ = false;
  if (body.size() >= sizeof(welcome)) ram_ = welcome.ram;  // an older service does not say
  machine_ = text_of(welcome.name);
  not_before_ns_ = 0;
  mark_alive();
  state_ = State::open;
  return true;
}

bool Session::may_lend(const Runs& runs) const {
  return std::ranges::all_of(runs, [this](const vm::Run& run) { return may_lend(run); });
}

// The service has not found a page of ours: it is of memory that was plugged in, which lies behind all that is in the file, and so is what lies
// behind it. False: a page that is always there, below 4 GiB.
bool Session::believe_plugged_in(std::uint64_t page) {
  constexpr std::uint64_t high = std::uint64_t{1} << 32;
  if (page < high / vm::page_bytes) return false;
  std::ifstream iomem("/proc/iomem");
  const std::uint64_t from = std::max(part_begin(iomem, page * vm::page_bytes), high);
  ram_ = vm::RamLayout{high, from - high};
  return true;
}

Result<PinnedSegment> Session::lendable(const char* name, std::uint64_t bytes, std::uint64_t page_bytes, vmci::HandedOut handed_out) {
  const auto make = [&] { return PinnedSegment::unpinned(name, bytes, page_bytes, handed_out); };
  auto segment = make();
  if (const Status pinned = segment ? segment->pin() : segment.error(); !pinned) return pinned.error();
  if (may_lend(segment->runs)) return segment;

  const auto keep = [this](const vm::Run& run) { return may_lend(run); };
  std::vector<vmci::UniqueFd> elsewhere;  // hold what may not be lent, so that it is not handed out again
  bool used_up = false;  // the other memory, but for what comes free just now
  int without_ballast = 0;
  const std::uint64_t begin_ns = vmci::monotonic_ns();
  for (std::uint64_t now_ns = begin_ns; now_ns < begin_ns + search_ns; now_ns = vmci::monotonic_ns()) {
    beat(now_ns);
    meanwhile_();
    if (!used_up) {
      const auto given_back = ballast_.grow(bytes, keep);
      used_up = !given_back || *given_back != 0;
      continue;
    }
    if (handed_out == vmci::HandedOut::read_only) {
      elsewhere.push_back(std::move(segment->ring));
      segment = make();
      if (!segment) return segment;
    } else {
      auto before = segment->give_up(keep);
      if (!before) return before.error();
      elsewhere.push_back(std::move(*before));
    }
    if (!ballast_.grow(bytes, keep, [&] { segment->touch(); }) && ++without_ballast > exchanges_max) break;
    if (const Status pinned = segment->pin(); !pinned) return pinned.error();
    if (may_lend(segment->runs)) break;
  }
  ballast_until_ns_ = vmci::monotonic_ns() + ballast_ns;
  if (segment->ring && may_lend(segment->runs)) return segment;
  if (state_ != State::open && std::exchange(said_plugged_in_, true)) return Errno{EFAULT};
  say("%llu KiB are only to be had of memory that was plugged into this machine (DIMMs, virtio-mem), which the host's service does not have: let the kernel have that as "
      "movable memory (memhp_default_state=online_movable), or start the machine with all its memory (\"vrdma vm add --memory\")%s",
      static_cast<unsigned long long>(bytes >> 10), state_ == State::open ? "" : "; waiting. If none was plugged in, start it with exactly what \"vrdma vm show\" prints");
  return Errno{EFAULT};
}

void Session::lose() {
  mark_dead();
  state_ = State::absent;
}

Vectors::Lease Session::lend_vector() {
  const std::uint64_t known = load(header_of(device_).service.vectors);
  return known <= device_.vectors ? vectors_.lend(static_cast<std::uint32_t>(known)) : vectors_.lend(device_.vectors);
}

// The lock that libvrdma's poll loops look at is the agent's: the kernel marks it if the agent dies, whatever of.
void Session::mark_alive() {
  marked_alive_ = true;
  if (in_bar_) {
    std::atomic_ref(header_of(device_).agent.page).store(bar_pages_.back().offset() / vm::page_bytes, std::memory_order_relaxed);
    return;
  }
  pthread_mutex_t* const alive = alive_mutex(page_);
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(alive, &attributes);
  pthread_mutexattr_destroy(&attributes);
  pthread_mutex_lock(alive);
}

void Session::mark_dead() {
  if (!std::exchange(marked_alive_, false)) return;
  if (in_bar_) return device_.mark_page_dead();
  pthread_mutex_t* const alive = alive_mutex(page_);
  pthread_mutex_unlock(alive);
  std::atomic_ref(*reinterpret_cast<std::uint32_t*>(alive)).store(owner_died, std::memory_order_release);
}

}  // namespace vrdma::agent
