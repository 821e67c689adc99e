// madvise and mremap as the application calls them: on pages that live in the window they mean what they mean on
// private memory. memfd_create: so that what is registered of it can be sealed against shrinking, and peers may map it. Calls that the C library makes inside itself do not come here (DESIGN.md, "What escapes").
//
// All others go on to the next function of that name and not to the kernel, as without this library: others patch the C library's code
// (UCX's libucm), and where they find that it is not passed they do without. UCX 1.20 then registers memory for each message anew,
// and moves 1 MiB messages at a third of the speed.
//
// Linked into libvrdma.so as an object, so that the symbols are exported; any thread, also inside an allocator with its
// locks held: never allocates.
#include <errno.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guest_lib/memory/manager.hpp"
#include "guest_lib/memory/remap.hpp"
#include "guest_lib/next_function.hpp"

using vrdma::memory::MemoryManager;

namespace {

constinit vrdma::NextFunction<int(void*, size_t, int)> next_madvise("madvise");
constinit vrdma::NextFunction<vrdma::memory::Mremap> next_mremap("mremap");
constinit vrdma::NextFunction<int(const char*, unsigned)> next_memfd_create("memfd_create");

[[gnu::constructor(101)]] void look_up() {
  next_madvise.get();
  next_mremap.get();
  next_memfd_create.get();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int madvise(void* address, size_t bytes, int advice) noexcept {
  if (const auto result = MemoryManager::on_madvise(reinterpret_cast<std::uint64_t>(address), bytes, advice)) {
    if (*result == 0) return 0;
    errno = *result;
    return -1;
  }
  auto* const next = next_madvise.get();
  return next != nullptr ? next(address, bytes, advice) : static_cast<int>(::syscall(SYS_madvise, address, bytes, advice));
}

extern "C" __attribute__((visibility("default"))) void* mremap(void* address, size_t old_bytes, size_t new_bytes,
                                                               int flags, ...) noexcept {
  void* target = nullptr;
  if ((flags & ~MREMAP_MAYMOVE) != 0) {
    va_list rest;
    va_start(rest, flags);
    target = va_arg(rest, void*);
    va_end(rest);
  }
  if (!MemoryManager::before_mremap(reinterpret_cast<std::uint64_t>(address), old_bytes)) {
    errno = ENOMEM;  // made longer it would have at its end whatever the window has there
    return MAP_FAILED;
  }
  return vrdma::memory::remap(next_mremap.get(), address, old_bytes, new_bytes, flags, target);
}

extern "C" __attribute__((visibility("default"))) int memfd_create(const char* name, unsigned flags) noexcept {
  auto* const next = next_memfd_create.get();
  flags |= MFD_ALLOW_SEALING;
  return next != nullptr ? next(name, flags) : static_cast<int>(::syscall(SYS_memfd_create, name, flags));
}
