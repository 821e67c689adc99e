// The TCP carrier's connections: who is dialed and let in, when one is given up, and which sockets are looked at.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "vmci_channel/arch.hpp"
#include "vmkernel_svc/hosts/address.hpp"
#include "vmkernel_svc/log/log.hpp"
#include "vmkernel_svc/remote/peer_filter.hpp"
#include "vmkernel_svc/remote/tcp_carrier.hpp"

namespace vrdma::remote {

namespace {
constexpr std::uint64_t look_ns = 50'000'000, quiet_look_ns = 200'000'000, alive_ns = 200'000'000;
// A host that could not be reached is tried again and again at first: a SYN that was lost is sent again after 1 s by the kernel, and later and
// later, but whoever waits for an answer gives up after 5 s of silence. Each try but the second is longer than the one before: on a way whose queues
// are deep an answer may take seconds, and none would come in time.
constexpr std::uint64_t connect_ns = 300'000'000, connects_in_haste = 5;
// What of ours is acknowledged counts as long as something that comes, after nothing came: a kernel takes bytes for a service that stands still.
constexpr std::uint64_t unheard_max_ns = 10'000'000'000;
constexpr std::uint64_t mute_max_ns = 3'000'000'000, shake_ns = 10'000'000'000, pause_min_ns = 50'000'000, pause_max_ns = 1'000'000'000;
// Connections that are cut within this time of each other while something is stuck: not what one cable, or one host that stood still, does.
constexpr std::uint64_t cut_again_ns = 20'000'000'000;
constexpr int mute_shakes_max = 3;  // in a row
constexpr int small_segment_bytes = 1220;  // TCP's payload of a packet that every network passes which may carry IPv6 (RFC 8200, 5)
constexpr std::uint64_t strange_patience_ns = 2'000'000'000;
constexpr std::uint64_t accept_pause_ns = 100'000'000;
constexpr std::size_t strangers_max = 64;  // besides as many as there are hosts

socklen_t address_of(const std::string& text, std::uint16_t port, sockaddr_storage& address) {  // 0: not an address
  address = {};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  if (::inet_pton(AF_INET, text.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    return sizeof(v4);
  }
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  if (::inet_pton(AF_INET6, text.c_str(), &v6.sin6_addr) != 1) return 0;
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(port);
  return sizeof(v6);
}

const sockaddr* generic(const sockaddr_storage& address) { return reinterpret_cast<const sockaddr*>(&address); }

// How long a connect may take, of so many with the last of them: 300, 300, 600, 1200, 2400 ms, and as long as anything.
std::uint64_t connect_max_ns(std::uint64_t connects) {
  return connects <= 2 ? connect_ns : connects <= connects_in_haste ? connect_ns << (connects - 2) : shake_ns;
}
}  // namespace

void TcpCarrier::listen() {
  sockaddr_storage address;
  const socklen_t bytes = address_of(here_.address, here_.port, address);
  listener_.reset(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (bytes != 0 && !listener_)
    throw std::runtime_error(fmt::format("cannot make a socket for other hosts ({}): {}", std::strerror(errno),
                                         errno == EAFNOSUPPORT ? "give the service its network (docs/hosts.md, \"As a service\")"
                                                                                 : "raise the limit of open files"));
  const int on = 1;  // a service that takes another's place listens where that one's connections still linger
  ::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const bool bound = bytes != 0 && ::bind(listener_.get(), generic(address), bytes) == 0;
  if (bound) find_hosts();  // it is closed to strangers from its beginning
  if (!bound || ::listen(listener_.get(), 256) != 0) {
    const int why = bytes == 0 ? EINVAL : errno;
    throw std::runtime_error(fmt::format("cannot listen at {} port {} ({}): {}", here_.address, here_.port, std::strerror(why),
                                         why == EADDRINUSE      ? "is another vrdmad there?"
                                         : why == EADDRNOTAVAIL ? "no interface of this host has that address, or it cannot be used yet (an IPv6 address: \"tentative\" in \"ip address\"); give one that it has as \"address\""
                                                                : "give another address or port"));
  }
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  if (!epoll_ || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0)
    throw std::runtime_error("cannot watch the carrier's sockets: too many open files?");
}

// Who may connect, and whom we connect to.
void TcpCarrier::find_hosts() {
  for (const LidHolder& holder : directory_->holders()) find(holder.host);
  std::vector<std::string> addresses;
  const std::uint64_t now = vmci::monotonic_ns();
  for (auto& [id, link] : links_) {
    const auto host = directory_->host(id);
    if (host) addresses.push_back(host->address);
    if (!link->connection) continue;
    if (!host || host->expired) disconnect(*link, now);
    else if (connects_elsewhere(*link, *host)) disconnect(*link, now), link->connects = link->pause_ns = 0, link->dial_at_ns = now;
  }
  close_to_strangers(addresses);
  next_look_ns_ = 0;
}

// To where it was before it moved: nobody may answer there, and that takes long to be seen.
bool TcpCarrier::connects_elsewhere(const Link& link, const PeerHost& host) {
  const auto& sought = link.connection->peer();
  return link.connection->state() != TcpConnection::State::open && sought && (sought->address != host.address || sought->carrier_port != host.carrier_port);
}

void TcpCarrier::close_to_strangers(const std::vector<std::string>& hosts) {
  const unsigned bits = accept_only(listener_.get(), hosts);
  if (std::exchange(compared_bits_, bits) == bits) return;  // said already
  if (bits == 0) log::warn("the carrier's port cannot be closed to strangers ({}): let a firewall do it (docs/hosts.md)", std::strerror(errno));
  else if (bits != address_bits(here_.address.find(':') != std::string::npos))
    log::warn("the carrier's port is closed only to who differs from all {} hosts in the first {} bits of an address: the kernel has no room for more (net.core.optmem_max, "
              "docs/hosts.md)", hosts.size(), bits);
}

TcpCarrier::Link* TcpCarrier::find(HostId id) {
  if (const auto known = links_.find(id); known != links_.end()) return known->second.get();
  const auto host = directory_->host(id);
  if (!host) return nullptr;
  auto link = std::make_unique<Link>();
  link->id = id;
  link->name = host->name;
  link->dials = here_.name < host->name;
  link->gauge = gauge(id);
  return links_.emplace(id, std::move(link)).first->second.get();
}

void TcpCarrier::dial(Link& link, std::uint64_t now) {
  const auto host = directory_->host(link.id);
  if (!host || !host->reachable || host->expired) return;
  link.pause_ns = std::clamp<std::uint64_t>(link.pause_ns * 2, pause_min_ns, pause_max_ns);
  link.dial_at_ns = now + link.pause_ns;
  sockaddr_storage theirs, ours;
  const socklen_t bytes = address_of(host->address, host->carrier_port, theirs), our_bytes = address_of(here_.address, 0, ours);
  if (bytes == 0 || theirs.ss_family != ours.ss_family) return;
  vmci::UniqueFd socket(::socket(theirs.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (const int why = socket ? 0 : errno; std::exchange(link.no_socket, why) != why && why != 0)
    log::warn("cannot make a socket to connect to host {} ({}): raise the limit of open files", link.name, std::strerror(why));
  if (socket && link.gauge->small_packets.load(std::memory_order_relaxed)) ::setsockopt(socket.get(), IPPROTO_TCP, TCP_MAXSEG, &small_segment_bytes, sizeof(small_segment_bytes));
  // From the address that the other host knows us by.
  if (!socket || ::bind(socket.get(), generic(ours), our_bytes) != 0 || (::connect(socket.get(), generic(theirs), bytes) != 0 && errno != EINPROGRESS)) {
    if (socket) link.gauge->connect_error.store(errno, std::memory_order_relaxed);
    return;
  }
  ++link.connects;
  link.connection = std::make_unique<TcpConnection>(context_, std::move(socket), host, now);
  link.watched = 0;
  link.mute_ns = link.unheard_ns = link.proven_bytes = 0;
  watch(*link.connection, link.watched);
}

void TcpCarrier::accept(std::uint64_t now) {
  constexpr int at_once = 4;  // whoever knocks all the time is let in at a bounded rate
  for (int left = at_once; left > 0; --left) {
    vmci::UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN) pause_accepting(errno, now);
      return;
    }
    not_accepted_ = 0;
    if (strangers_.size() >= strangers_max + links_.size()) {
      counters_.refused_connections.fetch_add(1, std::memory_order_relaxed);
      dispose(std::move(strangers_.front().connection));
      strangers_.erase(strangers_.begin());
    }
    strangers_.push_back({std::make_unique<TcpConnection>(context_, std::move(socket), nullptr, now), 0});
    watch(*strangers_.back().connection, strangers_.back().watched);
  }
}

// Out of descriptors, most likely: those who wait get their turn when there are some, and are not looked at all the time until then.
void TcpCarrier::pause_accepting(int why, std::uint64_t now) {
  if (std::exchange(not_accepted_, why) != why) {
    static constinit log::Sparing sparing;
    sparing.warn("cannot accept a connection of another host ({}): raise the limit of open files", std::strerror(why));
  }
  watch_listener(false);
  accept_at_ns_ = now + accept_pause_ns;
  next_look_ns_ = std::min(next_look_ns_, accept_at_ns_);
}

void TcpCarrier::watch_listener(bool on) {
  epoll_event event{};
  event.events = on ? EPOLLIN : 0u;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
}

void TcpCarrier::watch(TcpConnection& connection, std::uint32_t& watched) {
  const std::uint32_t wanted = EPOLLIN | (connection.wants_to_write() ? EPOLLOUT : 0u);
  if (wanted == watched) return;
  epoll_event event{};
  event.events = wanted;
  event.data.ptr = &connection;
  ::epoll_ctl(epoll_.get(), watched == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, connection.socket(), &event);
  watched = wanted;
}

void TcpCarrier::dispose(std::unique_ptr<TcpConnection> connection) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection->socket(), nullptr);
  disposed_.push_back(std::move(connection));
}

// Of the host that it is, or was to be. That the keys differ is said once until a connection with it stands, and not before it has lasted: where
// hosts have certificates the key is new with each session of theirs, which one of the two may know before the other.
void TcpCarrier::count_strange(const TcpConnection& connection, HostId host) {
  gauge(host)->unauthenticated.fetch_add(1, std::memory_order_relaxed);
  Link* const link = find(host);
  if (link == nullptr || link->greeted || connection.why() != TcpConnection::Why::strange) return;
  const std::uint64_t now = vmci::monotonic_ns();
  if (link->strange_since_ns == 0) link->strange_since_ns = now;
  if (now - link->strange_since_ns < strange_patience_ns || std::exchange(link->strange_said, true)) return;
  log::warn("no connection with host {}: the two do not have the same secret or key, its vrdmad is much older, or somebody else answers for it (\"vrdma doctor {}\" looks again)", link->name, link->name);
}

// Before there was TLS records had the port to themselves: such a service cannot say who it is, in a way that we understand.
void TcpCarrier::note_other_protocol(const TcpConnection& connection) {
  sockaddr_storage theirs{};
  socklen_t bytes = sizeof(theirs);
  if (::getpeername(connection.socket(), reinterpret_cast<sockaddr*>(&theirs), &bytes) != 0) return;
  char text[INET6_ADDRSTRLEN] = "";
  const void* const address = theirs.ss_family == AF_INET6 ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in6&>(theirs).sin6_addr)
                                                           : &reinterpret_cast<const sockaddr_in&>(theirs).sin_addr;
  if (::inet_ntop(theirs.ss_family, address, text, sizeof(text)) == nullptr) return;
  for (auto& [id, link] : links_) {
    const auto host = directory_->host(id);
    if (!host || link->greeted || !hosts::same_address(host->address, text) || link->gauge->other_protocol.exchange(true, std::memory_order_relaxed)) continue;
    static constinit log::Sparing sparing;
    sparing.warn("host {} ({}) connects and does not speak our protocol: an older vrdmad? Run one version on all hosts", link->name, text);
  }
}

