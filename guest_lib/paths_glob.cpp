// glob(3), which opens and lists directories by libc's calls to itself: where a pattern may lead into the tree, it is told to call ours. A
// program's own such functions (GLOB_ALTDIRFUNC) are its own. Binaries of before glibc 2.27 find dangling links, too, as that does.
#include <dirent.h>
#include <glob.h>
#include <sys/stat.h>

#include "guest_lib/paths.hpp"

namespace vrdma::paths {
namespace {

using OnError = int(const char*, int);
using Glob = int(const char*, int, OnError*, glob_t*);

static_assert(sizeof(glob_t) == sizeof(glob64_t) && sizeof(dirent) == sizeof(dirent64), "glob and glob64 share one implementation");

constinit NextFunction<Glob> next_glob{"glob"}, next_glob64{"glob64"};

__attribute__((constructor)) void look_up_all_of_patterns() {
  for (auto* f : {&next_glob, &next_glob64}) f->get();
}

// Whether what comes before the first wildcard leads to the tree, or may.
bool leads_to(const char* folder, const char* pattern) {
  for (; *folder != '\0'; ++folder, ++pattern) {
    if (*pattern == '\0') return false;
    // No wildcard matches the '/' that it would have to begin with.
    for (const char* wild = *folder == '/' ? "{\\" : "*?[{\\"; *wild != '\0'; ++wild)
      if (*pattern == *wild) return true;
    if (*pattern != *folder) return false;
  }
  return true;
}

bool may_match(const char* pattern) {
  if (pattern == nullptr) return false;
  if (pattern[0] != '/' && working_folder.load(std::memory_order_relaxed) != nullptr) return true;
  return leads_to("/sys/class/infiniband", pattern) || leads_to("/dev/infiniband", pattern);
}

int call_glob(NextFunction<Glob>& next, const char* pattern, int flags, OnError* on_error, glob_t* found) {
  Glob* const function = next.get();
  return function != nullptr ? function(pattern, flags, on_error, found) : fail(ENOSYS, GLOB_NOSYS);
}

int glob_pattern(NextFunction<Glob>& next, const char* pattern, int flags, OnError* on_error, glob_t* found) {
  if (found == nullptr || (flags & GLOB_ALTDIRFUNC) != 0 || !may_match(pattern)) return call_glob(next, pattern, flags, on_error, found);
  const glob_t before = *found;
  found->gl_opendir = [](const char* path) -> void* { return opendir(path); };
  found->gl_readdir = [](void* folder) { return readdir(static_cast<DIR*>(folder)); };
  found->gl_closedir = [](void* folder) { closedir(static_cast<DIR*>(folder)); };
  found->gl_stat = [](const char* path, struct stat* out) { return stat(path, out); };
  found->gl_lstat = [](const char* path, struct stat* out) { return lstat(path, out); };
  const int result = call_glob(next, pattern, flags | GLOB_ALTDIRFUNC, on_error, found);
  found->gl_opendir = before.gl_opendir;
  found->gl_readdir = before.gl_readdir;
  found->gl_closedir = before.gl_closedir;
  found->gl_stat = before.gl_stat;
  found->gl_lstat = before.gl_lstat;
  found->gl_flags &= ~GLOB_ALTDIRFUNC;
  return result;
}

}  // namespace
}  // namespace vrdma::paths

using namespace vrdma::paths;

VRDMA_INTERPOSE(int, glob, const char* pattern, int flags, int (*on_error)(const char*, int), glob_t* found) {
  return glob_pattern(next_glob, pattern, flags, on_error, found);
}
VRDMA_INTERPOSE(int, glob64, const char* pattern, int flags, int (*on_error)(const char*, int), glob_t* found) {
  return glob_pattern(next_glob64, pattern, flags, on_error, found);
}
