// Whether no other thread of this process is, or has ever been: what glibc 2.32 and later know, and say in a byte. False where that is not known.
#pragma once

#include <dlfcn.h>

namespace vrdma::guest {

// A pointer to glibc's own, not the name, for programs whose glibc has none; constructors before ours find it as if there were none.
inline constinit const char unknown_threads = 0;
inline constinit const char* single_threaded_byte = &unknown_threads;
inline const bool single_threaded_looked_up = [] {
  if (const void* const found = dlsym(RTLD_DEFAULT, "__libc_single_threaded")) single_threaded_byte = static_cast<const char*>(found);
  return true;
}();

inline bool single_threaded() { return *single_threaded_byte != 0; }

}  // namespace vrdma::guest