void TcpCarrier::disconnect(Link& link, std::uint64_t now) {
  if (link.greeted) {
    link.gauge->reconnects.fetch_add(1, std::memory_order_relaxed);
    log::info("host {} has gone, or the way to it: its connection has ended", link.name);
  }
  note_end(link, now);
  link.gauge->connect_error.store(link.connection->connect_error(), std::memory_order_relaxed);
  dispose(std::move(link.connection));
  link.greeted = link.knows_us = false;
  link.watched = 0;
  link.sent = 0;
  link.bypassing = false;
  link.acknowledge_at_ns = never;
  link.gauge->connected.store(false, std::memory_order_relaxed);
  link.dial_at_ns = std::max(link.dial_at_ns, now + link.pause_ns);
  next_look_ns_ = std::min(next_look_ns_, now + look_ns);
}

// Something was stuck on it: our records, or the other's, whose signs of life wait behind them; or, where certificates are exchanged, these.
void TcpCarrier::note_end(Link& link, std::uint64_t now) {
  using State = TcpConnection::State;
  const bool shook = link.connection->state() == State::shaking_hands && link.mute_ns > shake_ns;
  const bool stood = link.greeted || (link.connection->state() == State::open && link.mute_ns > mute_max_ns);  // the other's hello may be among what got stuck
  if (!stood && !shook) return;
  const bool stuck = shook || link.sent != 0 || link.mute_ns > mute_max_ns;
  link.doubted |= stuck;
  // A host that stands still cuts one connection, and leaves the handshake of the next, which its kernel takes, without an answer.
  link.mute_shakes = shook ? link.mute_shakes + 1 : 0;
  const bool again = shook ? link.mute_shakes >= mute_shakes_max : stuck && link.cut_ns != 0 && now - link.cut_ns < cut_again_ns;
  link.cut_ns = stuck && !shook ? now : 0;
  if (!link.dials) return;  // he who does makes the packets small, and sees the same
  if (link.gauge->small_packets.exchange(again, std::memory_order_relaxed) || !again) return;
  log::warn("one connection with host {} after the other stands and is cut again while something is under way: packets are lost between the two, perhaps the large ones (\"Large packets are "
            "lost\" in docs/hosts.md). The next ones are of small packets", link.name);
}

