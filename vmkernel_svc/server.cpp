#include "vmkernel_svc/server.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <boost/asio/post.hpp>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/readiness.hpp"
#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/hosts/certificates.hpp"
#include "vmkernel_svc/mad/management.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/memory/bus_guard.hpp"
#include "vmkernel_svc/memory_reserve.hpp"
#include "vmkernel_svc/pkeys.hpp"
#include "vmkernel_svc/remote/configured_subnet.hpp"
#include "vmkernel_svc/serve.hpp"
#include "vmkernel_svc/watching.hpp"

namespace vrdma::svc {

using namespace control;

namespace {
// How long who attaches is kept for this host's first lease: an election takes up to 6 s. Who cannot see whether this service runs does not
// wait for its answer so long (vmci::receive_answer), and is to be told of a lease that does not come.
constexpr std::chrono::seconds lease_patience(8), lease_patience_unseen(4);
static_assert(lease_patience_unseen < std::chrono::milliseconds(vmci::attach_within_ms));

// A process sees this service in /proc if it is of the PID namespace that we are of: it has one number then.
bool sees_us(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("NSpid:")) continue;
    std::istringstream numbers(line.substr(sizeof("NSpid:") - 1));
    return std::distance(std::istream_iterator<pid_t>(numbers), std::istream_iterator<pid_t>()) == 1;
  }
  return false;
}
}  // namespace

Server::Server(const Config& config) : config_(config) {
  BusGuard::install();
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
    open_files_ = files.rlim_cur;
    const rlim_t of_a_tenant = config_.one_user ? open_files_ / 4 * 3 : open_files_ / 4;
    const rlim_t to_a_tenant = config_.one_user ? open_files_ / 6 : open_files_ / 16;
    config_.quota.descriptors = static_cast<std::uint32_t>(std::min<rlim_t>(config_.quota.descriptors, of_a_tenant));
    connections_max_ = static_cast<std::uint32_t>(std::min<rlim_t>(connections_max_, std::max<rlim_t>(to_a_tenant, 32)));
  }
  auto page = vmci::Segment::create("vrdma-service-page", sizeof(ServicePage), true);
  if (!page)
    throw std::runtime_error(fmt::format("cannot create shared memory ({}): memfd_create must be allowed", std::strerror(value(page.error()))));
  page_ = std::move(*page);
  auto& head = *page_.at<ServicePage>(0);
  head.magic = magic;
  head.major = version_major;
  head.minor = version_minor;
  head.device_generation = 1;
  head.shard_count = config_.shards;

  listen();
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
  shard_ = std::make_unique<Shard>(config_, head);
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
}

void Server::listen() {
  auto inherited = vmci::inherited_listener();
  if (!inherited)
    throw std::runtime_error(fmt::format("the service manager's socket cannot be used ({}): its unit needs exactly one ListenSequentialPacket= with a path",
                                         std::strerror(value(inherited.error()))));
  if (inherited->fd) {
    config_.socket = inherited->path;
    listener_.assign(inherited->fd.release());
    return;
  }
  const auto directory = std::filesystem::path(config_.socket).parent_path();
  std::error_code error;
  if (!directory.empty()) std::filesystem::create_directories(directory, error);
  if (error)
    throw std::runtime_error(fmt::format("cannot make the folder {} of the socket ({}): make it, or give another --socket (programs look at $XDG_RUNTIME_DIR/vrdma/vrdmad.sock by themselves)",
                                         directory.string(), error.message()));
  auto listening = vmci::listen_packets(config_.socket, static_cast<mode_t>(config_.socket_mode));
  if (!listening) {
    const int why = value(listening.error());
    throw std::runtime_error(fmt::format(
        "cannot listen at {} ({}): {}", config_.socket, std::strerror(why),
        why == EADDRINUSE ? "it is served already; stop that vrdmad, or give another --socket"
        : why == ENOTSOCK ? "a file that is not a socket stands there; remove it, or give another --socket"
        : why == EACCES || why == EROFS ? "no permission there; run as another user, or give another --socket"
        : why == EAFNOSUPPORT ? "Unix sockets are not allowed here; where a unit started this, its RestrictAddressFamilies needs AF_UNIX"
        : why == ENAMETOOLONG ? "a socket's path has at most 107 characters; give a shorter --socket"
                              : "give another --socket"));
  }
  listener_.assign(listening->release());
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
  accept_next();
  machines_ = std::make_unique<Machines>(
      config_.machines_folder(),
      MachinePort::Service{io_, *shard_, config_.machine_arena_bytes, std::chrono::seconds(config_.machine_keep_s),
                           [this](vmci::PacketSocket socket, std::shared_ptr<MachineProcess> machine) {
                             const uid_t uid = machine->tenant;
                             admit(std::move(socket), uid, std::move(machine));
                           },
                           [this] { machines_changed(); }});
  machines_changed();
  if (hosts_) join_hosts();
  if (config_.idle_exit_s != 0) watch_idle();
  log::info("vrdmad {} serves {} (link layer {}, {} LIDs from {})", VRDMA_VERSION, config_.socket, config_.link_layer,
               config_.lid_count, config_.lid_first);
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
    if (now->may_give() || now->refused()) boost::asio::post(io_, [this] { lease_is_known(); });
  };
  lease_is_known_ = false;
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
    idle_seconds_ = connections_.empty() && !machines_->any_running() ? idle_seconds_ + 1 : 0;
    if (idle_seconds_ >= config_.idle_exit_s && go_unmissed()) {
      log::info("no guest for {} s: leaving", config_.idle_exit_s);
      io_.stop();
      return;
    }
    watch_idle();
  });
}

