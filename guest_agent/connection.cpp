// From the process to the service. The way back is in replies.cpp.
#include "guest_agent/connection.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "guest_agent/log.hpp"
#include "guest_agent/shared_pages.hpp"
#include "vmci_channel/peer_process.hpp"
#include "vrdma/copy_ring.hpp"

namespace vrdma::agent {

using control::Head;
using control::Request;
using vm::Frame;
using vmci::UniqueFd;

namespace {

// io_uring counts what a user pins against this limit of his: 8 MiB by default, too little for any registration that matters.
void lift_memlock(pid_t process) {
  const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
  static bool said = false;
  if (::prlimit(process, RLIMIT_MEMLOCK, &none, nullptr) == 0 || std::exchange(said, true)) return;
  say("cannot lift the limit of locked memory of process %d (%s): what programs can register stays limited by their \"ulimit -l\"", process,
      std::strerror(errno));
}

// Each registration of a process takes a descriptor here. A process gets half of them at most, and all together three quarters: others can
// always be accepted and served. A descriptor's number says how many there are, or more.
bool takes_too_many(int descriptor, std::size_t of_its_process) {
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return false;
  return of_its_process >= files.rlim_cur / 2 || static_cast<rlim_t>(descriptor) >= files.rlim_cur / 4 * 3;
}

std::uint64_t ram_bytes() {
  struct sysinfo info {};
  return ::sysinfo(&info) == 0 ? std::uint64_t{info.totalram} * info.mem_unit : 0;
}

bool has_exited(const UniqueFd& pidfd) {
  pollfd process{pidfd.get(), POLLIN, 0};
  return ::poll(&process, 1, 0) != 0;
}

}  // namespace

Result<std::unique_ptr<Connection>> Connection::open(std::uint32_t number, vmci::PacketSocket socket, std::shared_ptr<vmci::Closer> closer, Session& session, Watch& watch) {
  std::unique_ptr<Connection> connection(new Connection(number, std::move(socket), std::move(closer), session, watch));
  auto credentials = connection->socket_.peer();
  if (!credentials) return credentials.error();
  auto pidfd = connection->socket_.peer_pidfd();
  if (!pidfd) return pidfd.error();
  connection->credentials_ = *credentials;
  connection->exited_ = std::move(*pidfd);
  if (session.bar() == nullptr) lift_memlock(credentials->pid);
  connection->folder_ = vmci::process_folder(credentials->pid);
  if (!connection->folder_) return last_error();
  if (vmci::is_as_it_connected(connection->folder_.get(), *credentials)) {
    auto pagemap = Pagemap::of(connection->folder_.get());
    if (!pagemap) return pagemap.error();
    if (vmci::is_as_it_connected(connection->folder_.get(), *credentials)) connection->pagemap_ = std::move(*pagemap);
  }
  const int yes = 1;  // every packet says who has sent it
  if (::setsockopt(connection->socket_.fd(), SOL_SOCKET, SO_PASSCRED, &yes, sizeof(yes)) != 0) return last_error();
  // Until here its number was its own.
  if (has_exited(connection->exited_)) return Errno{ESRCH};
  if (auto added = watch.packets.add(connection->socket_.fd(), EPOLLIN, {number, item_socket}); !added) return added.error();
  if (auto added = watch.events.add(connection->exited_.get(), EPOLLIN, {number, item_exit}); !added) {
    watch.packets.remove(connection->socket_.fd());
    return added.error();
  }
  vmci::let_descriptors_in(connection->socket_.fd(), true);  // a library tries to share files before it is told that this is not for here
  session.link().send(Frame::open, number, vm::Open{credentials->uid, credentials->gid, static_cast<std::uint32_t>(credentials->pid), 0});
  return connection;
}

// The service is through with it. The process may not be: its memory may lie in what it was lent.
Connection::~Connection() {
  leave();
  BarPages* const bar = session_.bar_ever();
  if (bar == nullptr) return;
  for (auto* const slice : {&lent_arena_, &lent_copier_}) bar->give_back(std::move(*slice), folder_.get());
  for (auto& [backing, slice] : lent_) bar->give_back(std::move(slice), folder_.get());
  for (auto& [sequence, asked] : outstanding_) bar->give_back(std::move(asked.lent), folder_.get());
}

void Connection::leave() {
  if (!connected()) return;
  watch_.packets.remove(socket_.fd());
  watch_.events.remove(exited_.get());
  if (doorbell_) watch_.events.remove(doorbell_.get());
  while (!streams_.empty()) close_stream(streams_.begin());
  vectors_.clear();
  copier_streams_.clear();
  documents_.clear();
  doorbell_.reset();
  exited_.reset();
  pagemap_ = {};
  ::shutdown(socket_.fd(), SHUT_RDWR);
  closer_->close(socket_.release());
}

bool Connection::take_event(std::uint32_t item) {
  if (!connected()) return true;
  if (item == item_socket) return take_packet();
  if (item == item_exit) return !has_exited(exited_);
  if (item == item_doorbell) return ring_doorbell(), true;
  const auto found = streams_.find(item & ~item_streams);
  if (found == streams_.end()) return true;
  found->second.flush();
  watch(found->first, found->second);
  if (found->second.over()) close_stream(found);
  return true;
}

void Connection::ring_doorbell() {
  std::uint64_t rings;
  if (::read(doorbell_.get(), &rings, sizeof(rings)) == sizeof(rings)) session_.ring_doorbell();
}

bool Connection::take_packet() {
  std::array<std::byte, vm::frame_bytes_max> packet;
  if (!watch_.spare) watch_.spare.reset(::eventfd(0, EFD_CLOEXEC));
  auto received = vmci::receive_given(socket_.fd(), packet, closer_);  // descriptors are of no use to anybody here
  if (received && received->descriptors_missing) {  // a library brings one at most
    watch_.spare.reset();
    received = vmci::receive_given(socket_.fd(), packet, closer_);
  }
  if (!received) return value(received.error()) == EAGAIN;
  // Who only gives memory adds nothing to what is to be closed, and has no part in what another program of his user's does.
  const bool gives_more = std::any_of(received->descriptors.begin(), received->descriptors.end(), [](const vmci::GivenFd& fd) { return !fd.is_memory(); });
  if (received->descriptors_missing || (gives_more && closer_->pending() > closing_max)) return false;
  if (received->bytes < sizeof(Head)) return false;
  Head head{};
  std::memcpy(&head, packet.data(), sizeof(head));
  const auto body = std::span(packet).subspan(sizeof(head), received->bytes - sizeof(head));
  if (outstanding_.size() >= outstanding_max || outstanding_.contains(head.sequence)) return false;

  Outstanding asked;
  asked.request = static_cast<Request>(head.record.control & control_user_mask);  // as vrdmad understands it
  int refused = 0;
  switch (asked.request) {
    case Request::attach:
      refused = prepare_attach(body);
      if (refused == EPROTONOSUPPORT) {
        control::AttachReply mine{};
        mine.major = control::version_major;
        mine.minor = control::version_minor;
        return answer(head, refused, std::as_bytes(std::span(&mine, 1)));
      }
      break;
    case Request::reach_process:
      refused = prepare_reach();
      break;
    case Request::add_pinned: {
      control::AddPinnedRequest pinned{};
      if (body.size() < sizeof(pinned)) return answer(head, EINVAL);
      std::memcpy(&pinned, body.data(), sizeof(pinned));
      refused = session_.bar() != nullptr ? prepare_lent(pinned, asked.lent) : prepare_pinned(pinned, received->sender, asked.ring);
      std::memcpy(body.data(), &pinned, sizeof(pinned));
      break;
    }
    case Request::create_channel: {
      control::CreateChannelRequest channel{};
      if (body.size() < sizeof(channel)) return answer(head, EINVAL);
      std::memcpy(&channel, body.data(), sizeof(channel));
      prepare_channel(channel, asked);
      std::memcpy(body.data(), &channel, sizeof(channel));
      break;
    }
    case Request::remove_backing: {
      control::RemoveBackingRequest removed{};
      if (body.size() < sizeof(removed)) return answer(head, EINVAL);
      std::memcpy(&removed, body.data(), sizeof(removed));
      asked.backing = removed.backing;
      break;
    }
    // What descriptors of the process mean nothing to the host for.
    case Request::add_backing:
    case Request::queue_pair_alloc:
    case Request::queue_pair_attach:
      refused = EOPNOTSUPP;
      break;
    default:
      break;
  }
  if (refused != 0) return answer(head, refused);
  outstanding_.emplace(head.sequence, std::move(asked));
  session_.link().send(Frame::packet, number_, std::span(packet).first(received->bytes));
  return true;
}

bool Connection::answer(const Head& request, int status, std::span<const std::byte> body) {
  Head head{};
  head.record.word = static_cast<std::uint32_t>(body.size());
  head.record.control = (request.record.control & control_user_mask) | control::reply_bit;
  head.source_context = control::host_context;
  head.source_port = control::control_port;
  head.sequence = request.sequence;
  head.status = status;
  const auto bytes = std::as_bytes(std::span(&head, 1));
  std::vector<std::byte> packet(bytes.begin(), bytes.end());
  packet.insert(packet.end(), body.begin(), body.end());
  return socket_.send(packet).has_value();
}

void Connection::send_segment(std::uint32_t segment, const Runs& runs) {
  for (auto rest = std::span(runs); !rest.empty();) {
    const auto part = rest.first(std::min<std::size_t>(rest.size(), vm::runs_per_frame));
    session_.link().send(Frame::segment, number_, std::as_bytes(part), segment);
    rest = rest.subspan(part.size());
  }
}

Result<BarPages::Slice> Connection::lend(std::uint64_t bytes) {
  auto slice = session_.bar()->take(bytes);
  if (slice || std::exchange(said_full_, true)) return slice;
  say("no %llu KiB in one piece for process %d: of the %llu MiB of this machine's device %llu MiB are not lent; deregister memory, or give the machine a bigger "
      "one (\"vrdma vm add --private-ram --bar …\" on the host)",
      static_cast<unsigned long long>(bytes >> 10), credentials_.pid, static_cast<unsigned long long>(session_.bar()->bytes() >> 20),
      static_cast<unsigned long long>(session_.bar()->free_bytes() >> 20));
  return slice;
}

int Connection::prepare_attach(std::span<const std::byte> body) {
  if (std::exchange(asked_to_attach_, true)) return EISCONN;
  if (session_.bar() != nullptr) {
    control::AttachRequest request{};
    if (body.size() < sizeof(request)) return EPROTO;
    std::memcpy(&request, body.data(), sizeof(request));
    if (request.major == control::version_major && request.minor < control::minor_of_bar) {
      say("process %d has a libvrdma of an older version, which cannot be served in a machine whose RAM is its own: install the one that belongs to this vrdma-guestd",
          credentials_.pid);
      return EPROTONOSUPPORT;
    }
    if (!session_.admits(credentials_.uid)) {
      say("process %d of user %u is not served: where the machine's RAM is its own, all programs reach one another's queues, so they are one user's (and root's)",
          credentials_.pid, credentials_.uid);
      return EACCES;
    }
    auto arena = lend(session_.arena_bytes());
    if (!arena) return value(arena.error());
    lent_arena_ = std::move(*arena);
    send_segment(vm::segment_arena, lent_arena_.runs());
    return 0;
  }
  auto arena = session_.make_segment("vrdma-arena", session_.arena_bytes());
  if (!arena && value(arena.error()) == EFAULT) return ENOMEM;  // it has said why
  if (!arena && session_.ram_page_bytes() != vm::page_bytes) {
    say("no huge pages of %llu KiB for process %d (%s), which it needs as the host keeps this machine's RAM on such: give this machine more memory, or "
        "reserve some (vm.nr_hugepages)",
        static_cast<unsigned long long>(session_.ram_page_bytes() >> 10), credentials_.pid, std::strerror(value(arena.error())));
    return value(arena.error());
  }
  if (!arena) {
    say("cannot pin %llu bytes for process %d (%s): give this machine more memory, or its arenas less (machine_arena_bytes of the host's vrdmad)",
        static_cast<unsigned long long>(session_.arena_bytes()), credentials_.pid, std::strerror(value(arena.error())));
    return value(arena.error());
  }
  arena_ = std::move(*arena);
  send_segment(vm::segment_arena, arena_.runs);
  return 0;
}

int Connection::prepare_reach() {
  if (!attached_) return ENOTCONN;
  if (copier_.ring || lent_copier_) return 0;
  if (session_.bar() != nullptr) {
    auto word = vmci::Segment::create("vrdma-copier-word", vm::page_bytes);
    auto lent = word ? lend(copying::segment_bytes) : Result<BarPages::Slice>(word.error());
    if (!lent) return value(lent.error());
    copier_word_ = std::move(*word);
    lent_copier_ = std::move(*lent);
    send_segment(vm::segment_copier, lent_copier_.runs());
    return 0;
  }
  auto copier = session_.make_segment("vrdma-copier", copying::segment_bytes);
  if (!copier) return value(copier.error()) == EFAULT ? ENOMEM : value(copier.error());
  copier_ = std::move(*copier);
  send_segment(vm::segment_copier, copier_.runs);
  return 0;
}

// The interrupt works before the service knows of it.
void Connection::prepare_channel(control::CreateChannelRequest& body, Outstanding& asked) {
  if (body.interrupt != 0) asked.vector = session_.lend_vector();  // 0: a library that knows of no rings
  if (asked.vector.number() != 0) asked.interrupt = session_.device().interrupt_by(asked.vector.number());
  if (!asked.interrupt) asked.vector = {};
  body.interrupt = asked.vector.number();
}

int Connection::prepare_lent(control::AddPinnedRequest& body, BarPages::Slice& lent) {
  if (!attached_) return ENOTCONN;
  if (body.ring != control::lend_pages) return EOPNOTSUPP;
  if (body.bytes == 0 || body.bytes > session_.bar()->bytes()) return body.bytes == 0 ? EINVAL : ENOMEM;
  auto slice = lend(body.bytes);
  if (!slice) return value(slice.error());
  body.address = 0;
  body.bytes = slice->bytes();
  body.segment = next_segment_++;
  send_segment(body.segment, slice->runs());
  lent = std::move(*slice);
  return 0;
}

int Connection::prepare_pinned(control::AddPinnedRequest& body, pid_t sender, UniqueFd& ring) {
  if (!attached_) return ENOTCONN;
  // Who was given the socket by a process that now runs a program of more rights than he has does not see into that.
  if (sender != credentials_.pid) return EPERM;
  // Nor does he who has run one since he sent this. Where that was before he was accepted, there is no page table.
  if (!pagemap_ || !vmci::is_as_it_connected(folder_.get(), credentials_)) return EPERM;
  // More than all RAM cannot be pinned; many mappings of the same memory are not worth the time that they take.
  if (body.bytes == 0 || body.bytes > ram_bytes() || body.address > ~std::uint64_t{0} - vm::page_bytes - body.bytes) return EINVAL;
  auto taken = take_ring(exited_.get(), body.ring, closer_);
  if (taken ? takes_too_many(taken->get(), rings_.size()) : value(taken.error()) == EMFILE || value(taken.error()) == ENFILE) {
    if (!std::exchange(said_crowded_, true))
      say("process %d has %zu regions of memory registered and gets no more: each takes a descriptor here; raise the limit of open files that vrdma-guestd is started with",
          credentials_.pid, rings_.size());
    return ENOMEM;
  }
  if (!taken) return value(taken.error());
  if (const Status pinned = covers(taken->get(), body.address, body.bytes); !pinned) return value(pinned.error());
  const std::uint64_t first = page_floor(body.address);
  // What lies there now need not be what the ring has pinned.
  const std::uint64_t length = page_ceiling(body.address + body.bytes) - first;
  auto runs = pagemap_.runs(first, length, Pages::own);
  if (!runs && value(runs.error()) == EACCES && pagemap_.runs(first, length)) {  // all there, but some of it may be shared: all of it?
    auto shared = pin_shared(folder_.get(), first, length);
    if (!shared) return value(shared.error());
    if (!vmci::is_as_it_connected(folder_.get(), credentials_)) return EPERM;
    taken = std::move(shared->ring);
    runs = std::move(shared->runs);
  }
  if (!runs) return value(runs.error());
  if (!session_.may_lend(*runs)) return EFAULT;  // the program's own thread copies there
  body.segment = next_segment_++;
  send_segment(body.segment, *runs);
  ring = std::move(*taken);
  return 0;
}

}  // namespace vrdma::agent
