// How the TCP carrier begins and ends, and which hosts it knows.
#include "vmkernel_svc/remote/tcp_loop.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/random.h>

#include <cstdlib>
#include <stdexcept>

#include "vmci_channel/arch.hpp"
#include "vmkernel_svc/remote/peer_filter.hpp"

namespace vrdma::remote {

namespace {
// A service that takes another's place listens where that one's connections still linger. UCX reads this from the environment only,
// as the worker is made and as it listens; children of the service do not find it there.
struct ReuseAddress {
  static constexpr const char* name = "UCX_TCP_CM_REUSEADDR";
  const bool ours = ::getenv(name) == nullptr;
  ReuseAddress() {
    if (ours) ::setenv(name, "y", 1);
  }
  ~ReuseAddress() {
    if (ours) ::unsetenv(name);
  }
};
}  // namespace

TcpCarrier::Loop::Loop(TcpCarrier& carrier) : carrier_(carrier), ucx_(carrier.ucx_) {
  while (run_ == 0)
    if (::getrandom(&run_, sizeof(run_), 0) != sizeof(run_)) throw std::runtime_error("no random numbers: getrandom must be allowed");
  carrier_.directory_->when_changed([changed = changed_] { changed->store(true); });
  try {
    start();
  } catch (...) {
    stop();
    throw;
  }
}

TcpCarrier::Loop::~Loop() { stop(); }

socklen_t TcpCarrier::Loop::address_of(const std::string& text, std::uint16_t port, sockaddr_storage& address) {
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

// The interface that has the address: UCX's other sockets must not be open on any other. Empty: none.
std::string TcpCarrier::Loop::device_of(const std::string& text) {
  sockaddr_storage wanted;
  if (address_of(text, 0, wanted) == 0) return {};
  if (wanted.ss_family == AF_INET && ntohl(reinterpret_cast<const sockaddr_in&>(wanted).sin_addr.s_addr) >> 24 == 127) return "lo";
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return {};
  std::string name;
  for (const ifaddrs* one = all; one != nullptr && name.empty(); one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != wanted.ss_family) continue;
    const bool v4 = wanted.ss_family == AF_INET;
    const void* const mine = v4 ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr)
                                : static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr);
    const void* const sought = v4 ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in&>(wanted).sin_addr)
                                  : static_cast<const void*>(&reinterpret_cast<const sockaddr_in6&>(wanted).sin6_addr);
    if (std::memcmp(mine, sought, v4 ? 4 : 16) == 0) name = one->ifa_name;
  }
  ::freeifaddrs(all);
  return name;
}

void TcpCarrier::Loop::start() {
  const std::set<int> before = listening_sockets();
  const TcpCarrier::Place& here = carrier_.here_;
  const auto check = [&](ucs_status_t status, const std::string& what) {
    if (status != UCS_OK) throw std::runtime_error(fmt::format("{} ({})", what, ucx_.status_string(status)));
  };
  const std::string device = device_of(here.address);
  if (device.empty())
    throw std::runtime_error(fmt::format("no interface of this host has the address {}: give one that it has as \"address\"", here.address));
  ucp_config_t* config = nullptr;
  check(ucx_.config_read(nullptr, nullptr, &config), "UCX cannot read its settings");
  for (const auto& [key, value] : std::initializer_list<std::pair<const char*, std::string>>{
           {"TLS", "tcp"}, {"NET_DEVICES", device}, {"KEEPALIVE_INTERVAL", "1s"}, {"TCP_TX_SEG_SIZE", "128k"}, {"TCP_RX_SEG_SIZE", "128k"}})
    if (const auto status = ucx_.config_modify(config, key, value.c_str()); status != UCS_OK)
      spdlog::debug("UCX does not take {}={}: {}", key, value, ucx_.status_string(status));
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "vrdmad";
  const auto made = ucx_.init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  ucx_.config_release(config);
  check(made, fmt::format("UCX finds no way to send over {} ({})", here.address, device));
  const ReuseAddress reuse;
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // made here, used by the carrier's thread
  check(ucx_.worker_create(context_, &worker, &worker_), "UCX cannot make its worker");
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                       UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  handler.id = am_id;
  handler.cb = on_message;
  handler.arg = this;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  check(ucx_.worker_set_am_recv_handler(worker_, &handler), "UCX does not take a handler");
  sockaddr_storage address;
  const socklen_t bytes = address_of(here.address, here.port, address);
  ucp_listener_params_t listening{};
  listening.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  listening.sockaddr = {reinterpret_cast<const sockaddr*>(&address), bytes};
  listening.conn_handler = {on_connection, this};
  check(ucx_.listener_create(worker_, &listening, &listener_),
        fmt::format("cannot listen at {} port {}: is another vrdmad there?", here.address, here.port));
  for (const int socket : listening_sockets())
    if (!before.contains(socket)) listening_.push_back(socket);
  find_hosts();
  int descriptor = -1;
  check(ucx_.worker_get_efd(worker_, &descriptor), "UCX has no descriptor to wait for");
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  if (!epoll_ || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event) != 0 ||
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, carrier_.wake_.get(), &event) != 0)
    throw std::runtime_error("cannot watch the carrier's descriptors: too many open files?");
}

