#include "vmkernel_svc/server.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/readiness.hpp"
#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/hosts/address.hpp"
#include "vmkernel_svc/hosts/certificates.hpp"
#include "vmkernel_svc/hosts/etcd_client.hpp"
#include "vmkernel_svc/mad/management.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/memory/bus_guard.hpp"
#include "vmkernel_svc/memory_reserve.hpp"
#include "vmkernel_svc/pkeys.hpp"
#include "vmkernel_svc/remote/configured_subnet.hpp"
#include "vmkernel_svc/serve.hpp"

namespace vrdma::svc {

using namespace control;

namespace {
// As many as are allowed. What one tenant may have of them is bounded.
Reception::Limits raise_open_files(Config& config) {
  Reception::Limits limits;
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return limits;
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  limits.open_files = files.rlim_cur;
  if (!config.one_user && files.rlim_cur >= 256) limits.for_root = std::clamp<rlim_t>(files.rlim_cur / 16, 24, 1024);  // a program needs some 13
  const rlim_t of_a_tenant = config.one_user ? files.rlim_cur / 4 * 3 : files.rlim_cur / 4;
  const rlim_t to_a_tenant = config.one_user ? files.rlim_cur / 6 : files.rlim_cur / 16;
  config.quota.descriptors = static_cast<std::uint32_t>(std::min<rlim_t>(config.quota.descriptors, of_a_tenant));
  limits.of_one_user = static_cast<std::uint32_t>(std::min<rlim_t>(limits.of_one_user, std::max<rlim_t>(to_a_tenant, 32)));
  return limits;
}

// When a machine starts its address may be set a little later than we do, and a new IPv6 address is tentative for a second or two. Whoever is about to
// listen there says what is wrong, if it has not come until then.
void await_address(const std::string& address) {
  constexpr std::chrono::milliseconds patience{5000}, pause{100};
  if (!hosts::is_of_no_interface(address)) return;
  log::warn("waits for its address {}: no interface of this host has it, or it cannot be used yet", address);
  const auto until = std::chrono::steady_clock::now() + patience;
  while (hosts::is_of_no_interface(address) && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(pause);
}
}  // namespace

Server::Server(const Config& config) : config_(config) {
  BusGuard::install();
  const Reception::Limits limits = raise_open_files(config_);
  auto page = vmci::Segment::create("vrdma-service-page", sizeof(ServicePage), vmci::HandedOut::read_only);
  if (!page)
    throw std::runtime_error(fmt::format("cannot create shared memory ({}): {}", std::strerror(value(page.error())),
                                         value(page.error()) == EFBIG                                          ? "raise the limit of file sizes (ulimit -f)"
                                         : value(page.error()) == EMFILE || value(page.error()) == ENFILE ? "raise the limit of open files (ulimit -n)"
                                                                                                               : "memfd_create must be allowed"));
  page_ = std::move(*page);
  auto& head = *page_.at<ServicePage>(0);
  head.magic = magic;
  head.major = version_major;
  head.minor = version_minor;
  head.device_generation = 1;
  head.shard_count = config_.shards;

  if (!config_.remote.hosts.empty()) await_address(config_.remote.address);
  else if (config_.hosts) await_address(config_.hosts->address);
  listen();
  try {
    set_up(limits);
  } catch (...) {
    socket_file_.remove();
    throw;
  }
}

void Server::set_up(const Reception::Limits& limits) {
  if (!config_.remote.hosts.empty()) {
    const RemoteConfig& remote = config_.remote;
    directory_ = std::make_shared<remote::ConfiguredSubnet>(remote);
    carrier_place_ = {remote.name, remote.address, remote.port, remote.encrypt};
    config_.lid_first = directory_->ours().first;
    config_.lid_count = directory_->ours().last - config_.lid_first + 1u;
  } else if (config_.hosts) {
    auto settings = *config_.hosts;
    settings.version = VRDMA_VERSION;
    if (settings.carrier_port == 0) settings.carrier_port = static_cast<std::uint16_t>(settings.port + 1);
    hosts_ = std::make_shared<hosts::Service>(std::move(settings));
    directory_ = hosts_;
    const auto us = hosts_->snapshot()->us;
    carrier_place_ = {us.name, us.address, us.carrier_port, config_.hosts->encrypt};
  }
  shard_ = std::make_unique<Shard>(config_, *page_.at<ServicePage>(0));
  while (shard_->fabric().shards.all().size() < config_.shards) further_shards_.push_back(std::make_unique<Shard>(*shard_));
  if (directory_) {
    // Frames of 64 KiB come and go at the end of the heap: returned to the kernel each time, and cleared by it page by page, they would
    // cost more than the bytes in them.
    constexpr int kept_bytes = 16 << 20;
    ::mallopt(M_TRIM_THRESHOLD, kept_bytes);
    shard_->join(directory_, std::make_unique<remote::TcpCarrier>(carrier_place_, directory_));
    directory_->when_changed([shard = shard_.get()] { shard->submit([](Shard& own) { own.fabric().far->look_at_directory(); }); });
  }
  desk_ = std::make_unique<ControlDesk>(*shard_);
  packets_ = std::make_unique<PacketDesk>(*shard_, *desk_, page_.fd());
  reception_ = std::make_unique<Reception>(io_, *shard_, *packets_, limits, config_.machine_arena_bytes, [this] { tell_of_machines(); });
}

namespace {
std::string cannot_listen(const std::string& socket, int why) {
  return fmt::format("cannot listen at {} ({}): {}", socket, std::strerror(why),
                     why == EADDRINUSE ? "it is served already; stop that vrdmad, or give another --socket"
                     : why == ENOTSOCK ? "a file that is not a socket stands there; remove it, or give another --socket"
                     : why == EISDIR ? "that is a folder; give the path of a socket in it"
                     : why == EACCES || why == EROFS ? "no permission there; run as another user, or give another --socket"
                     : why == EAFNOSUPPORT ? "Unix sockets are not allowed here; where a unit started this, its RestrictAddressFamilies needs AF_UNIX"
                                           : "give another --socket");
}
}  // namespace

void Server::listen() {
  auto inherited = vmci::inherited_listener();
  if (!inherited)
    throw std::runtime_error(fmt::format("the service manager's socket cannot be used ({}): its unit needs exactly one ListenSequentialPacket= with a path",
                                         std::strerror(value(inherited.error()))));
  if (inherited->fd) {
    config_.socket = inherited->path;
    listener_ = std::move(inherited->fd);
    return;
  }
  const auto directory = std::filesystem::path(config_.socket).parent_path();
  std::error_code error;
  if (!directory.empty()) {
    const mode_t before = ::umask(0);
    ::umask(before | 022);  // a folder that others may write is one that programs pass over
    std::filesystem::create_directories(directory, error);
    ::umask(before);
  }
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  const bool has_runtime_folder = runtime != nullptr && *runtime == '/';  // as private_folder() of cli/ takes it
  if (error)
    throw std::runtime_error(fmt::format("cannot make the folder {} of the socket ({}): make it, or give another --socket (programs look at {} by themselves)", directory.string(),
                                         error.message(), has_runtime_folder ? "$XDG_RUNTIME_DIR/vrdma/vrdmad.sock" : fmt::format("/tmp/vrdma-{}/vrdmad.sock", ::getuid())));
  auto listening = vmci::listen_packets(config_.socket, static_cast<mode_t>(config_.socket_mode));
  if (!listening) throw std::runtime_error(cannot_listen(config_.socket, value(listening.error())));
  listener_ = std::move(*listening);
  socket_file_ = vmci::SocketFile(config_.socket);
}

Server::~Server() {
  if (hosts_) hosts_->stop();
  stop_shards();
  if (alive_ != nullptr) {
    // The kernel marks the lock of a thread that dies with it, if the page is still mapped then: who leaves in order does it himself.
    pthread_mutex_unlock(alive_);
    std::atomic_ref(*reinterpret_cast<std::uint32_t*>(alive_)).store(FUTEX_OWNER_DIED, std::memory_order_release);
  }
  socket_file_.remove();
}

void Server::run() {
  // The lock that says "alive": whoever maps the page sees its owner die (see ServicePage::alive_mutex).
  alive_ = reinterpret_cast<pthread_mutex_t*>(page_.at<ServicePage>(0)->alive_mutex);
  static_assert(sizeof(pthread_mutex_t) <= sizeof(ServicePage::alive_mutex));
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(alive_, &attributes);
  pthread_mutexattr_destroy(&attributes);
  pthread_mutex_lock(alive_);

  start_shards();
  signals_.add(SIGTERM);
  signals_.add(SIGINT);
  signals_.add(SIGXCPU);  // where a limit is set that cannot be raised: said before the kernel ends us
  struct sigaction hangup {};  // ignored under nohup
  if (::sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler == SIG_DFL) signals_.add(SIGHUP);
  signals_.async_wait([this](const boost::system::error_code& error, int signal) {
    if (error) return;
    if (signal == SIGXCPU) log::error("the limit of processor time under which this service was started (ulimit -t) is reached: leaving");
    else log::info("SIG{}: leaving", sigabbrev_np(signal));
    io_.stop();
  });
  reception_->open(std::move(listener_));
  machines_ = std::make_unique<Machines>(
      config_.machines_folder(),
      MachinePort::Service{io_, *shard_, config_.machine_arena_bytes, std::chrono::seconds(config_.machine_keep_s),
                           [this](vmci::PacketSocket socket, std::shared_ptr<MachineProcess> machine) {
                             const uid_t uid = machine->tenant;
                             reception_->admit(std::move(socket), uid, std::move(machine));
                           },
                           [this] { machines_changed(); }});
  machines_changed();
  if (hosts_) join_hosts();
  if (config_.idle_exit_s != 0) watch_idle();
  log::info("vrdmad {} serves {} (link layer {}, {})", VRDMA_VERSION, config_.socket, config_.link_layer,
            hosts_ ? std::string("LIDs that the subnet leases to this host") : fmt::format("{} LIDs from {}", config_.lid_count, config_.lid_first));
  vmci::Readiness(config_.ready_fd).serves("serves " + config_.socket);
  io_.run();
  machines_.reset();
  if (hosts_) hosts_->stop();
  stop_shards();
}

// On the main thread. Theirs is measured on the shard's thread, at the first moment that may be of interest.
void Server::set_alarm(std::uint64_t at_ns) {
  if (alarm_ns_ != 0 && alarm_ns_ <= at_ns) return;
  alarm_ns_ = at_ns;
  const std::uint64_t now_ns = vmci::monotonic_ns();
  alarm_timer_.expires_after(std::chrono::nanoseconds(at_ns > now_ns ? at_ns - now_ns : 0));
  alarm_timer_.async_wait([this](const boost::system::error_code& error) {
    if (error) return;
    alarm_ns_ = 0;
    shard_->submit([](Shard& shard) {
      shard.fabric().cm->expire(vmci::monotonic_ns());
      shard.fabric().management->expire(vmci::monotonic_ns());
    });
  });
}

void Server::start_shards() {
  const auto wake_up = [this](std::uint64_t at_ns) { boost::asio::post(io_, [this, at_ns] { set_alarm(at_ns); }); };
  shard_->fabric().cm->set_alarm(wake_up);
  shard_->fabric().management->set_alarm(wake_up);
  shard_->fabric().management->use_traffic([this](const Guest& guest) { return desk_->traffic_of(guest); });
  for (Shard* const shard : shard_->fabric().shards.all())
    shard_threads_.emplace_back([shard] {
      pthread_setname_np(pthread_self(), fmt::format("shard-{}", shard->number()).c_str());
      sigset_t all;
      sigfillset(&all);
      sigdelset(&all, SIGBUS);
      pthread_sigmask(SIG_BLOCK, &all, nullptr);
      shard->run();
    });
}

void Server::stop_shards() {
  for (Shard* const shard : shard_->fabric().shards.all()) shard->stop();
  for (std::thread& thread : shard_threads_) thread.join();
  shard_threads_.clear();
}

// However often they change, the shard is told once at a time, and before it is asked.
void Server::machines_changed() {
  machines_changed_ = true;
  if (!telling_of_machines_) tell_of_machines();
}

void Server::tell_of_machines() {
  if (!machines_ || !std::exchange(machines_changed_, false)) return;
  telling_of_machines_ = true;
  shard_->submit([this, all = machines_->status()](Shard& shard) {
    shard.fabric().machines = all;
    boost::asio::post(io_, [this] {
      telling_of_machines_ = false;
      tell_of_machines();
    });
  });
}

void Server::join_hosts() {
  const auto lease = [this] {
    const auto now = hosts_->snapshot();
    // Before anybody gets a LID, it is known in which partitions he is.
    shard_->submit([now](Shard& shard) {
      use_partitions(shard, *now->partitions);
      shard.fabric().lease_lids(now->lids, now->may_give());
    });
    // Posted after that was submitted: who attaches then finds the LIDs.
    if (now->may_give() || now->refused()) boost::asio::post(io_, [this] { reception_->lease_is_known(); });
  };
  reception_->await_first_lease();
  shard_->submit([hosts = hosts_](Shard& shard) {
    shard.fabric().hosts = hosts;
    shard.fabric().host_name = hosts->snapshot()->us.name;
  });
  hosts_->when_changed(lease);
  hosts_->start();
}

void Server::watch_idle() {
  idle_timer_.expires_after(std::chrono::seconds(1));
  idle_timer_.async_wait([this](const boost::system::error_code& error) {
    if (error) return;
    idle_seconds_ = reception_->is_empty() && !machines_->any_running() ? idle_seconds_ + 1 : 0;
    if (idle_seconds_ >= config_.idle_exit_s && go_unmissed()) {
      log::info("no guest for {} s: leaving", config_.idle_exit_s);
      io_.stop();
      return;
    }
    watch_idle();
  });
}

// Takes the socket away, unless somebody is connecting to it who would be told that a service is there, and find none. Who starts another service
// in this folder holds its lock (cli/private_service.cpp), and so waits until this one has gone.
bool Server::go_unmissed() {
  if (!socket_file_.is_there()) return true;  // a service manager keeps it, and whoever waits there; or it was taken away, and nobody comes
  const std::string lock = std::filesystem::path(config_.socket).replace_filename("lock");
  folder_lock_ = vmci::UniqueFd(::open(lock.c_str(), O_RDWR | O_CLOEXEC));
  if (!folder_lock_ && errno != ENOENT) return false;  // there is none where nobody starts services
  const std::string aside = config_.socket + ".leaving";
  const bool locked = !folder_lock_ || ::flock(folder_lock_.get(), LOCK_EX | LOCK_NB) == 0;
  if (locked && ::rename(config_.socket.c_str(), aside.c_str()) == 0) {
    if (!reception_->somebody_knocks()) {
      ::unlink(aside.c_str());
      socket_file_ = {};
      return true;
    }
    ::rename(aside.c_str(), config_.socket.c_str());
  }
  folder_lock_.reset();
  return false;
}

namespace {

// As the host's certificate says that it is called.
void check_name(const hosts::Settings& settings) {
  const std::string name = hosts::describe(hosts::load_host(settings.folder).certificate.get()).name;
  if (!settings.name.empty() && settings.name != name)
    throw WrongConfiguration(fmt::format("this host is \"{}\" by the configuration, \"{}\" by its certificate {}", settings.name, name,
                                         (settings.folder / "host.pem").string()));
  check_place_among_peers(settings, name);
}

}  // namespace

void check_files(const Config& config) {
  try {
    if (!config.remote.hosts.empty()) remote::ConfiguredSubnet{config.remote};
    boost::asio::io_context unused;
    if (config.hosts && config.hosts->etcd) hosts::EtcdClient(unused, *config.hosts->etcd, 0);
  } catch (const std::runtime_error& error) {
    throw WrongConfiguration(error.what());
  }
  if (config.hosts) check_name(*config.hosts);
  if (struct stat status; ::lstat(config.socket.c_str(), &status) == 0 && !S_ISSOCK(status.st_mode))
    throw WrongConfiguration(cannot_listen(config.socket, S_ISDIR(status.st_mode) ? EISDIR : ENOTSOCK));
}

void serve(const Config& config) {
  MemoryReserve::install();
  Server(config).run();
}

}  // namespace vrdma::svc
