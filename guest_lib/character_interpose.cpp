// write(2), read(2), writev(2), readv(2), ioctl(2) and close(2) in front of libc's, for the descriptors of character devices (character_files.hpp), and
// read(2) also for those of a port's counters; close(2) also for what this library keeps (own_fd.hpp). Another file's cost one look at a bit, or two.
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "guest_lib/character_files.hpp"
#include "guest_lib/cm/files.hpp"
#include "guest_lib/interruption.hpp"
#include "guest_lib/open_device.hpp"
#include "guest_lib/own_fd.hpp"
#include "guest_lib/paths.hpp"
#include "guest_lib/traffic_files.hpp"

using namespace vrdma;
using guest::CharacterFiles;
using paths::call;

namespace {

using Read = ssize_t(int, void*, std::size_t);
using ReadChk = ssize_t(int, void*, std::size_t, std::size_t);
using Vector = ssize_t(int, const iovec*, int);
using Write = ssize_t(int, const void*, std::size_t);
using Ioctl = int(int, unsigned long, ...);
using Close = int(int);

constinit NextFunction<Read> next_read{"read"};
constinit NextFunction<ReadChk> next___read_chk{"__read_chk"};
constinit NextFunction<Vector> next_readv{"readv"}, next_writev{"writev"};
constinit NextFunction<Write> next_write{"write"};
constinit NextFunction<Ioctl> next_ioctl{"ioctl"};
constinit NextFunction<Close> next_close{"close"};

__attribute__((constructor)) void look_up_all() {
  next_read.get();
  next___read_chk.get();
  for (auto* f : {&next_readv, &next_writev}) f->get();
  next_write.get();
  next_ioctl.get();
  next_close.get();
}

std::shared_ptr<guest::CharacterFile> file_of(int fd) {
  return CharacterFiles::may_hold(fd) ? CharacterFiles::instance().find(fd) : nullptr;
}

// What `use` does with the file; nullopt: it is none of these. EIO in a fork's child, which has the descriptor and not the channel.
template <class Use>
auto with_file(int fd, const Use& use) -> std::optional<decltype(use(std::declval<guest::CharacterFile&>()))> {
  const auto file = file_of(fd);
  if (!file) return std::nullopt;
  if (file->attachment->liveness().inherited()) return errno = EIO, -1;
  return use(*file);
}

// What the kernel itself does, whichever file it is.
bool is_of_every_file(unsigned long request) {
  switch (static_cast<std::uint32_t>(request)) {
    case FIONBIO:
    case FIOASYNC:
    case FIOCLEX:
    case FIONCLEX:
    case FIOQSIZE: return true;
    default: return false;
  }
}

// Pieces of memory as one, for files that have no use for several.
template <class Function>
ssize_t with_one(const iovec* pieces, int count, bool reads, const Function& use) {
  if (count == 1) return use(pieces->iov_base, pieces->iov_len);
  std::size_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += pieces[i].iov_len;
  std::unique_ptr<std::byte[]> whole(new (std::nothrow) std::byte[std::min<std::size_t>(bytes, 1 << 24)]);
  if (!whole || bytes > 1 << 24) return errno = ENOMEM, -1;
  const auto each = [&](std::size_t all, const auto& copy) {
    std::size_t at = 0;
    for (int i = 0; i < count && at < all; at += pieces[i++].iov_len)
      copy(whole.get() + at, static_cast<std::byte*>(pieces[i].iov_base), std::min(pieces[i].iov_len, all - at));
  };
  each(bytes, [](std::byte* to, const std::byte* from, std::size_t some) { std::memcpy(to, from, some); });
  const ssize_t result = use(whole.get(), bytes);
  // A read that fails for want of room has said how much it needs.
  if (reads) each(result < 0 ? bytes : static_cast<std::size_t>(result), [](const std::byte* from, std::byte* to, std::size_t some) { std::memcpy(to, from, some); });
  return result;
}

int really_close(int fd) {
  Close* const next = next_close.get();
  return next != nullptr ? next(fd) : static_cast<int>(syscall(SYS_close, fd));
}

}  // namespace

