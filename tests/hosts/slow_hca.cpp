// An HCA's library that takes its time: libvrdma's, in which registering large memory, and taking it back, lasts for as long as the file that
// VRDMA_TEST_SLOW_HCA names is there. No real one can be told to.
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <cstdlib>

#undef ibv_reg_mr_iova

namespace {

constexpr size_t large_bytes = size_t{16} << 20;

void take_time(size_t bytes) {
  const char* const gate = std::getenv("VRDMA_TEST_SLOW_HCA");
  while (bytes > large_bytes && gate != nullptr && ::access(gate, F_OK) == 0) ::usleep(1000);
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" [[gnu::visibility("default")]] ibv_mr* ibv_reg_mr_iova(ibv_pd* pd, void* memory, size_t bytes, uint64_t iova, int access) {
  take_time(bytes);
  return real<ibv_mr*(ibv_pd*, void*, size_t, uint64_t, int)>("ibv_reg_mr_iova")(pd, memory, bytes, iova, access);
}

extern "C" [[gnu::visibility("default")]] int ibv_dereg_mr(ibv_mr* mr) {
  take_time(mr->length);
  return real<int(ibv_mr*)>("ibv_dereg_mr")(mr);
}
