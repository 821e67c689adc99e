#include "vmkernel_svc/machines/port.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <boost/asio/post.hpp>
#include <cstring>
#include <stdexcept>

#include "vmkernel_svc/machines/plain.hpp"
#include "vmkernel_svc/machines/qemu.hpp"
#include "vmkernel_svc/memory/ram_file.hpp"
#include "vmkernel_svc/shard.hpp"
#include "vmkernel_svc/watching.hpp"

namespace vrdma::svc {

namespace {

constexpr std::uint64_t unsent_bytes_max = 4 << 20;   // an agent that reads nothing loses its session, …
constexpr std::uint64_t unsent_bytes_busy = 1 << 20;  // … and before that the service's replies wait
constexpr std::size_t processes_max = 4096;
constexpr std::size_t segments_max = 64;              // lent and not used yet, of one process
constexpr std::size_t segment_parts_max = 1 << 22;    // of one segment: 16 GiB in single pages
constexpr std::chrono::milliseconds thaw_every{10};   // a thaw looks at every queue pair
constexpr std::uint32_t beats_unheard_max = 20;       // of an agent that nobody tells about, heartbeat_ms each

std::uint64_t random_number() {
  std::uint64_t number = 0;
  while (number == 0)
    if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) number = 0;
  return number;
}

template <class Body>
std::optional<Body> body_of(std::span<const std::byte> bytes) {
  if (bytes.size() != sizeof(Body)) return std::nullopt;
  Body body;
  std::memcpy(&body, bytes.data(), sizeof(body));
  return body;
}

}  // namespace

// A pipe of the service that a process of the machine reads.
struct MachinePort::Stream {
  Stream(boost::asio::io_context& io, std::uint32_t number_in) : number(number_in), pipe(io) {}
  std::uint32_t number;
  boost::asio::posix::stream_descriptor pipe;
};

struct MachinePort::Process {
  Process(boost::asio::io_context& io, std::uint32_t connection_in) : connection(connection_in), readable(io) {}
  std::uint32_t connection;
  std::shared_ptr<MachineProcess> known;
  vmci::PacketSocket socket;                        // our end of the pair
  boost::asio::posix::stream_descriptor readable;   // a duplicate
  std::map<std::uint32_t, std::shared_ptr<Stream>> streams;
  std::uint32_t next_stream = 1;
  std::optional<std::pair<std::uint32_t, PinnedPages>> lending;  // the segment whose runs are coming in

  // All runs of that segment have come: a packet may use it.
  void end_lending() {
    if (!lending) return;
    auto& [number, pages] = *lending;
    known->segments.insert_or_assign(number, std::move(pages));
    lending.reset();
  }
  void hang_up() {
    stop_watching(readable);
    socket = {};
    for (auto& [number, stream] : streams) stop_watching(stream->pipe);
    streams.clear();
  }
};

struct MachinePort::Session {
  Session(std::uint64_t boot_in, std::byte* bar) : boot(boot_in), link(bar, /*agent=*/false) {}
  std::uint64_t boot;
  std::uint64_t generation = random_number();       // what stands in `page`: another number with each freeze and thaw
  vmci::VmLinkEnd link;
  std::shared_ptr<MachineRam> ram;                  // from hello on
  control::ServicePage* page = nullptr;             // the machine's copy, in its RAM
  std::string version;
  std::map<std::uint32_t, std::shared_ptr<Process>> processes;
  std::vector<std::shared_ptr<Process>> held;       // whose replies wait for room in the link
  std::uint32_t last_connection = 0;
  bool broken = false;
};

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
                                   MachineDevice::Events{[this] { service_.changed(); }, [this] { forget(); }}, [this] { return look(); });
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

// --- machines that stand still, are saved, and come back -------------------------------------------------------------

void MachinePort::came() {
  run_state_.qemu_came();
  beats_unheard_ = 0;
  if (!session_ && !kept_) epoch_ = random_number(), write_line();  // an agent that this QEMU loads knows another one
  service_.changed();
}

