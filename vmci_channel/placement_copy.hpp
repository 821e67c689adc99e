// memcpy whose last bytes become visible last: applications poll the last byte of an RDMA WRITE (DESIGN.md D7).
//
//   8 aligned bytes        one store
//   less than 256          vector stores, then the tail
//   more                   vector stores of 32 bytes, aligned, then the tail
//   from 32 KiB, Intel's   the C library's bulk copy, where source and target lie alike in their cache lines, then the tail
//   … without AVX2         vector stores up to 8 KiB, then the C library's bulk copy, then the tail
//
// The bulk copy is `rep movsb`. Intel's processors need not read the lines that they fill by it: 28.6 GB/s in place of 24.1 between two
// buffers of 1 MiB that just miss a second-level cache of 2 MiB (Sapphire Rapids), and no difference where they fit; where the two do not lie
// alike, 39 in place of 43. AMD's copy 3.5 GB/s with it in place of 55 where the target lies up to 63 bytes after the source, modulo 4096
// (100 000 bytes, Zen 4, glibc 2.36; an RDMA WRITE of a size that is no multiple of 64 is enough for that). Else the two are as fast as each other.
//
// The tail is the largest aligned word (1, 2, 4 or 8 bytes) that ends where the copy ends: one store, which no processor
// splits, after all the others. A wider last store could straddle two cache lines, whose halves appear in any order. The bulk
// copies that the C library offers are not ordered in themselves (measured: up to a quarter of all runs with `rep movsb`).
// Any thread. `from` may change meanwhile (its owner's affair). Where `to` and `from` overlap, what arrives there is undefined, as
// with an HCA, and nothing else is touched.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "vmci_channel/arch.hpp"

namespace vmci {

// Who copies by system calls has no such stores: there the last so many bytes, or all of fewer, go by a call of their own.
inline constexpr std::size_t ordered_tail_bytes = 8;

namespace detail {

constexpr std::size_t wide_bytes_min = 256, string_bytes_min = 32768;

#if defined(__x86_64__)
// Anywhere in memory, of whatever type. <immintrin.h> has the same, but takes 0.6 s of each compilation that includes this header.
struct [[gnu::packed, gnu::may_alias]] Vector {
  long long v __attribute__((vector_size(16)));
};
struct [[gnu::packed, gnu::may_alias]] WideVector {
  long long v __attribute__((vector_size(32)));
};
inline auto& vector(std::byte* at) { return *reinterpret_cast<Vector*>(at); }
inline auto& vector(const std::byte* at) { return *reinterpret_cast<const Vector*>(at); }
inline auto& wide(std::byte* at) { return *reinterpret_cast<WideVector*>(at); }
inline auto& wide(const std::byte* at) { return *reinterpret_cast<const WideVector*>(at); }

inline const bool has_wide_vectors = (__builtin_cpu_init(), __builtin_cpu_supports("avx2") != 0);
inline const bool has_fast_strings = (__builtin_cpu_init(), __builtin_cpu_is("intel") != 0);

// Whether vector stores are the way to copy so much, else the bulk copy.
inline bool goes_by_wide_vectors(const std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes < wide_bytes_min || !has_wide_vectors) return false;
  return bytes < string_bytes_min || !has_fast_strings || (reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) % 64 != 0;
}

// At least 128 bytes.
__attribute__((target("avx2"))) inline void copy_wide(std::byte* to, const std::byte* from, std::size_t bytes) {
  wide(to).v = wide(from).v;
  wide(to + 32).v = wide(from + 32).v;
  // From the target's next cache line on.
  for (std::size_t at = 64 - reinterpret_cast<std::uintptr_t>(to) % 64; at + 128 <= bytes; at += 128) {
    const auto a = wide(from + at).v;
    const auto b = wide(from + at + 32).v;
    const auto c = wide(from + at + 64).v;
    const auto d = wide(from + at + 96).v;
    wide(to + at).v = a;
    wide(to + at + 32).v = b;
    wide(to + at + 64).v = c;
    wide(to + at + 96).v = d;
  }
  for (std::size_t at = bytes - 128; at < bytes; at += 32)
    wide(to + at).v = wide(from + at).v;
}
#endif

// Without order of its own. Inline, because most messages are small.
inline void copy_body(std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__x86_64__)
  if (goes_by_wide_vectors(to, from, bytes)) return copy_wide(to, from, bytes);
  if (bytes > 8192) {
    std::memmove(to, from, bytes);  // who posts decides whether they overlap
    __builtin_ia32_sfence();  // glibc's copy may have used non-temporal stores
    return;
  }
  if (bytes >= 16) {
    std::size_t at = 0;
    for (; at + 64 <= bytes; at += 64) {
      const auto a = vector(from + at).v;
      const auto b = vector(from + at + 16).v;
      const auto c = vector(from + at + 32).v;
      const auto d = vector(from + at + 48).v;
      vector(to + at).v = a;
      vector(to + at + 16).v = b;
      vector(to + at + 32).v = c;
      vector(to + at + 48).v = d;
    }
    for (; at + 16 <= bytes; at += 16)
      vector(to + at).v = vector(from + at).v;
    if (at < bytes)
      vector(to + bytes - 16).v = vector(from + bytes - 16).v;
    return;
  }
  const auto halves = [&]<class Word>(Word) {  // they overlap
    Word first, second;
    std::memcpy(&first, from, sizeof(Word));
    std::memcpy(&second, from + bytes - sizeof(Word), sizeof(Word));
    std::memcpy(to, &first, sizeof(Word));
    std::memcpy(to + bytes - sizeof(Word), &second, sizeof(Word));
  };
  if (bytes >= 8) return halves(std::uint64_t{});
  if (bytes >= 4) return halves(std::uint32_t{});
  if (bytes >= 2) return halves(std::uint16_t{});
  if (bytes == 1) *to = *from;
#else
  std::memmove(to, from, bytes);
#endif
}

template <class Word>
void copy_tail(std::byte* to, const std::byte* from) {
  Word word;
  std::memcpy(&word, from, sizeof(word));
  std::atomic_ref(*reinterpret_cast<Word*>(to)).store(word, std::memory_order_release);
}

}  // namespace detail

inline void placement_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  const auto end = reinterpret_cast<std::uintptr_t>(to) + bytes;
  if (end % 8 == 0 && bytes >= 8) {
    bytes -= 8;
    if (bytes != 0) detail::copy_body(to, from, bytes);
    detail::copy_tail<std::uint64_t>(to + bytes, from + bytes);
  } else if (end % 4 == 0 && bytes >= 4) {
    bytes -= 4;
    detail::copy_body(to, from, bytes);
    detail::copy_tail<std::uint32_t>(to + bytes, from + bytes);
  } else if (end % 2 == 0 && bytes >= 2) {
    bytes -= 2;
    detail::copy_body(to, from, bytes);
    detail::copy_tail<std::uint16_t>(to + bytes, from + bytes);
  } else if (bytes != 0) {
    bytes -= 1;
    detail::copy_body(to, from, bytes);
    detail::copy_tail<std::uint8_t>(to + bytes, from + bytes);
  }
}

}  // namespace vmci
