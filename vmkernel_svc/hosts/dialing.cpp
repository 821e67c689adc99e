// Whom this host dials, when, and what comes of it; and whom it dials once, as another host's administrator asks.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "vmkernel_svc/hosts/address.hpp"
#include "vmkernel_svc/hosts/network.hpp"
#include "vmkernel_svc/log/log.hpp"

namespace vrdma::hosts {

namespace {
constexpr std::uint64_t pause_least_ms = 200;
// With as much again by chance: a host that is back is found before who sends to it gives up, after 5 s.
constexpr std::uint64_t pause_most_ms = 1'500;
}  // namespace

void Service::Network::connect(const std::shared_ptr<tcp::socket>& socket, const tcp::endpoint& to, std::uint64_t patience_ms,
                               std::function<void(const std::string& problem)> done) {
  auto patience = std::make_shared<asio::steady_timer>(io, std::chrono::milliseconds(patience_ms));
  patience->async_wait([socket](const error_code& early) {
    error_code ignored;
    if (!early) socket->close(ignored);
  });
  socket->async_connect(to, [socket, patience, done = std::move(done)](const error_code& failed) {
    patience->cancel();
    if (failed && failed != asio::error::operation_aborted) return done(failed.message());
    done(failed || !socket->is_open() ? "no answer" : "");
  });
}

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
  // One without an address is of a host that dials us, and says why that is gone, for as long as anybody knows it.
  std::erase_if(dials_, [&](const auto& entry) {
    return !wanted.contains(entry.first) && !entry.second.under_way && (!entry.second.address.empty() || node_->member().known().find(entry.first) == nullptr);
  });
  for (const auto& [key, endpoint] : wanted) {
    // One that has moved is dialed where it is now: it may be long until nothing is heard from where it was. Not again where it has a
    // session already, though the subnet has not heard yet that it is there: the new one would end that.
    if (const auto session = endpoint.name.empty() ? nullptr : session_with(endpoint.name);
        session && (is_right(*session) || (session->peer().address == endpoint.address && session->peer().port == endpoint.port)))
      continue;
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
  target.call_off = [waiting = std::weak_ptr(socket)] {
    error_code ignored;
    if (const auto one = waiting.lock()) one->close(ignored);
  };
  network_->connect(socket, endpoint, settings_.limits.opening_ms, [this, key, expected, socket](const std::string& failure) {
    dials_[key].call_off = nullptr;
    if (!failure.empty()) return dialed(key, failure);
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

void Service::probe(const SessionPtr& asker, const Probe& probe) {
  const Host* const known = node_->member().known().find(asker->peer().name);
  // Nobody has us knock at doors that are not his.
  if (probe.address != asker->remote_address() && (known == nullptr || probe.address != known->address))
    return asker->send(Probed{fmt::format("{} is not the address that you come from ({})", probe.address, asker->remote_address())});
  auto socket = std::make_shared<tcp::socket>(network_->io);
  const tcp::endpoint door(asio::ip::make_address(probe.address), probe.port);
  network_->connect(socket, door, settings_.limits.opening_ms, [this, asker, socket](const std::string& failure) {
    if (!failure.empty()) return asker->send(Probed{failure});
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

}  // namespace vrdma::hosts
