// How a function becomes part of libibverbs.so.1: defined `VRDMA_EXPORT type name(...)`, and named in libvrdma.map, which
// gives it its version. Nothing thrown may leave such a function, yet it cannot be noexcept: verbs.h declares it without,
// and clang refuses the difference.
#pragma once

#define VRDMA_VISIBLE __attribute__((visibility("default")))
#define VRDMA_EXPORT extern "C" VRDMA_VISIBLE
