#include "guest_lib/memory/shareable_file.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "vmci_channel/segment.hpp"

namespace vrdma::memory {
namespace {

bool fits(int fd, const FileId& wanted) {
  const auto id = file_id(fd);
  return id && *id == wanted && (::fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR;
}

// -1: it is not there. A program with thousands of descriptors registers parts of one file again and again: where it was found last is
// tried first.
int among_descriptors(const FileId& wanted) {
  static std::atomic<int> last_found{-1};  // a hint: any value will do
  if (const int hint = last_found.load(std::memory_order_relaxed); hint >= 0 && fits(hint, wanted)) return hint;
  const auto close = [](DIR* d) { ::closedir(d); };
  const std::unique_ptr<DIR, decltype(close)> directory(::opendir("/proc/self/fd"), close);
  if (!directory) return -1;
  while (const dirent* entry = ::readdir(directory.get())) {
    if (entry->d_name[0] == '.') continue;
    const int number = std::atoi(entry->d_name);
    if (fits(number, wanted)) {
      last_found.store(number, std::memory_order_relaxed);
      return number;
    }
  }
  return -1;
}

// Opening could do something to a device or a pipe, and closing ends locks: only what is memory. To look at it does neither (O_PATH).
vmci::UniqueFd opened(const char* path, const FileId& wanted) {
  const vmci::UniqueFd look(::open(path, O_PATH | O_CLOEXEC));
  if (!look || !vmci::memory_file_bytes(look.get())) return {};
  vmci::UniqueFd fd(::open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (fd && !fits(fd.get(), wanted)) fd.reset();
  return fd;
}

// The service, and peers, map for writing what somebody writes. (The system's headers may not know the latter.)
constexpr int write_seals = 0x0008 | 0x0010;  // F_SEAL_WRITE, F_SEAL_FUTURE_WRITE
bool is_write_sealed(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & write_seals) != 0;
}

// Programs often close the descriptor after mmap. To follow the link needs CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN; to read it does not.
struct Link {
  explicit Link(const Vma& vma) {
    std::snprintf(path, sizeof path, "/proc/self/map_files/%llx-%llx", static_cast<unsigned long long>(vma.range.begin),
                  static_cast<unsigned long long>(vma.range.end));
  }
  char path[96];
};
vmci::UniqueFd through_mapping(const Vma& vma) { return opened(Link(vma).path, vma.file); }
vmci::UniqueFd by_name(const Vma& vma) {
  char name[PATH_MAX];
  const ssize_t bytes = ::readlink(Link(vma).path, name, sizeof name - 1);
  if (bytes <= 0) return {};
  name[bytes] = '\0';
  return opened(name, vma.file);
}

}  // namespace

bool ShareableFile::still_is(const FileId& wanted) const { return fits(fd, wanted); }

Result<ShareableFile> open_shareable(const Vma& vma) {
  ShareableFile file;
  file.fd = among_descriptors(vma.file);
  if (file.fd < 0) {
    file.opened = through_mapping(vma);
    if (!file.opened) file.opened = by_name(vma);
    file.fd = file.opened.get();
  }
  if (file.fd < 0) return Errno{ENOENT};
  if (is_write_sealed(file.fd)) return Errno{EPERM};
  const auto bytes = vmci::memory_file_bytes(file.fd);
  if (!bytes) return bytes.error();
  (void)::fcntl(file.fd, F_ADD_SEALS, F_SEAL_SHRINK);  // where it can be: peers may map what does not shrink under them
  file.bytes = *bytes;
  return Result<ShareableFile>(std::move(file));
}

}  // namespace vrdma::memory
