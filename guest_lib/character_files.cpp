#include "guest_lib/character_files.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace vrdma::guest {

namespace {

// Past the interposer, which leads here.
ino_t inode_of(int fd) {
  struct stat status;
  return ::syscall(SYS_newfstatat, fd, "", &status, AT_EMPTY_PATH) == 0 && S_ISFIFO(status.st_mode) ? status.st_ino : 0;
}

CharacterFiles*& current() {
  static CharacterFiles* files = new CharacterFiles;  // never destroyed: exit handlers of others close such files
  return files;
}

}  // namespace

// --- one file -------------------------------------------------------------------------------------------------

CharacterFile::CharacterFile(std::shared_ptr<Attachment> attachment_in, std::uint32_t channel_in, int fd_in, dev_t device_in)
    : attachment(std::move(attachment_in)), channel(channel_in), fd(fd_in), device(device_in), inode_(inode_of(fd_in)) {}

long CharacterFile::read(void*, std::size_t) {
  errno = EINVAL;
  return -1;
}

int CharacterFile::control(unsigned long, void*) {
  errno = ENOTTY;
  return -1;
}

bool CharacterFile::blocks() const { return (::fcntl(fd, F_GETFL) & O_NONBLOCK) == 0; }

int CharacterFile::wait_until_readable(bool blocks) const {
  pollfd readable{fd, POLLIN, 0};
  const int ready = ::poll(&readable, 1, blocks ? -1 : 0);
  if (ready == 0) errno = EAGAIN;
  return ready > 0 ? 0 : -1;
}

long CharacterFile::wait_for_ever(bool blocks) {
  while (blocks) ::poll(nullptr, 0, -1);
  errno = EBADF;
  return -1;
}

void CharacterFile::take_record() const {
  // In a virtual machine its agent brings it, perhaps after the answer that said so.
  pollfd readable{fd, POLLIN, 0};
  constexpr timespec patience{0, 100'000'000};
  if (::syscall(SYS_ppoll, &readable, 1, &patience, nullptr, 0) != 1 || (readable.revents & POLLIN) == 0) return;
  control::AsyncRecord record;
  ::syscall(SYS_read, fd, &record, sizeof(record));
}

// --- all of them ----------------------------------------------------------------------------------------------

constinit std::atomic<std::uint64_t> CharacterFiles::marks_[fds_max / 64]{};
constinit std::atomic<bool> CharacterFiles::ever_opened_{false};

CharacterFiles& CharacterFiles::instance() { return *current(); }

bool CharacterFiles::abandon() {
  if (!ever_opened_.load(std::memory_order_relaxed)) return false;
  for (auto& marks : marks_) marks.store(0, std::memory_order_relaxed);
  current() = new CharacterFiles;  // what another thread held locked stays so in the old one
  return true;
}

void CharacterFiles::mark(int fd, bool on) {
  const std::uint64_t bit = std::uint64_t{1} << (fd % 64);
  if (on) marks_[fd / 64].fetch_or(bit, std::memory_order_relaxed);
  else marks_[fd / 64].fetch_and(~bit, std::memory_order_relaxed);
}

Result<std::shared_ptr<Attachment>> CharacterFiles::attach(std::uint16_t minor_of_service) {
  auto attachment = Attachment::current();
  if (!attachment) {
    complain(service_socket_path(), attachment.error());
    return Errno{ENODEV};
  }
  if ((*attachment)->service_minor() < minor_of_service) return Errno{EOPNOTSUPP};
  return attachment;
}

Status CharacterFiles::prepare(int fd, int flags) {
  if (fd >= fds_max) return Errno{EMFILE};
  if ((flags & O_CLOEXEC) == 0) ::fcntl(fd, F_SETFD, 0);
  if ((flags & O_NONBLOCK) != 0) ::fcntl(fd, F_SETFL, O_NONBLOCK);
  return ok();
}

void CharacterFiles::add(std::shared_ptr<CharacterFile> file) {
  ever_opened_.store(true, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  mark(file->fd, true);
  files_[file->fd] = std::move(file);
}

std::shared_ptr<CharacterFile> CharacterFiles::find(int fd) {
  std::shared_ptr<CharacterFile> file;
  {
    std::lock_guard lock(mutex_);
    const auto found = files_.find(fd);
    if (found == files_.end()) return nullptr;
    file = found->second;
  }
  if (inode_of(fd) == file->inode_) return file;
  forget(fd);  // somebody has closed it by another way than close(2)
  return nullptr;
}

void CharacterFiles::forget(int fd) {
  std::shared_ptr<CharacterFile> file;
  {
    std::lock_guard lock(mutex_);
    const auto found = files_.find(fd);
    if (found == files_.end()) return;
    file = std::move(found->second);
    files_.erase(found);
    mark(fd, false);
  }
  file->closed.store(true, std::memory_order_relaxed);
  file->forgotten();
}

}  // namespace vrdma::guest
