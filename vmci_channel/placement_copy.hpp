// memcpy whose last bytes become visible last: applications poll the last byte of an RDMA WRITE (DESIGN.md D7).
//
//   8 aligned bytes        one store
//   up to 8 KiB            ascending vector stores
//   more                   a bulk copy of all but 64 bytes, then an ordered tail
//
// The bulk copies that the C library offers are not ordered (measured: up to a quarter of all runs with `rep movsb`); only the
// tail needs to be. Any thread. `to` and `from` do not overlap; `from` may change meanwhile (its owner's affair).
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "vmci_channel/arch.hpp"

namespace vmci {

namespace detail {

#if defined(__x86_64__)
// x86-64 keeps stores in program order; the intrinsics keep the compiler from turning the loop into memcpy.
inline void copy_ascending(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes >= 16) {
    std::size_t at = 0;
    for (; at + 64 <= bytes; at += 64) {
      const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
      const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + 16));
      const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + 32));
      const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + 48));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + at), a);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + at + 16), b);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + at + 32), c);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + at + 48), d);
    }
    for (; at + 16 <= bytes; at += 16)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
    if (at < bytes)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + bytes - 16),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + bytes - 16)));
    return;
  }
  // Overlapping halves: the second store holds the last byte.
  auto halves = [&]<class Word>(Word) {
    Word first, second;
    std::memcpy(&first, from, sizeof(Word));
    std::memcpy(&second, from + bytes - sizeof(Word), sizeof(Word));
    std::memcpy(to, &first, sizeof(Word));
    std::atomic_signal_fence(std::memory_order_seq_cst);
    std::memcpy(to + bytes - sizeof(Word), &second, sizeof(Word));
  };
  if (bytes >= 8) return halves(std::uint64_t{});
  if (bytes >= 4) return halves(std::uint32_t{});
  if (bytes >= 2) return halves(std::uint16_t{});
  if (bytes == 1) *to = *from;
}
constexpr std::size_t ascending_bytes_max = 8192;
#else
inline void copy_ascending(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 8) {
    std::memcpy(to, from, bytes - 8);
    std::atomic_thread_fence(std::memory_order_release);
    to += bytes - 8, from += bytes - 8, bytes = 8;
  }
  for (; bytes != 0; ++to, ++from, --bytes) std::atomic_ref(*to).store(*from, std::memory_order_release);
}
constexpr std::size_t ascending_bytes_max = 64;
#endif

}  // namespace detail

inline void placement_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  const auto alignment = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  if (bytes == 8 && alignment % 8 == 0) {
    std::uint64_t word;
    std::memcpy(&word, from, 8);
    std::atomic_ref(*reinterpret_cast<std::uint64_t*>(to)).store(word, std::memory_order_release);
    return;
  }
  if (bytes > detail::ascending_bytes_max) {
    constexpr std::size_t tail_bytes = 64;
    std::memcpy(to, from, bytes - tail_bytes);
    std::atomic_thread_fence(std::memory_order_release);
#if defined(__x86_64__)
    _mm_sfence();  // glibc's copy may have used non-temporal stores
#endif
    to += bytes - tail_bytes, from += bytes - tail_bytes, bytes = tail_bytes;
  }
  detail::copy_ascending(to, from, bytes);
}

}  // namespace vmci
