#include "vmkernel_svc/remote/hca_library.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <mutex>

namespace vrdma::remote {

namespace {

#if defined(__x86_64__)
#define VRDMA_MULTIARCH "x86_64-linux-gnu"
#else
#define VRDMA_MULTIARCH "aarch64-linux-gnu"
#endif

// By paths: a name would be found where LD_LIBRARY_PATH says, or be what was preloaded.
constexpr const char* paths[] = {"/usr/lib/" VRDMA_MULTIARCH "/libibverbs.so.1", "/lib/" VRDMA_MULTIARCH "/libibverbs.so.1", "/usr/lib64/libibverbs.so.1",
                                 "/lib64/libibverbs.so.1", "/usr/lib/libibverbs.so.1", "/usr/local/lib/libibverbs.so.1"};

// libvrdma has all the names of the real one, also where it was mounted over its file, and one more: it stands before the C library's
// madvise(2), for what the application has registered.
bool is_ours(void* handle) {
  Dl_info verbs{}, memory{};
  void* const device_list = ::dlsym(handle, "ibv_get_device_list");
  void* const advise = ::dlsym(handle, "madvise");
  return device_list != nullptr && advise != nullptr && ::dladdr(device_list, &verbs) != 0 && ::dladdr(advise, &memory) != 0 &&
         verbs.dli_fbase == memory.dli_fbase;
}

// Under libvrdma a driver would be bound to it, as it has the name that the driver asks for: the real library then lives in a world of
// its own, with its C library.
bool under_libvrdma() { return is_ours(RTLD_DEFAULT); }

void* open_real(std::string& path, std::string& why) {
  const bool apart = under_libvrdma();
  why = "libibverbs.so.1 is in none of the system's folders: install it (Debian: libibverbs1 and ibverbs-providers)";
  for (const char* const candidate : paths) {
    if (::access(candidate, R_OK) != 0) continue;
    void* const library = apart ? ::dlmopen(LM_ID_NEWLM, candidate, RTLD_NOW | RTLD_LOCAL) : ::dlopen(candidate, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      why = fmt::format("{} cannot be loaded ({})", candidate, ::dlerror());
      continue;
    }
    if (!is_ours(library)) return path = candidate, library;
    why = fmt::format("{} is libvrdma: the host's own libibverbs is needed", candidate);
    ::dlclose(library);
  }
  return nullptr;
}

void* open_named(const std::string& path, std::string& why) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) why = fmt::format("{} cannot be loaded ({})", path, ::dlerror());
  return library;
}

}  // namespace

const HcaLibrary* HcaLibrary::load(const std::string& named, std::string& why) {
  static std::mutex mutex;
  static HcaLibrary loaded;
  const std::lock_guard lock(mutex);
  if (loaded.errno_location != nullptr) return &loaded;
  std::string path = named;
  void* const library = named.empty() ? open_real(path, why) : open_named(path, why);
  if (library == nullptr) return nullptr;
  HcaLibrary found;
#define VRDMA_HCA(name)                                                             \
  found.name = reinterpret_cast<decltype(found.name)>(::dlsym(library, #name));     \
  if (found.name == nullptr) {                                                      \
    why = fmt::format("{} has no {}: rdma-core 28 or newer is needed", path, #name); \
    return nullptr;                                                                 \
  }
  VRDMA_HCA_FUNCTIONS(VRDMA_HCA)
#undef VRDMA_HCA
  found.errno_location = reinterpret_cast<decltype(found.errno_location)>(::dlsym(library, "__errno_location"));
  if (found.errno_location == nullptr) return why = fmt::format("{} is of another C library", path), nullptr;
  found.path = path;
  loaded = found;
  return &loaded;
}

}  // namespace vrdma::remote
