#include "guest_lib/paths.hpp"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <string_view>

#include "guest_lib/open_device.hpp"
#include "guest_lib/next_function.hpp"
#include "guest_lib/traffic_files.hpp"
#include "vrdma/write_all.hpp"

namespace vrdma {
namespace paths {
namespace {

using Open = int(const char*, int, ...);
using OpenAt = int(int, const char*, int, ...);
using Open2 = int(const char*, int);
using OpenAt2 = int(int, const char*, int);
using Fopen = FILE*(const char*, const char*);
using Stat = int(const char*, struct stat*);
using FstatAt = int(int, const char*, struct stat*, int);
using Xstat = int(int, const char*, struct stat*);
using FxstatAt = int(int, int, const char*, struct stat*, int);
using Statx = int(int, const char*, int, unsigned, struct statx*);
using Access = int(const char*, int);
using FaccessAt = int(int, const char*, int, int);
using Realpath = char*(const char*, char*);
using RealpathChk = char*(const char*, char*, std::size_t);
using Canonicalize = char*(const char*);
using Readlink = ssize_t(const char*, char*, std::size_t);
using ReadlinkAt = ssize_t(int, const char*, char*, std::size_t);
using ReadlinkChk = ssize_t(const char*, char*, std::size_t, std::size_t);
using ReadlinkAtChk = ssize_t(int, const char*, char*, std::size_t, std::size_t);

// On x86-64 the 64 variants are the same functions; each still chains to its own name, which another preloaded
// library may have replaced.
constinit NextFunction<Open> next_open{"open"}, next_open64{"open64"}, next___open{"__open"},
    next___open64{"__open64"};
constinit NextFunction<OpenAt> next_openat{"openat"}, next_openat64{"openat64"};
constinit NextFunction<Open2> next___open_2{"__open_2"}, next___open64_2{"__open64_2"};
constinit NextFunction<OpenAt2> next___openat_2{"__openat_2"}, next___openat64_2{"__openat64_2"};
constinit NextFunction<Fopen> next_fopen{"fopen"}, next_fopen64{"fopen64"};
constinit NextFunction<Stat> next_stat{"stat"}, next_stat64{"stat64"}, next_lstat{"lstat"}, next_lstat64{"lstat64"};
constinit NextFunction<FstatAt> next_fstatat{"fstatat"}, next_fstatat64{"fstatat64"};
constinit NextFunction<Xstat> next___xstat{"__xstat", "GLIBC_2.2.5"}, next___xstat64{"__xstat64", "GLIBC_2.2.5"},
    next___lxstat{"__lxstat", "GLIBC_2.2.5"}, next___lxstat64{"__lxstat64", "GLIBC_2.2.5"};
constinit NextFunction<FxstatAt> next___fxstatat{"__fxstatat", "GLIBC_2.4"},
    next___fxstatat64{"__fxstatat64", "GLIBC_2.4"};
constinit NextFunction<Statx> next_statx{"statx"};
constinit NextFunction<Access> next_access{"access"}, next_eaccess{"eaccess"}, next_euidaccess{"euidaccess"};
constinit NextFunction<FaccessAt> next_faccessat{"faccessat"};
constinit NextFunction<Realpath> next_realpath{"realpath"};
constinit NextFunction<RealpathChk> next___realpath_chk{"__realpath_chk"};
constinit NextFunction<Canonicalize> next_canonicalize_file_name{"canonicalize_file_name"};
constinit NextFunction<Readlink> next_readlink{"readlink"};
constinit NextFunction<ReadlinkAt> next_readlinkat{"readlinkat"};
constinit NextFunction<ReadlinkChk> next___readlink_chk{"__readlink_chk"};
constinit NextFunction<ReadlinkAtChk> next___readlinkat_chk{"__readlinkat_chk"};

// So that later calls, which may come from signal handlers, find every function looked up.
__attribute__((constructor)) void look_up_all() {
  for (auto* f : {&next_open, &next_open64, &next___open, &next___open64}) f->get();
  for (auto* f : {&next_openat, &next_openat64}) f->get();
  for (auto* f : {&next___open_2, &next___open64_2}) f->get();
  for (auto* f : {&next___openat_2, &next___openat64_2}) f->get();
  for (auto* f : {&next_fopen, &next_fopen64}) f->get();
  for (auto* f : {&next_stat, &next_stat64, &next_lstat, &next_lstat64}) f->get();
  for (auto* f : {&next_fstatat, &next_fstatat64}) f->get();
  for (auto* f : {&next___xstat, &next___xstat64, &next___lxstat, &next___lxstat64}) f->get();
  for (auto* f : {&next___fxstatat, &next___fxstatat64}) f->get();
  next_statx.get();
  for (auto* f : {&next_access, &next_eaccess, &next_euidaccess}) f->get();
  next_faccessat.get();
  next_realpath.get();
  next___realpath_chk.get();
  next_canonicalize_file_name.get();
  next_readlink.get();
  next_readlinkat.get();
  next___readlink_chk.get();
  next___readlinkat_chk.get();
}

int sys_open(int dir, const char* path, int flags, mode_t mode) {
  return static_cast<int>(syscall(SYS_openat, dir, path, flags, mode));
}

int sys_stat(int dir, const char* path, struct stat* out, int flags) {
  return static_cast<int>(syscall(SYS_newfstatat, dir, path, out, flags));
}

// How open(2) finds out whether a mode follows.
bool takes_mode(int flags) { return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE; }

template <class Real>
int open_path(const char* path, int flags, Real real) {
  if (!ours(path)) return real();
  if (is_always_ours(path)) return open_entry(path, find_synthetic(path), flags);
  look_at_port(path);
  return real_or_synthetic(path, -1, real, [path, flags](const SyntheticEntry& e) {
    const int fd = open_entry(path, e, flags);
    if (e.changes && fd >= 0) traffic_files::remember(fd, path);
    return fd;
  });
}

// RLIMIT_FSIZE holds for memfds, too, and to exceed it ends the program by SIGXFSZ.
bool file_limit_allows(std::size_t bytes) {
  rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= bytes) return true;
  errno = EFBIG;
  return false;
}

// The memfd has the entry's name, by which described_text() knows it again, also after dup(2) and exec(2).
int text_descriptor(const char* path, const SyntheticEntry& entry, int flags) {
  const bool close_on_exec = (flags & O_CLOEXEC) != 0;
  if (entry.is_invalid) return epoll_create1(close_on_exec ? EPOLL_CLOEXEC : 0);  // which read(2) says EINVAL for
  char name[250];  // the kernel's most, and the end
  if (!normalise_synthetic(path, name)) return fail(ENAMETOOLONG, -1);
  int fd = file_limit_allows(entry.text_bytes) ? memfd_create(name, MFD_ALLOW_SEALING | (close_on_exec ? MFD_CLOEXEC : 0u)) : -1;
  if (fd >= 0) {
    write_all(fd, {entry.text, entry.text_bytes});
    lseek(fd, 0, SEEK_SET);
    if (!entry.changes) fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
    return fd;
  }
  if (errno == EMFILE || errno == ENFILE) return -1;
  // Sandboxes may forbid memfds. The text is far smaller than a pipe, so nothing blocks.
  int ends[2];
  if (pipe2(ends, close_on_exec ? O_CLOEXEC : 0) != 0) return -1;
  write_all(ends[1], {entry.text, entry.text_bytes});
  close(ends[1]);
  return ends[0];
}

mode_t mode_of(const SyntheticEntry& entry) {
  switch (entry.kind) {
    case EntryKind::directory: return S_IFDIR | 0555;
    case EntryKind::text: return S_IFREG | 0444;
    default: return S_IFCHR | 0666;
  }
}

dev_t device_of(const SyntheticEntry& entry) {
  if (entry.kind == EntryKind::verbs_device || entry.kind == EntryKind::mad_device) return makedev(character_major, entry.device_minor);
  return entry.kind == EntryKind::rdma_cm_device ? makedev(10, entry.device_minor) : 0;
}

int statx_entry(const SyntheticEntry& entry, struct statx* out) {
  struct stat s;
  stat_entry(entry, &s);
  *out = {};
  out->stx_mask = STATX_BASIC_STATS;
  out->stx_mode = static_cast<std::uint16_t>(s.st_mode);
  out->stx_nlink = static_cast<std::uint32_t>(s.st_nlink);
  out->stx_ino = s.st_ino;
  out->stx_size = static_cast<std::uint64_t>(s.st_size);
  out->stx_blksize = 4096;
  out->stx_rdev_major = major(s.st_rdev);
  out->stx_rdev_minor = minor(s.st_rdev);
  return 0;
}

int open_folder(const char* path, int flags) {
  if ((flags & O_PATH) == 0) {
    if ((flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL)) return fail(EEXIST, -1);
    if ((flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)) != 0) return fail(EISDIR, -1);
  }
  return folder_descriptors::open(path, flags);
}

int access_entry(const SyntheticEntry& entry, int wanted) {
  if ((wanted & ~(R_OK | W_OK | X_OK)) != 0) return fail(EINVAL, -1);
  const mode_t mode = mode_of(entry);
  const bool denied = ((wanted & W_OK) != 0 && (mode & 0222) == 0) || ((wanted & X_OK) != 0 && (mode & 0111) == 0);
  return denied ? fail(EACCES, -1) : 0;
}

template <class Real>
int stat_path(const char* path, struct stat* out, Real real) {
  if (!ours(path)) return real();
  return real_or_synthetic(path, -1, real, [out](const SyntheticEntry& e) { return stat_entry(e, out); });
}

template <class Real>
int access_path(const char* path, int mode, Real real) {
  if (!ours(path)) return real();
  return real_or_synthetic(path, -1, real, [mode](const SyntheticEntry& e) { return access_entry(e, mode); });
}

// Nothing in the synthetic tree is a symbolic link.
template <class Real>
ssize_t readlink_path(const char* path, Real real) {
  if (!ours(path)) return real();
  return real_or_synthetic(path, ssize_t{-1}, real, [](const SyntheticEntry&) { return fail(EINVAL, ssize_t{-1}); });
}

template <class Real>
char* real_path(const char* path, char* resolved, Real real) {
  if (!ours(path)) return real();
  return real_or_synthetic(path, static_cast<char*>(nullptr), real, [path, resolved](const SyntheticEntry&) {
    char clean[256];
    if (!normalise_synthetic(path, clean)) return fail(ENAMETOOLONG, static_cast<char*>(nullptr));
    return resolved != nullptr ? strcpy(resolved, clean) : strdup(clean);
  });
}

template <class Real>
FILE* fopen_path(const char* path, const char* mode, Real real) {
  if (!ours(path)) return real();
  int flags = strchr(mode, '+') != nullptr ? O_RDWR : mode[0] == 'r' ? O_RDONLY : O_WRONLY;
  if (strchr(mode, 'e') != nullptr) flags |= O_CLOEXEC;
  const auto open_stream = [path, mode, flags](const SyntheticEntry& entry) -> FILE* {
    const int fd = open_entry(path, entry, flags);
    if (fd < 0) return nullptr;
    FILE* stream = fdopen(fd, mode);
    if (stream == nullptr) close(fd);
    return stream;
  };
  if (is_always_ours(path)) return open_stream(find_synthetic(path));
  look_at_port(path);
  return real_or_synthetic(path, static_cast<FILE*>(nullptr), real, open_stream);
}

}  // namespace

