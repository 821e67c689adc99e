#include "vmkernel_svc/server.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <utility>

#include "vmkernel_svc/memory/bus_guard.hpp"
#include "vmkernel_svc/show.hpp"

namespace vrdma::svc {

using namespace control;

namespace {

template <class Body>
bool body_of(const std::vector<std::byte>& packet, Body& body) {
  if (packet.size() < sizeof(Head) + sizeof(Body)) return false;
  std::memcpy(&body, packet.data() + sizeof(Head), sizeof(Body));
  return true;
}

void send_reply(const vmci::PacketSocket& socket, const Head& request, int status, std::span<const std::byte> body = {},
                std::span<const int> descriptors = {}) {
  std::vector<std::byte> packet(sizeof(Head) + body.size());
  Head head{};
  head.record.word = static_cast<std::uint32_t>(body.size());
  head.record.control = (request.record.control & control_user_mask) | reply_bit;
  head.source_context = host_context;
  head.source_port = control_port;
  head.sequence = request.sequence;
  head.status = status;
  std::memcpy(packet.data(), &head, sizeof(head));
  if (!body.empty()) std::memcpy(packet.data() + sizeof(head), body.data(), body.size());
  if (const auto sent = socket.send(packet, descriptors); !sent)
    spdlog::debug("a reply could not be sent: {}", std::strerror(value(sent.error())));
}

template <class Body>
void send_result(const vmci::PacketSocket& socket, const Head& request, const Result<Body>& result,
                 std::span<const int> descriptors = {}) {
  if (!result) return send_reply(socket, request, value(result.error()));
  send_reply(socket, request, 0, std::as_bytes(std::span(&*result, 1)), descriptors);
}

}  // namespace

Server::Server(const Config& config) : config_(config) {
  BusGuard::install();
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
    config_.quota.descriptors = static_cast<std::uint32_t>(std::min<rlim_t>(config_.quota.descriptors, files.rlim_cur / 4));
    connections_max_ = static_cast<std::uint32_t>(std::min<rlim_t>(connections_max_, std::max<rlim_t>(files.rlim_cur / 16, 32)));
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
  head.shard_count = 1;

  const auto directory = std::filesystem::path(config_.socket).parent_path();
  std::error_code error;
  if (!directory.empty()) std::filesystem::create_directories(directory, error);
  if (error)
    throw std::runtime_error(fmt::format("cannot make the folder {} of the socket ({}): make it, or give another --socket",
                                         directory.string(), error.message()));
  auto listening = vmci::listen_packets(config_.socket, static_cast<mode_t>(config_.socket_mode));
  if (!listening) {
    const int why = value(listening.error());
    throw std::runtime_error(fmt::format(
        "cannot listen at {} ({}): {}", config_.socket, std::strerror(why),
        why == EADDRINUSE ? "it is served already; stop that vrdmad, or give another --socket"
        : why == ENOTSOCK ? "a file that is not a socket stands there; remove it, or give another --socket"
        : why == EACCES || why == EROFS ? "no permission there; run as another user, or give another --socket"
        : why == ENAMETOOLONG ? "a socket's path has at most 107 characters; give a shorter --socket"
                              : "give another --socket"));
  }
  listener_.assign(listening->release());
  shard_ = std::make_unique<Shard>(config_, head.shards[0]);
  desk_ = std::make_unique<ControlDesk>(*shard_);
}

Server::~Server() {
  if (shard_thread_.joinable()) {
    shard_->stop();
    shard_thread_.join();
  }
  std::error_code error;
  if (listener_.is_open()) std::filesystem::remove(config_.socket, error);
}

void Server::run() {
  // The lock that says "alive": whoever maps the page sees its owner die (see ServicePage::alive_mutex).
  auto* const alive = reinterpret_cast<pthread_mutex_t*>(page_.at<ServicePage>(0)->alive_mutex);
  static_assert(sizeof(pthread_mutex_t) <= sizeof(ServicePage::alive_mutex));
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(alive, &attributes);
  pthread_mutexattr_destroy(&attributes);
  pthread_mutex_lock(alive);

  shard_thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "shard-0");
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    shard_->run();
  });
  signals_.add(SIGTERM);
  signals_.add(SIGINT);
  signals_.async_wait([this](const boost::system::error_code& error, int signal) {
    if (error) return;
    spdlog::info("{}: leaving", signal == SIGTERM ? "SIGTERM" : "SIGINT");
    io_.stop();
  });
  accept_next();
  if (config_.idle_exit_s != 0) watch_idle();
  spdlog::info("vrdmad {} serves {} (link layer {}, {} LIDs from {})", VRDMA_VERSION, config_.socket, config_.link_layer,
               config_.lid_count, config_.lid_first);
  if (config_.ready_fd >= 0) {
    const char ready = 1;
    [[maybe_unused]] const auto written = ::write(config_.ready_fd, &ready, 1);
    ::close(config_.ready_fd);
  }
  io_.run();
  shard_->stop();
  shard_thread_.join();
}

