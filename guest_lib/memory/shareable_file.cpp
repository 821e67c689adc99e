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

// Another thread may close or reuse the number at any time: only the duplicate counts.
vmci::UniqueFd duplicate_of(int number, const FileId& wanted) {
  if (!fits(number, wanted)) return {};
  vmci::UniqueFd duplicate(::fcntl(number, F_DUPFD_CLOEXEC, 0));
  if (duplicate && !fits(duplicate.get(), wanted)) duplicate.reset();
  return duplicate;
}

// A program with thousands of descriptors registers parts of one file again and again: where it was found last is tried first.
vmci::UniqueFd among_descriptors(const FileId& wanted) {
  static std::atomic<int> last_found{-1};  // a hint: any value will do
  if (const int hint = last_found.load(std::memory_order_relaxed); hint >= 0)
    if (auto found = duplicate_of(hint, wanted)) return found;
  const auto close = [](DIR* d) { ::closedir(d); };
  const std::unique_ptr<DIR, decltype(close)> directory(::opendir("/proc/self/fd"), close);
  if (!directory) return {};
  while (const dirent* entry = ::readdir(directory.get())) {
    if (entry->d_name[0] == '.') continue;
    const int number = std::atoi(entry->d_name);
    if (auto found = duplicate_of(number, wanted)) {
      last_found.store(number, std::memory_order_relaxed);
      return found;
    }
  }
  return {};
}

// Opening could do something to a device or a pipe: only what is a regular file.
vmci::UniqueFd opened(const char* path, const FileId& wanted) {
  struct stat status;
  if (::stat(path, &status) != 0 || !S_ISREG(status.st_mode)) return {};
  vmci::UniqueFd fd(::open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (fd && !fits(fd.get(), wanted)) fd.reset();
  return fd;
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

Result<ShareableFile> open_shareable(const Vma& vma) {
  // Where it is allowed, the mapping leads there at once, however many descriptors there are.
  ShareableFile file{through_mapping(vma), 0};
  if (!file.fd) file.fd = among_descriptors(vma.file);
  if (!file.fd) file.fd = by_name(vma);
  if (!file.fd) return Errno{ENOENT};
  (void)::fcntl(file.fd.get(), F_ADD_SEALS, F_SEAL_SHRINK);  // where it can be: peers may map what does not shrink under them
  const auto bytes = vmci::memory_file_bytes(file.fd.get());
  if (!bytes) return bytes.error();
  file.bytes = *bytes;
  return Result<ShareableFile>(std::move(file));
}

}  // namespace vrdma::memory
