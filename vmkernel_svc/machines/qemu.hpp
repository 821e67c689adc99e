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
#include "vmkernel_svc/machines/device.hpp"
#include "vrdma/result.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::svc {

class Qemu final : public MachineDevice {
 public:
  // Listens in `folder`; tenant: the user that QEMU runs as. Throws std::runtime_error with a message for a person.
  Qemu(boost::asio::io_context& io, std::string machine, std::string folder, uid_t tenant, Events events);
  ~Qemu() override;
  Qemu(const Qemu&) = delete;
  Qemu& operator=(const Qemu&) = delete;

  bool connected() const override { return qemu_.is_open(); }
  std::byte* bar() const override { return bar_.data(); }
  int service_event(std::uint32_t vector) const override { return service_events_[vector].get(); }
  void ring_machine() const override { ring(machine_events_[vm::link_vector]); }
  void ring_service() const override { ring(service_events_[vm::link_vector]); }
  vmci::UniqueFd take_doorbell() override { return std::move(service_events_[vm::doorbell_vector]); }

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