// Takes the socket away, unless somebody is connecting to it who would be told that a service is there, and find none. Who starts another service
// in this folder holds its lock (cli/service.cpp), and so waits until this one has gone.
bool Server::go_unmissed() {
  if (!socket_file_.is_there()) return true;  // a service manager keeps it, and whoever waits there; or it was taken away, and nobody comes
  const std::string lock = std::filesystem::path(config_.socket).replace_filename("lock");
  folder_lock_ = vmci::UniqueFd(::open(lock.c_str(), O_RDWR | O_CLOEXEC));
  if (!folder_lock_ && errno != ENOENT) return false;  // there is none where nobody starts services
  const std::string aside = config_.socket + ".leaving";
  const bool locked = !folder_lock_ || ::flock(folder_lock_.get(), LOCK_EX | LOCK_NB) == 0;
  if (locked && ::rename(config_.socket.c_str(), aside.c_str()) == 0) {
    pollfd connecting{listener_.native_handle(), POLLIN, 0};
    if (::poll(&connecting, 1, 0) == 0) {
      ::unlink(aside.c_str());
      socket_file_ = {};
      return true;
    }
    ::rename(aside.c_str(), config_.socket.c_str());
  }
  folder_lock_.reset();
  return false;
}

void Server::accept_next() {
  listener_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this](const boost::system::error_code& error) {
    if (error) return;
    constexpr int at_once = 4;  // whoever knocks all the time does not keep the others waiting, nor signals and leases
    for (int left = at_once; left > 0; --left) {
      vmci::UniqueFd fd(::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno != EAGAIN) {  // out of descriptors: those who wait get their turn when others have left
          static constinit log::Sparing sparing;
          sparing.warn("cannot accept a guest ({}): raise the limit of open files", std::strerror(errno));
          accept_timer_.expires_after(std::chrono::milliseconds(100));
          accept_timer_.async_wait([this](const boost::system::error_code& late) {
            if (!late) accept_next();
          });
          return;
        }
        break;
      }
      ucred peer{};
      socklen_t peer_bytes = sizeof(peer);
      if (::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &peer_bytes) != 0) continue;
      admit(vmci::PacketSocket(std::move(fd)), peer.uid, nullptr);
    }
    accept_next();
  });
}

void Server::admit(vmci::PacketSocket socket, uid_t uid, std::shared_ptr<MachineProcess> machine) {
  auto connection = std::make_shared<Connection>(io_, std::move(socket));
  connection->uid = uid;
  connection->machine = std::move(machine);
  if (connections_of_[uid] >= connections_max_ || !watch_copy(connection->readable, connection->socket.fd())) {
    Head unread{};  // what it asks, most likely
    unread.record.control = static_cast<std::uint32_t>(Request::attach);
    PacketDesk::refuse(connection->socket, unread, EDQUOT);
    static constinit log::Sparing sparing;
    sparing.warn("a connection of uid {} was refused: it has {} of {}, or the limit of {} open files is reached, which is that of whoever started this service (ulimit -Hn)", uid,
                 connections_of_[uid], connections_max_, open_files_);
    // Not from here: who admits is not ready for the news.
    if (connection->machine) boost::asio::post(io_, [known = connection->machine] { if (known->detached) known->detached(); });
    return;
  }
  ++connections_of_[uid];
  connections_.emplace(connection.get(), connection);
  read_next(connection);
}

namespace {
void refuse_for_descriptors(const vmci::PacketSocket& socket, std::span<const std::byte> packet) {
  static constinit log::Sparing sparing;
  sparing.warn("what a guest gives to this service cannot be taken: raise the limit of open files (ulimit -n)");
  Head head{};
  std::memcpy(&head, packet.data(), sizeof(head));
  PacketDesk::refuse(socket, head, EMFILE);
}
}  // namespace

