// A machine that shares the BAR and can interrupt nobody: QEMU with ivshmem-plain, or User Mode Linux. The BAR is a file beside
// vm.json that outlives the service, so that a machine which runs is found again by the next one. What the machine wants is seen by
// looking, in naps that grow while nothing happens.
//
// The end of such a machine closes no socket of ours. Either its launcher tells (`vrdma vm uml` stays connected to launcher.sock while
// the machine runs, and brings the descriptor of its RAM), or its agent's heart stands still. The server's thread.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <string>

#include "vmci_channel/segment.hpp"
#include "vmkernel_svc/machines/device.hpp"
#include "vmkernel_svc/machines/listening.hpp"
#include "vrdma/result.hpp"

namespace vrdma::svc {

class Plain final : public MachineDevice {
 public:
  static constexpr const char* bar_name = "link.bar";
  static constexpr const char* launcher_name = "launcher.sock";

  // tenant: the user that the machine runs as; bar_bytes: of its BAR; look: at the link, by which this polls. Throws std::runtime_error with a message for a
  // person.
  Plain(boost::asio::io_context& io, std::string machine, std::string folder, uid_t tenant, std::uint64_t bar_bytes, Events events,
        std::function<LinkActivity()> look);
  ~Plain() override;
  Plain(const Plain&) = delete;
  Plain& operator=(const Plain&) = delete;

  bool connected() const override { return ram_ || alive_until_ns_ != 0; }
  std::byte* bar() const override { return bar_.data(); }
  int bar_fd() const override { return bar_file_.get(); }
  int service_event(std::uint32_t vector) const override { return events_fds_[vector].get(); }
  bool ring_machine() const override { return true; }  // it polls
  void ring_service() const override;
  bool monitored() const override { return static_cast<bool>(ram_); }
  vmci::UniqueFd take_doorbell() override { return std::move(events_fds_[vm::doorbell_vector]); }
  int ram() const override { return ram_.get(); }

 private:
  void open_bar(uid_t tenant, std::uint64_t bytes);
  void nap();
  void look();  // at the agent's line
  void take(vmci::GivenFd launcher);
  void let_go();  // of the launcher
  void await_end();

  std::string machine_, folder_;
  Events events_;
  std::function<LinkActivity()> look_at_link_;
  vmci::UniqueFd bar_file_;
  vmci::Mapping bar_;
  vmci::UniqueFd events_fds_[vm::fixed_vectors];
  Listener door_;
  boost::asio::posix::stream_descriptor launcher_;
  vmci::UniqueFd ram_;  // while there is a launcher
  boost::asio::steady_timer nap_;
  std::uint64_t nap_ns_ = 0;
  vm::AgentLine seen_{};               // what it said last
  std::uint64_t alive_until_ns_ = 0;   // unless its heart beats again; 0: nobody is there
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // handlers that outlive this look here first
};

}  // namespace vrdma::svc
