#include "vmkernel_svc/remote/tcp_carrier.hpp"

#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <csignal>
#include <stdexcept>

#include "vmci_channel/arch.hpp"
#include "vmci_channel/backoff.hpp"
#include "vmkernel_svc/remote/tcp_loop.hpp"

namespace vrdma::remote {

using engine::FarFrame;
using engine::FarFramePtr;

TcpCarrier::TcpCarrier(Place here, std::shared_ptr<Directory> directory, std::function<void()> arrived)
    : here_(std::move(here)), directory_(std::move(directory)), arrived_(std::move(arrived)), ucx_(Ucx::load()) {
  wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) throw std::runtime_error("cannot create the carrier's descriptor: too many open files?");
  loop_ = std::make_unique<Loop>(*this);
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "carrier-tcp");
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    loop_->run();
  });
}

TcpCarrier::~TcpCarrier() {
  stopping_.store(true, std::memory_order_release);
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
  thread_.join();
  loop_.reset();
  FarFrame* frame;
  while (outgoing_.pop(frame)) FarFramePtr{frame};
  while (arrivals_.pop(frame)) FarFramePtr{frame};
}

void TcpCarrier::send(FarFramePtr frame) {
  outgoing_.push(frame.release());
  vmci::store_load_fence();  // C1: pairs with C2 in Loop::sleep(): either it sees the frame or we see it asleep
  if (!asleep_.load(std::memory_order_relaxed)) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof(one));
}

FarFramePtr TcpCarrier::receive() {
  FarFrame* frame;
  if (arrivals_.empty() || !arrivals_.pop(frame)) return nullptr;
  FarFramePtr taken(frame);
  if (frame->record().kind != engine::FarKind::news)
    gauge(frame->host)->arrived_bytes.fetch_sub(static_cast<std::int64_t>(frame->whole_bytes()), std::memory_order_relaxed);
  return taken;
}

std::shared_ptr<Gauge> TcpCarrier::gauge(HostId host) {
  const std::lock_guard lock(gauges_mutex_);
  auto& known = gauges_[host];
  if (!known) known = std::make_shared<Gauge>();
  return known;
}

// --- the thread -----------------------------------------------------------------------------------------------

void TcpCarrier::Loop::run() {
  vmci::Backoff backoff;
  while (!carrier_.stopping_.load(std::memory_order_acquire)) {
    bool worked = take_outgoing();
    for (int left = 64; left > 0 && ucx_.worker_progress(worker_) != 0; --left) worked = true;
    const std::uint64_t now = vmci::monotonic_ns();
    worked |= close_broken();
    for (auto& [id, link] : links_) worked |= pump(*link, now);
    if (now >= next_look_ns_) look(now);
    if (news_) {
      news_ = false;
      carrier_.arrived_();
    }
    if (worked)
      backoff.stay_busy();
    else if (!backoff.tired())
      backoff.idle();
    else
      sleep(), backoff.reset();
  }
}

