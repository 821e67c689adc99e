// Stores into memory that this thread may write to only while it holds a claim, and that it cannot carry out any more once the claim
// was taken from it while it did not run: after a thread was off its processor (stopped, preempted, in a debugger), it looks at the claim
// again before its next store. Whoever took the claim, and has then seen the thread off its processor, need not wait for it.
//
// Each store is a restartable sequence (rseq(2), which the C library registers for every thread):
//
//     look at the claim; lost: nothing is written
//     store                   the kernel sends a thread that was off the processor between these two back to the first
//
// Longer copies are one sequence, too, which goes on where it was. Where there are no such sequences (another processor, a C library
// that was told not to register them, under ThreadSanitizer, which does not see them) the stores are plain and never fail; guarded()
// tells. One thread at a time.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "vmci_channel/placement_copy.hpp"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define VMCI_THREAD_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define VMCI_THREAD_SANITIZER 1
#endif

#if defined(__x86_64__) && !defined(VMCI_THREAD_SANITIZER) && __has_include(<sys/rseq.h>)
#include <sys/rseq.h>
#define VMCI_RESTARTABLE 1

// The sequence, around what is stored. A thread that is sent back finds its registers as they were: `body` can be entered again with them.
// The seven bytes before the way back are what the kernel asks for: a jump to any other place would be refused.
#define VMCI_CLAIMED(body)                         \
  ".pushsection __rseq_cs, \"aw?\"\n"              \
  ".balign 32\n"                                   \
  "70: .long 0, 0\n"                               \
  ".quad 71f, 72f - 71f, 74f\n"                    \
  ".popsection\n"                                  \
  "75: leaq 70b(%%rip), %[table]\n"                \
  "movq %[table], (%[sequence])\n"                 \
  "71: cmpq %[mine], (%[claim])\n"                 \
  "jne 76f\n" body                                 \
  "72: movl $1, %[stored]\n"                       \
  "76: movq $0, (%[sequence])\n"                   \
  ".pushsection __rseq_failure, \"ax?\"\n"         \
  ".byte 0x0f, 0xb9, 0x3d\n"                       \
  ".long 0x53053053\n"                             \
  "74: jmp 75b\n"                                  \
  ".popsection\n"
#endif

namespace vmci {

class ClaimedStores {
 public:
  ClaimedStores() = default;
  // While `*claim` is `mine`.
  ClaimedStores(const std::uint64_t* claim, std::uint64_t mine) : claim_(claim), mine_(mine) {}

  // Whether this thread's stores can be taken from it.
  static bool available() {
#if defined(VMCI_RESTARTABLE)
    return __rseq_size != 0 && static_cast<std::int32_t>(area().cpu_id) >= 0;
#else
    return false;
#endif
  }
  // From now on the stores are the calling thread's, and guarded where its can be.
  bool guard() {
#if defined(VMCI_RESTARTABLE)
    sequence_ = available() ? &area().rseq_cs : nullptr;
#endif
    return guarded();
  }
  bool guarded() const { return sequence_ != nullptr; }
  // False: a store would fail. True says so of the past only.
  bool held() const { return !guarded() || std::atomic_ref(const_cast<std::uint64_t&>(*claim_)).load(std::memory_order_relaxed) == mine_; }

  // All of them: false, and it is not written, where the claim is lost. A copy may then have been written in part.
  template <class Word>
  bool store(Word* to, Word value) const {
#if defined(VMCI_RESTARTABLE)
    if (guarded()) {
      std::uint32_t stored = 0;
      std::uint64_t table;
      const auto wide = static_cast<std::uint64_t>(value);
#define VMCI_STORE(instruction)                                                                                                        \
  asm volatile(VMCI_CLAIMED(instruction ", (%[to])\n")                                                                                 \
               : [stored] "+&r"(stored), [table] "=&r"(table)                                                                          \
               : [sequence] "r"(sequence_), [claim] "r"(claim_), [mine] "r"(mine_), [to] "r"(to), [value] "r"(wide)                    \
               : "memory", "cc")
      if constexpr (sizeof(Word) == 8) VMCI_STORE("movq %[value]");
      else if constexpr (sizeof(Word) == 4) VMCI_STORE("movl %k[value]");
      else if constexpr (sizeof(Word) == 2) VMCI_STORE("movw %w[value]");
      else VMCI_STORE("movb %b[value]");
#undef VMCI_STORE
      return stored != 0;
    }
#endif
    std::atomic_ref(*to).store(value, std::memory_order_release);
    return true;
  }

