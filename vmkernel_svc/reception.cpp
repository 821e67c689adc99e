#include "vmkernel_svc/reception.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <cstring>
#include <fstream>
#include <iterator>
#include <span>
#include <sstream>
#include <string>
#include <utility>

#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/shard.hpp"
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

// Of a packet that is at least so long.
Head head_in(std::span<const std::byte> packet) {
  Head head{};
  std::memcpy(&head, packet.data(), sizeof(head));
  return head;
}

// Whoever is refused before anybody has read what he asks: to attach, most likely.
void refuse_unread(const vmci::PacketSocket& socket, int status) {
  Head unread{};
  unread.record.control = static_cast<std::uint32_t>(Request::attach);
  PacketDesk::refuse(socket, unread, status);
}
}  // namespace

// In its queue are those who were not accepted, with what they have said.
Reception::~Reception() { std::make_shared<vmci::Closer>()->close(unwatched(listener_)); }

// What is unread in it may wait when it is closed, so the closer is the last to do so, when he comes to it.
Reception::Connection::~Connection() {
  stop_watching(readable);
  ::shutdown(socket.fd(), SHUT_RDWR);
  closer->close(socket.release());
}

void Reception::User::forget_read() {
  std::erase_if(unread, [](const vmci::GivenFd& socket) { return vmci::unread_bytes(socket.get()) == 0; });
}

void Reception::open(vmci::UniqueFd listener) {
  take_spare();
  none_given_ = vmci::let_descriptors_in(listener.get(), false);
  listener_.assign(listener.release());
  accept_next();
}

// Numbers are given out from the lowest on, so that a high one says how many there are.
bool Reception::is_for_root(int fd, uid_t uid) const {
  return uid != 0 && limits_.for_root != 0 && static_cast<std::uint64_t>(fd) + limits_.for_root >= limits_.open_files;
}

// Asked just before something is made for it.
bool Reception::is_full_for(const Connection& connection) const {
  if (connection.uid == 0 || limits_.for_root == 0) return false;
  const vmci::UniqueFd lowest(::fcntl(connection.socket.fd(), F_DUPFD_CLOEXEC, 0));
  if (lowest && !is_for_root(lowest.get(), connection.uid)) return false;
  static constinit log::Sparing sparing;
  sparing.warn("what a guest of uid {} asks for is refused: the last {} of {} open files are for root's programs; the limit is that of whoever started this service (ulimit -Hn)",
               connection.uid, limits_.for_root, limits_.open_files);
  return true;
}

void Reception::take_spare() {
  if (!spare_) spare_.reset(::eventfd(0, EFD_CLOEXEC));
}

// Who waits while no descriptor is left is told, by the spare one. False: nobody was.
bool Reception::refuse_one() {
  spare_.reset();
  vmci::PacketSocket socket(vmci::UniqueFd(::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)));
  if (!socket) return false;
  refuse_unread(socket, EMFILE);
  if (none_given_) return true;
  const auto peer = socket.peer();
  users_[peer ? peer->uid : ~uid_t{0}].closer->close(socket.release());
  return true;
}

bool Reception::somebody_knocks() {
  pollfd connecting{listener_.native_handle(), POLLIN, 0};
  return ::poll(&connecting, 1, 0) != 0;
}

