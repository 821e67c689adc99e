// The interposers of paths.cpp and its paths_*.cpp: libc functions that take a path, exported without a version so that
// they stand in front of libc's when libvrdma is preloaded (or comes before libc in the loader's order).
//
// A path outside /sys/class/infiniband* and /dev/infiniband costs one comparison. Inside, the real entry wins; where
// there is none, the synthetic tree answers. One exception: /dev/infiniband/rdma_cm is always ours, because the
// kernel's knows nothing of our devices. The tree's directories have descriptors (folder_descriptors.hpp), and paths relative to
// these are the tree's. Where libc calls itself, glob(3) is told to call us (paths_glob.cpp), and ftw(3) is done here (paths_ftw.cpp). Not covered:
// libc's own fts(3), paths that lead into the tree from a real directory ("infiniband" in /sys/class), and getdents64(2).
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <type_traits>

#include "guest_lib/folder_descriptors.hpp"
#include "guest_lib/next_function.hpp"
#include "guest_lib/synthetic_tree.hpp"

// Defines the exported libc function `symbol` as vrdma_next::symbol, out of reach of libc's declaration, whose
// nonnull attributes would let the compiler drop the check for a null path.
#define VRDMA_INTERPOSE(result, symbol, ...) \
  extern "C" __attribute__((visibility("default"))) result vrdma_interposed_##symbol(__VA_ARGS__) __asm__(#symbol); \
  extern "C" result vrdma_interposed_##symbol(__VA_ARGS__)

namespace vrdma::paths {

// Where chdir(2) went in the tree; null: nowhere. Set and cleared by paths_cwd.cpp.
using Folder = char[256];
extern std::atomic<const Folder*> working_folder;

// Makes `path`, as the program gives it, absolute where it is relative to such a folder, or to the descriptor `dir` of one, as long as this lives; and
// where it goes into the tree and by ".." out of it again, which the kernel could not follow, it is the path that remains. AT_EMPTY_PATH among
// `flags`: where it is empty it is the descriptor's own.
class Whole {
 public:
  explicit Whole(const char*& path, int dir = AT_FDCWD, int flags = 0) {
    if (path == nullptr || path[0] == '\0') {
      if (const char* const folder = (flags & AT_EMPTY_PATH) != 0 ? folder_descriptors::path_of(dir) : nullptr) path = folder;
      return;
    }
    if (path[0] == '/') {
      if (__builtin_expect(may_be_synthetic(path), 0) && leaves(path)) path = joined_;
      return;
    }
    const char* folder = nullptr;
    if (dir != AT_FDCWD)
      folder = folder_descriptors::path_of(dir);
    else if (const Folder* const working = working_folder.load(std::memory_order_acquire))
      folder = *working;
    if (folder != nullptr && join(folder, path)) [[unlikely]]
      path = joined_;
  }
  Whole(const Whole&) = delete;
  Whole& operator=(const Whole&) = delete;

 private:
  bool join(const char* folder, const char* path);
  bool leaves(const char* path);
  Folder joined_;
};

inline bool ours(const char* path) { return __builtin_expect(path != nullptr && may_be_synthetic(path), 0); }

// Whatever the kernel has by that name.
inline bool is_always_ours(const char* path) { return find_synthetic(path).kind == EntryKind::rdma_cm_device; }

// Runs real(); where it fails because nothing is there, runs synthetic(entry), which reports like the real one. A
// success leaves errno as it was. `failed` is what real() returns then.
template <class Result, class Real, class Synthetic>
Result real_or_synthetic(const char* path, Result failed, Real real, Synthetic synthetic) {
  const int errno_before = errno;
  const Result result = real();
  if (result != failed || (errno != ENOENT && errno != ENOTDIR)) return result;
  const SyntheticEntry entry = find_synthetic(path);
  if (entry.kind == EntryKind::none) {
    if (entry.not_a_directory) errno = ENOTDIR;
    return result;
  }
  errno = errno_before;
  return synthetic(entry);
}

template <class Result>
Result fail(int error, Result result) {
  errno = error;
  return result;
}

// Calls the function behind an interposer; ENOSYS where libc has none or the look-up came back into the interposer.
template <class Function, class... Arguments>
auto call(NextFunction<Function>& next, Arguments... arguments) {
  Function* function = next.get();
  using Result = decltype(function(arguments...));
  if (function != nullptr) return function(arguments...);
  if constexpr (std::is_pointer_v<Result>)
    return fail(ENOSYS, Result{nullptr});
  else
    return fail(ENOSYS, Result{-1});
}

// A descriptor for the entry at `path` as open(2) gives it: text in a sealed memfd, a directory's, a channel of the connection
// manager (guest_lib/cm/), or -1 with errno.
int open_entry(const char* path, const SyntheticEntry& entry, int flags);

// As stat(2).
int stat_entry(const SyntheticEntry& entry, struct stat* out);
// The text that was opened as `fd`; of EntryKind::none: it is something else.
SyntheticEntry described_text(int fd);

}  // namespace vrdma::paths
