// The only header that knows the processor: a cycle counter, a spin hint, a prefetch, a full fence, a word to Valgrind. Another architecture is added here.
// Any thread; never blocks (the first cycles_per_us() measures for 50 µs).
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>

#include "vmci_channel/found_once.hpp"

namespace vmci {

#if defined(__x86_64__)
// The compilers' own names: everybody includes this header, and <immintrin.h> takes 0.6 s of each compilation.
inline std::uint64_t cycles() { return __builtin_ia32_rdtsc(); }
constexpr unsigned fine_cycle_bits = 3;  // finer than anything that two cores can do after each other
inline void cpu_relax() { __builtin_ia32_pause(); }
// The compiler's prefetch fetches for reading unless it is told of a processor newer than x86-64's first.
inline void prefetch_for_write(const void* at) { asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at))); }
// Valgrind's client request (memcheck.hpp): changes nothing on a processor.
inline void client_request(const volatile std::uint64_t* arguments) {
  [[maybe_unused]] std::uint64_t answer = 0;
  asm volatile("rolq $3, %%rdi; rolq $13, %%rdi; rolq $61, %%rdi; rolq $51, %%rdi; xchgq %%rbx, %%rbx" : "+d"(answer) : "a"(arguments) : "cc", "memory");
}
#elif defined(__aarch64__)
inline std::uint64_t cycles() {
  std::uint64_t value;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
}
constexpr unsigned fine_cycle_bits = 0;  // it counts nanoseconds, or much less often
inline void cpu_relax() { asm volatile("yield"); }
inline void prefetch_for_write(const void* at) { __builtin_prefetch(at, 1); }
inline void client_request(const volatile std::uint64_t* arguments) {
  asm volatile("mov x3, xzr; mov x4, %0; ror x12, x12, #3; ror x12, x12, #13; ror x12, x12, #51; ror x12, x12, #61; orr x10, x10, x10" : : "r"(arguments) : "cc", "memory", "x3", "x4");
}
#else
#error "vmci_channel/arch.hpp knows x86-64 and aarch64"
#endif

inline std::uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}

inline std::uint64_t measure_cycles_per_us() {
  const std::uint64_t ns0 = monotonic_ns(), c0 = cycles();
  std::uint64_t ns1 = ns0;
  while (ns1 - ns0 < 50'000) ns1 = monotonic_ns();
  const std::uint64_t per_us = (cycles() - c0) * 1000 / (ns1 - ns0);
  return per_us ? per_us : 1;
}
inline std::uint64_t cycles_per_us() { return found_once<measure_cycles_per_us>(); }

// A store before it and a load after it stay in that order. ThreadSanitizer does not model fences: it gets a
// read-modify-write of a variable that every fence shares, which orders the same way.
inline void store_load_fence() {
#if defined(__SANITIZE_THREAD__)
  static std::atomic<int> fence_word;
  fence_word.fetch_add(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace vmci
