#include "vmkernel_svc/remote/tcp_carrier.hpp"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>
#include <utility>

#include "vmci_channel/arch.hpp"
#include "vmkernel_svc/log/log.hpp"

namespace vrdma::remote {

using engine::FarFrame;
using engine::FarFramePtr;

namespace {
constexpr std::uint64_t acknowledge_ns = 5'000'000, acknowledge_bytes = 512 * 1024;
constexpr std::size_t connection_bytes_max = 512 * 1024;     // sealed and not written: what waits longer waits unsealed
constexpr std::int64_t arrived_datagrams_max = 8 << 20;      // bytes; what is beyond it is lost
constexpr std::int64_t turn_bytes = 256 * 1024;              // read in a turn
constexpr std::uint64_t proven_ns = 1'000'000'000;           // of a connection: what was to be sent again is under way long since
// Others than the connections' peers are served by the same thread: while nothing comes the sockets are looked at now and then.
constexpr std::uint64_t idle_poll_us = 20, busy_ns = 200'000;
}  // namespace

TcpCarrier::TcpCarrier(Place here, std::shared_ptr<Directory> directory)
    : here_(std::move(here)), directory_(std::move(directory)),
      context_(here_.name, here_.encrypt, [this](std::string_view name) { return directory_->host_named(name); }) {
  while (first_run_ == 0) {
    if (::getrandom(&first_run_, sizeof(first_run_), 0) != sizeof(first_run_)) throw std::runtime_error("no random numbers: getrandom must be allowed");
    first_run_ >>= 1;  // none of those after it is 0
  }
  listen();
  directory_->when_changed([changed = changed_] { changed->store(true); });
}

TcpCarrier::~TcpCarrier() = default;

void TcpCarrier::send(FarFramePtr frame) {
  const auto found = links_.find(frame->host);
  if (found == links_.end() || frame->session != found->second->session) {
    return count_queued(*gauge(frame->host), *frame, -1);
  }
  Link& link = *found->second;
  link.records.push_back({std::move(frame), ++link.last_number});
  want_pump(link);
}

FarFramePtr TcpCarrier::receive() {
  if (arrivals_.empty()) return nullptr;
  FarFramePtr frame = std::move(arrivals_.front());
  arrivals_.pop_front();
  if (frame->record().kind != engine::FarKind::news)
    count_arrived(*links_.at(frame->host)->gauge, *frame, -1);
  return frame;
}

std::shared_ptr<Gauge> TcpCarrier::gauge(HostId host) {
  auto& known = gauges_[host];
  if (!known) known = std::make_shared<Gauge>();
  return known;
}

bool TcpCarrier::encrypts(HostId host) const {
  const auto found = links_.find(host);
  return found != links_.end() && found->second->encrypts;
}

std::string TcpCarrier::disagreement(HostId host) const {
  const auto found = links_.find(host);
  return found != links_.end() ? found->second->disagreement : "";
}

bool TcpCarrier::turn() {
  flush();
  const bool changed = changed_->load(std::memory_order_relaxed);
  if (!changed && vmci::cycles() < next_poll_cycles_) return false;
  const std::uint64_t now = vmci::monotonic_ns();
  if (changed && changed_->exchange(false)) find_hosts();
  if (now >= next_look_ns_) look(now);
  const bool worked = poll(now);
  if (worked) busy_until_ns_ = now + busy_ns;
  next_poll_cycles_ = now < busy_until_ns_ ? 0 : vmci::cycles() + idle_poll_us * vmci::cycles_per_us();
  acknowledge_due(now);
  return worked;
}

void TcpCarrier::flush() {
  if (to_pump_.empty()) return;
  const std::uint64_t now = vmci::monotonic_ns();
  busy_until_ns_ = now + busy_ns;  // an answer is on its way, more likely than not
  next_poll_cycles_ = 0;
  for (Link* const link : std::exchange(to_pump_, {})) {
    link->to_pump = false;
    pump(*link, now);
  }
}

// --- sending --------------------------------------------------------------------------------------------------

void TcpCarrier::want_pump(Link& link) {
  if (std::exchange(link.to_pump, true)) return;
  to_pump_.push_back(&link);
}

void TcpCarrier::transmit(Link& link, LinkKind kind, std::uint64_t number, std::shared_ptr<FarFrame> frame, std::uint64_t now) {
  LinkHead head{};
  head.kind = kind;
  if (kind == LinkKind::hello) {
    head.run = run_of(link), head.peer_run = link.run, head.features = link_features;
    head.small_packets = link.dials && link.gauge->small_packets.load(std::memory_order_relaxed);
    if (const auto theirs = directory_->written(link.id)) {
      const LidRange ours = directory_->ours();
      head.lids[0] = ours.first, head.lids[1] = ours.last;
      head.peer_lids[0] = theirs->first, head.peer_lids[1] = theirs->last;
    }
  }
  head.number = number;
  head.acknowledged = link.expected - 1;
  link.acknowledge_at_ns = never;
  link.unacknowledged_bytes = 0;
  link.said_ns = now;
  link.connection->send(head, std::move(frame));
}

void TcpCarrier::say(Link& link, LinkKind kind, std::uint64_t now) {
  transmit(link, kind, 0, FarFrame::make(0), now);
  want_pump(link);
}

bool TcpCarrier::bypass_next(Link& link, const Record& record) {
  if (!link.bypass->send(record.number, link.expected - 1, *record.frame)) return false;
  link.acknowledge_at_ns = never;
  link.unacknowledged_bytes = 0;
  link.gauge->bypassed_records.fetch_add(1, std::memory_order_relaxed);
  link.gauge->bypassed_bytes.fetch_add(record.frame->whole_bytes(), std::memory_order_relaxed);
  return true;
}

// The next record, if there is one that can go now.
bool TcpCarrier::send_next(Link& link, std::uint64_t now) {
  if (!link.greeted || link.sent == link.records.size() || link.connection->state() != TcpConnection::State::open) return false;
  if (link.bypass != nullptr && link.knows_us && !link.bypassing && link.bypass->open()) {
    if (link.sent != 0) return false;  // till they are acknowledged
    link.bypassing = true;
  }
  const Record& record = link.records[link.sent];
  if (link.bypassing ? !bypass_next(link, record) : link.connection->outgoing_bytes() >= connection_bytes_max) return false;
  ++link.sent;
  if (record.number <= link.furthest_sent) link.gauge->resent.fetch_add(1, std::memory_order_relaxed);
  link.furthest_sent = std::max(link.furthest_sent, record.number);
  if (!link.bypassing) transmit(link, LinkKind::record, record.number, record.frame, now);
  return true;
}

// What there is room for in the connection goes to it, and as much of that to the socket as it takes.
bool TcpCarrier::pump(Link& link, std::uint64_t now) {
  if (!link.connection || link.connection->state() != TcpConnection::State::open) return false;
  TcpConnection& connection = *link.connection;
  bool worked = false;
  do {
    while (send_next(link, now)) {
    }
    if (link.bypassing) link.bypass->flush();
    worked |= connection.flush();
  } while (!connection.wants_to_write() && connection.state() == TcpConnection::State::open && send_next(link, now));
  if (connection.state() == TcpConnection::State::broken || connection.worn()) {
    disconnect(link, now);
    return true;
  }
  watch(connection, link.watched);
  return worked;
}

// --- receiving ------------------------------------------------------------------------------------------------

void TcpCarrier::ready(Link& link, std::uint32_t events, std::uint64_t now) {
  using State = TcpConnection::State;
  TcpConnection& connection = *link.connection;
  if (connection.state() == State::connecting || connection.state() == State::shaking_hands) {
    connection.go_on();
    if (connection.state() == State::open) opened(link, now);
  }
  LinkHead head;
  std::int64_t budget = turn_bytes;
  // All that was read is taken, as nobody would tell of it again; of what was not, epoll does.
  if (arrivals_.size() < arrivals_max)
    while (FarFramePtr came = connection.receive(head, budget)) frame(link, head, std::move(came), now);
  if (budget != turn_bytes) bytes_came(link);
  if (connection.state() == State::broken) {
    if (connection.why() == TcpConnection::Why::strange) {
      counters_.unauthenticated.fetch_add(1, std::memory_order_relaxed);
      count_strange(connection, link.id);
    }
    if (connection.why() == TcpConnection::Why::malformed) counters_.malformed.fetch_add(1, std::memory_order_relaxed);
    return disconnect(link, now);
  }
  if ((events & EPOLLOUT) != 0) pump(link, now);
  else watch(connection, link.watched);
}

void TcpCarrier::frame(Link& link, const LinkHead& head, FarFramePtr frame, std::uint64_t now) {
  if (head.kind == LinkKind::hello) return hello(link, head, now);
  if (!link.greeted || (head.kind != LinkKind::record && head.kind != LinkKind::alive)) return link.connection->break_off(TcpConnection::Why::malformed);
  link.knows_us = true;
  acknowledged(link, head.acknowledged);
  heard(link, head.kind, now);
  if (head.kind != LinkKind::record) return;
  if (head.number > link.expected) return link.connection->break_off(TcpConnection::Why::malformed);
  came(link, head.number, std::move(frame), now);
}

// On a way that loses all large packets connection after connection comes about, with hello and signs of life, and no record that is larger
// ever comes through. So where one was cut while something was stuck, what counts is that ours are acknowledged, or so much of them is delivered
// (look()), or, if there are none, that the other's come, or its signs of life go on: those of a host whose records are stuck wait behind them.
void TcpCarrier::heard(Link& link, LinkKind kind, std::uint64_t now) {
  if (link.records.empty() && (kind == LinkKind::record || now - link.opened_ns >= proven_ns)) link.doubted = false;
  if (!link.doubted) link.gauge->silent_ns.store(0, std::memory_order_relaxed);
}

// Of a frame: one of 64 KiB takes longer than a host may be mute where the way is narrow, and its signs of life wait behind that.
void TcpCarrier::bytes_came(Link& link) {
  link.mute_ns = link.unheard_ns = 0;
  if (link.records.empty() && link.connection->received_bytes() >= proof_bytes) link.doubted = false;
  if (!link.doubted) link.gauge->silent_ns.store(0, std::memory_order_relaxed);
}

// For frames from the connection and from the bypass.
void TcpCarrier::came(Link& link, std::uint64_t number, FarFramePtr frame, std::uint64_t now) {
  if (link.acknowledge_at_ns == never) {
    link.acknowledge_at_ns = now + acknowledge_ns;
    acknowledge_at_ns_ = std::min(acknowledge_at_ns_, link.acknowledge_at_ns);
  }
  if (number < link.expected) return;  // a second time
  link.unacknowledged_bytes += frame->whole_bytes();
  take(link, std::move(frame), now);
}

void TcpCarrier::hello(Link& link, const LinkHead& head, std::uint64_t now) {
  if (head.run == 0 || link.greeted) return link.connection->break_off(TcpConnection::Why::malformed);
  link.greeted = true;
  link.mute_shakes = 0;
  if (!link.dials) link.gauge->small_packets.store(head.small_packets != 0, std::memory_order_relaxed);
  link.gauge->unauthenticated.store(0, std::memory_order_relaxed);
  link.gauge->other_protocol.store(false, std::memory_order_relaxed);
  link.strange_since_ns = 0;
  link.strange_said = false;
  compare_lids(link, head);
  link.pause_ns = link.connects = 0;
  link.sent = 0;
  if (head.run != link.run) {
    link.run = head.run;
    forget_records(link);
    link.expected = 1;
    link.last_number = link.furthest_sent = 0;
    ++link.session;
    link.bypass = nullptr;  // it led to the other run
    link.bypassing = false;
    link.doubted = false;  // the other one was ended, not its connection
    link.cut_ns = 0;
    log::info("host {} is there (over tcp{}{})", link.name, link.connection->encrypts() ? ", encrypted" : "", link.session == 1 ? "" : ", its service started anew");
    FarFramePtr news = FarFrame::make(0);
    news->host = link.id;
    news->session = link.session;
    news->record().bytes = head.features;
    arrivals_.push_back(std::move(news));
  } else if (head.peer_run == run_of(link)) {  // else it does not know of this session, and counts none of its records
    log::info("host {} is there again", link.name);
    link.sent = link.records.size();
    const bool doubted = link.doubted;
    acknowledged(link, head.acknowledged);
    link.doubted = doubted;  // they came on the connection that was cut
    link.sent = 0;
  }
  if (!link.doubted) link.gauge->silent_ns.store(0, std::memory_order_relaxed);
  void_what_nobody_repeats(link);
  link.gauge->connected.store(true, std::memory_order_relaxed);
  link.gauge->connect_error.store(0, std::memory_order_relaxed);
  say(link, LinkKind::alive, now);
}

// Messages to LIDs that one host gives to another one than the others do end nowhere, as if that host were silent.
void TcpCarrier::compare_lids(Link& link, const LinkHead& hello) {
  const auto written = directory_->written(link.id);
  std::string differs;
  const auto compare = [&](const LidRange& here, const std::uint16_t (&there)[2], const std::string& whose) {
    if (there[0] == 0 || here == LidRange{there[0], there[1]}) return;
    differs += fmt::format("{}{} has LIDs {}-{} by the configuration of {}, {}-{} by that of {}", differs.empty() ? "" : "; ", whose, there[0], there[1], link.name,
                           here.first, here.last, here_.name);
  };
  if (written) compare(directory_->ours(), hello.peer_lids, here_.name), compare(*written, hello.lids, link.name);
  if (!differs.empty() && differs != link.disagreement)
    log::warn("{}: programs of the two hosts may not meet until \"hosts\" in \"remote\" is the same on all hosts", differs);
  link.disagreement = std::move(differs);
}

// What is to be sent again is so for those who would repeat it: not for datagrams, nor for connections that were closed since. A host may
// have been away for long, and others have done meanwhile what these wanted to, or the opposite.
void TcpCarrier::void_what_nobody_repeats(Link& link) {
  using engine::FarKind;
  std::set<std::pair<std::uint32_t, std::uint32_t>> closed;  // connection and epoch
  for (const auto& entry : link.records)
    if (const auto& record = entry.frame->record(); record.kind == FarKind::close) closed.emplace(record.connection, record.epoch);
  for (const auto& entry : link.records) {
    auto& record = entry.frame->record();
    const bool asks = record.kind == FarKind::request || record.kind == FarKind::more;
    if (record.kind != FarKind::datagram && !(asks && closed.contains({record.connection, record.epoch}))) continue;
    count_queued(*link.gauge, *entry.frame, -1);
    record.kind = FarKind::credit;  // of nothing new
    record.flags = 0;
    record.payload_bytes = 0;
    count_queued(*link.gauge, *entry.frame, 1);
  }
}

void TcpCarrier::forget_records(Link& link) {
  for (const auto& record : link.records) count_queued(*link.gauge, *record.frame, -1);
  link.records.clear();
  link.sent = 0;
}

void TcpCarrier::acknowledged(Link& link, std::uint64_t number) {
  while (link.sent > 0 && link.records.front().number <= number) {
    const auto bytes = link.records.front().frame->whole_bytes();
    count_queued(*link.gauge, *link.records.front().frame, -1);
    link.gauge->sent_bytes.fetch_add(bytes, std::memory_order_relaxed);
    link.gauge->sent_records.fetch_add(1, std::memory_order_relaxed);
    link.records.pop_front();
    --link.sent;
    link.doubted = false;
  }
  if (link.sent == 0 && !link.records.empty()) want_pump(link);  // the bypass may begin
}

void TcpCarrier::take(Link& link, FarFramePtr frame, std::uint64_t now) {
  ++link.expected;
  link.gauge->received_bytes.fetch_add(frame->whole_bytes(), std::memory_order_relaxed);
  link.gauge->received_records.fetch_add(1, std::memory_order_relaxed);
  if (link.unacknowledged_bytes >= acknowledge_bytes) say(link, LinkKind::alive, now);
  if (frame->record().kind == engine::FarKind::datagram && link.gauge->arrived_datagrams.load(std::memory_order_relaxed) > arrived_datagrams_max) return;
  if (frame->record().kind == engine::FarKind::news) return link.connection->break_off(TcpConnection::Why::malformed);  // never between hosts
  frame->host = link.id;
  frame->session = link.session;
  count_arrived(*link.gauge, *frame, 1);
  arrivals_.push_back(std::move(frame));
}

// --- another way ----------------------------------------------------------------------------------------------

bool TcpCarrier::dials(HostId host) const {
  const auto found = links_.find(host);
  return found != links_.end() && found->second->dials;
}

void TcpCarrier::set_bypass(HostId host, Bypass* bypass) {
  Link* const link = find(host);
  if (link == nullptr) return;
  link->bypass = bypass;
  if (std::exchange(link->bypassing, false)) link->sent = 0;
  want_pump(*link);
}

void TcpCarrier::bypass_has_room(HostId host) {
  if (Link* const link = find(host); link != nullptr && link->bypassing) want_pump(*link);
}

// While there is no connection nothing is taken: with the next one it is sent again, from what was acknowledged on. So what has come
// meanwhile may leave a gap before what comes then.
void TcpCarrier::bypassed(HostId host, const Bypass& by, std::uint64_t number, std::uint64_t acknowledged_number, FarFramePtr frame) {
  Link* const link = find(host);
  if (link == nullptr || link->bypass != &by || !link->greeted || number > link->expected) return;
  acknowledged(*link, acknowledged_number);
  came(*link, number, std::move(frame), vmci::monotonic_ns());
}

void TcpCarrier::acknowledge_due(std::uint64_t now) {
  if (now < acknowledge_at_ns_) return;
  acknowledge_at_ns_ = never;
  for (auto& [id, link] : links_) {
    if (now >= link->acknowledge_at_ns) {
      if (link->greeted && link->connection && link->connection->state() == TcpConnection::State::open) say(*link, LinkKind::alive, now);
      else link->acknowledge_at_ns = never;  // the next hello says it
    }
    acknowledge_at_ns_ = std::min(acknowledge_at_ns_, link->acknowledge_at_ns);
  }
  flush();
}

}  // namespace vrdma::remote
