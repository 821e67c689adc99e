#include "vmkernel_svc/machines/port.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/uio.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <cstring>
#include <stdexcept>

#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/machines/plain.hpp"
#include "vmkernel_svc/machines/port_session.hpp"
#include "vmkernel_svc/machines/qemu.hpp"
#include "vmkernel_svc/memory/ram_file.hpp"
#include "vmkernel_svc/shard.hpp"
#include "vmkernel_svc/watching.hpp"
#include "vrdma/printable.hpp"

namespace vrdma::svc {

MachinePort::MachinePort(MachineSpec spec, Service service)
    : spec_(std::move(spec)),
      service_(std::move(service)),
      device_(make_device()),
      link_event_(service_.io),
      heartbeat_(service_.io),
      keeping_(service_.io),
      resting_(service_.io),
      epoch_(random_number()) {
  if (device_->connected()) forgotten_boot_ = boot_of_agent();  // of a session with an earlier service
  if (!watch_copy(link_event_, device_->service_event(vm::link_vector)))
    throw std::runtime_error(fmt::format("machine {}: cannot watch its doorbell ({}): raise the limit of open files", spec_.name, std::strerror(errno)));
  service_.shard.submit([doorbell = device_->service_event(vm::doorbell_vector)](Shard& shard) { (void)shard.watch(doorbell); });
  await_link();
  beat();
}

std::unique_ptr<MachineDevice> MachinePort::make_device() {
  if (spec_.plain)  // no came(): it is its agent that is noticed first, which must not find another epoch then
    return std::make_unique<Plain>(service_.io, spec_.name, spec_.folder, spec_.tenant, spec_.device_bar_bytes(),
                                   MachineDevice::Events{[this] { service_.changed(); }, [this] { went(); }}, [this] { return look(); });
  return std::make_unique<Qemu>(service_.io, spec_.name, spec_.folder, spec_.tenant, spec_.vectors, spec_.device_bar_bytes(),
                                MachineDevice::Events{[this] { came(); }, [this] { went(); }},
                                [this](const MonitorNews& news) { take_news(news); });
}

MachinePort::~MachinePort() {
  *alive_ = false;
  end_session();
  epoch_ = 0;
  write_line();
  const auto doorbell = std::make_shared<vmci::UniqueFd>(device_->take_doorbell());
  service_.shard.submit([doorbell](Shard& shard) { shard.unwatch(doorbell->get()); });
  stop_watching(link_event_);
}

MachineStatus MachinePort::status() const {
  MachineStatus now{spec_.name, spec_.tenant, device_->connected() ? "connected" : "waiting", 0, 0, "", spec_.bar_bytes};
  if (session_ && session_->page != nullptr)
    now.state = kept_ ? "suspended" : frozen_ ? "paused" : "attached", now.ram_bytes = spec_.bar_bytes != 0 ? 0 : session_->ram->bytes(), now.processes = session_->processes.size(), now.version = session_->version;
  return now;
}

// The machine begins anew, or is not what it was when the service saw it last: what the agent has written is of the past. An agent that
// does not know that yet finds another service.
void MachinePort::forget(std::uint64_t boot) {
  forgotten_boot_ = boot;
  epoch_ = random_number();
  kept_ = false;
  keeping_.cancel();
  end_session();
  write_line();
  service_.changed();
}

// --- the link -------------------------------------------------------------------------------------------------

void MachinePort::await_link() {
  link_event_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive) return;
    // Its description is QEMU's, too, which may have made it blocking and be quicker than we.
    std::uint64_t count;
    iovec whole{&count, sizeof(count)};
    if (::preadv2(link_event_.native_handle(), &whole, 1, -1, RWF_NOWAIT) < 0 && errno == EOPNOTSUPP)  // Linux before 5.8
      [[maybe_unused]] const auto got = ::read(link_event_.native_handle(), &count, sizeof(count));
    look();
    await_link();
  });
}

std::uint64_t MachinePort::boot_of_agent() const {
  // Pairs with the agent's release: its cursor is zero.
  return std::atomic_ref(device_->header().agent.boot).load(std::memory_order_acquire);
}

// The service's line, whole: a machine that is loaded brings an older one along.
void MachinePort::write_line() {
  auto& mine = device_->header().service;
  mine.major = vm::version_major;
  mine.minor = vm::version_minor;
  std::atomic_ref(mine.flags).store((spec_.plain ? vm::service_polls : 0) | (spec_.bar_bytes != 0 ? vm::service_lends_bar : 0), std::memory_order_relaxed);
  const auto interrupts = device_->interrupts();
  std::atomic_ref(mine.vectors).store(interrupts ? interrupts->size() : 0, std::memory_order_relaxed);
  std::atomic_ref(mine.magic).store(vm::magic, std::memory_order_relaxed);
  std::atomic_ref(mine.heartbeat).store(heartbeats_, std::memory_order_relaxed);
  // Pairs with the agent's acquire: the line is good.
  std::atomic_ref(mine.service_epoch).store(epoch_, std::memory_order_release);
}