void TcpCarrier::Loop::stop() {
  for (auto& [id, link] : links_)
    if (link->connection) close(std::move(link->connection));
  for (auto& connection : accepted_) close(std::move(connection));
  accepted_.clear();
  const std::uint64_t until = vmci::monotonic_ns() + 1'000'000'000;
  while (!closing_.empty() && vmci::monotonic_ns() < until) {
    ucx_.worker_progress(worker_);
    std::erase_if(closing_, [](const auto& connection) { return connection->closed && connection->sends == 0; });
  }
  if (listener_ != nullptr) ucx_.listener_destroy(listener_);
  if (worker_ != nullptr) ucx_.worker_destroy(worker_);
  if (context_ != nullptr) ucx_.cleanup(context_);
  listener_ = nullptr, worker_ = nullptr, context_ = nullptr;
}

// Who may connect, and whom we connect to. The directory is asked for every LID: there is no list of hosts that could differ from what look-ups say.
void TcpCarrier::Loop::find_hosts() {
  for (std::uint32_t lid = 1; lid <= 0xbfff; ++lid)
    if (const auto id = carrier_.directory_->host_of(static_cast<std::uint16_t>(lid))) find(*id);
  for (auto& [id, link] : links_) agree(*link, vmci::monotonic_ns());
  std::vector<std::string> addresses;
  for (const auto& [id, link] : links_)
    if (const auto host = carrier_.directory_->host(id)) addresses.push_back(host->address);
  for (const int socket : listening_)
    if (!accept_only(socket, addresses))
      spdlog::warn("the carrier's sockets cannot be closed to strangers ({}): let a firewall do it (docs/hosts.md)", std::strerror(errno));
}

TcpCarrier::Loop::Link* TcpCarrier::Loop::find(HostId id) {
  if (const auto known = links_.find(id); known != links_.end()) return known->second.get();
  const auto host = carrier_.directory_->host(id);
  if (!host) return nullptr;
  auto link = std::make_unique<Link>();
  link->id = id;
  link->name = host->name;
  link->gauge = carrier_.gauge(id);
  agree(*link, vmci::monotonic_ns());
  return links_.emplace(id, std::move(link)).first->second.get();
}

// With a new key all that is not acknowledged is tagged anew, on a new connection; the far end learns of the key at about the same time.
void TcpCarrier::Loop::agree(Link& link, std::uint64_t now) {
  const auto host = carrier_.directory_->host(link.id);
  if (host && (!host->reachable || (link.tagger && host->tag_key == link.key))) return;
  link.last_tagger = host ? std::move(link.tagger) : nullptr;
  link.tagger = host ? std::make_unique<Tagger>(std::span<const std::byte, 16>(host->tag_key.data(), 16)) : nullptr;
  if (host) link.key = host->tag_key;
  for (auto& record : link.records) record.sealed = false;
  if (!link.connection) return;
  disconnect(link, now);
  link.connect_at_ns = now + agree_ns;
}

}  // namespace vrdma::remote
