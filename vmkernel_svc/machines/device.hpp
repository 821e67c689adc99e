// What the service shares with a virtual machine, whoever runs that: the BAR with the link (vrdma/vm_link.hpp), and ways to tell one
// another. One machine at a time; another may come when it has gone. The server's thread.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "vmci_channel/unique_fd.hpp"
#include "vmkernel_svc/objects.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::svc {

enum class LinkActivity { none, processes, traffic };  // processes: there are some, and nothing has come of them

class MachineDevice {
 public:
  struct Events {
    std::function<void()> came, went;
  };
  virtual ~MachineDevice() = default;

  virtual bool connected() const = 0;
  virtual std::byte* bar() const = 0;
  virtual int bar_fd() const = 0;  // the memory that is the BAR
  vm::LinkHeader& header() const { return *reinterpret_cast<vm::LinkHeader*>(bar()); }
  // Eventfds that are rung for the service.
  virtual int service_event(std::uint32_t vector) const = 0;
  [[nodiscard]] virtual bool ring_machine() const = 0;  // false: not yet
  // By which its channels are interrupted; null: not at all.
  virtual std::shared_ptr<const Interrupts> interrupts() const { return nullptr; }
  virtual void ring_service() const = 0;  // perhaps not: it looks by itself now and then
  // The one that the shard watches, which has to let go of it first.
  virtual vmci::UniqueFd take_doorbell() = 0;
  // Somebody tells what becomes of the machine.
  virtual bool monitored() const { return false; }
  // Has that somebody answer by news with this number.
  virtual void ask(std::uint64_t) {}
  // The machine's RAM, if whoever runs it has brought it along; else -1.
  virtual int ram() const { return -1; }
};

}  // namespace vrdma::svc
