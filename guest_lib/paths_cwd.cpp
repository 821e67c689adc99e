// A working directory inside the synthetic tree, as `cd /sys/class/infiniband` in ibstatus(8) wants one: the kernel's is the nearest folder
// above that exists, and relative paths are looked up from where the program thinks it is. A program that is started there learns it from PWD.
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "guest_lib/own_process.hpp"
#include "guest_lib/paths.hpp"

namespace vrdma::paths {
namespace {

using Chdir = int(const char*);
using Fchdir = int(int);
using Getcwd = char*(char*, std::size_t);
using GetcwdChk = char*(char*, std::size_t, std::size_t);
using CurrentDirName = char*();

constinit NextFunction<Chdir> next_chdir{"chdir"};
constinit NextFunction<Fchdir> next_fchdir{"fchdir"};
constinit NextFunction<Getcwd> next_getcwd{"getcwd"};
constinit NextFunction<GetcwdChk> next___getcwd_chk{"__getcwd_chk"};
constinit NextFunction<CurrentDirName> next_get_current_dir_name{"get_current_dir_name"};

// Who looks at one while another thread changes directory finds an old one, as with the kernel's; slots are used again after `entered_max` changes.
constexpr std::size_t entered_max = 64;
constinit Folder entered[entered_max] = {};
constinit std::atomic<std::size_t> entered_count{0};

// Cuts `path`, absolute and normalised, down to its parent. False: it has none.
bool cut_to_parent(char* path) {
  char* const slash = strrchr(path, '/');
  if (slash == nullptr || path[1] == '\0') return false;
  slash[slash == path ? 1 : 0] = '\0';
  return true;
}

int real_chdir(const char* path) { return static_cast<int>(syscall(SYS_chdir, path)); }

int enter(const char* path) {
  Folder whole, real;
  if (!normalise_synthetic(path, whole)) return fail(ENAMETOOLONG, -1);
  memcpy(real, whole, sizeof real);
  while (cut_to_parent(real)) {
    if (real_chdir(real) != 0) continue;
    if (OwnProcess::is_visitor()) return 0;  // what it enters before its exec is no folder of ours
    Folder& folder = entered[entered_count.fetch_add(1, std::memory_order_relaxed) % entered_max];
    memcpy(folder, whole, sizeof folder);
    return working_folder.store(&folder, std::memory_order_release), 0;
  }
  return -1;
}

int leave(int result) {
  if (result == 0 && !OwnProcess::is_visitor()) working_folder.store(nullptr, std::memory_order_release);
  return result;
}

char* copy_of_folder(const Folder& folder, char* out, std::size_t bytes) {
  const std::size_t length = strlen(folder) + 1;
  if (out == nullptr) {
    if (bytes != 0 && bytes < length) return fail(ERANGE, static_cast<char*>(nullptr));
    out = static_cast<char*>(malloc(bytes != 0 ? bytes : length));  // as glibc
  } else if (bytes < length) {
    return fail(bytes == 0 ? EINVAL : ERANGE, static_cast<char*>(nullptr));
  }
  return out != nullptr ? static_cast<char*>(memcpy(out, folder, length)) : nullptr;
}

// PWD names a folder of the tree, and the kernel's working directory is where enter() would have left it.
__attribute__((constructor)) void take_over_working_folder() {
  next_chdir.get();
  next_fchdir.get();
  next_getcwd.get();
  next___getcwd_chk.get();
  next_get_current_dir_name.get();
  const char* const named = getenv("PWD");
  Folder path;
  if (!ours(named) || find_synthetic(named).kind != EntryKind::directory || !normalise_synthetic(named, path)) return;
  struct stat here, there;
  if (syscall(SYS_newfstatat, AT_FDCWD, path, &there, 0) == 0 || syscall(SYS_newfstatat, AT_FDCWD, ".", &here, 0) != 0) return;
  Folder real;
  memcpy(real, path, sizeof real);
  while (cut_to_parent(real)) {
    if (syscall(SYS_newfstatat, AT_FDCWD, real, &there, 0) != 0) continue;
    if (here.st_dev == there.st_dev && here.st_ino == there.st_ino) {
      memcpy(entered[entered_max - 1], path, sizeof path);
      working_folder.store(&entered[entered_max - 1], std::memory_order_release);
    }
    return;
  }
}

}  // namespace

constinit std::atomic<const Folder*> working_folder{nullptr};

bool Whole::leaves(const char* path) {
  const char* const up = strstr(path, "/..");
  Folder before;
  if (up == nullptr || static_cast<std::size_t>(up - path) >= sizeof before || !normalise_synthetic(path, joined_) || may_be_synthetic(joined_)) return false;
  memcpy(before, path, static_cast<std::size_t>(up - path));
  before[up - path] = '\0';
  const int errno_before = errno;
  struct stat there;
  const bool real = syscall(SYS_newfstatat, AT_FDCWD, before, &there, 0) == 0;
  errno = errno_before;
  return !real && find_synthetic(before).kind == EntryKind::directory;
}

bool Whole::join(const char* folder, const char* path) {
  char whole[2 * sizeof(Folder)];
  const int length = snprintf(whole, sizeof whole, "%s/%s", folder, path);
  if (length <= 0 || static_cast<std::size_t>(length) >= sizeof whole || !normalise_synthetic(whole, joined_)) return false;
  const std::size_t joined = strlen(joined_);
  if (whole[length - 1] == '/' && joined + 1 < sizeof joined_) strcpy(joined_ + joined, "/");  // it is to be a directory
  return true;
}

}  // namespace vrdma::paths

using namespace vrdma::paths;

VRDMA_INTERPOSE(int, chdir, const char* path) {
  const Whole whole(path);
  const auto real = [path] {
    auto* next = next_chdir.get();
    return leave(next != nullptr ? next(path) : real_chdir(path));
  };
  if (!ours(path)) return real();
  return real_or_synthetic(path, -1, real, [path](const vrdma::SyntheticEntry& entry) {
    return entry.kind == vrdma::EntryKind::directory ? enter(path) : fail(ENOTDIR, -1);
  });
}

VRDMA_INTERPOSE(int, fchdir, int fd) {
  const char* const folder = vrdma::folder_descriptors::path_of(fd);
  return folder != nullptr ? enter(folder) : leave(call(next_fchdir, fd));
}

VRDMA_INTERPOSE(char*, getcwd, char* out, std::size_t bytes) {
  const Folder* const folder = working_folder.load(std::memory_order_acquire);
  return folder != nullptr ? copy_of_folder(*folder, out, bytes) : call(next_getcwd, out, bytes);
}
VRDMA_INTERPOSE(char*, __getcwd_chk, char* out, std::size_t bytes, std::size_t room) {
  const Folder* const folder = working_folder.load(std::memory_order_acquire);
  return folder != nullptr && bytes <= room ? copy_of_folder(*folder, out, bytes) : call(next___getcwd_chk, out, bytes, room);
}
VRDMA_INTERPOSE(char*, get_current_dir_name) {
  const Folder* const folder = working_folder.load(std::memory_order_acquire);
  return folder != nullptr ? strdup(*folder) : call(next_get_current_dir_name);
}