  // Four words in this order, 32-byte aligned.
  bool store4(std::uint64_t* to, std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) const {
#if defined(VMCI_RESTARTABLE)
    if (guarded()) {
      std::uint32_t stored = 0;
      std::uint64_t table;
      asm volatile(VMCI_CLAIMED("movq %[a], (%[to])\n"
                                "movq %[b], 8(%[to])\n"
                                "movq %[c], 16(%[to])\n"
                                "movq %[d], 24(%[to])\n")
                   : [stored] "+&r"(stored), [table] "=&r"(table)
                   : [sequence] "r"(sequence_), [claim] "r"(claim_), [mine] "r"(mine_), [to] "r"(to), [a] "r"(a), [b] "r"(b), [c] "r"(c), [d] "r"(d)
                   : "memory", "cc");
      return stored != 0;
    }
#endif
    const std::uint64_t words[] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) std::atomic_ref(to[i]).store(words[i], std::memory_order_release);
    return true;
  }

  bool set_bits(std::uint64_t* to, std::uint64_t bits) const {
#if defined(VMCI_RESTARTABLE)
    if (guarded()) {
      std::uint32_t stored = 0;
      std::uint64_t table;
      asm volatile(VMCI_CLAIMED("lock orq %[bits], (%[to])\n")
                   : [stored] "+&r"(stored), [table] "=&r"(table)
                   : [sequence] "r"(sequence_), [claim] "r"(claim_), [mine] "r"(mine_), [to] "r"(to), [bits] "r"(bits)
                   : "memory", "cc");
      return stored != 0;
    }
#endif
    std::atomic_ref(*to).fetch_or(bits, std::memory_order_acq_rel);
    return true;
  }

  // value: what is added, then what was there before.
  bool fetch_add(std::uint64_t* to, std::uint64_t& value) const {
#if defined(VMCI_RESTARTABLE)
    if (guarded()) {
      std::uint32_t stored = 0;
      std::uint64_t table;
      asm volatile(VMCI_CLAIMED("lock xaddq %[value], (%[to])\n")
                   : [stored] "+&r"(stored), [table] "=&r"(table), [value] "+&r"(value)
                   : [sequence] "r"(sequence_), [claim] "r"(claim_), [mine] "r"(mine_), [to] "r"(to)
                   : "memory", "cc");
      return stored != 0;
    }
#endif
    value = std::atomic_ref(*to).fetch_add(value, std::memory_order_acq_rel);
    return true;
  }

  // value: what is compared, then what was there before.
  template <class Word>
  bool compare_and_swap(Word* to, Word& value, Word swap) const {
    static_assert(sizeof(Word) == 8 || sizeof(Word) == 4);
#if defined(VMCI_RESTARTABLE)
    if (guarded()) {
      std::uint32_t stored = 0;
      std::uint64_t table;
#define VMCI_SWAP(instruction)                                                                                                       \
  asm volatile(VMCI_CLAIMED("lock " instruction ", (%[to])\n")                                                                       \
               : [stored] "+&r"(stored), [table] "=&r"(table), "+&a"(value)                                                          \
               : [sequence] "r"(sequence_), [claim] "r"(claim_), [mine] "r"(mine_), [to] "r"(to), [swap] "r"(swap)                   \
               : "memory", "cc")
      if constexpr (sizeof(Word) == 8) VMCI_SWAP("cmpxchgq %[swap]");
      else VMCI_SWAP("cmpxchgl %k[swap]");
#undef VMCI_SWAP
      return stored != 0;
    }
#endif
    std::atomic_ref(*to).compare_exchange_strong(value, swap, std::memory_order_acq_rel);
    return true;
  }

  // A system call that stores. result: as the kernel gives it, an error as its negative number. Once it has begun it runs to its end: a
  // thread that is stopped is not inside of one (unless somebody stops it at system calls, see vmkernel_svc/direct/stopped.cpp). rseq(2)
  // forbids system calls inside a sequence; this is its last instruction, so that it has been left when the call returns, or ends in a signal.
  bool system_call(long number, const std::array<long, 4>& arguments, long& result) const {
#if defined(VMCI_RESTARTABLE)
    if (guarded()) {
      std::uint32_t stored = 0;
      std::uint64_t table;
      register long fourth asm("r10") = arguments[3];
      register long fifth asm("r8") = 0;
      result = number;
      asm volatile(VMCI_CLAIMED("syscall\n")
                   : [stored] "+&r"(stored), [table] "=&r"(table), "+&a"(result)
                   : [sequence] "r"(sequence_), [claim] "r"(claim_), [mine] "r"(mine_), "D"(arguments[0]), "S"(arguments[1]), "d"(arguments[2]),
                     "r"(fourth), "r"(fifth)
                   : "memory", "cc", "rcx", "r11");
      return stored != 0;
    }
#endif
    result = ::syscall(number, arguments[0], arguments[1], arguments[2], arguments[3], 0l);
    if (result == -1) result = -errno;
    return true;
  }