int stat_entry(const SyntheticEntry& entry, struct stat* out) {
  *out = {};
  out->st_mode = mode_of(entry);
  out->st_nlink = entry.kind == EntryKind::directory ? 2 : 1;
  out->st_ino = entry.inode;
  out->st_rdev = device_of(entry);
  out->st_size = entry.kind == EntryKind::text ? 4096 : 0;  // as sysfs: a page, whatever the text
  out->st_blksize = 4096;
  return 0;
}

SyntheticEntry described_text(int fd) {
  constexpr std::string_view before = "/memfd:", after = " (deleted)";
  char link[32], name[before.size() + 256 + after.size()];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const int errno_before = errno;
  const ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, name, sizeof name - 1);  // aarch64 has no readlink
  errno = errno_before;  // fstat(2) has succeeded, also where there is no /proc
  const std::string_view read(name, length < 0 ? 0 : static_cast<std::size_t>(length));
  if (!read.starts_with(before) || !read.ends_with(after)) return {};
  name[read.size() - after.size()] = '\0';
  SyntheticEntry entry = find_synthetic(name + before.size());
  if (entry.kind != EntryKind::text) entry.kind = EntryKind::none;
  return entry;
}

int open_entry(const char* path, const SyntheticEntry& entry, int flags) {
  switch (entry.kind) {
    case EntryKind::rdma_cm_device: return open_connection_manager(flags);
    case EntryKind::mad_device: return open_management_datagrams(flags);
    case EntryKind::verbs_device: return fail(ENXIO, -1);  // a node without a kernel driver
    case EntryKind::directory: return open_folder(path, flags);
    case EntryKind::none: return fail(ENOENT, -1);
    case EntryKind::text: break;
  }
  if ((flags & O_DIRECTORY) != 0) return fail(ENOTDIR, -1);
  if ((flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL)) return fail(EEXIST, -1);
  if ((flags & O_ACCMODE) != O_RDONLY) return fail(EACCES, -1);
  return text_descriptor(path, entry, flags);
}

}  // namespace paths
}  // namespace vrdma

