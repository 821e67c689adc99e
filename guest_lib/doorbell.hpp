// How a guest tells its shard that a queue has news: a bit in the guest's bitmap, and the descriptor if the shard sleeps.
// Any thread, after the news was published. Blocks only if nobody has read the descriptor for 2^64 rings.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "guest_lib/liveness.hpp"
#include "vmci_channel/arch.hpp"
#include "vmci_channel/ready_bitmap.hpp"

namespace vrdma::guest {

class Doorbell {
 public:
  Doorbell() = default;
  Doorbell(vmci::ReadyWords* words, const std::uint32_t* sleeping, int fd, Liveness& liveness)
      : words_(words), sleeping_(const_cast<std::uint32_t*>(sleeping)), liveness_(&liveness), fd_(fd) {}

  // There will be news soon: whoever sleeps wakes up meanwhile.
  void announce() const {
    if (std::atomic_ref(*sleeping_).load(std::memory_order_relaxed) != 0) wake();
  }

  void ring(std::uint32_t member) const {
    vmci::ReadyBitmap(words_).set(member);
    // D2: pairs with the shard's fence between its store of `sleeping` and its last look at the bitmap.
    vmci::store_load_fence();
    if (std::atomic_ref(*sleeping_).load(std::memory_order_relaxed) != 0) wake();
  }

 private:
  void wake() const {
    const std::uint64_t one = 1;
    // Not write(2): posting is no cancellation point, and a poster that ends here would leave the shard asleep.
    while (::syscall(SYS_write, fd_, &one, sizeof(one)) < 0)
      if (errno != EINTR) return liveness_->mark_dead();  // the program has closed it, and nobody would ever hear of what it posts
  }

  vmci::ReadyWords* words_ = nullptr;
  std::uint32_t* sleeping_ = nullptr;
  Liveness* liveness_ = nullptr;
  int fd_ = -1;
};

}  // namespace vrdma::guest
