// How a function becomes part of libibverbs.so.1: defined `VRDMA_EXPORT type name(...)`, and named in libvrdma.map, which
// gives it its version. Nothing thrown may leave such a function, yet it cannot be noexcept: verbs.h declares it without,
// and clang refuses the difference.
#pragma once

#define VRDMA_VISIBLE __attribute__((visibility("default")))
#define VRDMA_EXPORT extern "C" VRDMA_VISIBLE

// A symbol of the interface to hardware providers, under the versions that other releases give the whole of it, too. What a name means
// has changed between them only for who calls it on a device of its own. To stand behind the definition, in the same file.
// Not where VRDMA_ONE_VERSION says so, in sanitized builds, which no such program loads: clang keeps a symbol that its instrumentation
// has referred to beside the versioned one.
#ifdef VRDMA_ONE_VERSION
#define VRDMA_OTHER_RELEASES_TOO(name) static_assert(true)
#else
#define VRDMA_UNDER(name, version)                                                                       \
  __asm__(".globl " #name "__" #version "\n.set " #name "__" #version ", " #name "\n.symver " #name "__" \
          #version ", " #name "@IBVERBS_PRIVATE_" #version ", remove")
#define VRDMA_OTHER_RELEASES_TOO(name) \
  VRDMA_UNDER(name, 22);               \
  VRDMA_UNDER(name, 25);               \
  VRDMA_UNDER(name, 33);               \
  VRDMA_UNDER(name, 57);               \
  VRDMA_UNDER(name, 59);               \
  VRDMA_UNDER(name, 64);               \
  VRDMA_UNDER(name, 65);               \
  __asm__(".symver " #name ", " #name "@@@IBVERBS_PRIVATE_34")
#endif