void Server::read_next(const ConnectionPtr& connection) {
  connection->readable.async_wait(
      boost::asio::posix::stream_descriptor::wait_read, [this, connection](const boost::system::error_code& error) {
        if (error || connection->closed) return;
        if (const auto& machine = connection->machine) {
          if (machine->ended) return lost(connection);
          if (machine->frozen) {
            machine->thawed = [this, connection] { read_next(connection); };
            return;
          }
        }
        if (has_to_wait(*connection)) return await_lease(connection);
        std::vector<std::byte> packet(sizeof(Head) + body_bytes_max);
        auto received = connection->socket.receive(packet);
        if (!received && value(received.error()) == EAGAIN) return read_next(connection);
        if (received && received->descriptors_missing) {  // this request fails, not the guest
          refuse_for_descriptors(connection->socket, packet);
        } else {
          if (!received || received->bytes == 0) return lost(connection);
          packet.resize(received->bytes);
          handle_packet(connection, std::move(packet), std::move(received->descriptors));
        }
        // One packet at a time: the next is looked at when the shard is through with this one, so that nobody can pile up work.
        shard_->submit([this, connection](Shard&) {
          boost::asio::post(io_, [this, connection] {
            if (!connection->closed) read_next(connection);
          });
        });
      });
}

// The packet stays where it is: whatever becomes of the connection meanwhile is found as ever when it is read.
bool Server::has_to_wait(const Connection& connection) const {
  if (lease_is_known_ || connection.has_waited) return false;
  Head head{};
  return ::recv(connection.socket.fd(), &head, sizeof(head), MSG_PEEK | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof(head)) &&
         PacketDesk::request_of(head) == Request::attach;
}

// A host that begins has its LIDs when it has met who leads its subnet, a moment after it is there for its programs. Later on a lease that
// has lapsed is not waited for.
void Server::await_lease(const ConnectionPtr& connection) {
  connection->has_waited = true;
  const auto peer = connection->socket.peer();
  connection->patience.expires_after(!connection->machine && peer && sees_us(peer->pid) ? lease_patience : lease_patience_unseen);
  connection->patience.async_wait([this, connection](const boost::system::error_code&) { read_next(connection); });
}

void Server::lease_is_known() {
  if (std::exchange(lease_is_known_, true)) return;
  for (const auto& [raw, connection] : connections_) connection->patience.cancel();
}

void Server::lost(const ConnectionPtr& connection) {
  if (connection->closed) return;
  connection->closed = true;
  stop_watching(connection->readable);
  stop_watching(connection->exited);
  connections_.erase(connection.get());
  if (--connections_of_[connection->uid] == 0) connections_of_.erase(connection->uid);
  const auto gone = [this, connection] {
    if (!connection->machine) return;
    boost::asio::post(io_, [known = connection->machine] { if (known->detached) known->detached(); });
  };
  shard_->submit([connection, gone](Shard& shard) {
    Guest* const guest = shard.fabric().guest(GuestId{connection->guest.load()});
    if (guest == nullptr) return gone();
    log::info("{} (uid {}, pid {}) left", guest->name, guest->credentials.uid, guest->credentials.pid);
    shard.let_go(*guest, gone);
  });
}

void Server::await_exit(const ConnectionPtr& connection) {
  connection->exited.async_wait(
      boost::asio::posix::stream_descriptor::wait_read, [this, connection](const boost::system::error_code& error) {
        if (error || connection->closed) return;
        // Asio's waits also end without cause: the next descriptor that it watches gets the events of a closed one that it had
        // yet to deliver.
        pollfd process{connection->exited.native_handle(), POLLIN, 0};
        if (::poll(&process, 1, 0) == 1) return lost(connection);
        await_exit(connection);
      });
}

void Server::attach(const ConnectionPtr& connection, const Head& head, const std::vector<std::byte>& packet) {
  const auto& socket = connection->socket;
  const auto request = PacketDesk::attach_request(socket, head, packet);
  if (!request) return;
  if (std::exchange(connection->asked_to_attach, true)) return PacketDesk::refuse(socket, head, EISCONN);
  if (!ControlDesk::may_begin(Request::attach)) return PacketDesk::refuse(socket, head, ENOMEM);
  if (connection->machine) return attach_from_machine(connection, head, *request);
  auto credentials = socket.peer();
  auto pidfd = socket.peer_pidfd();
  if (!credentials) return PacketDesk::refuse(socket, head, value(credentials.error()));
  // The process's end counts even where a child still holds the socket.
  if (pidfd && watch_copy(connection->exited, pidfd->get())) await_exit(connection);
  vmci::UniqueFd own_socket(::fcntl(socket.fd(), F_DUPFD_CLOEXEC, 0));
  if (!own_socket) return PacketDesk::refuse(socket, head, EMFILE);
  auto info = std::make_shared<AttachInfo>(AttachInfo{*credentials, pidfd ? std::move(*pidfd) : vmci::UniqueFd(), std::move(own_socket)});
  shard_->submit([this, connection, head, request, info](Shard&) {
    connection->guest.store(packets_->attach(connection->socket, head, *request, std::move(*info)));
  });
}

