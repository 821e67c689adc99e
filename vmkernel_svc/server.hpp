// The service around the shard: listens, begins and ends, signals; the reception takes guests in and out. Boost.Asio on the main thread; whatever
// touches a guest's objects is submitted to the shard.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <thread>

#include "vmci_channel/segment.hpp"
#include "vmci_channel/socket_file.hpp"
#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/hosts/service.hpp"
#include "vmkernel_svc/machines/machines.hpp"
#include "vmkernel_svc/packet_desk.hpp"
#include "vmkernel_svc/reception.hpp"
#include "vmkernel_svc/remote/tcp_carrier.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

class Server {
 public:
  // Throws std::runtime_error with a message for a person.
  explicit Server(const Config& config);
  ~Server();

  void run();  // until SIGTERM, SIGINT, SIGHUP, or idle for config.idle_exit_s

 private:
  void start_shards();
  void stop_shards();
  void listen();
  void set_up(const Reception::Limits& limits);  // all behind the socket
  void watch_idle();
  bool go_unmissed();
  void machines_changed();
  void tell_of_machines();
  void join_hosts();
  void set_alarm(std::uint64_t at_ns);

  Config config_;
  boost::asio::io_context io_;
  boost::asio::signal_set signals_{io_};
  vmci::UniqueFd listener_;  // until run(); then the reception's
  vmci::SocketFile socket_file_;  // none where it is a service manager's
  vmci::UniqueFd folder_lock_;  // while it leaves
  boost::asio::steady_timer idle_timer_{io_};
  boost::asio::steady_timer alarm_timer_{io_};  // when the connection manager, or the management, gives something up
  std::uint64_t alarm_ns_ = 0;                 // 0: it is not set
  vmci::Segment page_;
  pthread_mutex_t* alive_ = nullptr;  // on the page; held from run() on
  std::shared_ptr<remote::Directory> directory_;  // nullptr: no other hosts
  remote::TcpCarrier::Place carrier_place_;
  std::vector<std::unique_ptr<Shard>> further_shards_;  // outlive the first one
  std::unique_ptr<Shard> shard_;
  std::unique_ptr<ControlDesk> desk_;    // these two are used on the shard's thread
  std::unique_ptr<PacketDesk> packets_;
  std::vector<std::thread> shard_threads_;
  std::unique_ptr<Machines> machines_;
  bool machines_changed_ = false, telling_of_machines_ = false;
  std::shared_ptr<hosts::Service> hosts_;  // nullptr: no other hosts
  std::unique_ptr<Reception> reception_;
  std::uint32_t idle_seconds_ = 0;
};

}  // namespace vrdma::svc
