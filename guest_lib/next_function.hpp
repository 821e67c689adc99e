// The function that an interposer stands in front of: the next definition in the loader's order, usually libc's. Where this library has come
// behind libc, as a dependency of a program that was given another LD_PRELOAD, nothing is next, and libc's own is meant.
// Usable before constructors have run and from signal handlers (all are looked up by a constructor of this library; a
// look-up before that may allocate). A look-up that comes back into an interposer, because malloc itself is interposed
// and opens files, gets a null function and must make the system call itself.
#pragma once

#include <dlfcn.h>

#include <atomic>

namespace vrdma {

[[gnu::tls_model("initial-exec")]] inline constinit thread_local bool next_function_lookup = false;

template <class Function>
class NextFunction {
 public:
  // version: of symbols that exist only as old versions (__xstat), which a plain look-up does not find.
  constexpr NextFunction(const char* name, const char* version = nullptr) : name_(name), version_(version) {}

  Function* get() {
    Function* function = function_.load(std::memory_order_relaxed);
    return function != nullptr ? function : look_up();
  }

 private:
  Function* look_up() {
    if (next_function_lookup) return nullptr;
    next_function_lookup = true;
    void* found = look_up(RTLD_NEXT);
    if (found == nullptr)
      if (void* const libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD)) found = look_up(libc);
    next_function_lookup = false;
    auto* function = reinterpret_cast<Function*>(found);
    function_.store(function, std::memory_order_relaxed);  // idempotent: every thread finds the same
    return function;
  }

  void* look_up(void* where) const { return version_ != nullptr ? dlvsym(where, name_, version_) : dlsym(where, name_); }

  const char* name_;
  const char* version_;
  std::atomic<Function*> function_{nullptr};
};

}  // namespace vrdma
