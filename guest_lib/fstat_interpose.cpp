// fstat(2) in front of libc's, for character devices (character_files.hpp), and files and directories (folder_descriptors.hpp) of the synthetic tree, which are
// something else to the kernel. Another file's costs one look at a bit and one load; of one that has no name any more (memfds, too) also readlink(2).
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guest_lib/open_device.hpp"
#include "guest_lib/paths.hpp"

using namespace vrdma;
using paths::call;

namespace {

using Fstat = int(int, struct stat*);
using Fxstat = int(int, int, struct stat*);

constinit NextFunction<Fstat> next_fstat{"fstat"}, next_fstat64{"fstat64"};
constinit NextFunction<Fxstat> next___fxstat{"__fxstat", "GLIBC_2.2.5"}, next___fxstat64{"__fxstat64", "GLIBC_2.2.5"};

__attribute__((constructor)) void look_up_all_of_fstat() {
  for (auto* f : {&next_fstat, &next_fstat64}) f->get();
  for (auto* f : {&next___fxstat, &next___fxstat64}) f->get();
}

// Before glibc 2.33 there is no such function, but to programs of an older one __fxstat.
int call_fstat(NextFunction<Fstat>& next, int fd, struct stat* out) {
  Fstat* const function = next.get();
  return function != nullptr ? function(fd, out) : static_cast<int>(::syscall(SYS_fstat, fd, out));
}

template <class Real>
int fstat_path(int fd, struct stat* out, Real real) {
  const int result = real();
  if (result != 0) return result;
  if (const char* const folder = folder_descriptors::path_of(fd)) [[unlikely]] {
    SyntheticEntry entry = find_synthetic(folder);
    entry.kind = EntryKind::directory;  // also of a device that is gone
    return paths::stat_entry(entry, out);
  }
  if (S_ISREG(out->st_mode) && out->st_nlink == 0) [[unlikely]] {  // cp(1) and tar(1) compare with what stat(2) says
    const off_t size = out->st_size;  // as it is: of a longer one the rest would pass for a hole
    if (const SyntheticEntry entry = paths::described_text(fd); entry.kind != EntryKind::none) {
      paths::stat_entry(entry, out);
      out->st_size = size;
      return result;
    }
  }
  stat_character_device(fd, out);
  return result;
}

}  // namespace

VRDMA_INTERPOSE(int, fstat, int fd, struct stat* out) {
  return fstat_path(fd, out, [&] { return call_fstat(next_fstat, fd, out); });
}
VRDMA_INTERPOSE(int, fstat64, int fd, struct stat* out) {
  return fstat_path(fd, out, [&] { return call_fstat(next_fstat64, fd, out); });
}
VRDMA_INTERPOSE(int, __fxstat, int version, int fd, struct stat* out) {
  return fstat_path(fd, out, [&] { return call(next___fxstat, version, fd, out); });
}
VRDMA_INTERPOSE(int, __fxstat64, int version, int fd, struct stat* out) {
  return fstat_path(fd, out, [&] { return call(next___fxstat64, version, fd, out); });
}
