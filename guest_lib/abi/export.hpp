// How a function becomes part of libibverbs.so.1: defined `VRDMA_EXPORT type name(...) noexcept`, and named in
// libvrdma.map, which gives it its version. Nothing thrown may cross such a function.
#pragma once

#define VRDMA_VISIBLE __attribute__((visibility("default")))
#define VRDMA_EXPORT extern "C" VRDMA_VISIBLE