void Server::watch_idle() {
  idle_timer_.expires_after(std::chrono::seconds(1));
  idle_timer_.async_wait([this](const boost::system::error_code& error) {
    if (error) return;
    idle_seconds_ = connections_.empty() ? idle_seconds_ + 1 : 0;
    if (idle_seconds_ >= config_.idle_exit_s) {
      spdlog::info("no guest for {} s: leaving", config_.idle_exit_s);
      io_.stop();
      return;
    }
    watch_idle();
  });
}

void Server::accept_next() {
  listener_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this](const boost::system::error_code& error) {
    if (error) return;
    for (;;) {
      vmci::UniqueFd fd(::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno != EAGAIN) {  // out of descriptors: those who wait get their turn when others have left
          spdlog::warn("cannot accept a guest ({}): raise the limit of open files", std::strerror(errno));
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
      if (connections_of_[peer.uid] >= connections_max_) continue;  // closed: nobody takes up all descriptors
      const int copy = ::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0);
      if (copy < 0) continue;
      auto connection = std::make_shared<Connection>(io_, vmci::PacketSocket(std::move(fd)));
      connection->readable.assign(copy);
      connection->uid = peer.uid;
      ++connections_of_[peer.uid];
      connections_.emplace(connection.get(), connection);
      read_next(connection);
    }
    accept_next();
  });
}

void Server::read_next(const ConnectionPtr& connection) {
  connection->readable.async_wait(
      boost::asio::posix::stream_descriptor::wait_read, [this, connection](const boost::system::error_code& error) {
        if (error || connection->closed) return;
        std::vector<std::byte> packet(sizeof(Head) + body_bytes_max);
        auto received = connection->socket.receive(packet);
        if (!received && value(received.error()) == EAGAIN) return read_next(connection);
        if (!received || received->bytes == 0) return lost(connection);
        packet.resize(received->bytes);
        handle_packet(connection, std::move(packet), std::move(received->descriptors));
        // One packet at a time: the next is looked at when the shard is through with this one, so that nobody can pile up work.
        shard_->submit([this, connection](Shard&) {
          boost::asio::post(io_, [this, connection] {
            if (!connection->closed) read_next(connection);
          });
        });
      });
}

void Server::lost(const ConnectionPtr& connection) {
  if (connection->closed) return;
  connection->closed = true;
  boost::system::error_code ignored;
  connection->readable.close(ignored);
  connection->exited.close(ignored);
  connections_.erase(connection.get());
  if (--connections_of_[connection->uid] == 0) connections_of_.erase(connection->uid);
  shard_->submit([this, connection](Shard& shard) {
    const auto guest = shard.fabric().guests.find(connection->guest.load());
    if (guest == shard.fabric().guests.end()) return;
    spdlog::info("{} (uid {}, pid {}) left", guest->second->name, guest->second->credentials.uid, guest->second->credentials.pid);
    desk_->detach(*guest->second);
  });
}

void Server::attach(const ConnectionPtr& connection, const Head& head, const std::vector<std::byte>& packet) {
  AttachRequest request{};
  if (!body_of(packet, request) || request.magic != magic) return send_reply(connection->socket, head, EPROTO);
  if (request.major != version_major) {
    spdlog::warn("a guest speaks version {}.{} of the channel, this service {}.{}: refused", request.major, request.minor,
                 version_major, version_minor);
    AttachReply mine{};
    mine.major = version_major;
    mine.minor = version_minor;
    return send_reply(connection->socket, head, EPROTONOSUPPORT, std::as_bytes(std::span(&mine, 1)));
  }
  if (std::exchange(connection->asked_to_attach, true)) return send_reply(connection->socket, head, EISCONN);
  auto credentials = connection->socket.peer();
  auto pidfd = connection->socket.peer_pidfd();
  if (!credentials) return send_reply(connection->socket, head, value(credentials.error()));
  if (pidfd) {  // the process's end counts even where a child still holds the socket
    if (const int copy = ::fcntl(pidfd->get(), F_DUPFD_CLOEXEC, 0); copy >= 0) {
      connection->exited.assign(copy);
      connection->exited.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                                    [this, connection](const boost::system::error_code& error) {
                                      if (!error) lost(connection);
                                    });
    }
  }
  auto info = std::make_shared<AttachInfo>(AttachInfo{
      *credentials, pidfd ? std::move(*pidfd) : vmci::UniqueFd(),
      vmci::UniqueFd(::fcntl(connection->socket.fd(), F_DUPFD_CLOEXEC, 0))});
  shard_->submit([this, connection, head, request, info](Shard& shard) {
    if (connection->guest.load() != 0) return send_reply(connection->socket, head, EISCONN);
    std::vector<int> descriptors;
    std::vector<vmci::UniqueFd> keep;
    const uid_t uid = info->credentials.uid;
    const pid_t pid = info->credentials.pid;
    auto reply = desk_->attach(request, std::move(*info), page_.fd(), descriptors, keep);
    if (reply) {
      connection->guest.store(reply->guest);
      spdlog::info("{} (uid {}, pid {}) attached as context {}, LID {}", reply->name, uid, pid, reply->guest,
                   shard.fabric().guests[reply->guest]->lid);
    } else {
      spdlog::warn("a guest (uid {}, pid {}) was refused: {}", uid, pid, std::strerror(value(reply.error())));
    }
    send_result(connection->socket, head, reply, descriptors);
  });
}

