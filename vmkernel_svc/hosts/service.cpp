#include "vmkernel_svc/hosts/service.hpp"

#include <fmt/format.h>
#include <openssl/rand.h>
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <stdexcept>
#include <utility>

#include "vmkernel_svc/hosts/address.hpp"
#include "vmkernel_svc/hosts/etcd_agreement.hpp"
#include "vmkernel_svc/hosts/session.hpp"
#include "vmkernel_svc/log/log.hpp"

namespace vrdma::hosts {

namespace asio = boost::asio;
using boost::system::error_code;
using asio::ip::tcp;

namespace {

constexpr std::size_t opening_max = 64;  // connections that have shown no certificate yet
constexpr std::uint64_t tick_ms = 50, pause_least_ms = 200;
// With as much again by chance: a host that is back is found before who sends to it gives up, after 5 s.
constexpr std::uint64_t pause_most_ms = 1'500;
// Who lets nobody in says so when both have said hello, so a session that is up is no success yet.
constexpr std::uint64_t lasting_ms = 1'000;

std::uint64_t random_number() {
  std::uint64_t number = 0;
  if (RAND_bytes(reinterpret_cast<unsigned char*>(&number), sizeof(number)) != 1) throw std::runtime_error("no random bytes");
  return number;
}

std::vector<std::string> names_of(const std::vector<Endpoint>& managers) {
  std::vector<std::string> names;
  for (const auto& one : managers) names.push_back(one.name);
  return names;
}

std::string listed(std::vector<Endpoint> managers) {
  std::sort(managers.begin(), managers.end(), [](const Endpoint& a, const Endpoint& b) { return a.name < b.name; });
  std::string text;
  for (const auto& one : managers) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", one.name, with_port(one.address, one.port));
  return text;
}

}  // namespace

struct Service::Network {
  explicit Network(Service& service_in) : service(service_in) {}
  Session::Events events() {
    return {[this](const SessionPtr& session) { service.on_up(session); }, [this](const SessionPtr& session, const Message& message) { service.on_message(session, message); },
            [this](const SessionPtr& session, const std::string& why) { service.on_down(session, why); }};
  }