  // As placement_copy; eight bytes, what counters and flags are, without a call.
  bool copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
    if (bytes != 8 || reinterpret_cast<std::uintptr_t>(to) % 8 != 0) return copy_any(to, from, bytes);
    std::uint64_t word;
    std::memcpy(&word, from, sizeof(word));
    return store(reinterpret_cast<std::uint64_t*>(to), word);
  }

 private:
  [[gnu::noinline]] bool copy_any(std::byte* to, const std::byte* from, std::size_t bytes) const {
#if defined(VMCI_RESTARTABLE)
    if (guarded()) {
      const auto end = reinterpret_cast<std::uintptr_t>(to) + bytes;
      if (end % 8 == 0 && bytes >= 8) return copy_in_order<std::uint64_t>(to, from, bytes - 8);
      if (end % 4 == 0 && bytes >= 4) return copy_in_order<std::uint32_t>(to, from, bytes - 4);
      if (end % 2 == 0 && bytes >= 2) return copy_in_order<std::uint16_t>(to, from, bytes - 2);
      return bytes == 0 || copy_in_order<std::uint8_t>(to, from, bytes - 1);
    }
#endif
    placement_copy(to, from, bytes);
    return true;
  }

#if defined(VMCI_RESTARTABLE)
  static struct rseq& area() { return *reinterpret_cast<struct rseq*>(static_cast<char*>(__builtin_thread_pointer()) + __rseq_offset); }

  template <class Word>
  bool copy_in_order(std::byte* to, const std::byte* from, std::size_t bytes) const {
    if (bytes != 0 && !copy_body(to, from, bytes)) return false;
    Word word;
    std::memcpy(&word, from + bytes, sizeof(word));
    return store(reinterpret_cast<Word*>(to + bytes), word);
  }

  // Without order of its own.
  bool copy_body(std::byte* to, const std::byte* from, std::size_t bytes) const {
    const auto halves = [&]<class Word>(Word) {  // they overlap
      Word first, second;
      std::memcpy(&first, from, sizeof(Word));
      std::memcpy(&second, from + bytes - sizeof(Word), sizeof(Word));
      return store(reinterpret_cast<Word*>(to), first) && store(reinterpret_cast<Word*>(to + bytes - sizeof(Word)), second);
    };
    if (detail::goes_by_wide_vectors(to, from, bytes)) return copy_wide(to, from, bytes);
    if (bytes > 8192) return copy_string(to, from, bytes);
    if (bytes >= 16) return copy_vectors(to, from, bytes);
    if (bytes >= 8) return halves(std::uint64_t{});
    if (bytes >= 4) return halves(std::uint32_t{});
    if (bytes >= 2) return halves(std::uint16_t{});
    return store(reinterpret_cast<std::uint8_t*>(to), static_cast<std::uint8_t>(*from));
  }

  // At least 16 bytes. `at` changes after the stores that it counts: who comes back repeats the last of them.
  bool copy_vectors(std::byte* to, const std::byte* from, std::size_t bytes) const {
    std::uint32_t stored = 0;
    std::uint64_t table;
    std::int64_t at = 0;
    asm volatile(VMCI_CLAIMED("leaq -64(%[bytes]), %[table]\n"
                              "cmpq %[table], %[at]\n"
                              "jg 62f\n"
                              "61: movups (%[from],%[at]), %%xmm0\n"
                              "movups 16(%[from],%[at]), %%xmm1\n"
                              "movups 32(%[from],%[at]), %%xmm2\n"
                              "movups 48(%[from],%[at]), %%xmm3\n"
                              "movups %%xmm0, (%[to],%[at])\n"
                              "movups %%xmm1, 16(%[to],%[at])\n"
                              "movups %%xmm2, 32(%[to],%[at])\n"
                              "movups %%xmm3, 48(%[to],%[at])\n"
                              "addq $64, %[at]\n"
                              "cmpq %[table], %[at]\n"
                              "jle 61b\n"
                              "62: leaq -16(%[bytes]), %[table]\n"
                              "cmpq %[table], %[at]\n"
                              "jg 64f\n"
                              "63: movups (%[from],%[at]), %%xmm0\n"
                              "movups %%xmm0, (%[to],%[at])\n"
                              "addq $16, %[at]\n"
                              "cmpq %[table], %[at]\n"
                              "jle 63b\n"
                              "64: cmpq %[bytes], %[at]\n"
                              "jge 72f\n"
                              "movups -16(%[from],%[bytes]), %%xmm0\n"
                              "movups %%xmm0, -16(%[to],%[bytes])\n")
                 : [stored] "+&r"(stored), [table] "=&r"(table), [at] "+&r"(at)
                 : [sequence] "r"(sequence_), [claim] "r"(claim_), [mine] "r"(mine_), [to] "r"(to), [from] "r"(from), [bytes] "r"(bytes)
                 : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3");
    return stored != 0;
  }

  // At least 128 bytes; likewise. From the target's next cache line on the stores are aligned.
  bool copy_wide(std::byte* to, const std::byte* from, std::size_t bytes) const {
    std::uint32_t stored = 0;
    std::uint64_t table;
    std::int64_t at = 0;
    const std::uint64_t next_line = 64 - reinterpret_cast<std::uintptr_t>(to) % 64;
    asm volatile(VMCI_CLAIMED("testq %[at], %[at]\n"
                              "jnz 61f\n"
                              "vmovdqu (%[from]), %%ymm0\n"
                              "vmovdqu 32(%[from]), %%ymm1\n"
                              "vmovdqu %%ymm0, (%[to])\n"
                              "vmovdqu %%ymm1, 32(%[to])\n"
                              "movq %[next_line], %[at]\n"
                              "61: leaq -128(%[bytes]), %[table]\n"
                              "cmpq %[table], %[at]\n"
                              "jg 63f\n"
                              "62: vmovdqu (%[from],%[at]), %%ymm0\n"
                              "vmovdqu 32(%[from],%[at]), %%ymm1\n"
                              "vmovdqu 64(%[from],%[at]), %%ymm2\n"
                              "vmovdqu 96(%[from],%[at]), %%ymm3\n"
                              "vmovdqu %%ymm0, (%[to],%[at])\n"
                              "vmovdqu %%ymm1, 32(%[to],%[at])\n"
                              "vmovdqu %%ymm2, 64(%[to],%[at])\n"
                              "vmovdqu %%ymm3, 96(%[to],%[at])\n"
                              "addq $128, %[at]\n"
                              "cmpq %[table], %[at]\n"
                              "jle 62b\n"
                              "63: vmovdqu -128(%[from],%[bytes]), %%ymm0\n"
                              "vmovdqu -96(%[from],%[bytes]), %%ymm1\n"
                              "vmovdqu -64(%[from],%[bytes]), %%ymm2\n"
                              "vmovdqu -32(%[from],%[bytes]), %%ymm3\n"
                              "vmovdqu %%ymm0, -128(%[to],%[bytes])\n"
                              "vmovdqu %%ymm1, -96(%[to],%[bytes])\n"
                              "vmovdqu %%ymm2, -64(%[to],%[bytes])\n"
                              "vmovdqu %%ymm3, -32(%[to],%[bytes])\n")
                 "vzeroupper\n"  // also where the claim was lost in the middle
                 : [stored] "+&r"(stored), [table] "=&r"(table), [at] "+&r"(at)
                 : [sequence] "r"(sequence_), [claim] "r"(claim_), [mine] "r"(mine_), [to] "r"(to), [from] "r"(from), [bytes] "r"(bytes),
                   [next_line] "r"(next_line)
                 : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
                   "xmm13", "xmm14", "xmm15");
    return stored != 0;
  }

  // The registers say how far it is.
  bool copy_string(std::byte* to, const std::byte* from, std::size_t bytes) const {
    std::uint32_t stored = 0;
    std::uint64_t table;
    asm volatile(VMCI_CLAIMED("rep movsb\n")
                 : [stored] "+&r"(stored), [table] "=&r"(table), "+&D"(to), "+&S"(from), "+&c"(bytes)
                 : [sequence] "r"(sequence_), [claim] "r"(claim_), [mine] "r"(mine_)
                 : "memory", "cc");
    __builtin_ia32_sfence();  // its stores come in any order; the tail comes after them
    return stored != 0;
  }

  __u64* sequence_ = nullptr;
#else
  static constexpr std::uint64_t* sequence_ = nullptr;
#endif
  const std::uint64_t* claim_ = nullptr;
  std::uint64_t mine_ = 0;
};

}  // namespace vmci
