#include "vmkernel_svc/memory/ram_file.hpp"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "vmci_channel/file_system.hpp"

namespace vrdma::svc {

namespace {

// Whether no part of the path is a link, so that it cannot lead elsewhere than it says.
bool is_straight(const std::string& path, const struct stat& file) {
  open_how how{};
  how.flags = O_PATH | O_CLOEXEC;
  how.resolve = RESOLVE_NO_SYMLINKS;
  const vmci::UniqueFd straight(static_cast<int>(::syscall(SYS_openat2, AT_FDCWD, path.c_str(), &how, sizeof(how))));
  struct stat status;
  return straight && ::fstat(straight.get(), &status) == 0 && status.st_dev == file.st_dev && status.st_ino == file.st_ino;
}

}  // namespace

Result<vmci::UniqueFd> open_ram_file(const std::string& path, uid_t tenant) {
  // A pipe or a device does not keep who opens it waiting.
  vmci::UniqueFd file(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  struct stat status;
  struct statfs filesystem;
  if (!file || ::fstat(file.get(), &status) != 0 || ::fstatfs(file.get(), &filesystem) != 0) return last_error();
  if (!S_ISREG(status.st_mode)) return Errno{ENODEV};
  if (vmci::served_by_others(filesystem.f_type)) return Errno{EMEDIUMTYPE};
  if (status.st_uid == tenant) return file;
  // Another tenant's memory, or, if folders on the way are the tenant's, any that the service could open.
  if ((status.st_uid != ::geteuid() && status.st_uid != 0) || !is_straight(path, status)) return Errno{EPERM};
  return file;
}

const char* ram_file_remedy(int error) {
  switch (error) {
    case ELOOP: return "it is a link: name the file itself";
    case EPERM: return "it belongs to another user than the machine's tenant: chown it, or add the machine with the right --tenant";
    case EMEDIUMTYPE: return "it lies on a file system that another process or host serves: keep it on a tmpfs, as /dev/shm is";
    case EROFS: return "it lies where vrdmad may not write: keep it in /dev/shm or /dev/hugepages, or name its folder in ReadWritePaths of vrdmad's unit";
    default: return "start the machine as \"vrdma vm show\" says";
  }
}

}  // namespace vrdma::svc
