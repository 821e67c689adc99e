// "Look at these": a two-level bitmap in shared memory of up to 16 384 members (work queues with news for the service, or
// completion lanes with news for a CQ), so that the reader's cost does not grow with their number.
//
// set() is called after the news is published; take() before it is looked at. Both levels change by read-modify-write, whose
// full ordering on the word makes the news visible to whoever takes the bit. A bit may be set for a member without news.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "vrdma/queue_layout.hpp"

namespace vmci {

class ReadyBitmap {
 public:
  ReadyBitmap() = default;
  explicit ReadyBitmap(ReadyWords* words) : words_(words) {}

  // B1: pairs with B2: release what was published, before the bit.
  void set(std::uint32_t member) {
    const std::uint32_t word = (member / 64) % 256;
    std::atomic_ref(words_->words[word]).fetch_or(std::uint64_t{1} << (member % 64), std::memory_order_acq_rel);
    std::atomic_ref(words_->summary[word / 64]).fetch_or(std::uint64_t{1} << (word % 64), std::memory_order_acq_rel);
  }

  bool any() const {
    std::uint64_t bits = 0;
    for (auto& word : words_->summary) bits |= std::atomic_ref(word).load(std::memory_order_relaxed);
    return bits != 0;
  }

  // Clears all bits and calls found(member) for each that was set.
  template <class Found>
  void take(Found&& found) {
    for (std::uint32_t s = 0; s < 4; ++s) {
      if (std::atomic_ref(words_->summary[s]).load(std::memory_order_relaxed) == 0) continue;
      // B2: pairs with B1: acquire the news behind every bit taken.
      std::uint64_t summary = std::atomic_ref(words_->summary[s]).exchange(0, std::memory_order_acq_rel);
      for (; summary != 0; summary &= summary - 1) {
        const std::uint32_t word = s * 64 + static_cast<std::uint32_t>(std::countr_zero(summary));
        std::uint64_t bits = std::atomic_ref(words_->words[word]).exchange(0, std::memory_order_acq_rel);
        for (; bits != 0; bits &= bits - 1) found(word * 64 + static_cast<std::uint32_t>(std::countr_zero(bits)));
      }
    }
  }

 private:
  ReadyWords* words_ = nullptr;
};

// Members that the reader names because it looks at them anyway: they need no bit. Certain after a full fence, which pairs with that of
// the reader between naming one and looking at what it named before (H1 of guest_lib/lanes.cpp).
template <std::size_t count>
bool is_named(const std::uint32_t (&named)[count], std::uint32_t member) {
  for (const std::uint32_t& one : named)
    if (std::atomic_ref(const_cast<std::uint32_t&>(one)).load(std::memory_order_relaxed) == member) return true;
  return false;
}

}  // namespace vmci
