// Several take from one ring of records, each record by one of them: the shared receive queue of direct mode (vrdma/direct.hpp). Its
// takers are posters in processes that can end or stand still between any two accesses, and the service, which afterwards must know
// whether one of them had taken a record.
//
//   last    (next index, taker) of the record taken last: taking the next one is one compare-and-swap
//   passed  by taker, the same of its own last one: written by whoever takes the record after it, before that
//
// So a record that a taker named before it tried is its own where `last` or its word of `passed` says so; both only ever tell the
// truth, and one of them does. Nobody waits: who finds a record taken looks at the next one.
//
// The bounds of what lies in shared memory are looked at here; what it says is believed as the queue's owner is (it spoils its own).
#pragma once

#include <atomic>
#include <cstdint>

#include "vmci_channel/claimed_stores.hpp"
#include "vrdma/direct.hpp"

namespace vmci {

class RecordTurns {
 public:
  RecordTurns() = default;
  explicit RecordTurns(vrdma::direct::Turns* words) : words_(words) {}
  explicit operator bool() const { return words_ != nullptr; }

  // What take() must be given, having read the record that it names.
  std::uint64_t last() const { return std::atomic_ref(words_->last).load(std::memory_order_acquire); }
  static std::uint32_t next(std::uint64_t last) { return static_cast<std::uint32_t>(last >> 32); }

  // Taker `who` takes record next(last). False: another has it, or who's claim (of `stores`) is lost. What was read of the record
  // before counts where it was taken: its slots are written again only after that.
  template <class Stores>
  bool take(std::uint64_t last, std::uint32_t who, const Stores& stores) const {
    using namespace vrdma::direct;
    if (const auto before = static_cast<std::uint32_t>(last); before != 0 && before != who && !pass(last, before, stores)) return false;
    std::uint64_t found = last;
    // G1: pairs with G2, and with last(): what the taker has named before, and the word of the one before it.
    return stores.compare_and_swap(&words_->last, found, turn_word(next(last) + 1, who)) && found == last;
  }
  // Whether that taker has taken record `index`, which it had named. Once it takes nothing more.
  bool took(std::uint32_t who, std::uint32_t index) const {
    using namespace vrdma::direct;
    const std::uint64_t wanted = turn_word(index + 1, who);
    // G2: pairs with G1. In this order: `passed` was written before `last` moved on.
    return std::atomic_ref(words_->last).load(std::memory_order_acquire) == wanted ||
           (who < takers_max && std::atomic_ref(words_->passed[who]).load(std::memory_order_acquire) == wanted);
  }

  std::uint32_t limit() const { return std::atomic_ref(words_->limit).load(std::memory_order_relaxed); }
  void set_limit(std::uint32_t limit) const { std::atomic_ref(words_->limit).store(limit, std::memory_order_relaxed); }

 private:
  // `last` says that `before` took a record; its own word is to say so before that is overwritten.
  template <class Stores>
  bool pass(std::uint64_t last, std::uint32_t before, const Stores& stores) const {
    if (before >= vrdma::direct::takers_max) return false;
    std::uint64_t& word = words_->passed[before];
    const std::uint64_t known = std::atomic_ref(word).load(std::memory_order_acquire);
    if (known == last) return true;
    // `known` is older: were it newer, `last` would have changed. Should `last` change after this look, the word may become what `last`
    // was, which is out of date, but true; whoever passes the same taker then finds the word changed, and looks anew.
    if (this->last() != last) return false;
    std::uint64_t found = known;
    return stores.compare_and_swap(&word, found, last) && (found == known || found == last);
  }

  vrdma::direct::Turns* words_ = nullptr;
};

}  // namespace vmci