// The connection stands: we say who we are, and it will. By itself: with records it could be part of a packet that is too large for the way.
void TcpCarrier::opened(Link& link, std::uint64_t now) {
  link.greeted = link.knows_us = false;
  link.sent = 0;
  link.mute_ns = link.unheard_ns = link.proven_bytes = 0;
  link.opened_ns = now;
  link.encrypts = link.connection->encrypts();
  say(link, LinkKind::hello, now);
  link.connection->flush();
}

bool TcpCarrier::poll(std::uint64_t now) {
  epoll_event events[32];
  const int count = ::epoll_wait(epoll_.get(), events, 32, 0);
  for (int i = 0; i < count; ++i) {
    void* const which = events[i].data.ptr;
    if (which == nullptr) {
      accept(now);
      continue;
    }
    const auto known = std::find_if(links_.begin(), links_.end(), [&](const auto& entry) { return entry.second->connection.get() == which; });
    if (known != links_.end()) {
      ready(*known->second, events[i].events, now);
      continue;
    }
    const auto stranger = std::find_if(strangers_.begin(), strangers_.end(), [&](const auto& entry) { return entry.connection.get() == which; });
    if (stranger != strangers_.end()) ready(static_cast<std::size_t>(stranger - strangers_.begin()), now);
  }
  disposed_.clear();
  flush();
  return count > 0;
}

