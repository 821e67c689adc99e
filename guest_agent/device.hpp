// The machine's ivshmem device (1af4:1110): a BAR that it shares with the host service, and a register that interrupts it. User Mode
// Linux has neither PCI nor interrupts, but the BAR (mapper.hpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>

#include "guest_agent/vfio.hpp"
#include "vmci_channel/unique_fd.hpp"
#include "vrdma/control.hpp"
#include "vrdma/vm_link.hpp"

namespace vrdma::agent {

constexpr std::uint32_t owner_died = 0x40000000;  // FUTEX_OWNER_DIED, by which libvrdma knows

// What the rest of the agent knows of a device; a test makes its own of plain memory. One thread.
struct Device {
  std::byte* bar = nullptr;                      // bar_bytes
  std::uint64_t bar_bytes = vm::bar_bytes;       // at least
  int bar_file = -1;                             // by which programs can map it, too; -1: they cannot
  volatile std::uint32_t* registers = nullptr;   // BAR 0; null: there is none
  int interrupt = -1;                            // eventfd of vm::link_vector; -1: there are no interrupts, the link is polled
  // Of the vectors from vm::fixed_vectors to here, a new eventfd that the kernel rings for one, in place of the last; none: it cannot be had.
  std::uint32_t vectors = 0;
  std::function<vmci::UniqueFd(std::uint32_t vector)> interrupt_by = {};
  // An eventfd by which everybody rings vm::doorbell_vector: the kernel does, at once, with what is added to it. -1: the agent has to.
  int doorbell = -1;

  bool service_polls() const {
    return (std::atomic_ref(reinterpret_cast<vm::LinkHeader*>(bar)->service.flags).load(std::memory_order_relaxed) & vm::service_polls) != 0;
  }
  // The machine's RAM is its own: what is lent is of the BAR.
  bool service_lends_bar() const {
    return (std::atomic_ref(reinterpret_cast<vm::LinkHeader*>(bar)->service.flags).load(std::memory_order_relaxed) & vm::service_lends_bar) != 0;
  }
  // What programs look at while they poll says from now on that nobody serves them: for pages of the BAR, whose agent may have been killed.
  // Not by a robust mutex, as in other pages: every program can write here, and the kernel and the C library would follow its pointers.
  void mark_page_dead() const {
    auto& header = *reinterpret_cast<vm::LinkHeader*>(bar);
    const std::uint64_t page = std::atomic_ref(header.agent.page).load(std::memory_order_relaxed);
    if (page < vm::bar_bytes / vm::page_bytes || page >= bar_bytes / vm::page_bytes) return;
    auto& alive = reinterpret_cast<control::ServicePage*>(bar + page * vm::page_bytes)->alive_mutex;
    std::atomic_ref(*reinterpret_cast<std::uint32_t*>(alive)).store(owner_died, std::memory_order_release);
    std::atomic_ref(header.agent.page).store(0, std::memory_order_relaxed);
  }
  // Tells the service.
  void ring(std::uint32_t vector) const {
    auto& header = *reinterpret_cast<vm::LinkHeader*>(bar);
    if (registers != nullptr && !service_polls())
      registers[vm::doorbell_register / sizeof(*registers)] = vm::service_peer << 16 | vector;
    else if (vector == vm::doorbell_vector)  // the link itself is looked at anyway
      std::atomic_ref(header.agent.doorbells).fetch_add(1, std::memory_order_release);
  }
};

// The machine has none, or several that may be vrdma's: which time does not heal.
struct NoDevice : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The real one, as long as this lives: by vfio with interrupts where the machine has an IOMMU, else by the BARs in /sys.
class IvshmemDevice {
 public:
  // bdf: as "0000:00:03.0"; empty: the only one that there is, or that is vrdma's. Throws std::runtime_error that says what to do.
  explicit IvshmemDevice(std::string bdf);
  IvshmemDevice(const IvshmemDevice&) = delete;
  IvshmemDevice& operator=(const IvshmemDevice&) = delete;
  ~IvshmemDevice();

  const Device& device() const { return device_; }
  const std::string& bdf() const { return bdf_; }

 private:
  void open_by_vfio();
  void open_by_sysfs();
  void take(void* registers, std::size_t register_bytes, void* bar, std::size_t bar_bytes);

  std::string bdf_;
  Device device_;
  std::size_t register_bytes_ = 0;
  std::optional<VfioDevice> vfio_;
  vmci::UniqueFd lock_;  // without vfio, which lends a device once
  vmci::UniqueFd bar_file_, interrupt_, doorbell_;
};

}  // namespace vrdma::agent
