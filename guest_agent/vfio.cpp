#include "guest_agent/vfio.hpp"

#include <fcntl.h>
#include <linux/pci_regs.h>
#include <linux/vfio.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "guest_agent/patience.hpp"

namespace vrdma::agent {

namespace {

namespace fs = std::filesystem;
using vmci::UniqueFd;

[[noreturn]] void fail_by_errno(const std::string& what) {
  const int why = errno;
  throw std::runtime_error("cannot " + what + " (" + std::strerror(why) +
                           "): run vrdma-guestd as root, or unbind the device from vfio-pci to do without interrupts");
}

UniqueFd open_or_fail(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) fail_by_errno("open " + path);
  return fd;
}

std::string driver_of(const fs::path& device) {
  std::error_code none;
  return fs::read_symlink(device / "driver", none).filename();
}

vfio_region_info region(int device, unsigned index) {
  vfio_region_info info{};
  info.argsz = sizeof(info);
  info.index = index;
  if (::ioctl(device, VFIO_DEVICE_GET_REGION_INFO, &info) != 0) fail_by_errno("ask vfio for region " + std::to_string(index));
  return info;
}

}  // namespace

bool VfioDevice::available(const fs::path& device) {
  std::error_code none;
  if (!fs::exists(device / "iommu_group", none) || !fs::exists("/dev/vfio/vfio", none)) return false;
  if (driver_of(device).empty() && fs::exists("/sys/bus/pci/drivers/vfio-pci", none)) {
    std::ofstream(device / "driver_override") << "vfio-pci" << std::flush;
    std::ofstream("/sys/bus/pci/drivers_probe") << device.filename().string() << std::flush;
  }
  return driver_of(device) == "vfio-pci";
}

VfioDevice::VfioDevice(const fs::path& device) : container_(open_or_fail("/dev/vfio/vfio")) {
  if (::ioctl(container_.get(), VFIO_GET_API_VERSION) != VFIO_API_VERSION) errno = ENOTSUP, fail_by_errno("use this kernel's vfio");
  const std::string group = fs::read_symlink(device / "iommu_group").filename();
  (void)taken_in_time([&] {
    group_.reset(::open(("/dev/vfio/" + group).c_str(), O_RDWR | O_CLOEXEC));
    return group_ || errno != EBUSY;
  });
  if (!group_ && errno == EBUSY)
    throw std::runtime_error("PCI device " + device.filename().string() + " is in use by another process: stop the other vrdma-guestd, or give another --device");
  if (!group_) fail_by_errno("open /dev/vfio/" + group);
  vfio_group_status status{};
  status.argsz = sizeof(status);
  if (::ioctl(group_.get(), VFIO_GROUP_GET_STATUS, &status) != 0) fail_by_errno("ask for the state of IOMMU group " + group);
  if ((status.flags & VFIO_GROUP_FLAGS_VIABLE) == 0) errno = EBUSY, fail_by_errno("use IOMMU group " + group + ", of which other drivers have devices");
  const int container = container_.get();
  if (::ioctl(group_.get(), VFIO_GROUP_SET_CONTAINER, &container) != 0) fail_by_errno("use IOMMU group " + group);
  // The device does not reach memory by itself: nothing is ever mapped for it.
  if (::ioctl(container_.get(), VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU) != 0) fail_by_errno("use the IOMMU");
  device_.reset(::ioctl(group_.get(), VFIO_GROUP_GET_DEVICE_FD, device.filename().c_str()));
  if (!device_) fail_by_errno("open PCI device " + device.filename().string());
  // BARs are memory; an interrupt is a write by the device.
  const auto config = static_cast<off_t>(region(device_.get(), VFIO_PCI_CONFIG_REGION_INDEX).offset) + PCI_COMMAND;
  std::uint16_t command = 0;
  if (::pread(device_.get(), &command, sizeof(command), config) != sizeof(command)) fail_by_errno("read the device's configuration");
  command |= PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER;
  if (::pwrite(device_.get(), &command, sizeof(command), config) != sizeof(command)) fail_by_errno("enable the device");
}

VfioDevice::Bar VfioDevice::map_bar(unsigned index) const {
  const auto info = region(device_.get(), VFIO_PCI_BAR0_REGION_INDEX + index);
  void* const memory = info.size == 0 ? (errno = ENODEV, MAP_FAILED)
                                      : ::mmap(nullptr, info.size, PROT_READ | PROT_WRITE, MAP_SHARED, device_.get(), static_cast<off_t>(info.offset));
  if (memory == MAP_FAILED) fail_by_errno("map BAR " + std::to_string(index));
  return {memory, info.size};
}

bool VfioDevice::set_interrupts(std::uint32_t first, std::span<const int> eventfds) const {
  std::vector<std::byte> request(sizeof(vfio_irq_set) + eventfds.size_bytes());
  vfio_irq_set set{};
  set.argsz = static_cast<std::uint32_t>(request.size());
  set.flags = VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER;
  set.index = VFIO_PCI_MSIX_IRQ_INDEX;
  set.start = first;
  set.count = static_cast<std::uint32_t>(eventfds.size());
  std::memcpy(request.data(), &set, sizeof(set));
  std::memcpy(request.data() + sizeof(set), eventfds.data(), eventfds.size_bytes());
  return ::ioctl(device_.get(), VFIO_DEVICE_SET_IRQS, request.data()) == 0;  // positive: the kernel has so many only
}

// All at once: kernels before 6.6 give no more later.
std::uint32_t VfioDevice::enable_interrupts(std::uint32_t count_max) const {
  vfio_irq_info info{};
  info.argsz = sizeof(info);
  info.index = VFIO_PCI_MSIX_IRQ_INDEX;
  if (::ioctl(device_.get(), VFIO_DEVICE_GET_IRQ_INFO, &info) != 0) fail_by_errno("ask for the device's interrupts");
  for (std::uint32_t count = std::min(count_max, info.count); count != 0; count /= 2)
    if (set_interrupts(0, std::vector<int>(count, -1))) return count;
  fail_by_errno("get the device's interrupts");
}

UniqueFd VfioDevice::interrupt(std::uint32_t vector) const {
  UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (event && !set_interrupts(vector, std::array{event.get()})) event.reset();
  return event;
}

UniqueFd VfioDevice::writing(unsigned bar, std::uint64_t offset, std::uint32_t word) const {
  UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  vfio_device_ioeventfd request{};
  request.argsz = sizeof(request);
  request.flags = VFIO_DEVICE_IOEVENTFD_32;
  request.offset = region(device_.get(), VFIO_PCI_BAR0_REGION_INDEX + bar).offset + offset;
  request.data = word;
  request.fd = event.get();
  if (!event || ::ioctl(device_.get(), VFIO_DEVICE_IOEVENTFD, &request) != 0) return {};
  // Kernels before 5.11 leave in it what was added: who has filled it would keep the others waiting.
  const std::uint64_t one = 1;
  std::uint64_t left;
  if (::write(event.get(), &one, sizeof(one)) != sizeof(one) || ::read(event.get(), &left, sizeof(left)) == sizeof(left)) {
    request.fd = -1;  // no longer
    ::ioctl(device_.get(), VFIO_DEVICE_IOEVENTFD, &request);
    return {};
  }
  return event;
}

}  // namespace vrdma::agent
