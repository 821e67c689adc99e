// Who comes, who stays and who goes: accepted or dialed, of a host or of a tool.
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include "vmkernel_svc/hosts/address.hpp"
#include "vmkernel_svc/hosts/network.hpp"
#include "vmkernel_svc/log/log.hpp"

namespace vrdma::hosts {

namespace {
constexpr std::size_t opening_max = 64;  // connections that have shown no certificate yet
}  // namespace

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

std::string Service::objection(const Session& session) {
  const Hello& peer = session.peer();
  if (node_->member().known().removed().contains(session.certificate().serial)) return "your host was removed from the subnet";
  if (peer.address.empty()) return "";  // a tool
  if (session.certificate().role != Role::host) return "your certificate is not a host's";
  if (have_expired()) return "our own certificate has expired";
  if (peer.name == settings_.name) {
    if (peer.run == run_) return "this is yourself: correct the addresses of \"peers\" or \"seed\"";
    if (said_.insert("twin " + session.remote_address()).second)
      log::error("hosts: another host ({}) has our name \"{}\": give each host a certificate of its own", session.remote(), peer.name);
    return fmt::format("the host at {} has your name \"{}\": give each host a certificate of its own", with_port(settings_.address, settings_.port), peer.name);
  }
  if (peer.manages && node_->consensus().votes() && listed(peer.managers) != listed(managers_)) {
    const std::string why = fmt::format("the lists of \"peers\" differ, and must be the same: \"{}\" has {}; \"{}\" has {}", peer.name, listed(peer.managers), settings_.name,
                                        listed(managers_));
    if (said_.insert("list " + peer.name).second) log::error("hosts: {}", why);
    return why;
  }
  return "";
}

void Service::on_up(const SessionPtr& session) {
  if (const std::string why = objection(*session); !why.empty()) return session->close(why);
  const Hello& peer = session->peer();
  const bool tool = peer.address.empty();
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
  // One that goes on for want of the same (it has expired, say) is told of less and less often.
  constexpr std::uint64_t pause_min_ms = 1000, pause_max_ms = 600'000;
  const bool same = why == warned_why_;
  if (const auto now = now_ms(); now - warned_ms_ >= (same ? warn_pause_ms_ : pause_min_ms)) {
    warned_ms_ = now;
    warned_why_ = why;
    warn_pause_ms_ = same ? std::min(2 * warn_pause_ms_, pause_max_ms) : pause_min_ms;
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

}  // namespace vrdma::hosts