void Server::attach_from_machine(const ConnectionPtr& connection, const Head& head, const AttachRequest& request) {
  MachineProcess& process = *connection->machine;
  const auto pages = process.take_segment(vm::segment_arena);
  if (!pages || pages->bytes() != config_.machine_arena_bytes) return PacketDesk::refuse(connection->socket, head, EPROTO);
  auto arena = pages->segment();
  if (!arena) {
    log::warn("machine {}: the queues of a program cannot be mapped ({}): its RAM is on huge pages, and its vrdma-guestd of an older version, or too many "
                 "mappings are there (sysctl vm.max_map_count)",
                 process.machine, std::strerror(value(arena.error())));
    return PacketDesk::refuse(connection->socket, head, value(arena.error()));
  }
  vmci::UniqueFd own_socket(::fcntl(connection->socket.fd(), F_DUPFD_CLOEXEC, 0));
  if (!own_socket) return PacketDesk::refuse(connection->socket, head, EMFILE);
  auto info = std::make_shared<AttachInfo>(AttachInfo{
      {static_cast<pid_t>(process.pid), process.tenant, 0}, {}, std::move(own_socket),
      std::make_unique<InMachine>(InMachine{process.machine, process.uid, process.pid, process.interrupts, process.in_bar, {}, static_cast<std::uint32_t>(pages->part_count())}), std::move(*arena)});
  shard_->submit([this, connection, head, request, info](Shard&) {
    connection->guest.store(packets_->attach(connection->socket, head, request, std::move(*info)));
  });
}

namespace {
// The rest is about descriptors that do not reach a machine, or about others on this host.
bool may_come_from_machine(Request request) {
  switch (request) {
    case Request::open_context:
    case Request::create_channel:
    case Request::open_xrcd:
    case Request::cm_open:
    case Request::mad_open:
    case Request::add_pinned:
    case Request::remove_backing:
    case Request::reach_process:
    case Request::show: return true;
    default: return false;
  }
}
}  // namespace

// The memory that a machine has lent for this packet.
std::optional<PinnedPages> Server::memory_of(const Connection& connection, Request request, const std::vector<std::byte>& packet) {
  if (!connection.machine) return std::nullopt;
  if (request == Request::reach_process) return connection.machine->take_segment(vm::segment_copier);
  AddPinnedRequest body;
  if (request != Request::add_pinned || packet.size() < sizeof(Head) + sizeof(body)) return std::nullopt;
  std::memcpy(&body, packet.data() + sizeof(Head), sizeof(body));
  return connection.machine->take_segment(body.segment);
}

void Server::handle_packet(const ConnectionPtr& connection, std::vector<std::byte> packet, std::vector<vmci::UniqueFd> descriptors) {
  Head head{};
  if (packet.size() < sizeof(head)) return lost(connection);
  std::memcpy(&head, packet.data(), sizeof(head));
  if (PacketDesk::request_of(head) == Request::attach) return attach(connection, head, packet);
  if (connection->machine && !may_come_from_machine(PacketDesk::request_of(head))) return PacketDesk::refuse(connection->socket, head, EOPNOTSUPP);
  auto given = std::make_shared<std::vector<vmci::UniqueFd>>(std::move(descriptors));
  auto memory = std::make_shared<std::optional<PinnedPages>>(memory_of(*connection, PacketDesk::request_of(head), packet));
  if (PacketDesk::request_of(head) == Request::show) tell_of_machines();
  const auto viewer = connection->machine ? std::optional(Viewer::in(connection->machine->machine, connection->machine->uid)) : std::nullopt;
  shard_->submit([this, connection, head, given, memory, viewer, packet = std::move(packet)](Shard&) {
    packets_->answer(connection->socket, connection->guest.load(), head, packet, std::move(*given), std::move(*memory), viewer, connection);
  });
}

void check_files(const Config& config) {
  if (!config.remote.hosts.empty()) remote::ConfiguredSubnet{config.remote};
  if (config.hosts) hosts::load_host(config.hosts->folder);
}

void serve(const Config& config) {
  MemoryReserve::install();
  Server(config).run();
}

}  // namespace vrdma::svc