void MachinePort::went() {
  const bool saved = run_state_.saved(), unsound = run_state_.unsound();
  run_state_.qemu_came();  // there is none
  if (session_ && session_->page != nullptr && (saved || kept_) && service_.keep.count() != 0) {
    spdlog::info("machine {}: is saved, and kept for {} s", spec_.name, service_.keep.count());
    kept_ = true;
    // Who has it again has loaded it.
    std::atomic_ref(session_->page->machine_generation).store(0, std::memory_order_relaxed);
    keep_for_a_while();
    return service_.changed();
  }
  if (unsound) spdlog::warn("machine {}: was saved while the service still wrote to it, and is not kept: stop it before it is saved", spec_.name);
  frozen_ = false;
  forget();
}

void MachinePort::keep_for_a_while() {
  keeping_.expires_after(service_.keep);
  keeping_.async_wait([this, alive = alive_](const boost::system::error_code& error) {
    if (error || !*alive || !kept_) return;
    // What is loaded, or waits to go on, is heard of again.
    if (device_->monitored() && run_state_.known() && (run_state_.loading() || restored())) return keep_for_a_while();
    spdlog::info("machine {}: did not come back", spec_.name);
    drop_kept();
  });
}

void MachinePort::take_news(const MonitorNews& news) {
  look_at_clock();
  switch (news.kind) {
    case MonitorNews::Kind::reset:
      if (session_) spdlog::info("machine {}: is reset", spec_.name);
      return forget();
    case MonitorNews::Kind::stopped:
      run_state_.stopped();
      break;
    case MonitorNews::Kind::resumed:
      if (kept_ && !run_state_.loading() && !restored()) drop_kept();
      if (!session_) forget();  // nobody knows whether the agent's boot is of now
      run_state_.resumed();
      kept_ = false;
      break;
    case MonitorNews::Kind::migration:
      run_state_.migrated(news.text, news.at_us);
      if (clock_.set_lately()) run_state_.clock_was_set();
      break;
    case MonitorNews::Kind::run_state:
      run_state_.ran_as(news.text);
      if (!kept_ || run_state_.loading()) break;
      if (!restored()) return drop_kept();
      kept_ = news.text != "running";  // it was loaded before anybody was told
      break;
    case MonitorNews::Kind::answer:
      if (news.text == std::to_string(asked_)) run_state_.answered();
      break;
  }
  settle();
}

void MachinePort::look_at_clock() {
  if (clock_.look()) run_state_.clock_was_set();
}

// It boots anew, or does not come.
void MachinePort::drop_kept() {
  spdlog::info("machine {}: what was kept of it is given up", spec_.name);
  run_state_.thawed();
  frozen_ = false;
  forget(session_->boot);
}

// True: the machine is the one that the service has seen last. The number is changed in one step, as the machine may be loaded under us.
bool MachinePort::renew_generation() {
  if (!session_) return true;
  if (session_->page == nullptr) return boot_of_agent() == session_->boot;
  std::uint64_t expected = session_->generation;
  session_->generation = random_number();  // once it was another, it stays that
  return std::atomic_ref(session_->page->machine_generation).compare_exchange_strong(expected, session_->generation) &&
         boot_of_agent() == session_->boot;
}

// Whether the machine that was saved has been loaded into this QEMU.
bool MachinePort::restored() const {
  return std::atomic_ref(session_->page->machine_generation).load(std::memory_order_relaxed) == session_->generation && boot_of_agent() == session_->boot;
}

// What the monitor has said last counts, not how often it has changed its mind.
void MachinePort::settle() {
  const bool still = run_state_.still();
  if (changing_ || kept_ || still == frozen_) return;
  if (still) return freeze();
  if (std::chrono::steady_clock::now() >= thaw_again_) return thaw();
  resting_.expires_at(thaw_again_);
  resting_.async_wait([this, alive = alive_](const boost::system::error_code& error) {
    if (!error && *alive) settle();
  });
}

// The shard is through with it.
void MachinePort::changed_over() {
  changing_ = false;
  settle();
}

