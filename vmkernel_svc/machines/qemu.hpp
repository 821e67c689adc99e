// The QEMU that runs a virtual machine, as the service meets it: the ivshmem server that gives it the BAR and the doorbells, and
// its monitor, which tells when the machine is reset. One QEMU at a time; another may come when it has gone. The server's thread.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "vmci_channel/segment.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vrdma/result.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::svc {

class Qemu {
 public:
  struct Events {
    std::function<void()> came, went;
    std::function<void()> reset;  // its machine begins anew, with the same memory
  };
  // Listens in `folder`; tenant: the user that QEMU runs as. Throws std::runtime_error with a message for a person.
  Qemu(boost::asio::io_context& io, std::string machine, std::string folder, uid_t tenant, Events events);
  ~Qemu();
  Qemu(const Qemu&) = delete;
  Qemu& operator=(const Qemu&) = delete;

  bool connected() const { return qemu_.is_open(); }
  vm::LinkHeader& header() const { return *bar_.at<vm::LinkHeader>(0); }
  std::byte* bar() const { return bar_.data(); }
  // Eventfds that the machine rings, and that are rung for it.
  int service_event(std::uint32_t vector) const { return service_events_[vector].get(); }
  void ring_machine() const { ring(machine_events_[vm::link_vector]); }
  void ring_service() const { ring(service_events_[vm::link_vector]); }
  // The one that the shard watches, which has to let go of it first.
  vmci::UniqueFd take_doorbell() { return std::move(service_events_[vm::doorbell_vector]); }

 private:
  static void ring(const vmci::UniqueFd& event);
  void accept_next();
  void take(vmci::UniqueFd fd);
  Status introduce(int qemu) const;  // the ivshmem protocol: who is who, and the descriptors
  void await_end();
  void lose();
  void accept_monitor();
  void await_news();
  bool take_news(std::string_view text);  // false: it is no monitor

  std::string machine_, folder_;
  Events events_;
  vmci::Segment bar_;
  vmci::UniqueFd service_events_[vm::vectors], machine_events_[vm::vectors];  // eventfds of ivshmem's peers
  boost::asio::posix::stream_descriptor listener_, qemu_, monitor_listener_, monitor_;
  std::string news_;  // the beginning of a line of the monitor
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // handlers that outlive this look here first
};

}  // namespace vrdma::svc
