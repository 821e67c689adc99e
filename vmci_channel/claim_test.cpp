// Every interleaving of a poster that posts and a service that hands a direction out, takes it back, or revokes it, over the real claim:
// each access to shared memory is one step. And the same as threads, for ThreadSanitizer, which has no opinion on interleavings.
#include "vmci_channel/claim.hpp"

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "vmci_channel/arch.hpp"

namespace vmci {
namespace {

using vrdma::direct::Direction;

// What both share: the claim, and of the send queue how many records are published and done.
struct World {
  Direction direction{};
  int published = 0, done = 0;
  bool needs_doorbell = true, rung = false;
  // where each of them stands, and what it knows privately
  int poster = 0, service = 0;
  int posts = 0, service_steps = 0;
  bool poster_inside = false, owned = true;
  // At the peer: what has arrived there, and how much that was when its end was taken from a poster that stood still.
  std::uint64_t arrived = 0, arrived_at_cut = 0;
  bool revoked = false, cut = false;

  std::string key() const {
    std::string bytes(reinterpret_cast<const char*>(&direction.claim), 8);
    for (const int value : {static_cast<int>(direction.stop), published, done, int{needs_doorbell}, int{rung}, poster, service, posts, service_steps,
                            int{poster_inside}, int{owned}, static_cast<int>(arrived), static_cast<int>(arrived_at_cut), int{revoked}, int{cut}})
      bytes += std::to_string(value) + ' ';
    return bytes;
  }
};

constexpr std::uint32_t epoch = 7;

class Search {
 public:
  // posts: of the poster. turns: how often the service goes round. revokes: it does not wait for who is inside.
  Search(int posts, int turns, bool revokes) : posts_(posts), turns_(turns), revokes_(revokes) {}
  std::size_t run() {
    World world;
    ServiceClaim(&world.direction, epoch);
    visit(world);
    return seen_.size();
  }

 private:
  void visit(const World& world) {
    if (!seen_.insert(world.key()).second) return;
    CHECK_FALSE((world.poster_inside && world.owned));
    if (world.owned) CHECK(static_cast<std::uint64_t>(world.done) == world.arrived);  // none twice, none forgotten
    if (world.cut) CHECK(world.arrived == world.arrived_at_cut);
    World next = world;
    const bool poster_moved = step_poster(next);
    if (poster_moved) visit(next);
    next = world;
    const bool service_moved = step_service(next);
    if (service_moved) visit(next);
    if (poster_moved || service_moved) return;
    // Nobody does anything any more: nothing that was published is left lying.
    CHECK(world.posts == posts_);
    CHECK((world.done == world.published || world.rung));
    CHECK_FALSE(world.poster_inside);
  }

  // run_directly() and ring_for() of guest_lib/post.cpp.
  bool step_poster(World& world) const {
    PosterClaim claim(&world.direction, epoch);
    switch (world.poster) {
      case 0:
        if (world.posts == posts_) return false;
        ++world.posts;
        ++world.published;
        world.poster = 1;
        return true;
      case 1:
        world.poster_inside = claim.enter();
        world.poster = world.poster_inside ? 2 : 4;
        return true;
      case 2:
        // It may stand still at any place; what it then stores depends on the claim (claimed_stores_test.cpp).
        if (world.done == world.published || claim.stop() || !stores_of(world).store(&world.arrived, world.arrived + 1)) world.poster = 3;
        else world.poster = 5;
        return true;
      case 5:  // on record
        ++world.done;
        world.poster = 2;
        return true;
      case 3: {
        const bool all = world.done == world.published;  // its own queue: nobody else adds to it
        claim.leave();
        world.poster_inside = false;
        world.poster = all ? 0 : 4;
        return true;
      }
      default:
        if (world.needs_doorbell) world.rung = true;
        world.poster = 0;
        return true;
    }
  }

  // DirectDesk::hand_out(), then may_run() and the engine, round and round.
  bool step_service(World& world) const {
    ServiceClaim claim = at(world);
    switch (world.service) {
      case 0:  // it owns the direction: run it
        if (world.done != world.published) return ++world.done, ++world.arrived, true;
        if (world.service_steps == turns_) {
          // Asleep from here on, with the flag set, until somebody rings.
          if (!world.needs_doorbell) return world.needs_doorbell = true, true;
          if (!world.rung) return false;
          return world.rung = false, world.needs_doorbell = false, true;
        }
        world.needs_doorbell = true;
        world.service = 1;
        return true;
      case 1:
        claim.hand_out();
        world.owned = false;
        ++world.service_steps;
        world.service = 2;
        return true;
      case 2:  // one look after it, and then only when somebody rings
        world.service = world.done != world.published ? 4 : 3;
        return true;
      case 3:
        if (world.rung) return world.rung = false, world.service = 4, true;
        if (world.service_steps > 1) return false;  // once, it takes it back for reasons of its own
        world.service = 4;
        return true;
      default:
        if (claim.take()) world.owned = true, world.revoked = world.cut = false, world.service = 0;
        else if (revokes_ && !world.revoked) world.revoked = claim.revoke();
        else if (world.revoked && !world.cut) world.cut = true, world.arrived_at_cut = world.arrived;
        else if (world.poster == 0 && world.posts == posts_) return false;
        return true;
    }
  }

