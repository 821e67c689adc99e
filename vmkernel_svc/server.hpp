// The service around the shard: listens, takes guests in and out, signals, and ends. Boost.Asio on the main thread; whatever
// touches a guest's objects is submitted to the shard.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <map>
#include <memory>
#include <thread>

#include "vmci_channel/segment.hpp"
#include "vmci_channel/socket_file.hpp"
#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/hosts/service.hpp"
#include "vmkernel_svc/machines/machines.hpp"
#include "vmkernel_svc/packet_desk.hpp"
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
  // One guest's socket (or one that has not attached, or a tool's).
  struct Connection : std::enable_shared_from_this<Connection> {
    Connection(boost::asio::io_context& io, vmci::PacketSocket socket_in)
        : socket(std::move(socket_in)), readable(io), exited(io), patience(io) {}
    vmci::PacketSocket socket;
    boost::asio::posix::stream_descriptor readable;  // a duplicate of the socket
    boost::asio::posix::stream_descriptor exited;    // the guest's pidfd
    boost::asio::steady_timer patience;              // with which it waits for this host's first lease of LIDs
    std::atomic<std::uint32_t> guest{0};             // VMCI context id once attached; set by the shard
    uid_t uid = 0;
    std::shared_ptr<MachineProcess> machine;         // whose process it is; nullptr: a process of this host
    bool asked_to_attach = false;                    // once is all: its pidfd is being waited for
    bool has_waited = false;                         // for that lease
    bool closed = false;
  };
  using ConnectionPtr = std::shared_ptr<Connection>;

  void start_shards();
  void stop_shards();
  void listen();
  void accept_next();
  void admit(vmci::PacketSocket socket, uid_t uid, std::shared_ptr<MachineProcess> machine);
  void read_next(const ConnectionPtr& connection);
  void handle_packet(const ConnectionPtr& connection, std::vector<std::byte> packet, std::vector<vmci::UniqueFd> descriptors);
  bool has_to_wait(const Connection& connection) const;
  void await_lease(const ConnectionPtr& connection);
  void lease_is_known();
  void attach(const ConnectionPtr& connection, const control::Head& head, const std::vector<std::byte>& packet);
  void attach_from_machine(const ConnectionPtr& connection, const control::Head& head, const control::AttachRequest& request);
  static std::optional<PinnedPages> memory_of(const Connection& connection, control::Request request, const std::vector<std::byte>& packet);
  void lost(const ConnectionPtr& connection);
  void await_exit(const ConnectionPtr& connection);
  void watch_idle();
  bool go_unmissed();
  void machines_changed();
  void tell_of_machines();
  void join_hosts();
  void set_alarm(std::uint64_t at_ns);

  Config config_;
  boost::asio::io_context io_;
  boost::asio::signal_set signals_{io_};
  boost::asio::posix::stream_descriptor listener_{io_};
  vmci::SocketFile socket_file_;  // none where it is a service manager's
  vmci::UniqueFd folder_lock_;  // while it leaves
  boost::asio::steady_timer idle_timer_{io_};
  boost::asio::steady_timer alarm_timer_{io_};  // when the connection manager, or the management, gives something up
  std::uint64_t alarm_ns_ = 0;                 // 0: it is not set
  boost::asio::steady_timer accept_timer_{io_};  // between two tries when descriptors have run out
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
  bool lease_is_known_ = true;             // false: LIDs are leased to this host, and have not been yet, nor refused
  std::map<Connection*, ConnectionPtr> connections_;
  std::map<uid_t, std::uint32_t> connections_of_;
  std::uint64_t open_files_ = 0;          // how many we may have
  std::uint32_t connections_max_ = 2048;  // of one user
  std::uint32_t idle_seconds_ = 0;
};

}  // namespace vrdma::svc
