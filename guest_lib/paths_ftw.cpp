// ftw(3) and nftw(3), which look at directories by libc's calls to itself: below a directory of the synthetic tree they are carried out
// here. There are no links and no mounts in it, and no descriptors are needed.
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guest_lib/paths.hpp"

namespace vrdma::paths {
namespace {

using Visit = int(const char*, const struct stat*, int);
using VisitAt = int(const char*, const struct stat*, int, struct FTW*);
using Ftw = int(const char*, Visit*, int);
using Nftw = int(const char*, VisitAt*, int, int);

constinit NextFunction<Ftw> next_ftw{"ftw"}, next_ftw64{"ftw64"};
constinit NextFunction<Nftw> next_nftw{"nftw"}, next_nftw64{"nftw64"};

__attribute__((constructor)) void look_up_all_of_walks() {
  for (auto* f : {&next_ftw, &next_ftw64}) f->get();
  for (auto* f : {&next_nftw, &next_nftw64}) f->get();
}

class Walk {
 public:
  // One of the two is null.
  Walk(Visit* visit, VisitAt* visit_at, int flags) : visit_(visit), visit_at_(visit_at), flags_(flags) {}

  // From `path`, which the program has called `given`.
  int from(const char* path, const char* given) {
    std::size_t given_bytes = strlen(given);
    while (given_bytes > 1 && given[given_bytes - 1] == '/') --given_bytes;
    if (given_bytes >= sizeof given_ || !normalise_synthetic(path, path_)) return fail(ENAMETOOLONG, -1);
    memcpy(given_, given, given_bytes);
    given_[given_bytes] = '\0';
    begin_ = strlen(path_);
    const int before = changes_folder() ? open(".", O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
    if (changes_folder() && (before < 0 || enter_parent() != 0)) return before < 0 ? -1 : leave(before, -1);
    const int result = look(0);
    return leave(before, is_action(result, FTW_SKIP_SUBTREE) || is_action(result, FTW_SKIP_SIBLINGS) ? 0 : result);
  }

 private:
  bool changes_folder() const { return (flags_ & FTW_CHDIR) != 0; }
  bool is_action(int result, int action) const { return (flags_ & FTW_ACTIONRETVAL) != 0 && result == action; }

  int enter_parent() const {
    Folder parent;
    strcpy(parent, path_);
    *strrchr(parent, '/') = '\0';  // nothing of the tree lies in the root directory
    return chdir(parent);
  }
  static int leave(int before, int result) {
    if (before < 0) return result;
    const int errno_before = errno;
    if (fchdir(before) != 0) result = -1;
    else errno = errno_before;
    close(before);
    return result;
  }

  int tell(const SyntheticEntry& entry, int type, int level) const {
    char shown[2 * sizeof(Folder)];
    snprintf(shown, sizeof shown, "%s%s", given_, path_ + begin_);
    struct stat status;
    stat_entry(entry, &status);
    if (visit_ != nullptr) return visit_(shown, &status, type);
    const char* const slash = strrchr(shown, '/');
    struct FTW place{slash != nullptr ? static_cast<int>(slash - shown) + 1 : 0, level};
    return visit_at_(shown, &status, type, &place);
  }

  // What is at path_, and below.
  int look(int level) {
    const SyntheticEntry entry = find_synthetic(path_);
    if (entry.kind == EntryKind::none) return 0;  // gone meanwhile
    if (entry.kind != EntryKind::directory) return tell(entry, FTW_F, level);
    const bool depth_first = (flags_ & FTW_DEPTH) != 0;
    if (const int result = depth_first ? 0 : tell(entry, FTW_D, level); result != 0) return is_action(result, FTW_SKIP_SUBTREE) ? 0 : result;
    if (changes_folder() && chdir(path_) != 0) return -1;
    const std::size_t length = strlen(path_);
    int result = 0;
    SyntheticName name;
    for (std::size_t i = 0; result == 0 && list_synthetic(path_, i, name); ++i) {
      if (length + 1 + strlen(name.text) >= sizeof path_) return fail(ENAMETOOLONG, -1);
      path_[length] = '/';
      strcpy(path_ + length + 1, name.text);
      result = look(level + 1);
      path_[length] = '\0';
      if (is_action(result, FTW_SKIP_SUBTREE)) result = 0;
    }
    if (is_action(result, FTW_SKIP_SIBLINGS)) result = 0;
    if (result == 0 && changes_folder() && enter_parent() != 0) return -1;
    return result == 0 && depth_first ? tell(entry, FTW_DP, level) : result;
  }

  Visit* const visit_;
  VisitAt* const visit_at_;
  const int flags_;
  Folder given_;
  std::size_t begin_ = 0;  // of what follows given_
  Folder path_;
};

// Whether only we have it.
bool only_synthetic(const char* path) {
  if (!ours(path)) return false;
  struct stat there;
  const int errno_before = errno;
  const bool real = syscall(SYS_newfstatat, AT_FDCWD, path, &there, 0) == 0;
  errno = errno_before;
  return !real && find_synthetic(path).kind != EntryKind::none;
}

int ftw_path(NextFunction<Ftw>& next, const char* given, Visit* visit, int descriptors) {
  const char* path = given;
  const Whole whole(path);
  return only_synthetic(path) ? Walk(visit, nullptr, 0).from(path, given) : call(next, given, visit, descriptors);
}
int nftw_path(NextFunction<Nftw>& next, const char* given, VisitAt* visit, int descriptors, int flags) {
  const char* path = given;
  const Whole whole(path);
  return only_synthetic(path) ? Walk(nullptr, visit, flags).from(path, given) : call(next, given, visit, descriptors, flags);
}

}  // namespace
}  // namespace vrdma::paths

using namespace vrdma::paths;

#define VRDMA_FTW(symbol)                                                                                                      \
  VRDMA_INTERPOSE(int, symbol, const char* path, int (*visit)(const char*, const struct stat*, int), int descriptors) {       \
    return ftw_path(next_##symbol, path, visit, descriptors);                                                                  \
  }
VRDMA_FTW(ftw)
VRDMA_FTW(ftw64)

#define VRDMA_NFTW(symbol)                                                                                                     \
  VRDMA_INTERPOSE(int, symbol, const char* path, int (*visit)(const char*, const struct stat*, int, struct FTW*), int descriptors, int flags) { \
    return nftw_path(next_##symbol, path, visit, descriptors, flags);                                                          \
  }
VRDMA_NFTW(nftw)
VRDMA_NFTW(nftw64)