void TcpCarrier::Loop::sleep() {
  carrier_.asleep_.store(true, std::memory_order_relaxed);
  vmci::store_load_fence();  // C2: pairs with C1
  if (carrier_.outgoing_.empty() && !carrier_.stopping_.load(std::memory_order_acquire) && ucx_.worker_arm(worker_) == UCS_OK) {
    const std::uint64_t now = vmci::monotonic_ns();
    std::uint64_t until = next_look_ns_;
    for (const auto& [id, link] : links_)
      if (link->connection && link->acknowledge_at_ns != 0) until = std::min(until, link->acknowledge_at_ns);
    const std::uint64_t wait = until > now ? until - now : 0;
    epoll_event events[4];
    ::epoll_wait(epoll_.get(), events, 4, static_cast<int>((wait + 999'999) / 1'000'000));
    std::uint64_t count;
    [[maybe_unused]] const auto read = ::read(carrier_.wake_.get(), &count, sizeof(count));
  }
  carrier_.asleep_.store(false, std::memory_order_relaxed);
}

bool TcpCarrier::Loop::take_outgoing() {
  bool worked = false;
  FarFrame* raw;
  for (int left = 64; left > 0 && carrier_.outgoing_.pop(raw); --left) {
    FarFramePtr frame(raw);
    worked = true;
    Link* const link = find(frame->host);
    const auto bytes = static_cast<std::int64_t>(frame->whole_bytes());
    if (link == nullptr || frame->session != link->session) {
      carrier_.gauge(frame->host)->queued_bytes.fetch_sub(bytes, std::memory_order_relaxed);
      continue;
    }
    link->records.push_back({std::move(frame), ++link->last_number, false});
  }
  return worked;
}

// --- connections ----------------------------------------------------------------------------------------------

void TcpCarrier::Loop::on_broken(void* argument, ucp_ep_h, ucs_status_t) { static_cast<Connection*>(argument)->broken = true; }

void TcpCarrier::Loop::on_closed(void* request, ucs_status_t, void* argument) {
  static_cast<Connection*>(argument)->closed = true;
  static_cast<Loop*>(static_cast<Connection*>(argument)->loop)->ucx_.request_free(request);
}

void TcpCarrier::Loop::on_connection(ucp_conn_request_h request, void* argument) {
  Loop& loop = *static_cast<Loop*>(argument);
  if (loop.accepted_.size() >= accepted_max + 4 * loop.links_.size()) {
    loop.carrier_.counters_.refused_connections.fetch_add(1, std::memory_order_relaxed);
    loop.ucx_.listener_reject(loop.listener_, request);
    return;
  }
  auto connection = std::make_unique<Connection>();
  connection->loop = &loop;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST | UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.conn_request = request;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {on_broken, connection.get()};
  if (loop.ucx_.ep_create(loop.worker_, &params, &connection->endpoint) != UCS_OK) return;
  loop.accepted_.push_back(std::move(connection));
}

void TcpCarrier::Loop::connect(Link& link, std::uint64_t now) {
  const auto host = carrier_.directory_->host(link.id);
  if (!host || !host->reachable || !link.tagger) return;
  sockaddr_storage address;
  const socklen_t bytes = address_of(host->address, host->carrier_port, address);
  if (bytes == 0) return;
  auto connection = std::make_unique<Connection>();
  connection->loop = this;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {on_broken, connection.get()};
  params.sockaddr = {reinterpret_cast<const sockaddr*>(&address), bytes};
  link.connected_at_ns = link.progress_ns = now;
  if (ucx_.ep_create(worker_, &params, &connection->endpoint) != UCS_OK) return retry_later(link, now);
  link.connection = std::move(connection);
  link.unsent = 0;
  say(link, LinkKind::hello, link.run != 0 ? link.run : link.candidate);
}

void TcpCarrier::Loop::retry_later(Link& link, std::uint64_t now) {
  link.pause_ns = std::clamp<std::uint64_t>(link.pause_ns * 2, pause_min_ns, pause_max_ns);
  link.connect_at_ns = now + link.pause_ns;
}

void TcpCarrier::Loop::close(std::unique_ptr<Connection> connection) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  params.cb.send = on_closed;
  params.user_data = connection.get();
  void* const request = ucx_.ep_close_nbx(connection->endpoint, &params);
  if (!UCS_PTR_IS_PTR(request)) connection->closed = true;
  closing_.push_back(std::move(connection));
}

bool TcpCarrier::Loop::close_broken() {
  bool worked = false;
  for (std::size_t i = 0; i < accepted_.size(); ++i) {
    if (!accepted_[i]->broken) continue;
    close(std::move(accepted_[i]));
    accepted_[i--] = std::move(accepted_.back());
    accepted_.pop_back();
    worked = true;
  }
  for (auto& [id, link] : links_) {
    if (!link->connection || !link->connection->broken) continue;
    disconnect(*link, vmci::monotonic_ns());
    worked = true;
  }
  // A connection may only go when nothing that was sent on it is under way any more.
  std::erase_if(closing_, [](const auto& connection) { return connection->closed && connection->sends == 0; });
  return worked;
}

void TcpCarrier::Loop::disconnect(Link& link, std::uint64_t now) {
  close(std::move(link.connection));
  link.gauge->connected.store(false, std::memory_order_relaxed);
  link.gauge->reconnects.fetch_add(1, std::memory_order_relaxed);
  retry_later(link, now);
}

// --- sending --------------------------------------------------------------------------------------------------

void TcpCarrier::Loop::on_sent(void* request, ucs_status_t, void* argument) {
  std::unique_ptr<Send> send(static_cast<Send*>(argument));
  --send->connection->sends;
  send->loop->ucx_.request_free(request);
}

// `frame`, sealed, on the link's connection; it is shared because an acknowledgement may come before UCX is done with it.
void TcpCarrier::Loop::transmit(Link& link, const std::shared_ptr<FarFrame>& frame) {
  auto send = std::make_unique<Send>(Send{this, link.connection.get(), frame});
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.flags = UCP_AM_SEND_FLAG_EAGER;
  params.cb.send = on_sent;
  params.user_data = send.get();
  void* const request = ucx_.am_send_nbx(link.connection->endpoint, am_id, nullptr, 0, frame->whole(), frame->whole_bytes(), &params);
  if (UCS_PTR_IS_ERR(request)) {
    link.connection->broken = true;
    return;
  }
  if (!UCS_PTR_IS_PTR(request)) return;
  ++link.connection->sends;
  static_cast<void>(send.release());
}

void TcpCarrier::Loop::seal(Link& link, FarFrame& frame, LinkKind kind, std::uint64_t number, std::uint64_t your_run) {
  LinkHead head{};
  head.magic = link_magic;
  head.version = link_version;
  head.kind = kind;
  head.run = run_;
  head.your_run = your_run;
  head.number = number;
  head.acknowledged = link.expected - 1;
  std::memcpy(head.name, carrier_.here_.name.data(), carrier_.here_.name.size());
  head.bytes = static_cast<std::uint32_t>(frame.whole_bytes() - sizeof(head));
  std::memcpy(frame.whole(), &head, sizeof(head));
  head.tag = (*link.tagger)({frame.whole(), frame.whole_bytes()});
  std::memcpy(frame.whole(), &head, sizeof(head));
  link.acknowledge_at_ns = 0;
  link.unacknowledged_bytes = 0;
}

void TcpCarrier::Loop::say(Link& link, LinkKind kind, std::uint64_t your_run) {
  if (!link.connection || link.connection->broken || link.connection->sends > sends_max) return;
  const std::shared_ptr<FarFrame> frame = FarFrame::make(0);
  seal(link, *frame, kind, 0, your_run);
  link.said_ns = vmci::monotonic_ns();
  transmit(link, frame);
}

static std::shared_ptr<FarFrame> copy_of(FarFrame& frame) {
  FarFramePtr copy = FarFrame::make(frame.record().payload_bytes);
  std::memcpy(copy->whole(), frame.whole(), frame.whole_bytes());
  copy->host = frame.host;
  copy->session = frame.session;
  return copy;
}

bool TcpCarrier::Loop::pump(Link& link, std::uint64_t now) {
  if (!link.connection || link.connection->broken) return false;
  bool worked = false;
  while (link.session != 0 && link.unsent < link.records.size() && link.connection->sends < sends_max && !link.connection->broken) {
    auto& record = link.records[link.unsent++];
    if (!std::exchange(record.sealed, true)) {
      if (record.frame.use_count() > 1) record.frame = copy_of(*record.frame);  // UCX is not done with how it was tagged before
      seal(link, *record.frame, LinkKind::record, record.number, link.run);
    } else {
      link.gauge->resent.fetch_add(1, std::memory_order_relaxed);
    }
    transmit(link, record.frame);
    link.said_ns = now;
    worked = true;
  }
  if (link.acknowledge_at_ns != 0 && (now >= link.acknowledge_at_ns || link.unacknowledged_bytes >= acknowledge_bytes)) {
    say(link, LinkKind::alive, link.run);
    worked = true;
  }
  return worked;
}

// Now and then: what the time brings.
void TcpCarrier::Loop::look(std::uint64_t now) {
  next_look_ns_ = now + look_ns;
  if (changed_->exchange(false)) find_hosts();
  for (auto& [id, link] : links_) {
    if (!link->connection) {
      if (now >= link->connect_at_ns) connect(*link, now);
      continue;
    }
    // A connection on which nothing gets through, in either direction, for so long is made anew: TCP's own patience is longer.
    const std::uint64_t heard = link->gauge->heard_ns.load(std::memory_order_relaxed);
    const bool mute = now - link->connected_at_ns > stall_ns && now > heard && now - heard > stall_ns;
    const bool stalled = !link->records.empty() && now - link->progress_ns > stall_ns;
    if (mute || stalled) {
      disconnect(*link, now);
      continue;
    }
    if (now - link->said_ns >= alive_ns)
      say(*link, link->session != 0 ? LinkKind::alive : LinkKind::hello, link->session != 0 ? link->run : link->candidate);
  }
}

// --- receiving ------------------------------------------------------------------------------------------------

ucs_status_t TcpCarrier::Loop::on_message(void* argument, const void*, std::size_t, void* data, std::size_t bytes,
                                          const ucp_am_recv_param_t* param) {
  Loop& loop = *static_cast<Loop*>(argument);
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {  // never sent by us
    loop.carrier_.counters_.malformed.fetch_add(1, std::memory_order_relaxed);
    return UCS_OK;
  }
  loop.message(static_cast<const std::byte*>(data), bytes);
  return UCS_OK;
}

void TcpCarrier::Loop::message(const std::byte* data, std::size_t bytes) {
  const auto count = [](std::atomic<std::uint64_t>& counter) { counter.fetch_add(1, std::memory_order_relaxed); };
  constexpr std::size_t least = sizeof(LinkHead) + sizeof(engine::FarRecord), most = 128 * 1024;
  LinkHead head;
  if (bytes < least || bytes > most) return count(carrier_.counters_.malformed);
  std::memcpy(&head, data, sizeof(head));
  if (head.magic != link_magic || head.version != link_version || head.bytes != bytes - sizeof(head) || head.name[host_name_max] != 0)
    return count(carrier_.counters_.malformed);
  const auto host = carrier_.directory_->host_named(head.name);
  Link* const link = host ? find(host->id) : nullptr;
  if (link == nullptr) return count(carrier_.counters_.unauthenticated);

  FarFramePtr frame = FarFrame::make(static_cast<std::uint32_t>(bytes - least));
  std::memcpy(frame->whole(), data, bytes);
  const Tag tag = head.tag;
  head.tag = {};
  std::memcpy(frame->whole(), &head, sizeof(head));
  const auto tagged_by = [&](const std::unique_ptr<Tagger>& tagger) { return tagger && (*tagger)({frame->whole(), bytes}) == tag; };
  if (tagged_by(link->tagger)) {
    if (link->last_tagger) link->last_tagger.reset(), link->unsent = 0;  // it has the key now: what it could not read is sent again
  } else if (!tagged_by(link->last_tagger))
    return count(carrier_.counters_.unauthenticated);
  if (frame->record().payload_bytes != bytes - least) return count(carrier_.counters_.malformed);

  const std::uint64_t now = vmci::monotonic_ns();
  if (head.kind == LinkKind::hello) return hello(*link, head, now);
  if (head.run != link->run || head.your_run != run_ || link->session == 0) {
    if (now - link->said_ns > hello_pause_ns) say(*link, LinkKind::hello, link->run);
    return;
  }
  heard(*link, now);
  acknowledged(*link, head.acknowledged, now);
  if (head.kind == LinkKind::record) record(*link, head.number, std::move(frame), now);
}

void TcpCarrier::Loop::heard(Link& link, std::uint64_t now) {
  link.gauge->heard_ns.store(now, std::memory_order_relaxed);
  link.pause_ns = 0;
}

void TcpCarrier::Loop::hello(Link& link, const LinkHead& head, std::uint64_t now) {
  if (head.run == 0 || std::find(link.past_runs.begin(), link.past_runs.end(), head.run) != link.past_runs.end()) return;
  if (head.run == link.run) {
    if (head.your_run == run_) heard(link, now);
    else if (now - link.said_ns > hello_pause_ns) say(link, LinkKind::hello, link.run);
    return;
  }
  if (head.your_run != run_) {  // it does not know us yet, or is an echo of somebody who did not
    link.candidate = head.run;
    if (!link.connection) link.connect_at_ns = now;  // it is there: no need to wait
    if (now - link.said_ns > hello_pause_ns) say(link, LinkKind::hello, head.run);
    return;
  }
  // A new session.
  if (link.run != 0) link.past_runs.push_back(link.run);
  if (link.past_runs.size() > past_runs_max) link.past_runs.pop_front();
  link.run = link.candidate = head.run;
  forget_records(link);
  link.early.clear();
  link.early_bytes = 0;
  link.expected = 1;
  link.last_number = 0;
  ++link.session;
  link.progress_ns = now;
  heard(link, now);
  link.gauge->connected.store(true, std::memory_order_relaxed);
  spdlog::info("host {} is there (over tcp{})", link.name, link.session == 1 ? "" : ", its service started anew");
  FarFramePtr news = FarFrame::make(0);
  news->host = link.id;
  news->session = link.session;
  deliver(std::move(news));
  say(link, LinkKind::hello, link.run);
}

void TcpCarrier::Loop::forget_records(Link& link) {
  for (auto& record : link.records)
    link.gauge->queued_bytes.fetch_sub(static_cast<std::int64_t>(record.frame->whole_bytes()), std::memory_order_relaxed);
  link.records.clear();
  link.unsent = 0;
}

void TcpCarrier::Loop::acknowledged(Link& link, std::uint64_t number, std::uint64_t now) {
  while (!link.records.empty() && link.records.front().number <= number && link.unsent > 0) {
    const auto bytes = link.records.front().frame->whole_bytes();
    link.gauge->queued_bytes.fetch_sub(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
    link.gauge->sent_bytes.fetch_add(bytes, std::memory_order_relaxed);
    link.gauge->sent_records.fetch_add(1, std::memory_order_relaxed);
    link.records.pop_front();
    --link.unsent;
    link.progress_ns = now;
  }
  if (link.records.empty()) link.progress_ns = now;
  link.gauge->connected.store(true, std::memory_order_relaxed);
}

void TcpCarrier::Loop::record(Link& link, std::uint64_t number, FarFramePtr frame, std::uint64_t now) {
  if (link.acknowledge_at_ns == 0) link.acknowledge_at_ns = now + acknowledge_ns;
  if (number < link.expected || number >= link.expected + early_max) return;  // a second time, or nonsense
  link.unacknowledged_bytes += frame->whole_bytes();
  frame->host = link.id;
  frame->session = link.session;
  if (number != link.expected) {
    // What there is no room for is not acknowledged, and so comes again.
    if (link.early_bytes > early_bytes_max) return;
    const std::size_t early = frame->whole_bytes();
    if (link.early.emplace(number, std::move(frame)).second) link.early_bytes += early;
    return;
  }
  take(link, std::move(frame));
  for (auto next = link.early.begin(); next != link.early.end() && next->first == link.expected; next = link.early.erase(next)) {
    link.early_bytes -= next->second->whole_bytes();
    take(link, std::move(next->second));
  }
}

void TcpCarrier::Loop::take(Link& link, FarFramePtr frame) {
  ++link.expected;
  const auto bytes = static_cast<std::int64_t>(frame->whole_bytes());
  link.gauge->received_bytes.fetch_add(static_cast<std::uint64_t>(bytes), std::memory_order_relaxed);
  link.gauge->received_records.fetch_add(1, std::memory_order_relaxed);
  // Connections keep to their windows, datagrams to none.
  if (frame->record().kind == engine::FarKind::datagram && link.gauge->arrived_bytes.load(std::memory_order_relaxed) > arrived_bytes_max) return;
  if (frame->record().kind == engine::FarKind::news) return carrier_.counters_.malformed.fetch_add(1, std::memory_order_relaxed), void();
  link.gauge->arrived_bytes.fetch_add(bytes, std::memory_order_relaxed);
  deliver(std::move(frame));
}

void TcpCarrier::Loop::deliver(FarFramePtr frame) {
  carrier_.arrivals_.push(frame.release());
  news_ = true;
}

}  // namespace vrdma::remote
