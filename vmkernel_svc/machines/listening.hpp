// Where whoever runs a machine connects to the service: a stream socket for one user. The server's thread.
#pragma once

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "vmci_channel/given_descriptors.hpp"
#include "vmci_channel/socket_file.hpp"

namespace vrdma::svc {

class Listener {
 public:
  using Handler = std::function<void(vmci::GivenFd)>;
  // machine: its name, for the log.
  Listener(boost::asio::io_context& io, std::string machine);
  ~Listener();  // takes the socket out of its folder
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Once. Who else serves the folder of machines serves another socket of guests, too: what stands at `path` is a leftover.
  // Throws std::runtime_error with a message for a person.
  void open(const std::string& path, uid_t tenant, Handler take);
  // Of what comes from there: while much of it is not closed yet, nobody is accepted.
  const std::shared_ptr<vmci::Closer>& closer() const { return closer_; }

 private:
  void accept_next();
  void accept_after(std::chrono::milliseconds pause);

  std::string machine_, path_;
  vmci::SocketFile file_;
  Handler take_;
  boost::asio::posix::stream_descriptor listener_;
  boost::asio::steady_timer pause_;  // between two who connect, and two tries when descriptors have run out
  std::shared_ptr<vmci::Closer> closer_ = std::make_shared<vmci::Closer>();
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // handlers that outlive this look here first
};

}  // namespace vrdma::svc
