#include "guest_agent/device.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "guest_agent/patience.hpp"
#include "vrdma/vm_device.hpp"

namespace vrdma::agent {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

// All of a BAR, which is no shorter than asked.
std::pair<void*, std::size_t> map_bar(const fs::path& file, std::size_t bytes_min) {
  const vmci::UniqueFd fd(::open(file.c_str(), O_RDWR | O_CLOEXEC | O_SYNC));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) {
    const int why = errno;
    fail("cannot open " + file.string() + " (" + std::strerror(why) + "): " +
         (why == EACCES || why == EPERM ? "run vrdma-guestd as root, without kernel lockdown" : "is the device bound to another driver?"));
  }
  const auto bytes = static_cast<std::size_t>(status.st_size);
  if (bytes < bytes_min) fail(file.string() + " has " + std::to_string(bytes) + " bytes, not " + std::to_string(bytes_min) + ": it is not vrdma's device");
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) {
    const int why = errno;
    fail("cannot map " + file.string() + " (" + std::strerror(why) + "): is the device bound to another driver?");
  }
  return {memory, bytes};
}

// Null where it cannot be.
VfioDevice::Bar map_whole(int file) {
  struct stat status {};
  if (file < 0 || ::fstat(file, &status) != 0) return {nullptr, 0};
  const auto bytes = static_cast<std::size_t>(status.st_size);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? VfioDevice::Bar{nullptr, 0} : VfioDevice::Bar{memory, bytes};
}

void enable(const std::string& bdf) {
  const fs::path file = vm::pci_devices / bdf / "enable";
  if (vm::word_in(file) != "0") return;  // the kernel counts who enables it
  std::ofstream enabled(file);
  if (!(enabled << "1" << std::flush)) fail("cannot enable PCI device " + bdf + " by " + file.string() + ": run vrdma-guestd as root");
}

// Whether vrdmad has written to its BAR, which it does before a machine can have it. False also where it cannot be looked at: somebody has it.
bool is_of_vrdma(const std::string& bdf) {
  const fs::path folder = vm::pci_devices / bdf;
  try {
    std::error_code none;
    std::optional<VfioDevice> vfio;
    if (fs::exists(folder / "driver", none) && VfioDevice::available(folder)) vfio.emplace(folder);  // one that has no driver is given none
    else enable(bdf);
    const vmci::UniqueFd file(::open((folder / "resource2").c_str(), O_RDWR | O_CLOEXEC));
    VfioDevice::Bar bar = map_whole(file.get());
    if (bar.memory == nullptr && vfio) bar = vfio->map_bar(2);
    if (bar.memory == nullptr) return false;
    const bool found = bar.bytes >= vm::bar_bytes && std::atomic_ref(static_cast<vm::LinkHeader*>(bar.memory)->service.magic).load() == vm::magic;
    ::munmap(bar.memory, bar.bytes);
    return found;
  } catch (const std::runtime_error&) {
    return false;
  }
}

// Others have such devices too (Looking Glass): of several, the one that vrdmad has written to.
std::string the_only_one() {
  const auto names = vm::ivshmem_devices();
  if (names.empty())
    throw NoDevice("this machine has no ivshmem device (PCI 1af4:1110) with a BAR of 1 MiB: start it with the QEMU arguments that "
                   "\"vrdma vm add\" prints on the host");
  if (names.size() == 1) return names.front();
  std::vector<std::string> ours;
  std::ranges::copy_if(names, std::back_inserter(ours), is_of_vrdma);
  if (ours.size() == 1) return ours.front();
  std::string list;
  for (const auto& name : ours.empty() ? names : ours) list += " " + name;
  throw NoDevice((ours.empty() ? "this machine has several ivshmem devices, and vrdmad has written to none that can be looked at: give --device one of"
                               : "this machine has several ivshmem devices of vrdma's: give --device one of") + list);
}

}  // namespace

IvshmemDevice::IvshmemDevice(std::string bdf) : bdf_(bdf.empty() ? the_only_one() : std::move(bdf)) {
  if (!vm::is_ivshmem(vm::pci_devices / bdf_)) throw NoDevice("PCI device " + bdf_ + " is no ivshmem device (1af4:1110): give another --device, or none");
  if (VfioDevice::available(vm::pci_devices / bdf_))
    open_by_vfio();
  else
    open_by_sysfs();
}

IvshmemDevice::~IvshmemDevice() {
  if (device_.bar != nullptr) ::munmap(device_.bar, device_.bar_bytes);
  if (device_.registers != nullptr) ::munmap(const_cast<std::uint32_t*>(device_.registers), register_bytes_);
}

void IvshmemDevice::open_by_sysfs() {
  const fs::path folder = vm::pci_devices / bdf_;
  enable(bdf_);
  // Two agents would end each other's sessions for ever.
  lock_.reset(::open((folder / "resource2").c_str(), O_RDWR | O_CLOEXEC));
  if (lock_ && !taken_in_time([this] { return ::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK; }))
    fail("PCI device " + bdf_ + " is served by another vrdma-guestd: stop that one, or give another --device");
  const auto [registers, register_bytes] = map_bar(folder / "resource0", vm::doorbell_register + sizeof(std::uint32_t));
  const auto [bar, bar_bytes] = map_bar(folder / "resource2", vm::bar_bytes);
  bar_file_.reset(::open((folder / "resource2").c_str(), O_RDWR | O_CLOEXEC));
  take(registers, register_bytes, bar, bar_bytes);
}

void IvshmemDevice::open_by_vfio() {
  vfio_.emplace(vm::pci_devices / bdf_);
  const auto registers = vfio_->map_bar(0);
  // Not by vfio, if it can be: programs may have to map it, too, who must get no more of the device than that; and the kernel lets nobody
  // map in the other way what somebody has mapped by vfio.
  bar_file_.reset(::open((vm::pci_devices / bdf_ / "resource2").c_str(), O_RDWR | O_CLOEXEC));
  VfioDevice::Bar bar = map_whole(bar_file_.get());
  if (bar.memory == nullptr) bar_file_.reset(), bar = vfio_->map_bar(2);
  if (registers.bytes < vm::doorbell_register + sizeof(std::uint32_t) || bar.bytes < vm::bar_bytes)
    fail("PCI device " + bdf_ + " has a BAR of " + std::to_string(bar.bytes) + " bytes: it is not vrdma's device");
  take(registers.memory, registers.bytes, bar.memory, bar.bytes);
  device_.vectors = vfio_->enable_interrupts(vm::vectors_max);
  interrupt_ = vfio_->interrupt(vm::link_vector);
  if (!interrupt_) fail("cannot get the interrupts of PCI device " + bdf_ + " (" + std::strerror(errno) + "): unbind it from vfio-pci to do without");
  device_.interrupt = interrupt_.get();
  device_.interrupt_by = [this](std::uint32_t vector) { return vfio_->interrupt(vector); };
  doorbell_ = vfio_->writing(0, vm::doorbell_register, vm::service_peer << 16 | vm::doorbell_vector);
  if (doorbell_) device_.doorbell = doorbell_.get();
}

void IvshmemDevice::take(void* registers, std::size_t register_bytes, void* bar, std::size_t bar_bytes) {
  device_.registers = static_cast<volatile std::uint32_t*>(registers);
  register_bytes_ = register_bytes;
  device_.bar = static_cast<std::byte*>(bar);
  device_.bar_bytes = bar_bytes;
  device_.bar_file = bar_file_.get();
}

}  // namespace vrdma::agent
