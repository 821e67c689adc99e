#include "vmci_channel/context.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "vmci_channel/attached_parts.hpp"
#include "vmci_channel/backoff.hpp"
#include "vmci_channel/control_exchange.hpp"

namespace vmci {

using namespace vrdma::control;
using vrdma::Errno;
using vrdma::Result;
using vrdma::Status;

namespace {

constexpr std::uint32_t control_member = 0;

bool watch(int epoll, int fd, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  return ::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

Result<std::shared_ptr<Context>> Context::attach(const Options& options) {
  auto socket = PacketSocket::connect(options.socket);
  if (!socket) return socket.error();
  std::shared_ptr<Context> context(new Context);
  context->socket_ = std::move(*socket);

  AttachRequest request{};
  request.magic = magic;
  request.major = version_major;
  request.minor = version_minor;
  request.link_layer = options.link_layer;
  request.pid = static_cast<std::uint32_t>(::getpid());
  std::copy_n(options.name.begin(), std::min(options.name.size(), sizeof(request.name) - 1), request.name);
  auto attached = context->call_on_socket<Request::attach>(request);
  if (!attached) return attached.error();
  const AttachReply& reply = context->reply_ = attached->body;
  if (reply.major != version_major) return Errno{EPROTONOSUPPORT};
  auto parts = AttachedParts::map(reply, attached->descriptors, map_sealed);
  if (!parts) return parts.error();
  context->arena_ = std::move(parts->arena);
  context->page_ = std::move(parts->page);
  context->doorbell_fd_ = std::move(parts->doorbell);
  context->wake_ = std::move(parts->wake);
  if (::fcntl(context->wake_.get(), F_SETFL, O_NONBLOCK) != 0) return vrdma::last_error();
  context->rings_ = parts->rings;
  context->requests_ = RecordWriter(parts->rings.produce(), reply.control_geometry.produce_slots);
  context->replies_ = RecordReader(parts->rings.consume_records(), reply.control_geometry.consume_entries);
  context->doorbell_ = ReadyBitmap(parts->ready_words);
  return context;
}

Context::~Context() = default;

bool Context::gone() {
  // glibc keeps the futex word of a mutex in its first four bytes; the kernel marks it when the owner dies.
  const auto* const word = reinterpret_cast<const std::uint32_t*>(service_page().alive_mutex);
  if ((std::atomic_ref(const_cast<std::uint32_t&>(*word)).load(std::memory_order_relaxed) & FUTEX_OWNER_DIED) != 0) return true;
  std::lock_guard lock(mutex_);
  return dead_;
}

void Context::ring_doorbell(std::uint32_t member) {
  doorbell_.set(member);
  store_load_fence();  // pairs with the shard's fence between `sleeping` and its last look at the bitmap
  const std::uint32_t& sleeping = service_page().shards[reply_.shard].sleeping;
  if (std::atomic_ref(const_cast<std::uint32_t&>(sleeping)).load(std::memory_order_relaxed) == 0) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(doorbell_fd_.get(), &one, sizeof(one));
}

// --- control requests -----------------------------------------------------------------------------------------

Result<std::vector<UniqueFd>> Context::exchange_on_socket(Request request, std::span<const std::byte> body,
                                                          std::span<const int> descriptors, std::span<std::byte> reply) {
  std::lock_guard lock(socket_mutex_);
  const PacketRequest packet{request, socket_sequence_++, body, descriptors, reply_.guest};
  if (const auto sent = send_request(socket_, packet); !sent) return sent.error();
  auto answer = receive_reply(socket_, packet, reply, request == Request::attach ? patience_to_attach : patience_for_ever);
  if (!answer) return answer.error();
  if (answer->status != 0) return Errno{answer->status};
  return std::move(answer->descriptors);
}

Status Context::exchange(Request request, std::span<const std::byte> body, std::span<std::byte> reply) {
  Lock lock(mutex_);
  const Head head = request_head(request, reply_.guest, sequence_++, body.size());
  Pending pending{request, reply, 0, false};
  pending_.emplace(head.sequence, &pending);
  Status outcome = put(lock, head, static_cast<std::uint32_t>(request), body);
  if (outcome) outcome = wait(lock, -1, [&] { return pending.done; });
  pending_.erase(head.sequence);
  if (!outcome) return outcome;
  return pending.status == 0 ? vrdma::ok() : Status(Errno{pending.status});
}

// --- datagrams ------------------------------------------------------------------------------------------------

Status Context::send(Address to, std::uint32_t from_port, std::uint16_t kind, std::uint32_t sequence, std::span<const std::byte> body) {
  Lock lock(mutex_);
  Head head{};
  head.record.tag = address_of(to.context, to.port);
  head.source_context = reply_.guest;
  head.source_port = from_port;
  head.sequence = sequence;
  return put(lock, head, kind, body);
}

Result<std::shared_ptr<Mailbox>> Context::bind(std::uint32_t port, std::uint32_t offers_max, std::size_t datagrams_max) {
  if (port == reply_port) return Errno{EADDRINUSE};
  auto mailbox = std::make_shared<Mailbox>();
  mailbox->datagrams_max_ = datagrams_max;
  mailbox->news_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  mailbox->poll_fd_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!mailbox->news_ || !mailbox->poll_fd_) return vrdma::last_error();
  const int epoll = mailbox->poll_fd_.get();
  if (!watch(epoll, mailbox->news_.get(), EPOLLIN) || !watch(epoll, wake_.get(), EPOLLIN) || !watch(epoll, socket_.fd(), 0))
    return vrdma::last_error();
  {
    // What arrives before the port is known here would be lost: nobody sorts between the reply and that.
    Lock lock(mutex_);
    ++binding_;
    set_waiting();
  }
  auto bound = call<Request::bind_port>({port, offers_max});
  Lock lock(mutex_);
  --binding_;
  if (bound) {
    mailbox->port_ = bound->port;
    const auto early = mailboxes_.find(bound->port);  // sort() made a place for what came between
    if (early != mailboxes_.end()) mailbox->queue_ = std::move(early->second->queue_);
    if (!mailbox->queue_.empty()) ::eventfd_write(mailbox->news_.get(), 1);
    mailboxes_[bound->port] = mailbox;
  }
  if (binding_ == 0) std::erase_if(mailboxes_, [](const auto& entry) { return !entry.second->poll_fd_; });
  set_waiting();
  if (!bound) return bound.error();
  return mailbox;
}

void Context::unbind(Mailbox& mailbox) {
  (void)call<Request::unbind_port>({mailbox.port(), 0});
  Lock lock(mutex_);
  mailboxes_.erase(mailbox.port());
  set_waiting();
}

Result<Datagram> Context::receive(Mailbox& mailbox, int timeout_ms) {
  Lock lock(mutex_);
  const auto there = [&] { return !mailbox.queue_.empty(); };
  pump();
  if (!there()) {
    if (timeout_ms == 0) {
      drain_wake_pipe();
      pump();
      if (!there()) return Errno{dead_ ? EIO : EAGAIN};
    } else if (const auto waited = wait(lock, timeout_ms, there); !waited) {
      return waited.error();
    }
  }
  Datagram datagram = std::move(mailbox.queue_.front());
  mailbox.queue_.pop_front();
  if (mailbox.queue_.empty()) {
    eventfd_t ignored;
    ::eventfd_read(mailbox.news_.get(), &ignored);
  }
  return datagram;
}

std::uint64_t Context::dropped(const Mailbox& mailbox) {
  Lock lock(mutex_);
  return mailbox.dropped_;
}

// --- the rings ------------------------------------------------------------------------------------------------

Status Context::put(Lock& lock, const Head& head, std::uint32_t user_bits, std::span<const std::byte> body) {
  const auto slots = static_cast<std::uint32_t>((sizeof(Head) + body.size() + vrdma::slot_bytes - 1) / vrdma::slot_bytes);
  if (body.size() > body_bytes_max || slots >= requests_.slot_count()) return Errno{EMSGSIZE};
  const auto room = [&] {
    // C2: pairs with the service's release of its cursor: it has read the slots before it.
    const std::uint32_t consumed = std::atomic_ref(rings_.header().attacher.consumed).load(std::memory_order_acquire);
    if (requests_.position() - consumed <= requests_.slot_count()) requests_.set_freed(consumed);
    return requests_.has_room(slots);
  };
  // The service reads requests as they come, without a notice: no sleep here.
  for (Backoff backoff; !requests_.has_room(slots) && !room();) {
    pump();
    if (dead_) return Errno{EIO};
    lock.unlock();
    const bool died = gone();
    backoff.idle();
    lock.lock();
    if (died) return Errno{EIO};
  }
  requests_.write(sizeof(vrdma::RecordHead), std::as_bytes(std::span(&head, 1)).subspan(sizeof(vrdma::RecordHead)));
  requests_.write(sizeof(Head), body);
  requests_.publish(head.record.tag, static_cast<std::uint32_t>(body.size()), user_bits, slots);
  store_load_fence();  // C1: pairs with the service's fence between its store of needs_doorbell and its last look at the ring
  if (std::atomic_ref(rings_.header().attacher.needs_doorbell).load(std::memory_order_relaxed) != 0) ring_doorbell(control_member);
  return vrdma::ok();
}

void Context::pump() {
  bool any = false;
  while (!dead_) {
    std::uint32_t slots = 0;
    const auto peek = replies_.peek(record_, vrdma::record_slots_max, slots);
    if (peek == RecordReader::Peek::empty) break;
    Head head;
    std::memcpy(&head, record_, sizeof(head));
    any = true;
    if (peek == RecordReader::Peek::malformed || head.record.word > slots * vrdma::slot_bytes - sizeof(head)) {
      dead_ = true;
      break;
    }
    replies_.advance(slots);
    // C3: pairs with the service's acquire before it writes over these slots.
    std::atomic_ref(rings_.header().creator.consumed).store(replies_.position(), std::memory_order_release);
    sort(head, std::span(record_).subspan(sizeof(head), head.record.word));
  }
  if (any) sorted_.notify_all();
}

void Context::sort(const Head& head, std::span<const std::byte> body) {
  const auto port = static_cast<std::uint32_t>(head.record.tag);
  const std::uint32_t user = head.record.control & vrdma::control_user_mask;
  if (port == reply_port) {
    const auto found = pending_.find(head.sequence);
    if (found == pending_.end() || !is_reply(head, found->second->request, head.sequence)) return;
    Pending& pending = *found->second;
    const auto outcome = take_reply(head, body, pending.reply);
    pending.status = outcome ? 0 : value(outcome.error());
    pending.done = true;
    return;
  }
  auto found = mailboxes_.find(port);
  if (found == mailboxes_.end()) {
    if (binding_ == 0) return;  // for a port that has just been unbound
    found = mailboxes_.emplace(port, std::make_shared<Mailbox>()).first;
    found->second->datagrams_max_ = 1024;
  }
  Mailbox& mailbox = *found->second;
  const bool from_service = head.source_context == host_context;
  if (!from_service && mailbox.queue_.size() >= mailbox.datagrams_max_) {
    ++mailbox.dropped_;
    return;
  }
  mailbox.queue_.push_back({{head.source_context, head.source_port}, user, head.sequence, head.status, {body.begin(), body.end()}});
  if (mailbox.queue_.size() == 1 && mailbox.news_) ::eventfd_write(mailbox.news_.get(), 1);
}

// --- sleep ----------------------------------------------------------------------------------------------------

void Context::drain_wake_pipe() {
  std::array<std::byte, 256> stale;
  while (::read(wake_.get(), stale.data(), stale.size()) == static_cast<ssize_t>(stale.size())) {
  }
  // Who polls a mailbox's descriptor learns of the service's end from the socket; here is where it becomes an error.
  pollfd end{socket_.fd(), 0, 0};
  if (::poll(&end, 1, 0) > 0 && (end.revents & (POLLHUP | POLLERR)) && replies_.empty()) dead_ = true;
}

// While a mailbox exists somebody may be polling: the service then wakes us for every record.
void Context::set_waiting() {
  const bool waiting = watched_ || binding_ != 0 || !mailboxes_.empty();
  std::atomic_ref(rings_.header().creator.waiting).store(waiting ? 1 : 0, std::memory_order_relaxed);
  store_load_fence();  // C4: pairs with the service's fence K1 between a record and its look at `waiting`
}

void Context::sleep(Lock& lock, int timeout_ms) {
  if (watched_) {
    if (timeout_ms < 0)
      sorted_.wait(lock);
    else
      sorted_.wait_for(lock, std::chrono::milliseconds(timeout_ms));
    return;
  }
  watched_ = true;
  set_waiting();
  if (replies_.empty()) {
    pollfd sources[] = {{wake_.get(), POLLIN, 0}, {socket_.fd(), 0, 0}};
    lock.unlock();
    ::poll(sources, std::size(sources), timeout_ms);
    lock.lock();
    drain_wake_pipe();
  }
  watched_ = false;
  set_waiting();
  pump();
  sorted_.notify_all();  // somebody else watches on
}

template <class Done>
Status Context::wait(Lock& lock, int timeout_ms, Done&& done) {
  const std::uint64_t until_ns = timeout_ms < 0 ? ~std::uint64_t{0} : monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * 1'000'000u;
  for (Backoff backoff;;) {
    pump();
    if (done()) return vrdma::ok();
    if (dead_) return Errno{EIO};
    const std::uint64_t now_ns = timeout_ms < 0 ? 0 : monotonic_ns();
    if (now_ns >= until_ns) return Errno{ETIMEDOUT};
    if (!backoff.tired()) {
      lock.unlock();
      backoff.idle();
      lock.lock();
    } else {
      sleep(lock, timeout_ms < 0 ? -1 : static_cast<int>((until_ns - now_ns + 999'999) / 1'000'000));
    }
  }
}

}  // namespace vmci
