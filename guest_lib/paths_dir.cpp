// Directory streams over the synthetic tree. A synthetic DIR is an object of ours that the caller cannot tell from
// libc's; every libc function that takes a DIR is therefore interposed. Ours lie in one array: to another DIR each costs a comparison.
#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "guest_lib/paths.hpp"

namespace vrdma::paths {
namespace {

using Opendir = DIR*(const char*);
using Fdopendir = DIR*(int);
using Closedir = int(DIR*);
using Readdir = dirent*(DIR*);
using ReaddirR = int(DIR*, dirent*, dirent**);
using Rewinddir = void(DIR*);
using Seekdir = void(DIR*, long);
using Telldir = long(DIR*);
using Dirfd = int(DIR*);
using Filter = int(const dirent*);
using Compare = int(const dirent**, const dirent**);
using Scandir = int(const char*, dirent***, Filter*, Compare*);
using Scandirat = int(int, const char*, dirent***, Filter*, Compare*);

static_assert(sizeof(dirent) == sizeof(dirent64), "readdir and readdir64 share one implementation");

constinit NextFunction<Opendir> next_opendir{"opendir"};
constinit NextFunction<Fdopendir> next_fdopendir{"fdopendir"};
constinit NextFunction<Closedir> next_closedir{"closedir"};
constinit NextFunction<Readdir> next_readdir{"readdir"}, next_readdir64{"readdir64"};
constinit NextFunction<ReaddirR> next_readdir_r{"readdir_r"}, next_readdir64_r{"readdir64_r"};
constinit NextFunction<Rewinddir> next_rewinddir{"rewinddir"};
constinit NextFunction<Seekdir> next_seekdir{"seekdir"};
constinit NextFunction<Telldir> next_telldir{"telldir"};
constinit NextFunction<Dirfd> next_dirfd{"dirfd"};
constinit NextFunction<Scandir> next_scandir{"scandir"}, next_scandir64{"scandir64"};
constinit NextFunction<Scandirat> next_scandirat{"scandirat"}, next_scandirat64{"scandirat64"};

__attribute__((constructor)) void look_up_all_of_folders() {
  next_opendir.get();
  next_fdopendir.get();
  next_closedir.get();
  for (auto* f : {&next_readdir, &next_readdir64}) f->get();
  for (auto* f : {&next_readdir_r, &next_readdir64_r}) f->get();
  next_rewinddir.get();
  next_seekdir.get();
  next_telldir.get();
  next_dirfd.get();
  for (auto* f : {&next_scandir, &next_scandir64}) f->get();
  for (auto* f : {&next_scandirat, &next_scandirat64}) f->get();
}

struct Stream {
  int fd = 0;         // the stream's own (folder_descriptors.hpp); -1: none could be had
  long position = 0;  // 0 and 1 are "." and "..", the tree's entries follow
  dirent entry{};
  char path[256] = {};
};

constexpr std::size_t streams_max = 1024;  // as descriptors of a process, where nobody has set another limit
constinit Stream streams[streams_max] = {};
constinit std::atomic<bool> taken[streams_max] = {};

// The stream behind `dir` if it is synthetic.
Stream* synthetic(DIR* dir) {
  const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(dir) - reinterpret_cast<std::uintptr_t>(&streams);
  return __builtin_expect(offset < sizeof streams, 0) ? &streams[offset / sizeof(Stream)] : nullptr;
}

// The stream owns `fd`, but where there is none: EMFILE.
DIR* open_stream(const char* path, int fd) {
  for (std::size_t i = 0; i < streams_max; ++i) {
    // A1: pairs with R1; who had it is done with it.
    if (taken[i].load(std::memory_order_relaxed) || taken[i].exchange(true, std::memory_order_acquire)) continue;
    if (!normalise_synthetic(path, streams[i].path)) {
      taken[i].store(false, std::memory_order_release);
      return fail(ENAMETOOLONG, static_cast<DIR*>(nullptr));
    }
    streams[i].fd = fd;
    streams[i].position = 0;
    return reinterpret_cast<DIR*>(&streams[i]);
  }
  return fail(EMFILE, static_cast<DIR*>(nullptr));
}

int close_stream(Stream* stream) {
  const int fd = stream->fd;
  taken[stream - streams].store(false, std::memory_order_release);  // R1
  return fd >= 0 ? close(fd) : 0;
}

unsigned char type_of(EntryKind kind) {
  return kind == EntryKind::directory ? DT_DIR : kind == EntryKind::text ? DT_REG : DT_CHR;
}

// The entry at the stream's position, null at the end; the stream moves on.
dirent* next_entry(Stream* stream) {
  dirent& entry = stream->entry;
  entry.d_type = DT_DIR;
  if (stream->position < 2) {
    strcpy(entry.d_name, stream->position == 0 ? "." : "..");
    entry.d_ino = 1;
  } else {
    SyntheticName name;
    if (!list_synthetic(stream->path, static_cast<std::size_t>(stream->position - 2), name)) return nullptr;
    strcpy(entry.d_name, name.text);
    entry.d_type = type_of(name.kind);
    char path[sizeof stream->path + sizeof name.text + 1];
    strcpy(path, stream->path);
    strcat(path, "/");
    strcat(path, name.text);
    entry.d_ino = find_synthetic(path).inode;
  }
  entry.d_off = ++stream->position;
  entry.d_reclen = sizeof entry;
  return &entry;
}

DIR* open_entry_stream(const char* path, const SyntheticEntry& entry) {
  if (entry.kind != EntryKind::directory) return fail(ENOTDIR, static_cast<DIR*>(nullptr));
  const int errno_before = errno;
  const int fd = folder_descriptors::open(path, O_CLOEXEC);
  errno = errno_before;
  DIR* const stream = open_stream(path, fd);
  if (stream == nullptr && fd >= 0) close(fd);
  return stream;
}

void free_entries(dirent** entries, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) free(entries[i]);
  free(entries);
}

int scan(const char* path, dirent*** out, Filter* filter, Compare* compare) {
  Stream stream;
  if (!normalise_synthetic(path, stream.path)) return fail(ENAMETOOLONG, -1);
  dirent** entries = nullptr;
  std::size_t count = 0;
  bool out_of_memory = false;
  while (const dirent* entry = next_entry(&stream)) {
    if (filter != nullptr && filter(entry) == 0) continue;
    auto** grown = static_cast<dirent**>(realloc(entries, (count + 1) * sizeof *entries));
    auto* copy = static_cast<dirent*>(malloc(sizeof *entry));
    if (grown != nullptr) entries = grown;
    if (grown == nullptr || copy == nullptr) {
      free(copy);
      out_of_memory = true;
      break;
    }
    memcpy(copy, entry, sizeof *entry);
    entries[count++] = copy;
  }
  if (out_of_memory) {
    free_entries(entries, count);
    return fail(ENOMEM, -1);
  }
  if (compare != nullptr && count > 1)
    qsort(entries, count, sizeof *entries, reinterpret_cast<int (*)(const void*, const void*)>(compare));
  *out = entries != nullptr ? entries : static_cast<dirent**>(malloc(sizeof *entries));
  return static_cast<int>(count);
}

template <class Real>
int scan_path(const char* path, dirent*** out, Filter* filter, Compare* compare, Real real) {
  if (!ours(path)) return real();
  return real_or_synthetic(path, -1, real, [=](const SyntheticEntry& entry) {
    return entry.kind == EntryKind::directory ? scan(path, out, filter, compare) : fail(ENOTDIR, -1);
  });
}

int copy_next_entry(Stream* stream, dirent* out, dirent** result) {
  const dirent* entry = next_entry(stream);
  *result = entry != nullptr ? static_cast<dirent*>(memcpy(out, entry, sizeof *out)) : nullptr;
  return 0;
}

}  // namespace
}  // namespace vrdma::paths

