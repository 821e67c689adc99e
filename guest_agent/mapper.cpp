#include "guest_agent/mapper.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "guest_agent/patience.hpp"

namespace vrdma::agent {

MapperDevice::MapperDevice(const std::string& path) : file_(::open(path.c_str(), O_RDWR | O_CLOEXEC)) {
  const auto fail = [&](const char* what, int why, const char* remedy) {
    throw std::runtime_error(std::string("cannot ") + what + " " + path + " (" + std::strerror(why) + "): " + remedy);
  };
  if (!file_ && (errno == EACCES || errno == EPERM)) fail("open", errno, "run vrdma-guestd as root");
  constexpr const char* others = "give another --device, as 0000:00:03.0, or none";
  if (!file_) throw NoDevice("cannot open " + path + " (" + std::strerror(errno) + "): " + others);
  // A file would be mapped as well, and be waited for in vain.
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0 || !S_ISCHR(status.st_mode)) throw NoDevice(path + " is no device: " + others);
  // Two agents would end each other's sessions for ever.
  if (!taken_in_time([this] { return ::flock(file_.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK; }))
    throw std::runtime_error(path + " is served by another vrdma-guestd: stop that one");
  void* const bar = ::mmap(nullptr, vm::bar_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (bar == MAP_FAILED) fail("map", errno, "start the machine by \"vrdma vm uml\" on the host, or with the iomem= that it gives");
  device_.bar = static_cast<std::byte*>(bar);
}

MapperDevice::~MapperDevice() {
  if (device_.bar != nullptr) ::munmap(device_.bar, vm::bar_bytes);
}

}  // namespace vrdma::agent
