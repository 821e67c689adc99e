// Whether the host service behind an attachment still lives, as every verb of this process sees it.
//
// The service holds a robust mutex on its page; the kernel marks the mutex's futex word when the service dies, however it
// dies. Reading the word is one relaxed load, so that poll loops can afford it. Any thread; never blocks.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstdint>

#include "vrdma/control.hpp"

namespace vrdma::guest {

class Liveness {
 public:
  enum class State : std::uint32_t {
    alive,
    dead,       // the service is gone: the device is fatal
    inherited,  // this process is a fork's child of the one that attached: the rings are not mapped here
  };

  explicit Liveness(const control::ServicePage* page)
      // glibc keeps the futex word of a mutex in its first four bytes.
      : word_(reinterpret_cast<std::uint32_t*>(const_cast<std::byte*>(page->alive_mutex))) {}
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  State state() const { return state_.load(std::memory_order_relaxed); }
  bool inherited() const { return state() == State::inherited; }

  // Looks at the word. True from then on when the service died, or when this process never had it.
  bool gone() {
    if (state() != State::alive) return true;
    if ((std::atomic_ref(*word_).load(std::memory_order_relaxed) & FUTEX_OWNER_DIED) == 0) return false;
    mark_dead();
    return true;
  }

  // The service closed its end of something, or broke the protocol.
  void mark_dead() {
    State alive = State::alive;
    state_.compare_exchange_strong(alive, State::dead, std::memory_order_relaxed);
  }
  void mark_inherited() { state_.store(State::inherited, std::memory_order_relaxed); }

 private:
  std::uint32_t* word_;
  std::atomic<State> state_{State::alive};
};

}  // namespace vrdma::guest
