// vrdma-guestd: owns the machine's device, keeps a session with the host service, and serves the machine's processes while there
// is one. Everything happens in the thread that calls run().
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "guest_agent/connection.hpp"
#include "guest_agent/poller.hpp"
#include "guest_agent/session.hpp"
#include "vmci_channel/readiness.hpp"
#include "vmci_channel/socket_file.hpp"

namespace vrdma::agent {

struct Options {
  std::string socket = "/run/vrdma/vrdmad.sock";
  unsigned socket_mode = 0666;
  int ready_fd = -1;  // gets a byte when processes can attach for the first time, and is closed
  std::uint64_t patience_ns = std::uint64_t{vm::session_patience_ms} * 1'000'000;
  std::uint32_t connections_per_user_max = 256;
  std::uint64_t ballast_bytes_max = ~std::uint64_t{0};  // of memory that is held while other memory is looked for (ballast.hpp)
};

class Agent {
 public:
  // Throws std::runtime_error with what to do.
  Agent(const Device& device, Options options);
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;
  ~Agent();

  // Until `stop` is readable. Throws Unsuitable, and std::runtime_error where processes cannot be served.
  void run(int stop);

 private:
  enum : std::uint32_t { item_stop, item_listener, item_packets, item_interrupt };  // of Source::connection 0

  void look(std::uint64_t now_ns);
  bool receive();                   // whether there was anything
  bool take_frame(const vm::FrameHead& head, std::span<const std::byte> body);  // false: the service breaks the protocol
  void wait(std::uint64_t now_ns);
  void take_event(Source source);
  void take_doorbells();
  void accept();
  void look_at_listener(std::uint64_t now_ns);
  void listen();
  void stop_listening();
  void lose();       // whoever was served is not any more
  void drop(Connection& connection, std::uint32_t number);
  void count_out(const Connection& connection);
  void forget_users();
  void leave_in_order();

  Options options_;
  vmci::Readiness readiness_;
  Watch watch_;
  Session session_;
  vmci::UniqueFd listener_;
  vmci::SocketFile socket_file_;
  bool accepting_ = false, packets_watched_ = false, stopping_ = false, frames_good_ = true;
  std::map<std::uint32_t, std::unique_ptr<Connection>> connections_;  // by number; of processes that have gone, too
  std::vector<std::unique_ptr<Connection>> left_behind_;              // of a session that is lost, until the next is accepted
  struct User {
    std::uint32_t connections = 0;
    std::shared_ptr<vmci::Closer> closer = std::make_shared<vmci::Closer>();  // of his sockets, and of what was taken from him
  };
  std::map<uid_t, User> users_;
  std::shared_ptr<vmci::Closer> backlog_closer_ = std::make_shared<vmci::Closer>();  // of listeners, with who was not accepted
  std::uint32_t next_connection_ = 1;
  std::uint64_t busy_until_ns_ = 0;
  std::uint64_t accept_again_ns_ = 0;  // while it has a listener and does not accept
  int not_accepted_ = 0;               // why, when that was tried last; 0: somebody was
};

}  // namespace vrdma::agent
