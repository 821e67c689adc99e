// The QEMU that runs a virtual machine, as the service meets it: the ivshmem server that gives it the BAR and the doorbells, and
// its monitor (monitor.hpp). One QEMU at a time; another may come when it has gone; one that runs already when the service starts is
// found again (keeper.hpp). The server's thread.
#pragma once

#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <memory>
#include <span>
#include <string>

#include "vmci_channel/segment.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vmkernel_svc/eventfd_signal.hpp"
#include "vmkernel_svc/machines/device.hpp"
#include "vmkernel_svc/machines/keeper.hpp"
#include "vmkernel_svc/machines/listening.hpp"
#include "vmkernel_svc/machines/monitor.hpp"
#include "vrdma/result.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::svc {

class Qemu final : public MachineDevice {
 public:
  // Listens in `folder`; tenant: the user that QEMU runs as; vectors: of its device, at least vm::fixed_vectors; bar_bytes: of its BAR; news: what its monitor says,
  // all of it before Events::went. Throws std::runtime_error with a message for a person.
  Qemu(boost::asio::io_context& io, std::string machine, std::string folder, uid_t tenant, std::uint32_t vectors, std::uint64_t bar_bytes, Events events, Monitor::Handler news);
  ~Qemu() override;
  Qemu(const Qemu&) = delete;
  Qemu& operator=(const Qemu&) = delete;

  bool connected() const override { return qemu_.is_open(); }
  std::byte* bar() const override { return bar_.data(); }
  int bar_fd() const override { return bar_.fd(); }
  int service_event(std::uint32_t vector) const override { return service_events_[vector].get(); }
  bool ring_machine() const override { return signal_eventfd((*machine_events_)[vm::link_vector].get()); }
  void ring_service() const override { (void)signal_eventfd(service_events_[vm::link_vector].get()); }
  std::shared_ptr<const Interrupts> interrupts() const override { return machine_events_; }
  vmci::UniqueFd take_doorbell() override { return std::move(service_events_[vm::doorbell_vector]); }
  bool monitored() const override { return monitor_.there(); }
  void ask(std::uint64_t number) override { monitor_.ask(number); }

 private:
  void take(vmci::GivenFd fd);
  void take_monitor(vmci::GivenFd fd);
  bool ended() const;  // QEMU has, though nobody has noticed yet
  Status introduce(int qemu) const;  // the ivshmem protocol: who is who, and the descriptors
  std::array<std::span<vmci::UniqueFd>, 2> doorbells() { return {{service_events_, *machine_events_}}; }
  bool find_again(std::uint64_t bar_bytes);
  void keep();
  void keep_soon();
  void await_end();
  void lose();

  std::string machine_, kept_as_;
  Events events_;
  Keeper keeper_;
  vmci::Segment bar_;
  vmci::UniqueFd service_events_[vm::fixed_vectors];  // eventfds of ivshmem's peers
  std::shared_ptr<Interrupts> machine_events_;
  Listener link_door_, monitor_door_;
  boost::asio::posix::stream_descriptor qemu_;
  Monitor monitor_;
  bool refused_ = false;  // somebody besides who is there: said once
  boost::asio::steady_timer keeping_;
  bool keep_waits_ = false;
  std::chrono::steady_clock::time_point kept_until_{};  // of the times at which it may be kept, the last that is used up
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // handlers that outlive this look here first
};

}  // namespace vrdma::svc
