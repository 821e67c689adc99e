// Copies whole pages of an application's memory: not by memcpy, whose sanitized kind looks at what the application has poisoned
// there. Any thread. Both ranges are mapped and do not overlap; bytes: a multiple of 8.
#pragma once

#include <cstdint>

namespace vrdma::memory {

inline void raw_copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes) {
#if defined(__x86_64__)
  std::uint64_t words = bytes / 8;
  asm volatile("rep movsq" : "+D"(to), "+S"(from), "+c"(words) : : "memory");
#elif defined(__aarch64__)
  for (const std::uint64_t end = from + bytes; from != end;) {
    std::uint64_t word;
    asm volatile("ldr %0, [%1], #8\n\tstr %0, [%2], #8" : "=&r"(word), "+r"(from), "+r"(to) : : "memory");
  }
#else
#error "guest_lib/memory/raw_copy.hpp knows x86-64 and aarch64"
#endif
}

}  // namespace vrdma::memory