void Server::handle_packet(const ConnectionPtr& connection, std::vector<std::byte> packet, std::vector<vmci::UniqueFd> descriptors) {
  Head head{};
  if (packet.size() < sizeof(head)) return lost(connection);
  std::memcpy(&head, packet.data(), sizeof(head));
  const auto request = static_cast<Request>(head.record.control & control_user_mask);
  if (request == Request::attach) return attach(connection, head, packet);

  auto given = std::make_shared<std::vector<vmci::UniqueFd>>(std::move(descriptors));
  shard_->submit([this, connection, head, request, given, packet = std::move(packet)](Shard& shard) {
    const auto& socket = connection->socket;
    if (request == Request::show) return answer_show(shard, socket, head, packet);
    const auto found = shard.fabric().guests.find(connection->guest.load());
    if (found == shard.fabric().guests.end()) return send_reply(socket, head, ENOTCONN);
    Guest& guest = *found->second;
    std::vector<vmci::UniqueFd> give;
    const auto reply_with = [&](const auto& result) {
      std::vector<int> fds;
      for (const auto& fd : give) fds.push_back(fd.get());
      send_result(socket, head, result, fds);
    };
    switch (request) {
      case Request::add_backing: {
        AddBackingRequest body{};
        if (!body_of(packet, body) || given->size() != 1) return send_reply(socket, head, EINVAL);
        return reply_with(desk_->on(guest, body, std::move(given->front())));
      }
      case Request::remove_backing: {
        RemoveBackingRequest body{};
        if (!body_of(packet, body)) return send_reply(socket, head, EINVAL);
        const auto removed = desk_->on(guest, body);
        return send_reply(socket, head, removed ? 0 : value(removed.error()));
      }
      case Request::open_context: {
        OpenContextRequest body{};
        if (!body_of(packet, body)) return send_reply(socket, head, EINVAL);
        return reply_with(desk_->on(guest, body, give));
      }
      case Request::create_channel: {
        CreateChannelRequest body{};
        if (!body_of(packet, body)) return send_reply(socket, head, EINVAL);
        return reply_with(desk_->on(guest, body, give));
      }
      case Request::reach_process: {
        ReachProcessRequest body{};
        if (!body_of(packet, body)) return send_reply(socket, head, EINVAL);
        // Weak: a worker that hangs on the guest's page may be the last to hold the question.
        const auto answer = [this, weak = std::weak_ptr(connection), head](bool by_service) {
          const auto asking = weak.lock();
          if (!asking) return;
          auto& guests = shard_->fabric().guests;
          const auto asker = guests.find(asking->guest.load());
          if (asker == guests.end()) return;
          std::vector<vmci::UniqueFd> segment;
          const auto reply = desk_->reach(*asker->second, by_service, segment);
          if (reply && !by_service)
            spdlog::info("{} (uid {}, pid {}): its memory is out of reach here; a thread of the program copies small and odd registrations",
                         asker->second->name, asker->second->credentials.uid, asker->second->credentials.pid);
          std::vector<int> fds;
          for (const auto& fd : segment) fds.push_back(fd.get());
          send_result(asking->socket, head, reply, fds);
        };
        if (const auto asked = desk_->ask_how_reached(guest, body, answer); !asked) send_reply(socket, head, value(asked.error()));
        return;
      }
      case Request::queue_pair_alloc: {
        QueuePairAllocRequest body{};
        if (!body_of(packet, body)) return send_reply(socket, head, EINVAL);
        return reply_with(shard.fabric().vmci.alloc(guest, body, give));
      }
      case Request::queue_pair_attach: {
        QueuePairAttachRequest body{};
        if (!body_of(packet, body)) return send_reply(socket, head, EINVAL);
        return reply_with(shard.fabric().vmci.attach(guest, body, give));
      }
      default:
        return send_reply(socket, head, EOPNOTSUPP);
    }
  });
}

}  // namespace vrdma::svc
