#include "guest_lib/cm/files.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guest_lib/cm/open.hpp"
#include "guest_lib/verbs_result.hpp"

namespace vrdma::guest::cm {

namespace {

// Past the interposer, which leads here.
ino_t inode_of(int fd) {
  struct stat status;
  return ::syscall(SYS_newfstatat, fd, "", &status, AT_EMPTY_PATH) == 0 && S_ISFIFO(status.st_mode) ? status.st_ino : 0;
}

}  // namespace

constinit std::atomic<std::uint64_t> Files::marks_[fds_max / 64]{};
constinit std::atomic<bool> Files::ever_opened_{false};

namespace {
Files*& current() {
  static Files* files = new Files;  // never destroyed: exit handlers of others close channels
  return files;
}
}  // namespace

Files& Files::instance() { return *current(); }

void Files::abandon() {
  if (!ever_opened_.load(std::memory_order_relaxed)) return;
  for (auto& marks : marks_) marks.store(0, std::memory_order_relaxed);
  current() = new Files;  // what another thread held locked stays so in the old one
}

void Files::mark(int fd, bool on) {
  const std::uint64_t bit = std::uint64_t{1} << (fd % 64);
  if (on) marks_[fd / 64].fetch_or(bit, std::memory_order_relaxed);
  else marks_[fd / 64].fetch_and(~bit, std::memory_order_relaxed);
}

void File::take_record() const {
  // In a virtual machine its agent brings it, perhaps after the answer that said so.
  pollfd readable{fd, POLLIN, 0};
  constexpr timespec patience{0, 100'000'000};
  if (::syscall(SYS_ppoll, &readable, 1, &patience, nullptr, 0) != 1 || (readable.revents & POLLIN) == 0) return;
  control::AsyncRecord record;
  ::syscall(SYS_read, fd, &record, sizeof(record));
}

Result<int> Files::open(int flags) {
  auto attachment = Attachment::current();
  if (!attachment) {
    complain(service_socket_path(), attachment.error());
    return Errno{ENODEV};
  }
  if ((*attachment)->service_minor() < control::minor_of_cm) return Errno{EOPNOTSUPP};
  auto opened = (*attachment)->call_on_socket<control::Request::cm_open>({});
  if (!opened) return opened.error();
  if (opened->descriptors.size() != 1) return Errno{EPROTO};
  const int fd = opened->descriptors[0].get();
  if (fd >= fds_max) return Errno{EMFILE};
  if ((flags & O_CLOEXEC) == 0) ::fcntl(fd, F_SETFD, 0);
  if ((flags & O_NONBLOCK) != 0) ::fcntl(fd, F_SETFL, O_NONBLOCK);
  ever_opened_.store(true, std::memory_order_relaxed);
  std::lock_guard lock(mutex);
  files_[fd] = std::make_shared<File>(*attachment, opened->body.channel, fd, inode_of(fd));
  mark(fd, true);
  return opened->descriptors[0].release();
}

std::shared_ptr<File> Files::find(int fd) {
  std::shared_ptr<File> file;
  {
    std::lock_guard lock(mutex);
    const auto found = files_.find(fd);
    if (found == files_.end()) return nullptr;
    file = found->second;
  }
  if (inode_of(fd) == file->inode) return file;
  forget(fd);  // somebody has closed it by another way than close(2)
  return nullptr;
}

void Files::forget(int fd) {
  std::shared_ptr<File> file;
  {
    std::lock_guard lock(mutex);
    const auto found = files_.find(fd);
    if (found == files_.end()) return;
    file = std::move(found->second);
    files_.erase(found);
    mark(fd, false);
    std::erase_if(told, [&](const auto& one) { return one.second.channel == file->key(); });
  }
  file->closed.store(true, std::memory_order_relaxed);
  if (!file->attachment->liveness().gone()) (void)file->attachment->call<control::Request::cm_close>({file->channel, 0});
}

}  // namespace vrdma::guest::cm

namespace vrdma {
int open_connection_manager(int flags) {
  int fd = -1;
  const int error = guest::as_int([&]() -> Status {
    auto opened = guest::cm::Files::instance().open(flags);
    if (!opened) return opened.error();
    fd = *opened;
    return ok();
  });
  if (error != 0) errno = error;
  return fd;
}
}  // namespace vrdma