// Says that the service lives, and finds what nobody rang for.
void MachinePort::beat() {
  ++heartbeats_;
  clock_.beat();
  look_at_clock();
  if (frozen_) end_unheard();
  write_line();
  look();
  heartbeat_.expires_after(std::chrono::milliseconds(vm::heartbeat_ms));
  heartbeat_.async_wait([this, alive = alive_](const boost::system::error_code& error) {
    if (!error && *alive) beat();
  });
}

LinkActivity MachinePort::look() {
  if (!device_->connected() || run_state_.loading()) return LinkActivity::none;
  look_at_heart();
  const std::uint64_t boot = boot_of_agent();
  if (kept_ && boot != 0 && boot != session_->boot) drop_kept();  // a QEMU whose monitor says nothing, and another agent in it
  if (frozen_) return LinkActivity::none;
  if (session_ && session_->boot != boot) end_session();
  if (boot == 0 || boot == forgotten_boot_) return LinkActivity::none;
  if (!session_) {
    if (leaving_ != 0) return LinkActivity::none;  // looks again when the last of them has gone
    begin_session(boot);
  }
  if (session_->broken) return LinkActivity::none;
  bool anything = false;
  const bool sound = session_->link.receive([&](const vm::FrameHead& head, std::span<const std::byte> body) {
    anything = true;
    if (!session_->broken) take(head, body);
  });
  if (!sound && boot_of_agent() == boot) refuse("its frames make no sense");
  anything |= session_->link.unsent_bytes() != 0;
  push();
  // A machine that has much to say gets its turn again after the others.
  if (session_ && !session_->broken && session_->link.anything()) device_->ring_service();
  return anything ? LinkActivity::traffic : session_ && !session_->processes.empty() ? LinkActivity::processes : LinkActivity::none;
}

void MachinePort::begin_session(std::uint64_t boot) {
  session_ = std::make_unique<Session>(boot, device_->bar());
  std::atomic_ref(device_->header().service.accepted).store(boot, std::memory_order_release);
  ring_owed_ = !device_->ring_machine();
}

void MachinePort::end_session() {
  if (!session_) return;
  const auto ended = std::move(session_);
  for (auto& [connection, process] : ended->processes) {
    ++leaving_;
    process->known->detached = [this, alive = alive_] {
      if (*alive && --leaving_ == 0) look();
    };
    process->hang_up();
    process->known->ended = true;
    if (const auto thawed = std::exchange(process->known->thawed, {})) thawed();
  }
  if (ended->page != nullptr) {
    // The mapping stays until the shard writes there no more.
    ++leaving_;
    service_.shard.submit([this, alive = alive_, &io = service_.io, ram = ended->ram, page = ended->page](Shard& shard) {
      shard.end_mirror(*page);
      boost::asio::post(io, [this, alive] {
        if (*alive && --leaving_ == 0) look();
      });
    });
    log::info("machine {}: its session has ended", spec_.name);
  }
  service_.changed();
}

void MachinePort::refuse(const char* why) {
  if (session_->broken) return;
  // Who has not greeted yet may be in the midst of what it had to say to a service before this one: it begins anew by itself.
  if (session_->page == nullptr) log::info("machine {}: {}: it waits for its agent to begin anew", spec_.name, why);
  else log::warn("machine {}: {}: it has lost its session", spec_.name, why);
  // The session stays as a stone until the agent begins another: `boot` tells.
  const std::uint64_t boot = session_->boot;
  boost::asio::post(service_.io, [this, alive = alive_, boot] {
    if (!*alive || !session_ || session_->boot != boot) return;
    end_session();
    session_ = std::make_unique<Session>(boot, device_->bar());
    session_->broken = true;
  });
  session_->broken = true;
}

void MachinePort::push() {
  if (!session_ || frozen_) return;
  if (session_->link.flush() || ring_owed_) ring_owed_ = !device_->ring_machine();
  if (!session_->held.empty() && session_->link.unsent_bytes() <= unsent_bytes_busy)
    for (const auto& process : std::exchange(session_->held, {}))
      if (process->socket) await_replies(process);
  if (session_->link.unsent_bytes() > unsent_bytes_max) refuse("its agent reads nothing");
}

void MachinePort::take(const vm::FrameHead& head, std::span<const std::byte> body) {
  const auto kind = static_cast<vm::Frame>(head.kind);
  if (kind == vm::Frame::hello) return greet(body);
  if (session_->page == nullptr) return refuse("it did not say hello");
  if (kind == vm::Frame::open) return open(head.connection, body);
  const auto found = session_->processes.find(head.connection);
  if (found == session_->processes.end()) return;  // it has gone in the meantime
  Process& process = *found->second;
  switch (kind) {
    case vm::Frame::packet: return forward(process, body);
    case vm::Frame::segment: return append(process, head.item, body);
    case vm::Frame::close: return process.hang_up();
    default: return refuse("it sends frames of an unknown kind");
  }
}

