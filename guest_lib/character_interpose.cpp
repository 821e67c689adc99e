// write(2), read(2), ioctl(2), fstat(2) and close(2) in front of libc's, for the descriptors of character devices (character_files.hpp), and
// read(2) also for those of a port's counters. Another file's cost one look at a bit, or two.
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>

#include "guest_lib/character_files.hpp"
#include "guest_lib/paths.hpp"
#include "guest_lib/traffic_files.hpp"

using namespace vrdma;
using guest::CharacterFiles;
using paths::call;

namespace {

using Read = ssize_t(int, void*, std::size_t);
using Write = ssize_t(int, const void*, std::size_t);
using Ioctl = int(int, unsigned long, ...);
using Fstat = int(int, struct stat*);
using Fxstat = int(int, int, struct stat*);
using Close = int(int);

constinit NextFunction<Read> next_read{"read"};
constinit NextFunction<Write> next_write{"write"};
constinit NextFunction<Ioctl> next_ioctl{"ioctl"};
constinit NextFunction<Fstat> next_fstat{"fstat"}, next_fstat64{"fstat64"};
constinit NextFunction<Fxstat> next___fxstat{"__fxstat", "GLIBC_2.2.5"}, next___fxstat64{"__fxstat64", "GLIBC_2.2.5"};
constinit NextFunction<Close> next_close{"close"};

__attribute__((constructor)) void look_up_all() {
  next_read.get();
  next_write.get();
  next_ioctl.get();
  for (auto* f : {&next_fstat, &next_fstat64}) f->get();
  for (auto* f : {&next___fxstat, &next___fxstat64}) f->get();
  next_close.get();
}

std::shared_ptr<guest::CharacterFile> file_of(int fd) {
  return CharacterFiles::may_hold(fd) ? CharacterFiles::instance().find(fd) : nullptr;
}

// librdmacm asks whether what it has opened is a character device.
template <class Real>
int fstat_path(int fd, struct stat* out, Real real) {
  const int result = real();
  if (result != 0) return result;
  if (const auto file = file_of(fd)) {
    out->st_mode = S_IFCHR | 0666;
    out->st_rdev = file->device;
  }
  return result;
}

}  // namespace

VRDMA_INTERPOSE(ssize_t, read, int fd, void* bytes, std::size_t count) {
  if (traffic_files::may_hold(fd)) [[unlikely]]
    traffic_files::refresh(fd);
  if (CharacterFiles::may_hold(fd)) [[unlikely]]
    if (const auto file = file_of(fd)) return file->read(bytes, count);
  Read* const next = next_read.get();
  return next != nullptr ? next(fd, bytes, count) : syscall(SYS_read, fd, bytes, count);
}

VRDMA_INTERPOSE(ssize_t, write, int fd, const void* bytes, std::size_t count) {
  if (CharacterFiles::may_hold(fd)) [[unlikely]]
    if (const auto file = file_of(fd)) return file->write(bytes, count);
  Write* const next = next_write.get();
  return next != nullptr ? next(fd, bytes, count) : syscall(SYS_write, fd, bytes, count);
}

VRDMA_INTERPOSE(int, ioctl, int fd, unsigned long request, ...) {
  va_list arguments;
  va_start(arguments, request);
  void* const argument = va_arg(arguments, void*);  // or a number, or none: whoever asks knows
  va_end(arguments);
  if (CharacterFiles::may_hold(fd)) [[unlikely]]
    if (const auto file = file_of(fd)) return file->control(request, argument);
  Ioctl* const next = next_ioctl.get();
  return next != nullptr ? next(fd, request, argument) : static_cast<int>(syscall(SYS_ioctl, fd, request, argument));
}

VRDMA_INTERPOSE(int, close, int fd) {
  if (CharacterFiles::may_hold(fd)) [[unlikely]]
    CharacterFiles::instance().forget(fd);
  Close* const next = next_close.get();
  return next != nullptr ? next(fd) : static_cast<int>(syscall(SYS_close, fd));
}

VRDMA_INTERPOSE(int, fstat, int fd, struct stat* out) {
  return fstat_path(fd, out, [&] { return call(next_fstat, fd, out); });
}
VRDMA_INTERPOSE(int, fstat64, int fd, struct stat* out) {
  return fstat_path(fd, out, [&] { return call(next_fstat64, fd, out); });
}
VRDMA_INTERPOSE(int, __fxstat, int version, int fd, struct stat* out) {
  return fstat_path(fd, out, [&] { return call(next___fxstat, version, fd, out); });
}
VRDMA_INTERPOSE(int, __fxstat64, int version, int fd, struct stat* out) {
  return fstat_path(fd, out, [&] { return call(next___fxstat64, version, fd, out); });
}
