// What is Asio's of hosts::Service, and what its files share: service.cpp (the node), connections.cpp and dialing.cpp.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <string>

#include "vmkernel_svc/hosts/service.hpp"
#include "vmkernel_svc/hosts/session.hpp"

namespace vrdma::hosts {

namespace asio = boost::asio;
using boost::system::error_code;
using asio::ip::tcp;

// Who lets nobody in says so when both have said hello, so a session that is up is no success yet.
constexpr std::uint64_t lasting_ms = 1'000;

std::uint64_t random_number();

struct Service::Network {
  explicit Network(Service& service_in) : service(service_in) {}
  Session::Events events() {
    return {[this](const SessionPtr& session) { service.on_up(session); }, [this](const SessionPtr& session, const Message& message) { service.on_message(session, message); },
            [this](const SessionPtr& session, const std::string& why) { service.on_down(session, why); }};
  }

  // Connects `socket`; `done` hears why it is not, or "". Who closes it meanwhile calls that off.
  void connect(const std::shared_ptr<tcp::socket>& socket, const tcp::endpoint& to, std::uint64_t patience_ms, std::function<void(const std::string& problem)> done);

  Service& service;
  asio::io_context io{1};
  tcp::acceptor acceptor{io};
  asio::steady_timer timer{io}, accept_timer{io};
};

}  // namespace vrdma::hosts
