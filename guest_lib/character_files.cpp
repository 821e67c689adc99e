#include "guest_lib/character_files.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "guest_lib/cancellation.hpp"
#include "guest_lib/interruption.hpp"
#include "guest_lib/own_process.hpp"

namespace vrdma::guest {

namespace {

// Past the interposer, which leads here. Of no file where there is none.
memory::FileId file_at(int fd) {
  const auto id = memory::file_id(fd);
  return id ? *id : memory::FileId{};
}

}  // namespace

// --- one file -------------------------------------------------------------------------------------------------

CharacterFile::CharacterFile(std::shared_ptr<Attachment> attachment_in, std::uint32_t channel_in, int fd_in, dev_t device_in)
    : attachment(std::move(attachment_in)), channel(channel_in), fd(fd_in), device(device_in), pipe_(file_at(fd_in)) {}

long CharacterFile::read(void*, std::size_t) {
  errno = EINVAL;
  return -1;
}

int CharacterFile::control(unsigned long, void*) {
  errno = ENOTTY;
  return -1;
}

bool CharacterFile::blocks() const {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags >= 0) blocks_.store((flags & O_NONBLOCK) == 0, std::memory_order_relaxed);
  return blocks_.load(std::memory_order_relaxed);  // one that is closed by now is found out later, and is what it was
}

int CharacterFile::wait_until_readable(bool blocks) const {
  pollfd readable{fd, POLLIN, 0};
  const int ready = blocks ? sleep_as_read(readable) : ::poll(&readable, 1, 0);
  if (ready == 0) errno = EAGAIN;
  return ready > 0 ? 0 : -1;
}

bool CharacterFile::has_descriptor() const {
  const memory::FileId there = file_at(fd);
  return there == pipe_ || (silenced_.load(std::memory_order_acquire) && there == silent_pipe_);  // S1: pairs with S2 in fall_silent
}

void CharacterFile::take_record() {
  // In a virtual machine its agent brings it, perhaps after the answer that said so.
  pollfd readable{fd, POLLIN, 0};
  constexpr timespec patience{0, 100'000'000}, now{};
  ::syscall(SYS_ppoll, &readable, 1, &patience, nullptr, 0);
  std::lock_guard lock(descriptor_);
  if (closed.load(std::memory_order_relaxed) || !has_descriptor()) return;
  if (::syscall(SYS_ppoll, &readable, 1, &now, nullptr, 0) != 1 || (readable.revents & POLLIN) == 0) return;
  control::AsyncRecord record;
  ::syscall(SYS_read, fd, &record, sizeof(record));
}

void CharacterFile::fall_silent() {
  std::lock_guard lock(descriptor_);
  if (writing_end_ || closed.load(std::memory_order_relaxed) || !has_descriptor()) return;
  // A pipe's writing end can be opened again: then it is the same file for whoever else has it, a child that keeps it in an epoll instance of ours.
  const std::string there = "/proc/self/fd/" + std::to_string(fd);
  if (vmci::UniqueFd end(static_cast<int>(::syscall(SYS_openat, AT_FDCWD, there.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC))); end)
    return writing_end_.reset(std::move(end));
  // No socket's can (ENXIO).
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return;
  const vmci::UniqueFd reading_end(ends[0]);
  writing_end_.reset(vmci::UniqueFd(ends[1]));
  silent_pipe_ = file_at(reading_end.get());
  silenced_.store(true, std::memory_order_release);  // S2: pairs with S1 in has_descriptor, before the number is that file's
  const int flags = ::fcntl(fd, F_GETFL), descriptor_flags = ::fcntl(fd, F_GETFD);
  ::fcntl(reading_end.get(), F_SETFL, flags & O_NONBLOCK);
  ::syscall(SYS_dup3, reading_end.get(), fd, (descriptor_flags & FD_CLOEXEC) != 0 ? O_CLOEXEC : 0);
}

// --- all of them ----------------------------------------------------------------------------------------------

CharacterFiles& CharacterFiles::instance() {
  static CharacterFiles* const files = new CharacterFiles;  // never destroyed: exit handlers of others close such files
  return *files;
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
  if (!FdMarks::has_room_for(fd)) return Errno{EMFILE};
  if ((flags & O_CLOEXEC) == 0) ::fcntl(fd, F_SETFD, 0);
  if ((flags & O_NONBLOCK) != 0) ::fcntl(fd, F_SETFL, O_NONBLOCK);
  return ok();
}

void CharacterFiles::add(std::shared_ptr<CharacterFile> file) {
  (void)file->blocks();  // as it was opened
  std::lock_guard lock(mutex_);
  marks_.set(file->fd);
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
  if (file->has_descriptor()) return file;
  forget(fd, *file);
  return nullptr;
}

void CharacterFiles::forget(int fd, const CharacterFile& which) {
  std::shared_ptr<CharacterFile> file;
  {
    std::lock_guard lock(mutex_);
    const auto found = files_.find(fd);
    if (found == files_.end() || found->second.get() != &which || OwnProcess::is_visitor()) return;
    file = std::move(found->second);
    files_.erase(found);
    marks_.clear(fd);
  }
  file->closed.store(true, std::memory_order_relaxed);
  file->forgotten();
}

void CharacterFiles::forget_closed() {
  std::vector<std::shared_ptr<CharacterFile>> all;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [fd, file] : files_) all.push_back(file);
  }
  for (const auto& file : all)
    if (!file->has_descriptor()) forget(file->fd, *file);
}

std::optional<int> CharacterFiles::close(int fd, int (*really)(int)) {
  const auto file = find(fd);
  if (!file) return std::nullopt;
  pthread_testcancel();  // here, or not at all
  const CancellationOff cancellation_off;
  std::unique_lock lock(file->descriptor_, std::defer_lock);
  if (!file->attachment->liveness().inherited()) lock.lock();  // in a fork's child nobody may be left to unlock it
  forget(fd, *file);
  return really(fd);
}

}  // namespace vrdma::guest