using namespace vrdma::paths;

#define VRDMA_OPEN(symbol)                                                            \
  VRDMA_INTERPOSE(int, symbol, const char* path, int flags, ...) {                    \
    mode_t mode = 0;                                                                  \
    if (takes_mode(flags)) {                                                          \
      va_list arguments;                                                              \
      va_start(arguments, flags);                                                     \
      mode = va_arg(arguments, mode_t);                                               \
      va_end(arguments);                                                              \
    }                                                                                 \
    const Whole whole(path);                                                          \
    return open_path(path, flags, [=] {                                               \
      auto* next = next_##symbol.get();                                               \
      return next != nullptr ? next(path, flags, mode) : sys_open(AT_FDCWD, path, flags, mode); \
    });                                                                               \
  }
VRDMA_OPEN(open)
VRDMA_OPEN(open64)
VRDMA_OPEN(__open)
VRDMA_OPEN(__open64)

#define VRDMA_OPENAT(symbol)                                                       \
  VRDMA_INTERPOSE(int, symbol, int dir, const char* path, int flags, ...) {        \
    mode_t mode = 0;                                                               \
    if (takes_mode(flags)) {                                                       \
      va_list arguments;                                                           \
      va_start(arguments, flags);                                                  \
      mode = va_arg(arguments, mode_t);                                            \
      va_end(arguments);                                                           \
    }                                                                              \
    const Whole whole(path, dir);                                                  \
    return open_path(path, flags, [=] {                                            \
      auto* next = next_##symbol.get();                                            \
      return next != nullptr ? next(dir, path, flags, mode) : sys_open(dir, path, flags, mode); \
    });                                                                            \
  }
