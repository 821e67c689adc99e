// Between the thread that copies for the service (guest_lib/copier.hpp) and those that move pages into the window and out: a
// move by a process that has no other thread relies on nobody writing meanwhile, and that thread writes.
//
//   CopyGate::Passage p;   the copying thread, for one job, and whenever it writes to its own variables in the heap
//   CopyGate::Closed c;    whoever moves pages; c.holds(): nobody is copying, nor will be until c ends
//
// A job can be stuck on a page that the application itself has yet to supply: closing gives up after a while, and the copying
// thread then counts as what it is, another thread. Never allocates; may be used around fork.
#pragma once

#include <pthread.h>
#include <time.h>

#include <atomic>

namespace vrdma::memory {

class CopyGate {
 public:
  class Passage {
   public:
    Passage() { pthread_mutex_lock(&mutex_); }
    ~Passage() { pthread_mutex_unlock(&mutex_); }
    Passage(const Passage&) = delete;
    Passage& operator=(const Passage&) = delete;
  };

  class Closed {
   public:
    Closed() {
      if (threads_.load(std::memory_order_relaxed) == 0) return;
      timespec until;
      ::clock_gettime(patience_clock, &until);
      until.tv_nsec += patience_ns;
      until.tv_sec += until.tv_nsec / 1'000'000'000, until.tv_nsec %= 1'000'000'000;
#if defined(__SANITIZE_THREAD__)  // does not see pthread_mutex_clocklock
      locked_ = pthread_mutex_timedlock(&mutex_, &until) == 0;
#else
      locked_ = pthread_mutex_clocklock(&mutex_, patience_clock, &until) == 0;
#endif
    }
    ~Closed() {
      if (locked_) pthread_mutex_unlock(&mutex_);
    }
    Closed(const Closed&) = delete;
    Closed& operator=(const Closed&) = delete;
    bool holds() const { return locked_; }

   private:
    bool locked_ = false;
  };

  // How many threads pass here. Each counts itself, from its beginning to its end.
  static int threads() { return threads_.load(std::memory_order_relaxed); }
  static void change_threads(int change) { threads_.fetch_add(change, std::memory_order_relaxed); }
  // In a fork's child, where no such thread is and nobody will open what one had passed at the fork.
  static void become_child() {
    threads_.store(0, std::memory_order_relaxed);
    mutex_ = PTHREAD_MUTEX_INITIALIZER;
  }

 private:
  static constexpr long patience_ns = 100'000'000;
#if defined(__SANITIZE_THREAD__)
  static constexpr clockid_t patience_clock = CLOCK_REALTIME;
#else
  static constexpr clockid_t patience_clock = CLOCK_MONOTONIC;
#endif
  static inline pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  static inline std::atomic<int> threads_{0};
};

}  // namespace vrdma::memory