void MachinePort::freeze() {
  frozen_ = changing_ = true;
  beats_unheard_ = 0;
  if (session_)
    for (auto& [connection, process] : session_->processes) process->known->frozen = true;
  const auto page = session_ ? session_->page : nullptr;
  service_.shard.submit([this, alive = alive_, &io = service_.io, name = spec_.name, page](Shard& shard) {
    if (page != nullptr) shard.end_mirror(*page);
    for (auto& [id, guest] : shard.fabric().guests)
      if (guest->machine && guest->machine->name == name) shard.freeze(*guest);
    boost::asio::post(io, [this, alive] {
      if (!*alive) return;
      if (frozen_) {
        (void)renew_generation();  // who is not the same any more is told so when it goes on
        // That was the last write: a page that went out before may lack it.
        look_at_clock();
        run_state_.frozen(clock_.now_us());
        device_->ask(++asked_);
      }
      changed_over();
    });
  });
  service_.changed();
}

void MachinePort::thaw() {
  frozen_ = false;
  keeping_.cancel();
  run_state_.thawed();
  thaw_again_ = std::chrono::steady_clock::now() + thaw_every;
  if (!renew_generation()) {
    spdlog::warn("machine {}: goes on from another state than it had: its programs lose their device", spec_.name);
    return forget();
  }
  write_line();
  if (session_) std::atomic_ref(device_->header().service.accepted).store(session_->boot, std::memory_order_release);
  if (session_) {
    changing_ = true;
    service_.shard.submit([this, alive = alive_, &io = service_.io, name = spec_.name, ram = session_->ram, page = session_->page](Shard& shard) {
      if (page != nullptr) {
        std::atomic_ref(page->shards[0].sleeping).store(0, std::memory_order_relaxed);
        shard.mirror(*page);
      }
      for (auto& [id, guest] : shard.fabric().guests)
        if (guest->machine && guest->machine->name == name) shard.thaw(*guest);
      boost::asio::post(io, [this, alive] {
        if (*alive) changed_over();
      });
    });
    for (auto& [connection, process] : session_->processes) {
      process->known->frozen = false;
      if (const auto thawed = std::exchange(process->known->thawed, {})) thawed();
    }
  }  // guests of a session that has ended meanwhile are on their way out, and stay frozen
  push();
  look();
  service_.changed();
}

// A machine that is said to stand still, or to be saved, and whose monitor has gone: that it runs again is told by its agent's heart alone,
// and too late to go on with it.
void MachinePort::end_unheard() {
  if (!device_->connected() || device_->monitored()) return;
  const std::uint64_t heart = std::atomic_ref(device_->header().agent.heartbeat).load(std::memory_order_relaxed);
  if (std::exchange(heart_seen_, heart) == heart || ++beats_unheard_ < beats_unheard_max) return;
  spdlog::warn("machine {}: it runs, and no monitor has said so: its programs lose their device", spec_.name);
  run_state_.qemu_came();
  frozen_ = false;
  forget();
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
    spdlog::info("machine {}: its session has ended", spec_.name);
  }
  service_.changed();
}

