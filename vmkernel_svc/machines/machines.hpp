// The virtual machines of this host, as the folder of machines says: one sub-folder each, with vm.json in it. Watched, so that
// `vrdma vm add` and `vrdma vm remove` take effect at once. One service at a time serves a folder. The server's thread.
//
// What vm.json says is believed: it names the file that is read and written as the machine's RAM. So nothing is looked at that others than root and this
// service's user have made, or can write.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "vmci_channel/unique_fd.hpp"
#include "vmkernel_svc/machines/port.hpp"

namespace vrdma::svc {

class Machines {
 public:
  // folder: may not exist yet. What is wrong with one machine is logged and hurts no other. Throws std::runtime_error with a message for a
  // person where another service serves it.
  Machines(std::string folder, MachinePort::Service service);
  ~Machines();

  std::vector<MachineStatus> status() const;
  bool any_running() const;  // some machine's QEMU is connected

 private:
  void look();   // what the folder says now
  bool is_trusted() const;  // the folder
  std::string hold();  // the folder, if it is there; else who does
  void watch();
  bool take_changes();
  void await_changes();

  std::string folder_;
  vmci::UniqueFd held_;  // locked while this lives
  MachinePort::Service service_;
  boost::asio::posix::stream_descriptor changes_;  // inotify
  int beside_ = -1;                                // its watch of the place where the folder would appear
  int own_ = -1;  // of the folder
  std::map<std::string, std::unique_ptr<MachinePort>> ports_;
  std::map<std::string, std::string> complaints_;  // already logged, by machine
};

}  // namespace vrdma::svc
