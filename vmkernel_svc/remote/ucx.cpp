#include "vmkernel_svc/remote/ucx.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace vrdma::remote {

namespace {

// A setting that the libraries read as they are loaded, and that is not left to children of the service.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) {
    if (const char* const before = ::getenv(name)) before_ = before;
    ::setenv(name, value, 1);
  }
  ~Setting() {
    if (before_)
      ::setenv(name_, before_->c_str(), 1);
    else
      ::unsetenv(name_);
  }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(fmt::format("libucp.so.0 has no {}: UCX 1.12 or newer is needed (Debian: libucx0)", name));
}

}  // namespace

const Ucx& Ucx::load() {
  static const Ucx loaded = [] {
    // Signals are ours (memory/bus_guard.hpp), and so is the memory: no hooks in malloc.
    const Setting errors("UCX_HANDLE_ERRORS", "none"), hooks("UCX_MEM_EVENTS", "n"), files("UCX_VFS_ENABLE", "n"), level("UCX_LOG_LEVEL", "fatal");
    void* const library = ::dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
      throw std::runtime_error(fmt::format("other hosts are reached through UCX, which cannot be loaded ({}): install it (Debian: libucx0)", ::dlerror()));
    Ucx ucx;
#define VRDMA_UCP(name) find(library, "ucp_" #name, ucx.name);
    VRDMA_UCP_FUNCTIONS(VRDMA_UCP)
#undef VRDMA_UCP
    find(library, "ucs_status_string", ucx.status_string);
    return ucx;
  }();
  return loaded;
}

}  // namespace vrdma::remote
