// The claim of a direction (vrdma/direct.hpp): who runs its queues. Two may want it: the poster, for the length of one call of
// post, and the service, for as long as it likes. Neither waits here; who does not get it goes another way. An inbox has many posters,
// each with its guest's number.
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
  PosterClaim(vrdma::direct::Direction* direction, std::uint32_t epoch, std::uint32_t poster = 0)
      : direction_(direction), epoch_(epoch), poster_(poster),
        stores_(&direction->claim, vrdma::direct::claim_word(epoch, vrdma::direct::held_by_revocable_poster, poster)) {}

  bool enter() {
    using namespace vrdma::direct;
    std::uint64_t expected = claim_word(epoch_, held_by_nobody);
    const bool revocable = stores_.guard();
    // K1: pairs with K4: the positions and terms that the service left; of an inbox also with K2: those that another poster left. Of
    // other directions nobody else can be the poster, under this one's own lock.
    return std::atomic_ref(direction_->claim)
        .compare_exchange_strong(expected, claim_word(epoch_, revocable ? held_by_revocable_poster : held_by_poster, poster_),
                                 std::memory_order_acquire, std::memory_order_relaxed);
  }
  // Whether the connection is over: nobody will enter by this claim any more.
  bool over() const { return vrdma::direct::epoch_of(word()) != epoch_; }
  bool stop() const { return std::atomic_ref(direction_->stop).load(std::memory_order_relaxed) != 0; }
  void leave() {
    using namespace vrdma::direct;
    // K2: pairs with K3: all that was done under the claim, in the peer's queues too.
    if (stores_.store(&direction_->claim, claim_word(epoch_, held_by_nobody))) return;
    // Likewise: of the poster's own queues, and how far it is.
    std::atomic_ref(direction_->claim).store(claim_word(epoch_, given_up_by_poster), std::memory_order_release);
  }
  // Inside: where the direction stands, at the last message boundary; what is written for the next one, which counts once published.
  const vrdma::direct::Positions& positions() const { return direction_->positions[direction_->current & 1]; }
  vrdma::direct::Positions& next_positions() const { return direction_->positions[(direction_->current + 1) & 1]; }
  void publish_positions() const {
    // R1: pairs with R2 in the service's recorded(), should this process end here: one of the two positions is whole.
    std::atomic_ref(direction_->current).store(direction_->current + 1, std::memory_order_release);
  }
  // What belongs to others is written by these, while inside.
  const ClaimedStores& stores() const { return stores_; }
  vrdma::direct::Direction& direction() const { return *direction_; }

 private:
  std::uint64_t word() const { return std::atomic_ref(direction_->claim).load(std::memory_order_relaxed); }

  vrdma::direct::Direction* direction_ = nullptr;
  std::uint32_t epoch_ = 0, poster_ = 0;
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
    const std::uint32_t poster = poster_of(word());
    std::uint64_t expected = claim_word(epoch_, held_by_revocable_poster, poster);
    return std::atomic_ref(direction_->claim)
               .compare_exchange_strong(expected, claim_word(epoch_, revoked, poster), std::memory_order_acq_rel, std::memory_order_relaxed) ||
           expected == claim_word(epoch_, revoked, poster);
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
    return epoch_of(claim) == epoch_ && (holder_of(claim) == held_by_revocable_poster || holder_of(claim) == held_by_poster);
  }
  // Of an inbox, whose posters may take turns meanwhile: what the claim is now; whether take() has it when it is that; and as seize(), of the
  // poster that it names (poster_of()), if nothing has changed since.
  std::uint64_t word() const { return std::atomic_ref(direction_->claim).load(std::memory_order_relaxed); }
  bool is_free(std::uint64_t seen) const {
    using namespace vrdma::direct;
    return seen == claim_word(epoch_, held_by_nobody) || seen == claim_word(epoch_, given_up_by_poster);
  }
  bool seize(std::uint64_t seen) {
    using namespace vrdma::direct;
    return std::atomic_ref(direction_->claim)
        .compare_exchange_strong(seen, claim_word(epoch_, held_by_service), std::memory_order_acquire, std::memory_order_relaxed);
  }
  // The connection is over; held by the service. Who tries to enter sees it.
  void end() {
    using namespace vrdma::direct;
    std::atomic_ref(direction_->claim).store(claim_word(0, held_by_service), std::memory_order_relaxed);
  }
  vrdma::direct::Direction& direction() const { return *direction_; }

 private:
  vrdma::direct::Direction* direction_ = nullptr;
  std::uint32_t epoch_ = 0;
};

}  // namespace vmci