void MachinePort::refuse(const char* why) {
  if (session_->broken) return;
  spdlog::warn("machine {}: {}: it has lost its session", spec_.name, why);
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
  const auto hello = body_of<vm::Hello>(body);
  if (!hello || session_->page != nullptr) return refuse("its greeting makes no sense");
  vm::Welcome welcome{};
  welcome.major = vm::version_major;
  welcome.minor = vm::version_minor;
  welcome.arena_bytes = service_.arena_bytes;
  std::strncpy(welcome.name, spec_.name.c_str(), sizeof(welcome.name) - 1);
  std::strncpy(welcome.version, VRDMA_VERSION, sizeof(welcome.version) - 1);
  session_->version.assign(hello->version, ::strnlen(hello->version, sizeof(hello->version)));
  const auto answer = [&](int status) {
    welcome.status = status;
    session_->link.send(vm::Frame::welcome, 0, welcome);
    if (status != 0) spdlog::warn("machine {}: refused ({})", spec_.name, std::strerror(status));
  };
  if (hello->major != vm::version_major) return answer(EPROTONOSUPPORT);
  const bool in_bar = spec_.bar_bytes != 0;
  if (in_bar && (hello->flags & vm::hello_bar) == 0) {
    spdlog::warn("machine {}: its agent, vrdma {}, knows of no machine whose RAM is its own: install the vrdma-guestd that belongs to this vrdmad", spec_.name,
                 session_->version);
    return answer(EPROTONOSUPPORT);
  }
  const auto open_ram = [&]() -> Result<std::shared_ptr<MachineRam>> {
    auto file = open_ram_file(spec_.ram, spec_.tenant);
    if (!file) return file.error();
    return MachineRam::map(std::move(*file), hello->high_bytes);
  };
  auto ram = in_bar               ? MachineRam::map_bar(device_->bar_fd())
             : device_->ram() >= 0 ? MachineRam::map(vmci::UniqueFd(::fcntl(device_->ram(), F_DUPFD_CLOEXEC, 0)), hello->high_bytes)
             : spec_.ram.empty()   ? Result<std::shared_ptr<MachineRam>>(Errno{ENOENT})
                                   : open_ram();
  if (!ram) {
    spdlog::warn("machine {}: cannot map its {} {} ({}): {}", spec_.name, in_bar ? "BAR" : "RAM", spec_.ram, std::strerror(value(ram.error())),
                 ram_file_remedy(value(ram.error())));
    return answer(ENODEV);
  }
  welcome.ram_page_bytes = (*ram)->page_bytes();
  if (service_.arena_bytes % welcome.ram_page_bytes != 0) {
    spdlog::warn("machine {}: its RAM {} has pages of {} KiB, and machine_arena_bytes in vrdmad.json ({}) is not a multiple of that: change it, or keep the RAM on "
                 "smaller pages", spec_.name, spec_.ram, welcome.ram_page_bytes >> 10, service_.arena_bytes);
    return answer(EINVAL);
  }
  const auto offset = (*ram)->offset_of({hello->page, 1});
  if (!offset) return answer(EFAULT);
  std::byte* const at = (*ram)->data() + *offset;
  std::uint64_t proof;
  std::memcpy(&proof, at, sizeof(proof));
  if (proof != hello->proof || proof == 0) return answer(EFAULT);

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
  session_->ram = *ram;
  session_->page = page;
  service_.shard.submit([ram = *ram, page](Shard& shard) {
    std::atomic_ref(page->shards[0].sleeping).store(0, std::memory_order_relaxed);
    shard.mirror(*page);
  });
  spdlog::info("machine {}: attached, {} MiB of {}, agent {}", spec_.name, (*ram)->bytes() >> 20, in_bar ? "BAR" : "RAM", session_->version);
  answer(0);
  service_.changed();
}

// --- processes ------------------------------------------------------------------------------------------------

