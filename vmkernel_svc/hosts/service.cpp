// The node: what it is told, what it says, and what of it is on disk.
#include "vmkernel_svc/hosts/service.hpp"

#include <fmt/format.h>
#include <openssl/rand.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <stdexcept>
#include <utility>

#include "vmkernel_svc/hosts/address.hpp"
#include "vmkernel_svc/hosts/etcd_agreement.hpp"
#include "vmkernel_svc/hosts/network.hpp"
#include "vmkernel_svc/log/log.hpp"

namespace vrdma::hosts {

namespace {
constexpr std::uint64_t tick_ms = 50;
}  // namespace

std::uint64_t random_number() {
  std::uint64_t number = 0;
  if (RAND_bytes(reinterpret_cast<unsigned char*>(&number), sizeof(number)) != 1) throw std::runtime_error("no random bytes");
  return number;
}

Service::Service(Settings settings)
    : settings_(std::move(settings)),
      tls_(Tls::of_host(settings_.folder)),
      file_(load_subnet(settings_.folder / "subnet.json")),
      network_(std::make_unique<Network>(*this)) {
  if (settings_.name.empty()) settings_.name = tls_->us().name;
  if (settings_.name != tls_->us().name)
    throw std::runtime_error(fmt::format("this host is \"{}\" by the configuration, \"{}\" by its certificate {}", settings_.name, tls_->us().name,
                                         (settings_.folder / "host.pem").string()));
  const auto endpoint = tcp::endpoint(asio::ip::make_address(settings_.address), settings_.port);
  error_code error;
  network_->acceptor.open(endpoint.protocol(), error);
  if (!error) network_->acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) network_->acceptor.bind(endpoint, error);
  if (!error) network_->acceptor.listen(128, error);
  if (error)
    throw std::runtime_error(fmt::format("cannot listen for other hosts at {} ({}): {}", with_port(settings_.address, settings_.port), error.message(),
                                         error == asio::error::address_family_not_supported ? "give the service its network (docs/hosts.md, \"As a service\")"
                                         : error.value() == EADDRNOTAVAIL                   ? "no interface of this host has that address, or it cannot be used yet (an IPv6 address: \"tentative\" in \"ip address\")"
                                                                                            : "correct \"address\" and \"port\" in \"hosts\""));
  const Endpoint us{settings_.name, settings_.address, settings_.port};
  managers_ = !settings_.peers.empty() ? settings_.peers
              : settings_.seed         ? file_.managers
                                       : std::vector<Endpoint>{us};
  if (settings_.etcd) {
    const std::uint64_t patience_ms = std::max<std::uint64_t>(500, settings_.timing.election_ms / 2);  // two tries within a lease
    etcd_client_ = std::make_unique<EtcdClient>(network_->io, *settings_.etcd, patience_ms);
    etcd_ = std::make_unique<EtcdAgreement>(*etcd_client_, settings_.etcd->prefix, us, settings_.timing, [this] { return now_ms(); }, [this] { heard_of_etcd(); });
  }
  run_ = fmt::format("{:016x}", random_number());
  node_ = std::make_unique<Node>(Member::Self{settings_.name, tls_->us().serial, run_, settings_.address, settings_.port, settings_.carrier_port, settings_.lids},
                                 names_of(managers_), settings_.timing, random_number(), file_.memory, etcd_.get());
  publish();
}

Service::~Service() { stop(); }

void Service::stop() {
  if (!thread_.joinable()) return;
  network_->io.stop();
  thread_.join();
}

void Service::start() {
  accept_next();
  tick();
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "hosts");
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    for (;;) {
      try {
        network_->io.run();
        return;
      } catch (const std::exception& error) {  // of memory that has run out, say: one handler is lost, not the host
        log::error("hosts: {}", error.what());
      }
    }
  });
}

std::uint64_t Service::now_ms() const {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(BootClock::now() - began_).count()) + 1;
}

// --- the node

void Service::tick() {
  network_->timer.expires_after(std::chrono::milliseconds(tick_ms));
  network_->timer.async_wait([this](const error_code& error) {
    if (!error) tick();
  });
  perform(node_->tick(now_ms()));
  drop_those_out();
  note_who_lasts();
  dial_those_missing();
  if (node_->member().may_give(now_ms()) != may_give_ || manager_problem() != snapshot()->manager_problem) publish();
}