using namespace vrdma::paths;

VRDMA_INTERPOSE(DIR*, opendir, const char* path) {
  const Whole whole(path);
  const auto real = [=] { return call(next_opendir, path); };
  if (!ours(path)) return real();
  return real_or_synthetic(path, static_cast<DIR*>(nullptr), real,
                           [path](const vrdma::SyntheticEntry& entry) { return open_entry_stream(path, entry); });
}

VRDMA_INTERPOSE(DIR*, fdopendir, int fd) {
  const char* const folder = vrdma::folder_descriptors::path_of(fd);
  return folder != nullptr ? open_stream(folder, fd) : call(next_fdopendir, fd);
}

VRDMA_INTERPOSE(int, closedir, DIR* dir) {
  auto* stream = synthetic(dir);
  return stream != nullptr ? close_stream(stream) : call(next_closedir, dir);
}

VRDMA_INTERPOSE(dirent*, readdir, DIR* dir) {
  auto* stream = synthetic(dir);
  return stream != nullptr ? next_entry(stream) : call(next_readdir, dir);
}
VRDMA_INTERPOSE(dirent*, readdir64, DIR* dir) {
  auto* stream = synthetic(dir);
  return stream != nullptr ? next_entry(stream) : call(next_readdir64, dir);
}

VRDMA_INTERPOSE(int, readdir_r, DIR* dir, dirent* out, dirent** result) {
  auto* stream = synthetic(dir);
  return stream != nullptr ? copy_next_entry(stream, out, result) : call(next_readdir_r, dir, out, result);
}
VRDMA_INTERPOSE(int, readdir64_r, DIR* dir, dirent* out, dirent** result) {
  auto* stream = synthetic(dir);
  return stream != nullptr ? copy_next_entry(stream, out, result) : call(next_readdir64_r, dir, out, result);
}

