// Threads inside the verb that waits for an object's events, beside one that destroys the object: the kernel keeps a file for as long as
// somebody reads it, and nothing ever happens there. So does what stands for it here: who destroys it is counted as well, and the last of all
// deletes it. Any thread.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace vrdma::guest {

class Readers {
 public:
  void enter() { word_.fetch_add(1, std::memory_order_relaxed); }
  // True: nobody is left of an object that was closed. Pairs with all the others that have left before.
  bool leave() { return word_.fetch_sub(1, std::memory_order_acq_rel) == (closed_bit | 1); }

  // By one of those inside, before the service hears of it, which lets those wake up who wait: they find it so. alone: a fork's child, which has none
  // of its parent's threads, so that nobody else is inside.
  void close(bool alone) {
    if (alone) word_.store(closed_bit | 1, std::memory_order_relaxed);
    else word_.fetch_or(closed_bit, std::memory_order_release);
  }
  void reopen() { word_.fetch_and(~closed_bit, std::memory_order_relaxed); }
  bool closed() const { return (word_.load(std::memory_order_acquire) & closed_bit) != 0; }

 private:
  static constexpr std::uint32_t closed_bit = 1u << 31;
  std::atomic<std::uint32_t> word_{0};
};

// One of the threads inside `object`, also where it is cancelled there. Keeps errno.
template <class Object>
class Inside {
 public:
  explicit Inside(Object& object) : object_(object) { object_.readers.enter(); }
  Inside(const Inside&) = delete;
  ~Inside() {
    const int error = errno;
    if (object_.readers.leave()) delete &object_;
    errno = error;
  }

 private:
  Object& object_;
};

}  // namespace vrdma::guest