void Service::heard_of_etcd() {
  // Who leads is to be reached, also before anything else is known of the subnet.
  const Endpoint us{settings_.name, settings_.address, settings_.port}, &leader = etcd_->leader_endpoint();
  managers_ = {us};
  if (!leader.name.empty() && leader.name != us.name) managers_.push_back(leader);
  perform(node_->tick(now_ms()));
  if (problem() != snapshot()->problem) publish();
}

void Service::save() {
  unsaved_ = true;
  try {
    file_.memory = node_->memory();
    save_subnet(settings_.folder / "subnet.json", file_);
    unsaved_ = false;
    said_.erase("save");
  } catch (const std::exception& error) {
    if (said_.insert("save").second) log::error("hosts: {}: this host takes no part in the subnet until it can be", error.what());
  }
}

void Service::perform(Outbox out) {
  const auto before = snapshot();
  // Nobody hears of what is not on disk.
  if (out.save || unsaved_) save();
  for (const auto& line : out.log) log::info("hosts: {}", line);
  for (const auto& line : out.warnings) log::warn("hosts: {}", line);
  if (unsaved_) {
    if (problem() != before->problem) publish();
    return;
  }
  for (const auto& letter : out.letters) deliver(letter);
  const Member& member = node_->member();
  if (member.lids() != before->lids || member.leader() != before->leader || problem() != before->problem || member.known().id().version != before->version ||
      member.may_give(now_ms()) != may_give_ || node_->consensus().memory().term != before->term)
    publish();
  else if (may_give_ && began_ + std::chrono::milliseconds(now_ms() + member.lease_left_ms(now_ms())) > before->lease_until)
    publish();
}

void Service::deliver(const Outbox::Letter& letter) {
  if (letter.to.route != 0) {
    if (const auto found = sessions_.find(letter.to.route); found != sessions_.end()) found->second->send(letter.message);
    return;
  }
  if (const auto session = session_with(letter.to.name)) session->send(letter.message);
}

void Service::adopt_managers(const Hello& peer) {
  const bool known = std::ranges::any_of(managers_, [&](const Endpoint& one) { return one.name == peer.name; });
  if (!settings_.seed || !(known || peer.name == seed_name_) || peer.managers.empty() || listed(peer.managers) == listed(managers_)) return;
  managers_ = peer.managers;
  file_.managers = managers_;
  node_->member().set_managers(names_of(managers_));
  log::info("hosts: the subnet is led by one of: {}", listed(managers_));
  save();
}

void Service::on_message(const SessionPtr& session, const Message& message) {
  if (!sessions_.contains(session->route)) return;
  if (const auto* probing = std::get_if<Probe>(&message)) return probe(session, *probing);
  const bool admin = session->certificate().role == Role::admin;
  if (const auto* removing = std::get_if<Remove>(&message)) {
    if (!admin) return session->close("only who has the subnet's authority removes a host");
    return wish<RemoveReply>(session, message, fmt::format("\"{}\" is to be removed", removing->name));
  }
  if (const auto* change = std::get_if<ChangePartition>(&message)) {
    if (!admin && change->pkey != 0) return session->close("only who has the subnet's authority changes partitions");
    return wish<PartitionsReply>(session, message, change->pkey == 0 ? "" : fmt::format("partition {} is to change", pkey_text(change->pkey)));
  }
  if (session->peer().address.empty()) return session->close("a tool asks to be probed, to remove a host, or for partitions");
  perform(node_->receive(now_ms(), {session->peer().name, session->certificate().serial, session->route}, message));
  drop_those_out();
}

template <class Reply>
void Service::wish(const SessionPtr& asker, const Message& message, const std::string& what) {
  if (node_->leads(now_ms())) {
    if (!what.empty()) log::info("hosts: {}, by {}", what, asker->remote());
    perform(node_->receive(now_ms(), {asker->peer().name, asker->certificate().serial, asker->route}, message));
    return;
  }
  Reply reply;
  const std::string& leader = node_->member().leader();
  const auto found = std::ranges::find(managers_, leader, &Endpoint::name);
  if (found != managers_.end() && leader != settings_.name) reply.leader = found->address, reply.port = found->port;
  else reply.error = no_leader;
  asker->send(reply);
}

}  // namespace vrdma::hosts