void MachinePort::open(std::uint32_t connection, std::span<const std::byte> body) {
  const auto who = body_of<vm::Open>(body);
  if (!who || connection <= session_->last_connection) return refuse("it opens a connection twice");
  session_->last_connection = connection;
  int ends[2];
  if (session_->processes.size() >= processes_max || ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
    return session_->link.send(vm::Frame::closed, connection, std::span<const std::byte>{});
  vmci::UniqueFd ours(ends[0]), theirs(ends[1]);
  auto process = std::make_shared<Process>(service_.io, connection);
  process->known = std::make_shared<MachineProcess>(MachineProcess{spec_.name, spec_.tenant, who->uid, who->gid, who->pid, {}});
  process->known->interrupts = device_->interrupts();
  process->known->in_bar = session_->ram->is_bar();
  process->socket = vmci::PacketSocket(std::move(ours));
  // Called after end_session() has taken itself out of this.
  process->known->detached = [this, connection] {
    session_->processes.erase(connection);
    session_->link.send(vm::Frame::closed, connection, std::span<const std::byte>{});
    push();
    service_.changed();
  };
  if (!watch_copy(process->readable, process->socket.fd()))
    return session_->link.send(vm::Frame::closed, connection, std::span<const std::byte>{});
  session_->processes.emplace(connection, process);
  await_replies(process);
  service_.admit(vmci::PacketSocket(std::move(theirs)), process->known);
  service_.changed();
}

void MachinePort::forward(Process& process, std::span<const std::byte> packet) {
  process.end_lending();
  if (!process.socket) return;
  // Full: a process has one request under way at a time, and its agent lets nobody have more than a few.
  if (const auto sent = process.socket.send(packet); !sent) process.hang_up();
}

void MachinePort::append(Process& process, std::uint32_t segment, std::span<const std::byte> body) {
  if (body.empty() || body.size() % sizeof(vm::Run) != 0) return refuse("it lends memory in parts of runs");
  if (!process.lending || process.lending->first != segment) {
    process.end_lending();
    if (process.known->segments.size() >= segments_max) return refuse("it lends memory and does not use it");
    process.lending.emplace(segment, PinnedPages(session_->ram));
  }
  PinnedPages& pages = process.lending->second;
  for (std::size_t at = 0; at < body.size(); at += sizeof(vm::Run)) {
    vm::Run run;
    std::memcpy(&run, body.data() + at, sizeof(run));
    if (pages.part_count() >= segment_parts_max || !pages.append(run)) return refuse("it lends memory that is not its own");
  }
}

// What the service answers goes to the process; the descriptors are pipes that it is to read, and become streams.
void MachinePort::await_replies(const std::shared_ptr<Process>& process) {
  process->readable.async_wait(
      boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_, process](const boost::system::error_code& error) {
        if (error || !*alive || !process->socket) return;
        std::array<std::byte, sizeof(control::Head) + control::body_bytes_max> packet;
        auto received = process->socket.receive(packet);
        if (!received && value(received.error()) == EAGAIN) return await_replies(process);
        if (!received || received->bytes == 0) return process->hang_up();
        const std::uint32_t first = process->next_stream;
        std::vector<vmci::UniqueFd> documents;
        for (auto& pipe : received->descriptors) {
          if (struct stat status; ::fstat(pipe.get(), &status) == 0 && S_ISREG(status.st_mode)) {
            documents.push_back(std::move(pipe));  // all of it is there
            continue;
          }
          auto stream = std::make_shared<Stream>(service_.io, process->next_stream++);
          if (::fcntl(pipe.get(), F_SETFL, O_NONBLOCK) != 0 || !watch_copy(stream->pipe, pipe.get())) return process->hang_up();
          process->streams.emplace(stream->number, stream);
        }
        session_->link.send(vm::Frame::reply, process->connection, std::span(packet).first(received->bytes), first,
                            static_cast<std::uint16_t>(received->descriptors.size()));
        for (std::uint32_t number = first; number < process->next_stream; ++number) await_stream(process, process->streams[number]);
        for (const auto& document : documents) send_document(*process, document);
        push();
        if (session_->link.unsent_bytes() > unsent_bytes_busy)
          session_->held.push_back(process);
        else
          await_replies(process);
      });
}

void MachinePort::send_document(Process& process, const vmci::UniqueFd& document) {
  const std::uint32_t number = process.next_stream++;
  std::array<std::byte, vm::frame_bytes_max> bytes;
  off_t at = 0;
  for (ssize_t got; (got = ::pread(document.get(), bytes.data(), bytes.size(), at)) > 0; at += got)
    session_->link.send(vm::Frame::stream, process.connection, std::span(bytes).first(static_cast<std::size_t>(got)), number);
  session_->link.send(vm::Frame::stream_end, process.connection, std::span<const std::byte>{}, number);
}

void MachinePort::await_stream(const std::shared_ptr<Process>& process, const std::shared_ptr<Stream>& stream) {
  stream->pipe.async_wait(
      boost::asio::posix::stream_descriptor::wait_read, [this, alive = alive_, process, stream](const boost::system::error_code& error) {
        if (error || !*alive || !stream->pipe.is_open()) return;
        std::array<std::byte, 4096> bytes;
        const ssize_t got = ::read(stream->pipe.native_handle(), bytes.data(), bytes.size());
        if (got > 0) {
          session_->link.send(vm::Frame::stream, process->connection, std::span(bytes).first(static_cast<std::size_t>(got)), stream->number);
        } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
          stop_watching(stream->pipe);
          process->streams.erase(stream->number);
          session_->link.send(vm::Frame::stream_end, process->connection, std::span<const std::byte>{}, stream->number);
        }
        push();
        if (stream->pipe.is_open()) await_stream(process, stream);
      });
}

}  // namespace vrdma::svc
