// The claim of a direction (vrdma/direct.hpp): who runs its queues. Two may want it: the poster, for the length of one call of
// post, and the service, for as long as it likes. Neither waits here; who does not get it goes another way.
//
//   service  hand_out() → nobody → poster enter() … leave() → nobody → service take()
//                                         enter() … revoke() … leave() → given up → service take()
//
// What the holder wrote is seen by the next one. Whoever enters looks at `stop` at every message boundary and leaves. From one who
// does not the service can revoke the claim: nothing that is written by stores() has an effect then, once the poster was off its
// processor.
#pragma once

#include <atomic>
#include <cstdint>

#include "vmci_channel/claimed_stores.hpp"
#include "vrdma/direct.hpp"

namespace vmci {

class PosterClaim {
 public:
  PosterClaim() = default;
  PosterClaim(vrdma::direct::Direction* direction, std::uint32_t epoch)
      : direction_(direction), epoch_(epoch), stores_(&direction->claim, vrdma::direct::claim_word(epoch, vrdma::direct::held_by_revocable_poster)) {}

  bool enter() {
    using namespace vrdma::direct;
    std::uint64_t expected = claim_word(epoch_, held_by_nobody);
    const bool revocable = stores_.guard();
    // K1: pairs with K4: the positions and terms that the service left. Under this poster's own lock nobody else can be the poster.
    return std::atomic_ref(direction_->claim)
        .compare_exchange_strong(expected, claim_word(epoch_, revocable ? held_by_revocable_poster : held_by_poster), std::memory_order_acquire,
                                 std::memory_order_relaxed);
  }
  bool stop() const { return std::atomic_ref(direction_->stop).load(std::memory_order_relaxed) != 0; }
  void leave() {
    using namespace vrdma::direct;
    // K2: pairs with K3: all that was done under the claim, in the peer's queues too.
    if (stores_.store(&direction_->claim, claim_word(epoch_, held_by_nobody))) return;
    // Likewise: of the poster's own queues, and how far it is.
    std::atomic_ref(direction_->claim).store(claim_word(epoch_, given_up_by_poster), std::memory_order_release);
  }
  // What belongs to others is written by these, while inside.
  const ClaimedStores& stores() const { return stores_; }
  vrdma::direct::Direction& direction() const { return *direction_; }

 private:
  vrdma::direct::Direction* direction_ = nullptr;
  std::uint32_t epoch_ = 0;
  ClaimedStores stores_;
};

class ServiceClaim {
 public:
  ServiceClaim() = default;
  // The service holds it from the start.
  ServiceClaim(vrdma::direct::Direction* direction, std::uint32_t epoch) : direction_(direction), epoch_(epoch) { seize(); }

  // False: the poster is inside. It has been asked to leave.
  bool take() {
    using namespace vrdma::direct;
    std::atomic_ref(direction_->stop).store(1, std::memory_order_relaxed);
    std::uint64_t expected = claim_word(epoch_, held_by_nobody);
    // K3: pairs with K2. A poster that writes nonsense here is taken for one inside, until its process has ended.
    std::atomic_ref claim(direction_->claim);
    if (claim.compare_exchange_strong(expected, claim_word(epoch_, held_by_service), std::memory_order_acquire, std::memory_order_relaxed)) return true;
    return expected == claim_word(epoch_, given_up_by_poster) &&
           claim.compare_exchange_strong(expected, claim_word(epoch_, held_by_service), std::memory_order_acquire, std::memory_order_relaxed);
  }
  // The poster is inside and does not leave: from now on it writes nothing of others' any more but with the store that it is at, if it
  // runs. False: it is not inside, or its threads cannot lose their stores.
  bool revoke() {
    using namespace vrdma::direct;
    std::uint64_t expected = claim_word(epoch_, held_by_revocable_poster);
    return std::atomic_ref(direction_->claim)
               .compare_exchange_strong(expected, claim_word(epoch_, revoked), std::memory_order_acq_rel, std::memory_order_relaxed) ||
           expected == claim_word(epoch_, revoked);
  }
  // The poster's process has ended, inside or not.
  void seize() {
    using namespace vrdma::direct;
    std::atomic_ref(direction_->claim).store(claim_word(epoch_, held_by_service), std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
  }
  void hand_out() {
    using namespace vrdma::direct;
    std::atomic_ref(direction_->stop).store(0, std::memory_order_relaxed);
    direction_->handouts += 1;
    // K4: pairs with K1.
    std::atomic_ref(direction_->claim).store(claim_word(epoch_, held_by_nobody), std::memory_order_release);
  }
  // Whether the poster was inside a moment ago.
  bool poster_inside() const {
    using namespace vrdma::direct;
    // Pairs with K2: where it has left, what it wrote inside is seen.
    const std::uint64_t claim = std::atomic_ref(direction_->claim).load(std::memory_order_acquire);
    return claim == claim_word(epoch_, held_by_revocable_poster) || claim == claim_word(epoch_, held_by_poster);
  }
  vrdma::direct::Direction& direction() const { return *direction_; }

 private:
  vrdma::direct::Direction* direction_ = nullptr;
  std::uint32_t epoch_ = 0;
};

}  // namespace vmci
