#include "guest_lib/traffic_files.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "guest_lib/memory/vma.hpp"
#include "guest_lib/synthetic_tree.hpp"

namespace vrdma::traffic_files {

namespace {

struct File {
  int fd = -1;
  memory::FileId id{};  // with its device: inodes of other file systems have the same numbers
  char path[128] = {};
};
constinit std::mutex mutex;
constinit std::array<File, 64> files;
constinit std::size_t next_file = 0;

// In a fork's child nobody may be left to unlock it. It is held for some stores.
std::unique_lock<std::mutex> lock_soon() {
  std::unique_lock lock(mutex, std::try_to_lock);
  for (int tries = 0; !lock && tries < 1000; ++tries) {
    ::sched_yield();
    [[maybe_unused]] const bool locked = lock.try_lock();
  }
  return lock;
}

// What is remembered of that descriptor; with fd -1 if it is another file by now, and then forgotten.
File find(int fd) {
  const auto id = memory::file_id(fd);
  const std::unique_lock lock = lock_soon();
  if (lock && id)
    for (const File& file : files)
      if (file.fd == fd && file.id == *id) return file;
  if (lock) marks.clear(fd);
  return {};
}

}  // namespace

void remember(int fd, const char* path) {
  if (!FdMarks::has_room_for(fd) || std::strlen(path) >= sizeof(File::path)) return;
  const auto id = memory::file_id(fd);
  if (!id) return;
  const std::unique_lock lock = lock_soon();
  if (!lock) return;
  File& file = files[next_file++ % files.size()];
  file.fd = fd;
  file.id = *id;
  std::strcpy(file.path, path);
  marks.set(fd);
}

void refresh(int fd) {
  const int before = errno;
  if (const File file = find(fd); file.fd == fd && ::lseek(fd, 0, SEEK_CUR) == 0) {
    look_at_port(file.path);
    const SyntheticEntry entry = find_synthetic(file.path);
    if (entry.kind == EntryKind::text && ::ftruncate(fd, static_cast<off_t>(entry.text_bytes)) == 0)
      [[maybe_unused]] const auto written = ::syscall(SYS_pwrite64, fd, entry.text, entry.text_bytes, off_t{0});
  }
  errno = before;
}

}  // namespace vrdma::traffic_files
