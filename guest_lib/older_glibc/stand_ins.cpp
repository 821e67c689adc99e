// What glibc has only since a version that not every program's has yet. The linker finds these before glibc's own, and they lead on to
// glibc's where it has any. None of the headers that declare them to be something else is included here.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <time.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>

extern "C" {

// 2.35. The area of rseq(2) that each thread has; none of no bytes.
std::ptrdiff_t vrdma_rseq_offset __asm__("__rseq_offset") = 0;
unsigned vrdma_rseq_size __asm__("__rseq_size") = 0;
// 2.32. libstdc++'s, which asks it before it counts references without atomics; ours is guest_lib/single_thread.hpp.
char vrdma_libc_single_threaded __asm__("__libc_single_threaded") = 0;
}

namespace {

// A function of glibc's by its name; null where it has none.
template <class Function>
Function* there(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

int (*real_mutex_clocklock)(pthread_mutex_t*, clockid_t, const timespec*);

#if defined(DLFO_STRUCT_HAS_EH_DBASE)
int (*real_find_object)(void*, dl_find_object*);

struct Sought {
  std::uintptr_t address;
  dl_find_object* result;
};

int look_at(dl_phdr_info* object, std::size_t, void* argument) {
  auto& sought = *static_cast<Sought*>(argument);
  std::uintptr_t begin = ~std::uintptr_t{0}, end = 0, eh_frame = 0;
  bool here = false;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& part = object->dlpi_phdr[i];
    const std::uintptr_t at = object->dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_GNU_EH_FRAME) eh_frame = at;
    if (part.p_type != PT_LOAD) continue;
    if (at < begin) begin = at;
    if (at + part.p_memsz > end) end = at + part.p_memsz;
    here |= sought.address - at < part.p_memsz;
  }
  if (!here || eh_frame == 0) return 0;
  *sought.result = {};
  sought.result->dlfo_map_start = reinterpret_cast<void*>(begin);
  sought.result->dlfo_map_end = reinterpret_cast<void*>(end);
  sought.result->dlfo_eh_frame = reinterpret_cast<void*>(eh_frame);
  return 1;
}
#endif

// Before all other constructors.
__attribute__((constructor(101))) void take_what_is_there() {
#if defined(DLFO_STRUCT_HAS_EH_DBASE)
  real_find_object = there<int(void*, dl_find_object*)>("_dl_find_object");
#endif
  real_mutex_clocklock = there<int(pthread_mutex_t*, clockid_t, const timespec*)>("pthread_mutex_clocklock");
  const auto* const offset = static_cast<const std::ptrdiff_t*>(dlsym(RTLD_DEFAULT, "__rseq_offset"));
  const auto* const size = static_cast<const unsigned*>(dlsym(RTLD_DEFAULT, "__rseq_size"));
  if (offset == nullptr || size == nullptr) return;
  vrdma_rseq_offset = *offset;
  vrdma_rseq_size = *size;
}

}  // namespace

extern "C" {

#if defined(DLFO_STRUCT_HAS_EH_DBASE)
// 2.35. Asked by the static libgcc of gcc 12 and later for the tables of a frame that an exception passes.
int vrdma_find_object(void* address, dl_find_object* result) __asm__("_dl_find_object");
int vrdma_find_object(void* address, dl_find_object* result) {
  if (real_find_object != nullptr) return real_find_object(address, result);
  Sought sought{reinterpret_cast<std::uintptr_t>(address), result};
  return dl_iterate_phdr(look_at, &sought) == 1 ? 0 : -1;
}
#endif

// 2.32.
const char* vrdma_strerrorname(int error) __asm__("strerrorname_np");
const char* vrdma_strerrorname(int error) {
  auto* const real = there<const char*(int)>("strerrorname_np");
  return real != nullptr ? real(error) : nullptr;
}

// 2.30. Without it, by the time of day: who sets that meanwhile changes how long it waits.
int vrdma_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const timespec* until) __asm__("pthread_mutex_clocklock");
int vrdma_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  if (real_mutex_clocklock != nullptr) return real_mutex_clocklock(mutex, clock, until);
  timespec now, today;
  ::clock_gettime(clock, &now);
  ::clock_gettime(CLOCK_REALTIME, &today);
  today.tv_sec += until->tv_sec - now.tv_sec;
  today.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (today.tv_nsec < 0) today.tv_nsec += 1'000'000'000, --today.tv_sec;
  if (today.tv_nsec >= 1'000'000'000) today.tv_nsec -= 1'000'000'000, ++today.tv_sec;
  return pthread_mutex_timedlock(mutex, &today);
}

// 2.38, which calls strtol and its like by these names where they are to know binary numbers.
#define VRDMA_PLAIN(result, name, parameters, arguments)                   \
  result vrdma_plain_##name parameters __asm__(#name);                     \
  result vrdma_isoc23_##name parameters __asm__("__isoc23_" #name);        \
  result vrdma_isoc23_##name parameters { return vrdma_plain_##name arguments; }

VRDMA_PLAIN(long, strtol, (const char* from, char** end, int base), (from, end, base))
VRDMA_PLAIN(unsigned long, strtoul, (const char* from, char** end, int base), (from, end, base))
VRDMA_PLAIN(long long, strtoll, (const char* from, char** end, int base), (from, end, base))
VRDMA_PLAIN(unsigned long long, strtoull, (const char* from, char** end, int base), (from, end, base))
VRDMA_PLAIN(int, vsscanf, (const char* from, const char* format, std::va_list values), (from, format, values))
VRDMA_PLAIN(int, vfscanf, (std::FILE* from, const char* format, std::va_list values), (from, format, values))

int vrdma_isoc23_sscanf(const char* from, const char* format, ...) __asm__("__isoc23_sscanf");
int vrdma_isoc23_sscanf(const char* from, const char* format, ...) {
  std::va_list values;
  va_start(values, format);
  const int read = vrdma_plain_vsscanf(from, format, values);
  va_end(values);
  return read;
}

int vrdma_isoc23_fscanf(std::FILE* from, const char* format, ...) __asm__("__isoc23_fscanf");
int vrdma_isoc23_fscanf(std::FILE* from, const char* format, ...) {
  std::va_list values;
  va_start(values, format);
  const int read = vrdma_plain_vfscanf(from, format, values);
  va_end(values);
  return read;
}
}