VRDMA_INTERPOSE(void, rewinddir, DIR* dir) {
  if (auto* stream = synthetic(dir))
    stream->position = 0;
  else if (auto* next = next_rewinddir.get())
    next(dir);
}
VRDMA_INTERPOSE(void, seekdir, DIR* dir, long position) {
  if (auto* stream = synthetic(dir))
    stream->position = position < 0 ? 0 : position;
  else if (auto* next = next_seekdir.get())
    next(dir, position);
}
VRDMA_INTERPOSE(long, telldir, DIR* dir) {
  auto* stream = synthetic(dir);
  return stream != nullptr ? stream->position : call(next_telldir, dir);
}

// POSIX: a stream without a descriptor says ENOTSUP.
VRDMA_INTERPOSE(int, dirfd, DIR* dir) {
  const auto* stream = synthetic(dir);
  if (stream == nullptr) return call(next_dirfd, dir);
  return stream->fd >= 0 ? stream->fd : fail(ENOTSUP, -1);
}

VRDMA_INTERPOSE(int, scandir, const char* path, dirent*** out, Filter* filter, Compare* compare) {
  const Whole whole(path);
  return scan_path(path, out, filter, compare, [=] { return call(next_scandir, path, out, filter, compare); });
}
VRDMA_INTERPOSE(int, scandir64, const char* path, dirent*** out, Filter* filter, Compare* compare) {
  const Whole whole(path);
  return scan_path(path, out, filter, compare, [=] { return call(next_scandir64, path, out, filter, compare); });
}

VRDMA_INTERPOSE(int, scandirat, int at, const char* path, dirent*** out, Filter* filter, Compare* compare) {
  const Whole whole(path, at);
  return scan_path(path, out, filter, compare, [=] { return call(next_scandirat, at, path, out, filter, compare); });
}
VRDMA_INTERPOSE(int, scandirat64, int at, const char* path, dirent*** out, Filter* filter, Compare* compare) {
  const Whole whole(path, at);
  return scan_path(path, out, filter, compare, [=] { return call(next_scandirat64, at, path, out, filter, compare); });
}