void MachinePort::greet(std::span<const std::byte> body) {
  std::optional<vm::Hello> hello;
  if (body.size() == sizeof(vm::Hello) || body.size() == vm::hello_bytes(0)) std::memcpy(static_cast<void*>(&hello.emplace()), body.data(), body.size());
  if (!hello || session_->page != nullptr) return refuse("its greeting makes no sense");
  vm::Welcome welcome{};
  welcome.major = vm::version_major;
  welcome.minor = vm::version_minor;
  welcome.arena_bytes = service_.arena_bytes;
  std::strncpy(welcome.name, spec_.name.c_str(), sizeof(welcome.name) - 1);
  std::strncpy(welcome.version, VRDMA_VERSION, sizeof(welcome.version) - 1);
  session_->version = printable({hello->version, ::strnlen(hello->version, sizeof(hello->version))});
  const auto answer = [&](int status) {
    welcome.status = status;
    session_->link.send(vm::Frame::welcome, 0, std::as_bytes(std::span(&welcome, 1)).first(vm::welcome_bytes(hello->minor)));
    if (status != 0) log::warn("machine {}: refused ({})", spec_.name, std::strerror(status));
  };
  if (hello->major != vm::version_major) return answer(EPROTONOSUPPORT);
  const bool in_bar = spec_.bar_bytes != 0;
  if (in_bar && (hello->flags & vm::hello_bar) == 0) {
    log::warn("machine {}: its agent, vrdma {}, knows of no machine whose RAM is its own: install the vrdma-guestd that belongs to this vrdmad", spec_.name,
                 session_->version);
    return answer(EPROTONOSUPPORT);
  }
  const auto ram = map_ram(*hello);
  if (!ram) {
    log::warn("machine {}: cannot map its {} {} ({}): {}", spec_.name, in_bar ? "BAR" : "RAM", spec_.ram, std::strerror(value(ram.error())),
                 ram_file_remedy(value(ram.error())));
    return answer(ENODEV);
  }
  welcome.ram_page_bytes = (*ram)->page_bytes();
  if (!in_bar) welcome.ram = (*ram)->layout();
  if (service_.arena_bytes % welcome.ram_page_bytes != 0) {
    log::warn("machine {}: its RAM {} has pages of {} KiB, and machine_arena_bytes in vrdmad.json ({}) is not a multiple of that: change it, or keep the RAM on "
                 "smaller pages", spec_.name, spec_.ram, welcome.ram_page_bytes >> 10, service_.arena_bytes);
    return answer(EINVAL);
  }
  const auto offset = (*ram)->offset_of({hello->page, 1});
  std::uint64_t proof = 0;
  if (offset) std::memcpy(&proof, (*ram)->data() + *offset, sizeof(proof));
  if (proof != hello->proof || proof == 0) {
    log::warn("machine {}: its pages are not in its {} {}: start it with exactly the QEMU arguments of \"vrdma vm show {}\"", spec_.name, in_bar ? "BAR" : "RAM", spec_.ram,
                 spec_.name);
    return answer(EFAULT);
  }
  begin_page(*ram, (*ram)->data() + *offset);
  log::info("machine {}: attached, {} MiB of {}, agent {}", spec_.name, (*ram)->bytes() >> 20, in_bar ? "BAR" : "RAM", session_->version);
  answer(0);
  service_.changed();
}

Result<std::shared_ptr<MachineRam>> MachinePort::map_ram(const vm::Hello& hello) {
  if (spec_.bar_bytes != 0) return MachineRam::map_bar(device_->bar_fd());
  const MachineRam::Seen seen{hello.high_bytes, hello.low_end};
  if (device_->ram() >= 0) return MachineRam::map(vmci::UniqueFd(::fcntl(device_->ram(), F_DUPFD_CLOEXEC, 0)), seen);
  if (spec_.ram.empty()) return Errno{ENOENT};
  auto file = open_ram_file(spec_.ram, spec_.tenant);
  if (!file) return file.error();
  return MachineRam::map(std::move(*file), seen);
}

void MachinePort::begin_page(const std::shared_ptr<MachineRam>& ram, std::byte* at) {
  auto* const page = reinterpret_cast<control::ServicePage*>(at);
  std::memset(static_cast<void*>(page), 0, sizeof(*page));
  page->magic = control::magic;
  page->major = control::version_major;
  page->minor = control::version_minor;
  page->device_generation = 1;
  page->shard_count = 1;
  page->machine_generation = session_->generation;
  constexpr std::uint32_t somebody = 1;  // not FUTEX_OWNER_DIED; the agent sets that
  std::memcpy(page->alive_mutex, &somebody, sizeof(somebody));
  // Until the shard mirrors its state, everybody rings.
  std::atomic_ref(page->shards[0].sleeping).store(1, std::memory_order_release);
  session_->ram = ram;
  session_->page = page;
  service_.shard.submit([ram, page](Shard& shard) {
    std::atomic_ref(page->shards[0].sleeping).store(0, std::memory_order_relaxed);
    shard.mirror(*page);
  });
}

}  // namespace vrdma::svc