void TcpCarrier::ready(std::size_t index, std::uint64_t now) {
  TcpConnection& connection = *strangers_[index].connection;
  connection.go_on();
  if (connection.state() == TcpConnection::State::shaking_hands) return watch(connection, strangers_[index].watched);
  Stranger stranger = std::move(strangers_[index]);
  strangers_.erase(strangers_.begin() + static_cast<std::ptrdiff_t>(index));
  const bool is_open = connection.state() == TcpConnection::State::open;
  // A host that was ended, or gave up, while it proved who it is has proved nothing else. Of who says less than that nothing is known.
  const bool hung_up = connection.why() == TcpConnection::Why::hung_up && connection.peer();
  if (hung_up || connection.why() == TcpConnection::Why::failed) return dispose(std::move(stranger.connection));
  if (is_open && !directory_->host(connection.peer()->id)) return dispose(std::move(stranger.connection));  // gone while its handshake lasted
  Link* const link = is_open ? find(connection.peer()->id) : nullptr;
  if (link == nullptr || link->dials) {
    counters_.unauthenticated.fetch_add(1, std::memory_order_relaxed);
    if (const auto& claimed = connection.peer(); claimed) count_strange(connection, claimed->id);
    if (!connection.is_tls()) note_other_protocol(connection);
    return dispose(std::move(stranger.connection));
  }
  if (link->connection) disconnect(*link, now);  // it has given up that one, or does not know of it
  link->connection = std::move(stranger.connection);
  link->watched = stranger.watched;
  opened(*link, now);
  ready(*link, 0, now);
}

