// Preloaded into a kernel of User Mode Linux by `vrdma vm uml`: what it asks of the host for its processes, mended in two ways.
//
// They are to die with it (PTRACE_O_EXITKILL), and its helpers likewise (PR_SET_PDEATHSIG). Else those of a kernel that is killed run
// on, as processes of the host, or sleep for ever in its memory.
//
// On processors that have more registers than it knows of it takes back too few. It keeps 2696 bytes of what XSAVE saves of its processes, which ends with PKRU. Where there is more (AMX: 11008 bytes) the
// host hands out the beginning when asked by PTRACE_GETREGSET, but takes back nothing less than the whole, and no process would ever
// run. Here the whole is taken back, with all that the kernel does not know of in its initial state.
//
// Called by the one thread that traces; its stacks are small, so the whole is kept here.
#include <cpuid.h>
#include <dlfcn.h>
#include <elf.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <new>

namespace {

constexpr unsigned ptrace_old_setoptions = 21;  // of linux/ptrace.h, which cannot be included beside the C library's
constexpr unsigned xsave_leaf = 0xd;
constexpr std::size_t features_at = 512;  // in the area: the components that are not in their initial state, a bit each
constexpr std::size_t area_bytes_max = 1 << 14;
alignas(64) char area[area_bytes_max];

std::size_t area_bytes() {
  unsigned a = 0, bytes = 0, c = 0, d = 0;
  return __get_cpuid_count(xsave_leaf, 0, &a, &bytes, &c, &d) != 0 ? bytes : 0;
}

// Those components that end within so many bytes.
std::uint64_t features_within(std::size_t bytes) {
  std::uint64_t within = 3;  // x87 and SSE lie before the rest
  for (unsigned feature = 2; feature < 63; ++feature) {
    unsigned size = 0, offset = 0, c = 0, d = 0;
    if (__get_cpuid_count(xsave_leaf, feature, &size, &offset, &c, &d) != 0 && size != 0 && offset + size <= bytes) within |= std::uint64_t{1} << feature;
  }
  return within;
}

struct Start {
  int (*function)(void*);
  void* argument;
};

int begin(void* start) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const Start& real = *static_cast<const Start*>(start);
  return real.function(real.argument);
}

}  // namespace

// As clone(3) with four arguments, which are all that its callers give. What the child is to do lies at the top of its own stack.
extern "C" __attribute__((visibility("default"))) int cloned(int (*function)(void*), void* stack, int flags, void* argument) __asm__("clone");

int cloned(int (*function)(void*), void* stack, int flags, void* argument) {
  using Clone = int (*)(int (*)(void*), void*, int, ...);
  static const auto real = reinterpret_cast<Clone>(::dlsym(RTLD_NEXT, "clone"));
  constexpr std::uintptr_t alignment = 16;
  const auto top = (reinterpret_cast<std::uintptr_t>(stack) & ~(alignment - 1)) - sizeof(Start);
  auto* const start = new (reinterpret_cast<void*>(top)) Start{function, argument};
  return real(begin, start, flags, start);
}

// Its callers give it four arguments, whatever its declaration says.
extern "C" __attribute__((visibility("default"))) long traced(unsigned request, pid_t pid, void* address, void* data) __asm__("ptrace");

long traced(unsigned request, pid_t pid, void* address, void* data) {
  using Ptrace = long (*)(unsigned, pid_t, void*, void*);
  static const auto real = reinterpret_cast<Ptrace>(::dlsym(RTLD_NEXT, "ptrace"));
  static const std::size_t whole_bytes = area_bytes();
  if (request == PTRACE_SETOPTIONS || request == ptrace_old_setoptions)
    return real(request, pid, address, reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(data) | PTRACE_O_EXITKILL));
  const auto* const given = static_cast<const iovec*>(data);
  if (request != PTRACE_SETREGSET || reinterpret_cast<std::uintptr_t>(address) != NT_X86_XSTATE || given->iov_len >= whole_bytes ||
      given->iov_len < features_at + sizeof(std::uint64_t) || whole_bytes > area_bytes_max)
    return real(request, pid, address, data);
  static std::size_t known_bytes = 0;
  static std::uint64_t known_features = 0;
  if (known_bytes != given->iov_len) known_bytes = given->iov_len, known_features = features_within(known_bytes);
  std::memset(area, 0, whole_bytes);
  std::memcpy(area, given->iov_base, given->iov_len);
  std::uint64_t features;
  std::memcpy(&features, area + features_at, sizeof(features));
  features &= known_features;
  std::memcpy(area + features_at, &features, sizeof(features));
  iovec whole{area, whole_bytes};
  return real(request, pid, address, &whole);
}