  static ClaimedStores stores_of(World& world) {
    ClaimedStores stores(&world.direction.claim, vrdma::direct::claim_word(epoch, vrdma::direct::held_by_revocable_poster));
    stores.guard();
    return stores;
  }
  static ServiceClaim at(World& world) {
    const std::uint64_t before = world.direction.claim;
    ServiceClaim claim(&world.direction, epoch);  // seizes it: undone
    world.direction.claim = before;
    return claim;
  }

  int posts_, turns_;
  bool revokes_;
  std::set<std::string> seen_;
};

TEST_CASE("In every interleaving one of them runs the queue, and nothing that was posted is left lying") {
  CHECK(Search(1, 1, false).run() > 20);
  CHECK(Search(2, 2, false).run() > 100);
  CHECK(Search(3, 3, false).run() > 400);
}

TEST_CASE("In every interleaving nothing arrives any more where the peer's end was taken from a poster, and nothing that had arrived is done again") {
  const std::size_t waiting = Search(2, 2, false).run(), revoking = Search(2, 2, true).run();
  CHECK((revoking > waiting) == ClaimedStores::available());
  CHECK(Search(3, 3, true).run() > 400);
}

TEST_CASE("Whoever knows an older epoch claims nothing") {
  Direction direction{};
  ServiceClaim old(&direction, 1);
  old.hand_out();
  PosterClaim stale(&direction, 1);
  CHECK(old.take());
  ServiceClaim fresh(&direction, 2);
  fresh.hand_out();
  CHECK_FALSE(stale.enter());
  CHECK(PosterClaim(&direction, 2).enter());
}

TEST_CASE("A poster that wrote nonsense or ended inside keeps the claim until it is seized") {
  Direction direction{};
  ServiceClaim service(&direction, 1);
  service.hand_out();
  PosterClaim poster(&direction, 1);
  REQUIRE(poster.enter());
  CHECK_FALSE(service.take());
  CHECK(poster.stop());
  std::atomic_ref(direction.claim).store(0x1234567890, std::memory_order_relaxed);
  CHECK_FALSE(service.take());
  service.seize();
  CHECK_FALSE(poster.enter());
  service.hand_out();
  CHECK_FALSE(poster.stop());
  CHECK(poster.enter());
}

TEST_CASE("A claim is revoked only from a poster that can lose its stores, and is nobody's until that has given up") {
  Direction direction{};
  ServiceClaim service(&direction, 1);
  PosterClaim poster(&direction, 1);
  CHECK_FALSE(service.revoke());
  service.hand_out();
  CHECK_FALSE(service.revoke());
  REQUIRE(poster.enter());
  std::uint64_t of_the_peer = 0;
  CHECK(poster.stores().store(&of_the_peer, std::uint64_t{1}));
  const bool revocable = poster.stores().guarded();
  CHECK(service.revoke() == revocable);
  CHECK(service.revoke() == revocable);
  CHECK(poster.stores().store(&of_the_peer, std::uint64_t{2}) != revocable);
  CHECK(of_the_peer == (revocable ? 1 : 2));
  CHECK_FALSE(service.take());
  poster.leave();
  const bool inside = poster.enter();
  CHECK(inside != revocable);
  if (inside) poster.leave();
  CHECK(service.take());
  CHECK_FALSE(service.revoke());
  service.hand_out();
  CHECK(poster.enter());
}

TEST_CASE("What one holder wrote the next one sees") {
  constexpr std::uint64_t rounds = 20'000;
  Direction direction{};
  std::uint64_t counted = 0;  // only ever touched under the claim
  ServiceClaim service(&direction, 1);
  service.hand_out();
  std::thread poster([&] {
    PosterClaim claim(&direction, 1);
    for (std::uint64_t done = 0; done < rounds;) {
      if (!claim.enter()) {
        std::this_thread::yield();
        continue;
      }
      for (int i = 0; i < 8 && done < rounds && !claim.stop(); ++i) ++counted, ++done;
      claim.leave();
      if (claim.stop()) std::this_thread::yield();
    }
  });
  for (std::uint64_t taken = 0; taken < rounds / 100;) {
    if (!service.take()) {
      std::this_thread::yield();
      continue;
    }
    ++taken;
    ++counted;
    service.hand_out();
  }
  poster.join();
  CHECK(counted == rounds + rounds / 100);
}

}  // namespace
}  // namespace vmci