void Reception::accept_next() {
  listener_.async_wait(boost::asio::posix::stream_descriptor::wait_read, [this](const boost::system::error_code& error) {
    if (error) return;
    constexpr int at_once = 4;  // whoever knocks all the time does not keep the others waiting, nor signals and leases
    for (int left = at_once; left > 0; --left) {
      take_spare();  // first, or those who come have all there are, and nobody could be told any more
      vmci::UniqueFd fd;
      if (spare_) fd.reset(::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      else errno = EMFILE;
      if (!fd) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        const int why = errno;
        if (why != EAGAIN) {  // out of descriptors: those who wait get their turn when others have left
          static constinit log::Sparing sparing;
          sparing.warn("cannot accept a guest ({}): raise the limit of open files", std::strerror(why));
          if (why == EMFILE && spare_ && refuse_one()) continue;
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

void Reception::admit(vmci::PacketSocket socket, uid_t uid, std::shared_ptr<MachineProcess> machine) {
  User& user = users_[uid];
  user.forget_read();
  const std::size_t closing = user.closer->pending();
  auto connection = std::make_shared<Connection>(io_, std::move(socket), user.closer);
  connection->uid = uid;
  connection->machine = std::move(machine);
  if (!user.has_room(limits_) || closing > limits_.of_one_user || is_for_root(connection->socket.fd(), uid) || !watch_copy(connection->readable, connection->socket.fd())) {
    refuse_unread(connection->socket, EDQUOT);
    if (none_given_ && !connection->machine) connection->socket = {};  // at once, or those who are refused have root's descriptors until the closer comes to them
    static constinit log::Sparing sparing;
    sparing.warn("a connection of uid {} was refused: it has {} of {}, {} that have ended and whose answers are unread, and {} descriptors whose closing waits, or the limit of {} open files is reached, which is that of whoever started this "
                 "service (ulimit -Hn)", uid, user.connections, limits_.of_one_user, user.unread.size(), closing, limits_.open_files);
    // Not from here: who admits is not ready for the news.
    if (connection->machine) boost::asio::post(io_, [known = connection->machine] { if (known->detached) known->detached(); });
    return;
  }
  vmci::let_descriptors_in(connection->socket.fd(), true);
  ++user.connections;
  connections_.emplace(connection.get(), connection);
  read_next(connection);
}

// This request fails, not the guest, if the one descriptor that a request brings is all that there was no room for. More than that is not taken out of
// the socket here (given_descriptors.hpp), and waits until there is room. EBUSY: so does this one, as the spare was gone already.
Status Reception::refuse_for_descriptors(const Connection& connection, std::span<std::byte> packet) {
  static constinit log::Sparing sparing;
  sparing.warn("what a guest gives to this service cannot be taken: raise the limit of open files (ulimit -n)");
  spare_.reset();  // there is another one with the next packet
  const auto received = vmci::receive_given(connection.socket.fd(), packet, connection.closer);
  if (!received) return received.error();
  if (received->descriptors_missing) return Errno{EBUSY};
  PacketDesk::refuse(connection.socket, head_in(packet), EMFILE);
  return ok();
}

Status Reception::take_packet(const ConnectionPtr& connection) {
  if (connection->closer->pending() > limits_.of_one_user) {  // of all his programs: this one need not have given any, and waits
    char byte;
    return Errno{::recv(connection->socket.fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0 ? ENOTCONN : EBUSY};
  }
  take_spare();
  std::vector<std::byte> packet(sizeof(Head) + body_bytes_max);
  auto received = vmci::receive_given(connection->socket.fd(), packet, connection->closer);
  if (!received) return received.error();
  if (received->bytes < sizeof(Head)) return Errno{EPROTO};  // 0: it has hung up
  if (received->descriptors_missing) return refuse_for_descriptors(*connection, packet);
  if (std::ranges::any_of(received->descriptors, [&](const vmci::GivenFd& fd) { return is_for_root(fd.get(), connection->uid); })) {
    PacketDesk::refuse(connection->socket, head_in(packet), EMFILE);
    return ok();
  }
  packet.resize(received->bytes);
  handle_packet(connection, std::move(packet), std::move(received->descriptors));
  return ok();
}

void Reception::read_next(const ConnectionPtr& connection) {
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
        if (const Status taken = take_packet(connection); !taken) {
          if (value(taken.error()) == EBUSY) return read_later(connection);
          return value(taken.error()) == EAGAIN ? read_next(connection) : lost(connection);
        }
        // One packet at a time: the next is looked at when the shard is through with this one, so that nobody can pile up work.
        shard_.submit([this, connection](Shard&) {
          boost::asio::post(io_, [this, connection] {
            if (!connection->closed) read_next(connection);
          });
        });
      });
}

void Reception::read_later(const ConnectionPtr& connection) {
  connection->patience.expires_after(std::chrono::milliseconds(100));
  connection->patience.async_wait([this, connection](const boost::system::error_code&) {
    if (!connection->closed) read_next(connection);
  });
}

// The packet stays where it is: whatever becomes of the connection meanwhile is found as ever when it is read.
bool Reception::has_to_wait(const Connection& connection) const {
  if (lease_is_known_ || connection.has_waited) return false;
  Head head{};
  return ::recv(connection.socket.fd(), &head, sizeof(head), MSG_PEEK | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof(head)) &&
         PacketDesk::request_of(head) == Request::attach;
}

// A host that begins has its LIDs when it has met who leads its subnet, a moment after it is there for its programs. Later on a lease that
// has lapsed is not waited for.
void Reception::await_lease(const ConnectionPtr& connection) {
  connection->has_waited = true;
  const auto peer = connection->socket.peer();
  connection->patience.expires_after(!connection->machine && peer && sees_us(peer->pid) ? lease_patience : lease_patience_unseen);
  connection->patience.async_wait([this, connection](const boost::system::error_code&) { read_next(connection); });
}

void Reception::lease_is_known() {
  if (std::exchange(lease_is_known_, true)) return;
  for (const auto& [raw, connection] : connections_) connection->patience.cancel();
}

void Reception::lost(const ConnectionPtr& connection) {
  if (connection->closed) return;
  connection->closed = true;
  stop_watching(connection->readable);
  stop_watching(connection->exited);
  connections_.erase(connection.get());
  User& user = users_[connection->uid];
  --user.connections;
  if (!connection->machine) ::shutdown(connection->socket.fd(), SHUT_RDWR);  // what the shard is yet to answer would come after it is counted
  // A child of its process may have the socket.
  if (vmci::unread_bytes(connection->socket.fd()) > 0)
    if (vmci::UniqueFd copy(::fcntl(connection->socket.fd(), F_DUPFD_CLOEXEC, 0)); copy) user.unread.emplace_back(std::move(copy), connection->closer);
  // Whoever else has the closer may close by it yet, as this connection does when nobody has it any more: it is found when the next one ends.
  for (auto& [uid, known] : users_) known.forget_read();
  std::erase_if(users_, [](const auto& known) { return known.second.connections == 0 && known.second.closer.use_count() == 1 && known.second.closer->pending() == 0; });
  const auto gone = [this, connection] {
    if (!connection->machine) return;
    boost::asio::post(io_, [known = connection->machine] { if (known->detached) known->detached(); });
  };
  shard_.submit([connection, gone](Shard& shard) {
    Guest* const guest = shard.fabric().guest(GuestId{connection->guest.load()});
    if (guest == nullptr) return gone();
    static constinit log::Sparing left{log::Sparing::lines_of_ordinary_life};
    left.info("{} (uid {}, pid {}) left", guest->name, guest->credentials.uid, guest->credentials.pid);
    shard.let_go(*guest, gone);
  });
}

void Reception::await_exit(const ConnectionPtr& connection) {
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

void Reception::attach(const ConnectionPtr& connection, const Head& head, const std::vector<std::byte>& packet) {
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
  auto info = std::make_shared<AttachInfo>(AttachInfo{*credentials, pidfd ? std::move(*pidfd) : vmci::UniqueFd(), vmci::GivenFd(std::move(own_socket), connection->closer)});
  shard_.submit([this, connection, head, request, info](Shard&) {
    if (is_full_for(*connection)) return PacketDesk::refuse(connection->socket, head, EDQUOT);
    connection->guest.store(packets_.attach(connection->socket, head, *request, std::move(*info)));
  });
}

void Reception::attach_from_machine(const ConnectionPtr& connection, const Head& head, const AttachRequest& request) {
  MachineProcess& process = *connection->machine;
  const auto pages = process.take_segment(vm::segment_arena);
  if (!pages || pages->bytes() != machine_arena_bytes_) return PacketDesk::refuse(connection->socket, head, EPROTO);
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
      {static_cast<pid_t>(process.pid), process.tenant, 0}, {}, vmci::GivenFd(std::move(own_socket), connection->closer),
      std::make_unique<InMachine>(InMachine{process.machine, process.uid, process.pid, process.interrupts, process.in_bar, {}, static_cast<std::uint32_t>(pages->part_count())}), std::move(*arena)});
  shard_.submit([this, connection, head, request, info](Shard&) {
    if (is_full_for(*connection)) return PacketDesk::refuse(connection->socket, head, EDQUOT);
    connection->guest.store(packets_.attach(connection->socket, head, request, std::move(*info)));
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
    case Request::query_link_layer:
    case Request::show: return true;
    default: return false;
  }
}
}  // namespace

// The memory that a machine has lent for this packet.
std::optional<PinnedPages> Reception::memory_of(const Connection& connection, Request request, const std::vector<std::byte>& packet) {
  if (!connection.machine) return std::nullopt;
  if (request == Request::reach_process) return connection.machine->take_segment(vm::segment_copier);
  AddPinnedRequest body;
  if (request != Request::add_pinned || packet.size() < sizeof(Head) + sizeof(body)) return std::nullopt;
  std::memcpy(&body, packet.data() + sizeof(Head), sizeof(body));
  return connection.machine->take_segment(body.segment);
}

void Reception::handle_packet(const ConnectionPtr& connection, std::vector<std::byte> packet, std::vector<vmci::GivenFd> descriptors) {
  const Head head = head_in(packet);
  if (PacketDesk::request_of(head) == Request::attach) return attach(connection, head, packet);
  if (connection->machine && !may_come_from_machine(PacketDesk::request_of(head))) return PacketDesk::refuse(connection->socket, head, EOPNOTSUPP);
  auto given = std::make_shared<std::vector<vmci::GivenFd>>(std::move(descriptors));
  auto memory = std::make_shared<std::optional<PinnedPages>>(memory_of(*connection, PacketDesk::request_of(head), packet));
  if (PacketDesk::request_of(head) == Request::show) before_show_();
  const auto viewer = connection->machine ? std::optional(Viewer::in(connection->machine->machine, connection->machine->uid)) : std::nullopt;
  shard_.submit([this, connection, head, given, memory, viewer, packet = std::move(packet)](Shard&) {
    if (PacketDesk::request_of(head) != Request::remove_backing && is_full_for(*connection)) return PacketDesk::refuse(connection->socket, head, EDQUOT);
    packets_.answer(connection->socket, connection->guest.load(), head, packet, std::move(*given), std::move(*memory), viewer, connection, connection->closer);
  });
}

}  // namespace vrdma::svc
