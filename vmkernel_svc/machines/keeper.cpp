#include "vmkernel_svc/machines/keeper.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "vmci_channel/packet_socket.hpp"
#include "vrdma/wire.hpp"

namespace vrdma::svc {

namespace {

// A request; where there are descriptors, they follow in packets of one byte, from who has them. A keeper serves services of other
// versions, too: this stays as it is.
enum class Wish : std::uint32_t { keep = 1, take, drop };
struct KeeperRequest {
  Wish wish;
  std::uint32_t descriptors;  // that follow
  char machine[248];          // ends with a zero
};
struct Reply {
  std::int32_t status;  // 0, or an errno value
  std::uint32_t descriptors;
};
static_assert(WireRecord<KeeperRequest> && WireRecord<Reply> && sizeof(KeeperRequest) == 256 && sizeof(Reply) == 8);

constexpr int patience_ms = 3000, start_patience_ms = 30'000;
constexpr int lingers_ms = 1000;  // with nothing to keep
constexpr std::size_t descriptors_max = 64;

template <class Record>
std::span<const std::byte> bytes_of(const Record& record) {
  return std::as_bytes(std::span(&record, 1));
}

template <class Record>
Result<Record> receive(const vmci::PacketSocket& socket, int timeout_ms = patience_ms) {
  Record record;
  const auto got = socket.receive(std::as_writable_bytes(std::span(&record, 1)), timeout_ms);
  if (!got) return got.error();
  if (got->bytes != sizeof(record)) return Errno{EPROTO};
  return record;
}

Status send_all(const vmci::PacketSocket& socket, std::span<const int> descriptors) {
  while (!descriptors.empty()) {
    const auto some = descriptors.first(std::min(descriptors.size(), vmci::packet_descriptors_max));
    const std::byte one{1};
    if (const Status sent = socket.send({&one, 1}, some); !sent) return sent;
    descriptors = descriptors.subspan(some.size());
  }
  return ok();
}

Result<std::vector<vmci::UniqueFd>> receive_all(const vmci::PacketSocket& socket, std::size_t count, int timeout_ms = patience_ms) {
  std::vector<vmci::UniqueFd> descriptors;
  while (descriptors.size() < count) {
    std::byte one;
    auto got = socket.receive({&one, 1}, timeout_ms);
    if (!got) return got.error();
    if (got->descriptors_missing) return Errno{EMFILE};
    if (got->descriptors.empty()) return Errno{EPROTO};
    for (auto& fd : got->descriptors) descriptors.push_back(std::move(fd));
  }
  if (descriptors.size() != count) return Errno{EPROTO};
  return descriptors;
}

std::vector<int> numbers_of(const std::vector<vmci::UniqueFd>& descriptors) {
  std::vector<int> numbers;
  for (const auto& fd : descriptors) numbers.push_back(fd.get());
  return numbers;
}

Result<vmci::PacketSocket> ask(const std::string& path, Wish wish, std::string_view machine, std::size_t descriptors = 0, int timeout_ms = patience_ms) {
  KeeperRequest request{wish, static_cast<std::uint32_t>(descriptors), {}};
  if (machine.size() >= sizeof(request.machine)) return Errno{ENAMETOOLONG};
  std::memcpy(request.machine, machine.data(), machine.size());
  auto socket = vmci::PacketSocket::connect(path, timeout_ms);
  if (!socket) return socket.error();
  if (const Status sent = socket->send(bytes_of(request)); !sent) return sent.error();
  return socket;
}

// --- the process ------------------------------------------------------------------------------------------------------

class Store {
 public:
  void serve(const vmci::PacketSocket& service) {
    const auto who = service.peer();
    if (!who || (who->uid != ::geteuid() && who->uid != 0)) return;
    const auto request = receive<KeeperRequest>(service);
    if (!request || request->machine[sizeof(request->machine) - 1] != 0) return;
    switch (request->wish) {
      case Wish::keep: return keep(service, *request);
      case Wish::take: return give(service, request->machine);
      case Wish::drop: return drop(service, request->machine);
    }
  }

  // Forgets the machines that end, until somebody connects. False: there is nothing to keep any more, and nobody has come for a while.
  bool wait(int listening) {
    for (;;) {
      std::vector<pollfd> waiting{{listening, POLLIN, 0}};
      for (const auto& [machine, descriptors] : kept_) waiting.push_back({descriptors.front().get(), POLLRDHUP, 0});
      const int ready = ::poll(waiting.data(), waiting.size(), kept_.empty() ? lingers_ms : -1);
      if (ready == 0) return false;
      if (ready < 0) continue;  // a signal
      std::size_t at = 0;
      std::erase_if(kept_, [&](const auto&) { return waiting[++at].revents != 0; });
      if (waiting.front().revents != 0) return true;
    }
  }