// librdmacm asks whether what it has opened is a character device.
void vrdma::stat_character_device(int fd, struct stat* status) {
  if (const auto file = file_of(fd)) {
    status->st_mode = S_IFCHR | 0666;
    status->st_rdev = file->device;
  }
}

VRDMA_INTERPOSE(ssize_t, read, int fd, void* bytes, std::size_t count) {
  if (traffic_files::may_hold(fd)) [[unlikely]]
    traffic_files::refresh(fd);
  if (CharacterFiles::may_hold(fd)) [[unlikely]]
    if (const auto done = with_file(fd, [&](auto& file) { return file.read(bytes, count); })) return *done;
  Read* const next = next_read.get();
  return next != nullptr ? next(fd, bytes, count) : syscall(SYS_read, fd, bytes, count);
}

// read(2) of programs that were built with _FORTIFY_SOURCE.
VRDMA_INTERPOSE(ssize_t, __read_chk, int fd, void* bytes, std::size_t count, std::size_t room) {
  if (traffic_files::may_hold(fd)) [[unlikely]]
    traffic_files::refresh(fd);
  if (CharacterFiles::may_hold(fd) && count <= room) [[unlikely]]
    if (const auto done = with_file(fd, [&](auto& file) { return file.read(bytes, count); })) return *done;
  return call(next___read_chk, fd, bytes, count, room);
}

VRDMA_INTERPOSE(ssize_t, readv, int fd, const iovec* pieces, int count) {
  if (CharacterFiles::may_hold(fd)) [[unlikely]]
    if (const auto done = with_file(fd, [&](auto& file) { return with_one(pieces, count, true, [&](void* bytes, std::size_t room) { return file.read(bytes, room); }); }))
      return *done;
  return call(next_readv, fd, pieces, count);
}
VRDMA_INTERPOSE(ssize_t, writev, int fd, const iovec* pieces, int count) {
  if (CharacterFiles::may_hold(fd)) [[unlikely]]
    if (const auto done = with_file(fd, [&](auto& file) { return with_one(pieces, count, false, [&](const void* bytes, std::size_t all) { return file.write(bytes, all); }); }))
      return *done;
  return call(next_writev, fd, pieces, count);
}

VRDMA_INTERPOSE(ssize_t, write, int fd, const void* bytes, std::size_t count) {
  if (CharacterFiles::may_hold(fd)) [[unlikely]]
    if (const auto done = with_file(fd, [&](auto& file) { return file.write(bytes, count); })) return *done;
  Write* const next = next_write.get();
  const ssize_t written = next != nullptr ? next(fd, bytes, count) : syscall(SYS_write, fd, bytes, count);
  // rping of rdma-core before 59 closes its channel when its thread has acknowledged the last event; that thread then ends a good test, unless it
  // happens to wait in the kernel by then, where nothing reaches it.
  if (written < 0 && errno == EBADF && guest::cm::asks_for_more_of_closed(fd, bytes, count)) [[unlikely]] return guest::wait_for_ever(true);
  return written;
}

VRDMA_INTERPOSE(int, ioctl, int fd, unsigned long request, ...) {
  va_list arguments;
  va_start(arguments, request);
  void* const argument = va_arg(arguments, void*);  // or a number, or none: whoever asks knows
  va_end(arguments);
  if (CharacterFiles::may_hold(fd) && !is_of_every_file(request)) [[unlikely]]
    if (const auto done = with_file(fd, [&](auto& file) { return file.control(request, argument); })) return *done;
  Ioctl* const next = next_ioctl.get();
  return next != nullptr ? next(fd, request, argument) : static_cast<int>(syscall(SYS_ioctl, fd, request, argument));
}

VRDMA_INTERPOSE(int, close, int fd) {
  if (CharacterFiles::may_hold(fd)) [[unlikely]]
    if (const auto closed = CharacterFiles::instance().close(fd, really_close)) return *closed;
  if (OwnNumbers::may_hold(fd) && OwnNumbers::holds(fd)) [[unlikely]] return errno = EBADF, -1;
  return really_close(fd);
}