  Service& service;
  asio::io_context io{1};
  tcp::acceptor acceptor{io};
  asio::steady_timer timer{io}, accept_timer{io};
};

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
  if (node_->member().may_give(now_ms()) != may_give_) publish();
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

Service::SessionPtr Service::session_with(const std::string& name) const {
  SessionPtr best;
  for (const auto& [route, session] : sessions_) {
    if (!session->is_up() || session->retired() || session->peer().name != name || session->peer().address.empty()) continue;
    if (is_right(*session)) return session;  // of two that claim a name
    best = session;
  }
  return best;
}

bool Service::is_right(const Session& session) const {
  const Host* const known = node_->member().known().find(session.peer().name);
  return known == nullptr || (session.peer().address == known->address && session.peer().port == known->port);
}

// --- connections

Hello Service::hello() const {
  Hello hello;
  hello.version = settings_.version;
  hello.name = settings_.name;
  hello.run = run_;
  hello.address = settings_.address;
  hello.port = settings_.port;
  hello.carrier_port = settings_.carrier_port;
  hello.managers = managers_;
  hello.manages = node_->consensus().votes();
  return hello;
}

void Service::accept_next() {
  network_->acceptor.async_accept([this](const error_code& error, tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    if (error) {  // out of descriptors: when others have left
      network_->accept_timer.expires_after(std::chrono::milliseconds(100));
      network_->accept_timer.async_wait([this](const error_code& late) {
        if (!late) accept_next();
      });
      return;
    }
    accept_next();  // before what may fail: that loses one connection, and no others
    std::erase_if(opening_, [](const auto& weak) {
      const auto session = weak.lock();
      return !session || session->is_up();
    });
    // Who fills the room with connections that say nothing loses the oldest of them, and keeps nobody out.
    if (opening_.size() >= opening_max) {
      if (const auto oldest = opening_.front().lock()) oldest->close("too many connections without a certificate");
      opening_.pop_front();
    }
    auto session = std::make_shared<Session>(*tls_, std::move(socket), false, settings_.limits, network_->events());
    opening_.push_back(session);
    session->start(hello(), "");
  });
}

void Service::on_up(const SessionPtr& session) {
  const Hello& peer = session->peer();
  if (node_->member().known().removed().contains(session->certificate().serial)) return session->close("your host was removed from the subnet");
  const bool tool = peer.address.empty();
  if (!tool && session->certificate().role != Role::host) return session->close("your certificate is not a host's");
  if (!tool && have_expired()) return session->close("our own certificate has expired");
  if (!tool && peer.name == settings_.name) {
    if (peer.run == run_) return session->close("this is yourself: correct the addresses of \"peers\" or \"seed\"");
    if (said_.insert("twin " + session->remote_address()).second)
      log::error("hosts: another host ({}) has our name \"{}\": give each host a certificate of its own", session->remote(), peer.name);
    return session->close(fmt::format("the host at {} has your name \"{}\": give each host a certificate of its own", with_port(settings_.address, settings_.port), peer.name));
  }
  if (!tool && peer.manages && node_->consensus().votes() && listed(peer.managers) != listed(managers_)) {
    const std::string why = fmt::format("the lists of \"peers\" differ, and must be the same: \"{}\" has {}; \"{}\" has {}", peer.name, listed(peer.managers), settings_.name,
                                        listed(managers_));
    if (said_.insert("list " + peer.name).second) log::error("hosts: {}", why);
    return session->close(why);
  }
  if (!tool) valid_until_s_[session->certificate().serial] = session->certificate().not_after_s;
  session->route = next_route_++;
  session->up_ms = now_ms();
  sessions_[session->route] = session;
  if (tool) return;
  for (const auto& [route, other] : std::map(sessions_)) {
    if (other == session || !other->is_up() || other->peer().name != peer.name || other->peer().address != peer.address || other->peer().port != peer.port) continue;
    // Both dialed at once: the connection stays that the smaller name made. Both ends come to the same end.
    const bool we_should_dial = settings_.name < peer.name;
    const bool old_stays = other->peer().run == peer.run && other->dialed() != session->dialed() && other->dialed() == we_should_dial;
    (old_stays ? session : other)->retire();
  }
  adopt_managers(peer);
  // Of one that hangs up each time that is said no more than that it does.
  if (const auto [last, is_first] = fleeting_.try_emplace(peer.name, false); !is_first) last->second = true;
  else say_it_is_there(*session);
  publish();
}

void Service::say_it_is_there(const Session& session) {
  const Hello& peer = session.peer();
  log::info("hosts: \"{}\" ({}, vrdmad {}) is there", peer.name, with_port(peer.address, peer.port), peer.version);
}

// What was said of failures before is over, and so are the pauses between tries.
void Service::note_who_lasts() {
  for (const auto& [route, session] : sessions_) {
    const std::string& name = session->peer().name;
    if (!session->is_up() || session->peer().address.empty() || now_ms() - session->up_ms < lasting_ms) continue;
    const auto fleeting = fleeting_.find(name);
    if (fleeting == fleeting_.end()) continue;
    if (fleeting->second) say_it_is_there(*session);
    fleeting_.erase(fleeting);
    for (const std::string& key : {name, std::string(name == seed_name_ ? "seed" : name)}) {
      said_.erase("dial " + key);
      if (const auto target = dials_.find(key); target != dials_.end()) target->second.pause_ms = target->second.next_ms = 0, target->second.problem.clear();
    }
  }
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

void Service::on_down(const SessionPtr& session, const std::string& why) {
  const bool was_up = sessions_.erase(session->route) != 0;
  if (session->retired()) {
    if (was_up) publish();  // the other session's key counts from here on, if it did not before
    return;
  }
  if (was_up) {
    if (session->peer().address.empty()) return;
    if (const auto fleeting = fleeting_.find(session->peer().name); fleeting == fleeting_.end() || !fleeting->second)
      log::info("hosts: \"{}\" ({}) is gone: {}", session->peer().name, session->remote(), why);
    if (auto& target = dials_[session->peer().name]; target.problem.empty()) target.problem = why;
    publish();
    return;
  }
  if (session->dialed()) return;  // whoever dialed knows
  ++strangers_;
  last_stranger_ = fmt::format("{}: {}", session->remote(), why);
  if (const auto now = now_ms(); now - warned_ms_ >= 1000) {
    warned_ms_ = now;
    log::warn("hosts: {} is not let in: {} ({} so far)", session->remote(), why, strangers_);
  }
  publish();
}

// Who was let in, and would not be any more. Ours counts as theirs does: they may be of another opinion of what time it is.
void Service::drop_those_out() {
  const auto& removed = node_->member().known().removed();
  const std::int64_t now_s = std::time(nullptr);
  std::set<std::string> expired;
  for (const auto& [serial, until_s] : valid_until_s_)
    if (until_s < now_s) expired.insert(serial);
  if (tls_->us().not_after_s < now_s) expired.insert(tls_->us().serial);
  const bool news = std::exchange(expired_, expired) != expired;
  std::vector<std::pair<SessionPtr, const char*>> out;  // closing one takes it out of sessions_
  for (const auto& [route, session] : sessions_) {
    const std::string& serial = session->certificate().serial;
    if (removed.contains(serial)) out.emplace_back(session, "your host was removed from the subnet");
    else if (session->certificate().not_after_s < now_s) out.emplace_back(session, "your certificate has expired: make another by \"vrdma host add\"");
    else if (have_expired() && !session->peer().address.empty()) out.emplace_back(session, "our own certificate has expired");
  }
  for (const auto& [session, why] : out) session->close(why);
  if (!have_expired()) said_.erase("expired");
  else if (said_.insert("expired").second) log::error("hosts: our certificate has expired: make another by \"vrdma host add\", and join with that");
  if (news) publish();  // data connections end with it
}

bool Service::have_expired() const { return expired_.contains(tls_->us().serial); }

// --- dialing

void Service::dial_those_missing() {
  std::map<std::string, Endpoint> wanted;
  // Of two hosts the smaller name dials; everybody dials who may lead.
  for (const auto& [name, host] : node_->member().known().hosts())
    if (settings_.name < name) wanted[name] = {name, host.address, host.port};
  for (const auto& one : managers_) wanted.try_emplace(one.name, one);
  wanted.erase(settings_.name);
  if (have_expired()) return;  // nobody lets us in
  const bool lost = node_->member().leader().empty();
  if (settings_.seed && (managers_.empty() || lost) && (seed_name_.empty() || !session_with(seed_name_)))
    wanted["seed"] = {"", settings_.seed->first, settings_.seed->second};
  std::erase_if(dials_, [&](const auto& entry) { return !wanted.contains(entry.first) && !entry.second.under_way && entry.second.address.size() != 0; });
  for (const auto& [key, endpoint] : wanted) {
    // One that has moved is dialed where it is now: it may be long until nothing is heard from where it was.
    if (const auto session = endpoint.name.empty() ? nullptr : session_with(endpoint.name); session && is_right(*session)) continue;
    Dial& target = dials_[key];
    const bool moved = target.address != endpoint.address || target.port != endpoint.port;
    if (target.under_way && moved && target.call_off) std::exchange(target.call_off, nullptr)();
    if (target.under_way || (now_ms() < target.next_ms && !moved)) continue;
    target.address = endpoint.address;
    target.port = endpoint.port;
    dial(key, endpoint.name, target);
  }
}

void Service::dial(const std::string& key, const std::string& expected, Dial& target) {
  target.under_way = true;
  const auto endpoint = tcp::endpoint(asio::ip::make_address(target.address), target.port);
  auto socket = std::make_shared<tcp::socket>(network_->io);
  error_code error;
  socket->open(endpoint.protocol(), error);
  // From the address by which others know us.
  if (!error) socket->bind(tcp::endpoint(asio::ip::make_address(settings_.address), 0), error);
  if (error) return dialed(key, error.message());
  auto timer = std::make_shared<asio::steady_timer>(network_->io, std::chrono::milliseconds(settings_.limits.opening_ms));
  timer->async_wait([socket](const error_code& early) {
    error_code ignored;
    if (!early) socket->close(ignored);
  });
  target.call_off = [waiting = std::weak_ptr(socket)] {
    error_code ignored;
    if (const auto one = waiting.lock()) one->close(ignored);
  };
  socket->async_connect(endpoint, [this, key, expected, socket, timer](const error_code& failed) {
    timer->cancel();
    dials_[key].call_off = nullptr;
    if (failed || !socket->is_open()) return dialed(key, failed && failed != asio::error::operation_aborted ? failed.message() : "no answer");
    Session::Events on = network_->events();
    on.up = [this, key](const SessionPtr& session) {
      if (key == "seed") seed_name_ = session->peer().name;
      dials_[key].under_way = false;
      on_up(session);
    };
    on.down = [this, key](const SessionPtr& session, const std::string& why) {
      const bool refused = session->route == 0 || now_ms() - session->up_ms < lasting_ms;
      on_down(session, why);
      if (refused && !session->retired()) dialed(key, why);
    };
    std::make_shared<Session>(*tls_, std::move(*socket), true, settings_.limits, std::move(on))->start(hello(), expected);
  });
}

// A dial failed: schedules the next one.
void Service::dialed(const std::string& key, const std::string& problem) {
  Dial& target = dials_[key];
  target.under_way = false;
  const bool news = target.problem != problem;
  target.problem = problem;
  target.pause_ms = std::clamp(target.pause_ms * 2, pause_least_ms, pause_most_ms);
  target.next_ms = now_ms() + target.pause_ms + random_number() % target.pause_ms;
  if (said_.insert("dial " + key).second || news) log::warn("hosts: cannot reach {} at {}: {}", key == "seed" ? "the seed" : "\"" + key + "\"", with_port(target.address, target.port), problem);
  publish();
}

// --- tools

void Service::probe(const SessionPtr& asker, const Probe& probe) {
  const Host* const known = node_->member().known().find(asker->peer().name);
  // Nobody has us knock at doors that are not his.
  if (probe.address != asker->remote_address() && (known == nullptr || probe.address != known->address))
    return asker->send(Probed{fmt::format("{} is not the address that you come from ({})", probe.address, asker->remote_address())});
  auto socket = std::make_shared<tcp::socket>(network_->io);
  auto timer = std::make_shared<asio::steady_timer>(network_->io, std::chrono::milliseconds(settings_.limits.opening_ms));
  timer->async_wait([socket](const error_code& early) {
    error_code ignored;
    if (!early) socket->close(ignored);
  });
  socket->async_connect({asio::ip::make_address(probe.address), probe.port}, [this, asker, socket, timer](const error_code& failed) {
    timer->cancel();
    if (failed || !socket->is_open()) return asker->send(Probed{failed && failed != asio::error::operation_aborted ? failed.message() : "no answer"});
    auto done = std::make_shared<bool>(false);
    const auto answer = [asker, done](const std::string& error) {
      if (!std::exchange(*done, true)) asker->send(Probed{error});
    };
    Session::Events on{[answer](const SessionPtr& session) { answer(""), session->retire(); }, [](const SessionPtr&, const Message&) {},
                       [answer](const SessionPtr&, const std::string& why) { answer(why); }};
    Hello as_tool = hello();
    as_tool.address.clear();
    std::make_shared<Session>(*tls_, std::move(*socket), true, settings_.limits, std::move(on))->start(as_tool, asker->peer().name);
  });
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
  else reply.error = "the subnet has no leader now: a majority of its managers must run";
  asker->send(reply);
}

}  // namespace vrdma::hosts