 private:
  void keep(const vmci::PacketSocket& service, const KeeperRequest& request) {
    if (request.descriptors == 0 || request.descriptors > descriptors_max) return;
    auto descriptors = receive_all(service, request.descriptors);
    if (!descriptors) return;  // a part of them is of no use
    kept_.insert_or_assign(request.machine, std::move(*descriptors));
    (void)service.send(bytes_of(Reply{0, 0}));
  }
  void give(const vmci::PacketSocket& service, const std::string& machine) const {
    const auto found = kept_.find(machine);
    if (found == kept_.end()) return (void)service.send(bytes_of(Reply{ENOENT, 0}));
    if (service.send(bytes_of(Reply{0, static_cast<std::uint32_t>(found->second.size())}))) (void)send_all(service, numbers_of(found->second));
  }
  void drop(const vmci::PacketSocket& service, const std::string& machine) {
    kept_.erase(machine);
    (void)service.send(bytes_of(Reply{0, 0}));
  }

  std::map<std::string, std::vector<vmci::UniqueFd>> kept_;
};

}  // namespace

int Keeper::serve(const std::string& path) {
  // Nothing of who started it: its descriptors, its terminal, its folder.
  ::close_range(3, ~0u, 0);
  ::setsid();
  if (::chdir("/") != 0) return 1;
  ::signal(SIGPIPE, SIG_IGN);
  auto listening = vmci::listen_packets(path, 0600);
  if (!listening) return value(listening.error()) == EADDRINUSE ? 0 : 1;
  if (const pid_t background = ::fork(); background != 0) return background > 0 ? 0 : 1;

  Store store;
  while (store.wait(listening->get())) {
    vmci::UniqueFd fd(::accept4(listening->get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (fd) store.serve(vmci::PacketSocket(std::move(fd)));
  }
  // Who connects in this moment is hung up on, and starts another keeper.
  ::unlink(path.c_str());
  return 0;
}

// --- the service's side -----------------------------------------------------------------------------------------------

Status Keeper::start() const {
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  for (const int standard : {0, 1, 2}) ::posix_spawn_file_actions_addopen(&actions, standard, "/dev/null", O_RDWR, 0);
  // The service's threads have signals blocked, which a program inherits.
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  const char* const words[] = {"vrdmad", "--keeper", path_.c_str(), nullptr};
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, "/proc/self/exe", &actions, &attributes, const_cast<char* const*>(words), environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return Errno{error};
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) return last_error();
  return status == 0 ? ok() : Status(Errno{ECHILD});
}

Status Keeper::keep(std::string_view machine, std::span<const int> descriptors) const {
  Status kept = Errno{EINVAL};
  for (int attempt = 0; attempt < 3; ++attempt) {  // a keeper may be about to end
    const auto socket = ask(path_, Wish::keep, machine, descriptors.size());
    if (!socket) {
      kept = socket.error();
      if (value(socket.error()) != ENOENT && value(socket.error()) != ECONNREFUSED && value(socket.error()) != EPIPE) break;
      if (const Status started = start(); !started) return started;
      continue;
    }
    kept = send_all(*socket, descriptors);
    if (!kept) continue;
    const auto reply = receive<Reply>(*socket);
    if (reply) return reply->status == 0 ? ok() : Status(Errno{reply->status});
    kept = reply.error();
    if (value(reply.error()) == ETIMEDOUT) break;
  }
  return kept;
}

Result<std::vector<vmci::UniqueFd>> Keeper::take(std::string_view machine) const {
  auto taken = try_to_take(machine);
  // One that had nothing to keep any more may have hung up on us; then there is none now.
  return taken || value(taken.error()) == ETIMEDOUT ? std::move(taken) : try_to_take(machine);
}

Result<std::vector<vmci::UniqueFd>> Keeper::try_to_take(std::string_view machine) const {
  const auto nothing = [] { return std::vector<vmci::UniqueFd>(); };
  const auto socket = ask(path_, Wish::take, machine, 0, start_patience_ms);
  if (!socket) {
    // A keeper that ends, or has ended without tidying up, keeps nothing.
    const int error = value(socket.error());
    if (error == ENOENT || error == ECONNREFUSED || error == EPIPE) return nothing();
    return socket.error();
  }
  const auto reply = receive<Reply>(*socket, start_patience_ms);
  if (!reply) return reply.error();
  if (reply->status == ENOENT) return nothing();
  if (reply->status != 0 || reply->descriptors > descriptors_max) return Errno{EPROTO};
  return receive_all(*socket, reply->descriptors, start_patience_ms);
}

void Keeper::drop(std::string_view machine) const {
  if (const auto socket = ask(path_, Wish::drop, machine)) (void)receive<Reply>(*socket);
}

}  // namespace vrdma::svc