// Now and then: what the time brings.
//
// A connection on which nothing comes for long is made anew: TCP's own patience is longer. Nothing comes only if nothing lies unread,
// and while we do look: one that is slow is not gone, neither we nor the other. A way that fails in one direction is seen by the host at
// its end, which hangs up. So nobody need judge how fast its own records are acknowledged, and signs of life may wait behind them.
//
// Where queues are deep and packets are lost in them, nothing comes for longer than that, though the way works. So while more is acknowledged than
// signs of life, that counts like something that comes, for a while: neither large packets that are lost nor a way that is cut let so much pass, and a
// service that stands still has its kernel take no more than its buffer.
void TcpCarrier::look(std::uint64_t now) {
  using State = TcpConnection::State;
  const std::uint64_t passed = std::min(now - looked_ns_, 2 * quiet_look_ns);
  looked_ns_ = now;
  bool soon = false;
  for (auto& [id, link] : links_) {
    if (link->greeted && link->doubted && link->connection->delivered_bytes() >= proof_bytes) link->doubted = false;
    const bool open = link->connection && link->connection->state() == State::open;
    const bool unread = open && link->connection->has_unread();
    if (unread) link->mute_ns = link->unheard_ns = 0;
    const std::uint64_t delivered = open ? link->connection->delivered_bytes() : 0;
    const bool takes = delivered >= link->proven_bytes + proof_bytes && link->unheard_ns < unheard_max_ns;
    if (takes || link->mute_ns == 0) link->proven_bytes = std::max(link->proven_bytes, delivered);
    if (unread || takes) {
      link->mute_ns = 0;
      if (!link->doubted) link->gauge->silent_ns.store(0, std::memory_order_relaxed);
    } else {
      link->mute_ns += passed;
      link->gauge->silent_ns.fetch_add(passed, std::memory_order_relaxed);
    }
    if (!unread) link->unheard_ns += passed;
    if (link->connection) {
      const TcpConnection& connection = *link->connection;
      const bool connecting = connection.state() == State::connecting;
      const bool mute = link->mute_ns > (connection.state() == State::open ? mute_max_ns : connecting ? connect_max_ns(link->connects) : shake_ns);
      if (connection.state() == State::broken || mute) {
        disconnect(*link, now);
        if (connecting && mute) link->dial_at_ns = now, link->gauge->connect_error.store(ETIMEDOUT, std::memory_order_relaxed);
      } else if (link->greeted && now - link->said_ns >= alive_ns && !connection.wants_to_write()) say(*link, LinkKind::alive, now);
    }
    if (!link->connection && link->dials && now >= link->dial_at_ns) dial(*link, now);
    soon |= !link->connection ? link->dials : !link->greeted || !link->records.empty();
  }
  while (!strangers_.empty() && now - strangers_.front().connection->since_ns() > shake_ns) {
    dispose(std::move(strangers_.front().connection));
    strangers_.erase(strangers_.begin());
  }
  disposed_.clear();
  if (now >= accept_at_ns_) accept_at_ns_ = never, watch_listener(true);
  next_look_ns_ = std::min(accept_at_ns_, now + (soon ? look_ns : quiet_look_ns));
  flush();
}

}  // namespace vrdma::remote