VRDMA_OPENAT(openat)
VRDMA_OPENAT(openat64)

#define VRDMA_OPEN_2(symbol)                                       \
  VRDMA_INTERPOSE(int, symbol, const char* path, int flags) {      \
    const Whole whole(path);                                       \
    return open_path(path, flags, [=] {                            \
      auto* next = next_##symbol.get();                            \
      return next != nullptr ? next(path, flags) : sys_open(AT_FDCWD, path, flags, 0); \
    });                                                            \
  }
VRDMA_OPEN_2(__open_2)
VRDMA_OPEN_2(__open64_2)

#define VRDMA_OPENAT_2(symbol)                                          \
  VRDMA_INTERPOSE(int, symbol, int dir, const char* path, int flags) {  \
    const Whole whole(path, dir);                                       \
    return open_path(path, flags, [=] {                                 \
      auto* next = next_##symbol.get();                                 \
      return next != nullptr ? next(dir, path, flags) : sys_open(dir, path, flags, 0); \
    });                                                                 \
  }
VRDMA_OPENAT_2(__openat_2)
VRDMA_OPENAT_2(__openat64_2)

#define VRDMA_FOPEN(symbol)                                                   \
  VRDMA_INTERPOSE(FILE*, symbol, const char* path, const char* mode) {        \
    const Whole whole(path);                                                  \
    return fopen_path(path, mode, [=] { return call(next_##symbol, path, mode); }); \
  }
VRDMA_FOPEN(fopen)
VRDMA_FOPEN(fopen64)

#define VRDMA_STAT(symbol, syscall_flags)                                       \
  VRDMA_INTERPOSE(int, symbol, const char* path, struct stat* out) {            \
    const Whole whole(path);                                                    \
    return stat_path(path, out, [=] {                                           \
      auto* next = next_##symbol.get();                                         \
      return next != nullptr ? next(path, out) : sys_stat(AT_FDCWD, path, out, syscall_flags); \
    });                                                                         \
  }
VRDMA_STAT(stat, 0)
VRDMA_STAT(stat64, 0)
VRDMA_STAT(lstat, AT_SYMLINK_NOFOLLOW)
VRDMA_STAT(lstat64, AT_SYMLINK_NOFOLLOW)

#define VRDMA_FSTATAT(symbol)                                                             \
  VRDMA_INTERPOSE(int, symbol, int dir, const char* path, struct stat* out, int flags) {  \
    const Whole whole(path, dir, flags);                                                  \
    return stat_path(path, out, [=] {                                                     \
      auto* next = next_##symbol.get();                                                   \
      return next != nullptr ? next(dir, path, out, flags) : sys_stat(dir, path, out, flags); \
    });                                                                                   \
  }
VRDMA_FSTATAT(fstatat)
VRDMA_FSTATAT(fstatat64)

// What stat() was before glibc 2.33; binaries built then still call these.
#define VRDMA_XSTAT(symbol)                                                        \
  VRDMA_INTERPOSE(int, symbol, int version, const char* path, struct stat* out) {  \
    const Whole whole(path);                                                       \
    return stat_path(path, out, [=] { return call(next_##symbol, version, path, out); }); \
  }
VRDMA_XSTAT(__xstat)
VRDMA_XSTAT(__xstat64)
VRDMA_XSTAT(__lxstat)
VRDMA_XSTAT(__lxstat64)

#define VRDMA_FXSTATAT(symbol)                                                                         \
  VRDMA_INTERPOSE(int, symbol, int version, int dir, const char* path, struct stat* out, int flags) {  \
    const Whole whole(path, dir, flags);                                                               \
    return stat_path(path, out, [=] { return call(next_##symbol, version, dir, path, out, flags); });  \
  }
VRDMA_FXSTATAT(__fxstatat)
VRDMA_FXSTATAT(__fxstatat64)

VRDMA_INTERPOSE(int, statx, int dir, const char* path, int flags, unsigned mask, struct statx* out) {
  const Whole whole(path, dir, flags);
  const auto real = [=] { return call(next_statx, dir, path, flags, mask, out); };
  if (!ours(path)) return real();
  return real_or_synthetic(path, -1, real,
                           [out](const vrdma::SyntheticEntry& entry) { return statx_entry(entry, out); });
}

#define VRDMA_ACCESS(symbol)                                 \
  VRDMA_INTERPOSE(int, symbol, const char* path, int mode) { \
    const Whole whole(path);                                 \
    return access_path(path, mode, [=] { return call(next_##symbol, path, mode); }); \
  }
VRDMA_ACCESS(access)
VRDMA_ACCESS(eaccess)
VRDMA_ACCESS(euidaccess)

VRDMA_INTERPOSE(int, faccessat, int dir, const char* path, int mode, int flags) {
  const Whole whole(path, dir, flags);
  return access_path(path, mode, [=] { return call(next_faccessat, dir, path, mode, flags); });
}

VRDMA_INTERPOSE(char*, realpath, const char* path, char* resolved) {
  const Whole whole(path);
  return real_path(path, resolved, [=] { return call(next_realpath, path, resolved); });
}
VRDMA_INTERPOSE(char*, __realpath_chk, const char* path, char* resolved, std::size_t room) {
  const Whole whole(path);
  return real_path(path, resolved, [=] { return call(next___realpath_chk, path, resolved, room); });
}
VRDMA_INTERPOSE(char*, canonicalize_file_name, const char* path) {
  const Whole whole(path);
  return real_path(path, nullptr, [=] { return call(next_canonicalize_file_name, path); });
}

VRDMA_INTERPOSE(ssize_t, readlink, const char* path, char* out, std::size_t bytes) {
  const Whole whole(path);
  return readlink_path(path, [=] {
    auto* next = next_readlink.get();
    return next != nullptr ? next(path, out, bytes) : static_cast<ssize_t>(syscall(SYS_readlinkat, AT_FDCWD, path, out, bytes));
  });
}
VRDMA_INTERPOSE(ssize_t, readlinkat, int dir, const char* path, char* out, std::size_t bytes) {
  const Whole whole(path, dir);
  return readlink_path(path, [=] { return call(next_readlinkat, dir, path, out, bytes); });
}
VRDMA_INTERPOSE(ssize_t, __readlink_chk, const char* path, char* out, std::size_t bytes, std::size_t room) {
  const Whole whole(path);
  return readlink_path(path, [=] { return call(next___readlink_chk, path, out, bytes, room); });
}
VRDMA_INTERPOSE(ssize_t, __readlinkat_chk, int dir, const char* path, char* out, std::size_t bytes, std::size_t room) {
  const Whole whole(path, dir);
  return readlink_path(path, [=] { return call(next___readlinkat_chk, dir, path, out, bytes, room); });
}
