// poll_cq and req_notify_cq against a thread that writes completions by the service's rules, both over one mapping.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <semaphore>
#include <thread>

#include "guest_lib/lanes.hpp"
#include "guest_lib/objects.hpp"
#include "vmci_channel/arch.hpp"
#include "vmci_channel/ready_bitmap.hpp"
#include "vmci_channel/stamp.hpp"

namespace vrdma::guest {
bool service_died = false;
void watch_after_death(Cq&) {
  if (!service_died) FAIL("nobody died here");
}
bool raise_missed(Cq& cq) {
  if (cq.verbs.channel == nullptr) FAIL("no channel here");
  return true;
}
std::vector<const Qp*> taken_up;
void run_send_queue(Qp& qp) {
  taken_up.push_back(&qp);
  qp.direct_offer = qp.send.direct_offer().load();
}
}  // namespace vrdma::guest

using namespace vrdma;
using namespace vrdma::guest;

namespace {

constexpr std::uint32_t lane_entries = 16;

// One queue pair's send side: its shared memory, the service's writer and the guest's reader.
struct Queue {
  static constexpr vmci::QueuePairGeometry geometry{64, lane_entries, vmci::QueueKind::completions, 0};
  std::unique_ptr<std::byte[]> raw{new std::byte[geometry.total_bytes() + 128]()};
  vmci::QueuePairView view;
  Qp qp;
  vmci::LaneWriter writer;
  std::uint64_t next = 0;  // wr_id that the writer writes next

  explicit Queue(std::uint32_t number) {
    const auto address = (reinterpret_cast<std::uintptr_t>(raw.get()) + 127) & ~std::uintptr_t{127};
    view = vmci::QueuePairView(reinterpret_cast<std::byte*>(address), geometry);
    writer = vmci::LaneWriter(view.consume_completions(), lane_entries);
    qp.send.open(view, lane_entries);
    qp.send_lane.reader = vmci::LaneReader(view.consume_completions(), lane_entries);
    qp.send_lane.header = &view.header();
    qp.send_lane.qp = &qp;
    qp.send_lane.qpn = number + 1;  // 0 is nobody's
    qp.send_lane.number = number;
    qp.send_lane.send = &qp.send;
  }
  bool lane_has_room() {
    return writer.position() - std::atomic_ref(view.header().creator.consumed).load(std::memory_order_acquire) < lane_entries;
  }
};

struct World {
  control::ServicePage page{};
  Liveness liveness{&page};
  control::CqShared shared{};
  Cq cq;
  std::vector<std::unique_ptr<Queue>> queues;
  std::counting_semaphore<1 << 20> events{0};

  explicit World(std::uint32_t lanes) {
    for (auto& hot : shared.hot) hot = control::no_lane;
    cq.liveness = &liveness;
    cq.shared = &shared;
    for (std::uint32_t i = 0; i < lanes; ++i) {
      queues.push_back(std::make_unique<Queue>(i));
      add(queues.back()->qp.send_lane);
    }
  }

  void add(Lane& lane) {
    cq.make_room_for(lane);
    cq.add_lane(lane);
  }

  // As the service: the completion, a fence, the bitmap unless the lane is hot, a fence, the arm. ago: of which its stamp says so.
  void complete(Queue& queue, std::uint64_t ago = 0) {
    Cqe cqe{};
    cqe.wr_id = queue.next++;
    cqe.queue_position = 1;
    CqeState state{WcStatus::success, WcOpcode::send, 0};
    if (vmci::wants_stamps(shared)) vmci::put_stamp(cqe, state, true, vmci::stamp_now() - ago);
    queue.writer.push(cqe, pack(state));
    vmci::store_load_fence();
    if (!vmci::is_named(shared.hot, queue.qp.send_lane.number)) vmci::ReadyBitmap(&shared.ready).set(queue.qp.send_lane.number);
    vmci::store_load_fence();
    const auto arm = std::atomic_ref(shared.arm);
    std::uint32_t seen = arm.load(std::memory_order_acquire);
    if ((seen & 3) == control::arm_next && arm.compare_exchange_strong(seen, (seen & ~3u) | control::arm_fired)) events.release();
  }

  ibv_cq* verbs() { return cq.base(); }
};

std::uint32_t number_of(const ibv_wc& wc) { return wc.qp_num - 1; }

// A stream of favourites: most completions are of one lane, which changes, so that lanes become hot and stop being it.
std::size_t pick(std::uint32_t& random, std::uint64_t done, std::size_t count) {
  random = random * 1664525 + 1013904223;
  return (random >> 16) % 4 != 0 ? done / 61 % count : (random >> 8) % count;
}

// Polls until `total` were found, of which found(wc, number) is told; room(number): how many to ask for. False: something is overlooked, as so
// many polls in a row found nothing though something was `written` before. No time is measured: a machine that is busy is only slow.
template <class Room, class Found>
bool poll_until(World& world, const std::atomic<std::uint64_t>& written, std::uint64_t total, Room room, Found found) {
  constexpr std::uint32_t too_many = 1'000'000;
  std::uint32_t in_vain = 0;
  for (std::uint64_t got_all = 0; got_all < total;) {
    const bool there = written.load(std::memory_order_relaxed) > got_all;  // makes nothing visible: that is for the lanes themselves
    ibv_wc wc[40];
    const int got = poll_cq(world.verbs(), room(got_all), wc);
    for (int i = 0; i < got; ++i) found(wc[i], got_all + static_cast<std::uint64_t>(i));
    got_all += static_cast<std::uint64_t>(got);
    if (got != 0) in_vain = 0;
    else if (there && ++in_vain == too_many) return false;
    else std::this_thread::yield();  // the writers may wait for this processor
  }
  return true;
}

}  // namespace

TEST_CASE("every completion is polled once and in order while lanes become hot and stop being it") {
  for (const std::uint32_t lanes : {1u, 4u, 5u, 23u}) {
    CAPTURE(lanes);
    World world(lanes);
    constexpr std::uint64_t total = 60000;
    std::atomic<std::uint64_t> written{0};
    std::atomic<bool> given_up{false};
    std::thread service([&] {
      std::uint32_t random = lanes;
      for (std::uint64_t done = 0; done < total && !given_up;) {
        Queue& queue = *world.queues[pick(random, done, lanes)];
        if (!queue.lane_has_room()) {
          std::this_thread::yield();
          continue;
        }
        world.complete(queue);
        written.store(++done, std::memory_order_relaxed);
        // Often nothing more comes until all is polled: a completion that was overlooked is not found by the next one.
        if ((random >> 24) % 4 == 0)
          while (std::atomic_ref(world.shared.consumed).load(std::memory_order_acquire) != done && !given_up) std::this_thread::yield();
      }
    });
    std::vector<std::uint64_t> expected(lanes);
    bool in_order = true;
    const bool found_all = poll_until(
        world, written, total, [](std::uint64_t number) { return 1 + static_cast<int>(number % 5); },
        [&](const ibv_wc& wc, std::uint64_t) { in_order &= wc.wr_id == expected[number_of(wc)]++; });
    given_up = !found_all;
    service.join();
    REQUIRE(found_all);
    CHECK(in_order);
    CHECK(world.shared.consumed == static_cast<std::uint32_t>(total));
  }
}

TEST_CASE("lanes that are filled again at once complete evenly where the program takes fewer at a time") {
  for (const std::uint32_t lanes : {6u, 16u, 17u, 64u}) {
    CAPTURE(lanes);
    World world(lanes);
    std::vector<std::uint64_t> got_of(lanes);
    std::uint64_t spread = 0;
    for (auto& queue : world.queues) world.complete(*queue);
    for (int polls = 0; polls < 2000; ++polls) {
      ibv_wc wc[5];
      const int got = poll_cq(world.verbs(), 5, wc);
      REQUIRE(got == 5);
      for (int i = 0; i < got; ++i) ++got_of[number_of(wc[i])];
      for (int i = 0; i < got; ++i) world.complete(*world.queues[number_of(wc[i])]);
      const auto [least, most] = std::ranges::minmax(got_of);
      spread = std::max(spread, most - least);
    }
    CHECK(spread <= 2);
  }
}

TEST_CASE("completions of several queue pairs are polled in the order in which one caused the other") {
  for (const std::uint32_t lanes : {2u, 4u, 5u, 300u}) {
    CAPTURE(lanes);
    World world(lanes);
    CHECK(world.shared.wants_stamps == 1);
    constexpr std::uint64_t total = 8000;
    // Each completes what it completes only after it has seen that the one before is there.
    std::atomic<std::uint64_t> done{0};
    std::atomic<bool> given_up{false};
    const auto write = [&](std::uint64_t mine, std::uint32_t random) {
      for (std::uint64_t now; (now = done.load(std::memory_order_acquire)) < total && !given_up;) {
        if (now % 2 != mine) {
          std::this_thread::yield();
          continue;
        }
        Queue& queue = *world.queues[pick(random, now, lanes)];
        if (!queue.lane_has_room()) {
          std::this_thread::yield();
          continue;
        }
        queue.next = now;
        world.complete(queue);
        done.store(now + 1, std::memory_order_release);
      }
    };
    std::thread first(write, 0, lanes), second(write, 1, lanes + 7);
    std::uint64_t early = 0;
    const bool found_all = poll_until(
        world, done, total,
        [](std::uint64_t number) {
          if (number % 5 == 0) std::this_thread::yield();
          return number % 3 == 0 ? 1 : number % 3 == 1 ? 5 : 40;
        },
        [&](const ibv_wc& wc, std::uint64_t number) { early += wc.wr_id != number; });
    given_up = !found_all;
    first.join(), second.join();
    REQUIRE(found_all);
    CHECK(early == 0);
  }
}

TEST_CASE("what was there before a second queue pair came is polled first") {
  World world(1);
  for (int i = 0; i < 3; ++i) world.complete(*world.queues[0]);
  CHECK(world.shared.wants_stamps == 0);
  world.queues.push_back(std::make_unique<Queue>(1));
  world.add(world.queues[1]->qp.send_lane);
  world.complete(*world.queues[1]);
  world.complete(*world.queues[0]);
  world.complete(*world.queues[1]);
  std::vector<std::uint32_t> numbers;
  ibv_wc wc;
  while (poll_cq(world.verbs(), 1, &wc) == 1) numbers.push_back(number_of(wc));
  CHECK(numbers == std::vector<std::uint32_t>{0, 0, 0, 1, 0, 1});
}

TEST_CASE("what has lain for longer than half of what stamps tell apart is polled before what is younger, whichever lane holds it") {
  constexpr std::uint64_t quarter = std::uint64_t{1} << (cqe_stamp_bits - 2);
  for (const std::size_t old : {std::size_t{0}, std::size_t{1}, std::size_t{7}}) {
    CAPTURE(old);
    World world(8);
    world.complete(*world.queues[old], 3 * quarter);  // 48 minutes at 2.3 GHz
    for (std::size_t i = 0; i < 8; ++i)
      if (i != old) world.complete(*world.queues[i]);
    ibv_wc wc{};
    CHECK(poll_cq(world.verbs(), 1, &wc) == 1);
    CHECK(number_of(wc) == old);
  }
}

TEST_CASE("what has lain for longer than stamps tell apart does not wait behind what is still to come") {
  constexpr std::uint64_t range = std::uint64_t{1} << cqe_stamp_bits;
  for (const std::uint64_t ago : {range / 2 + range / 4, range + range / 4, 2 * range - range / 8}) {
    CAPTURE(ago);
    World world(2);
    world.complete(*world.queues[1]);
    ibv_wc wc{};
    // In the row before it lies behind another of its lane, and found as the row is empty.
    for (int round = 0; round < 3; ++round) {
      world.complete(*world.queues[0], round == 0 ? 0 : ago);
      world.complete(*world.queues[0], ago);
      std::uint64_t others = 0;
      for (int of_it = 0; of_it < 2;) {
        world.complete(*world.queues[1]);
        REQUIRE(poll_cq(world.verbs(), 1, &wc) == 1);
        if (number_of(wc) == 0) ++of_it;
        else REQUIRE(++others < 5);
      }
    }
  }
}

TEST_CASE("the time of a completion is what it was a quarter of an hour later, and where the reader's clock lags behind") {
  constexpr std::uint64_t now = 7'000'000'000'000, second = 1'000'000'000, known = (std::uint64_t{1} << cqe_stamp_bits) - 1;
  for (const std::uint64_t time : {now, now - 600 * second, now - 900 * second, now + 100 * second}) CHECK(time_of_stamp(time & known, now + times_ahead_max) == time);
}

TEST_CASE("what comes long after the last poll is in order also for who arms before the next") {
  World world(2);
  ibv_comp_channel channel{};
  world.cq.verbs.channel = &channel;
  ibv_wc wc[4];
  world.complete(*world.queues[0]);
  REQUIRE(poll_cq(world.verbs(), 4, wc) == 1);
  world.cq.latest -= std::uint64_t{1} << 32;  // when that poll was
  for (const int queue : {1, 1, 0}) world.complete(*world.queues[static_cast<std::size_t>(queue)]);
  REQUIRE(req_notify_cq(world.verbs(), 0) == 0);
  REQUIRE(poll_cq(world.verbs(), 4, wc) == 3);
  CHECK(number_of(wc[0]) == 1);
  CHECK(number_of(wc[1]) == 1);
  CHECK(number_of(wc[2]) == 0);
}

TEST_CASE("a writer that takes back what it has written does no harm") {
  World world(3);
  for (auto& queue : world.queues)
    for (int i = 0; i < 4; ++i) world.complete(*queue);
  ibv_wc wc[16];
  CHECK(poll_cq(world.verbs(), 1, wc) == 1);  // the others have been seen
  for (auto& queue : world.queues)
    for (std::uint32_t i = 0; i < lane_entries; ++i) queue->view.consume_completions()[i].state ^= control_phase_bit;
  int got_all = 0;
  for (int polls = 0; polls < 20; ++polls) {
    const int got = poll_cq(world.verbs(), 16, wc);
    CHECK(got >= 0);
    got_all += got;
  }
  CHECK(got_all <= static_cast<int>(3 * lane_entries));
}

TEST_CASE("completions of who knows no stamps are polled, too, each lane in order") {
  World world(9);
  std::vector<std::uint64_t> expected(9);
  std::uint32_t random = 5;
  for (int round = 0, got_all = 0; round < 3000; ++round) {
    Queue& queue = *world.queues[pick(random, static_cast<std::uint64_t>(round), 9)];
    world.shared.wants_stamps = random % 3 != 0;
    world.complete(queue);
    ibv_wc wc[8];
    const int got = poll_cq(world.verbs(), 8, wc);
    got_all += got;
    CHECK(got_all == round + 1);
    for (int i = 0; i < got; ++i) CHECK(wc[i].wr_id == expected[number_of(wc[i])]++);
  }
}

TEST_CASE("who arms, polls once more, finds nothing and sleeps is always woken") {
  World world(6);
  constexpr std::uint64_t total = 20000;
  std::thread service([&] {
    std::uint32_t random = 3;
    for (std::uint64_t done = 0; done < total;) {
      Queue& queue = *world.queues[pick(random, done, world.queues.size())];
      if (!queue.lane_has_room()) {
        std::this_thread::yield();
        continue;
      }
      world.complete(queue);
      ++done;
      if (random % 64 == 0) std::this_thread::yield();
    }
  });
  std::uint64_t got_all = 0;
  bool woken = true;
  const auto poll_all = [&] {
    ibv_wc wc[8];
    for (int got; (got = poll_cq(world.verbs(), 8, wc)) > 0;) got_all += static_cast<std::uint64_t>(got);
  };
  while (got_all < total && woken) {
    poll_all();
    const std::uint64_t before = got_all;
    REQUIRE(req_notify_cq(world.verbs(), 0) == 0);
    poll_all();
    if (got_all == before && got_all < total) woken = world.events.try_acquire_for(std::chrono::seconds(30));
  }
  CHECK(woken);
  if (!woken) std::abort();
  service.join();
  CHECK(got_all == total);
}

TEST_CASE("a lane that is removed takes its completions along and leaves the others") {
  World world(7);
  for (auto& queue : world.queues)
    for (int i = 0; i < 3; ++i) world.complete(*queue);
  for (const std::size_t gone : {std::size_t{0}, std::size_t{5}}) world.cq.remove_lane(world.queues[gone]->qp.send_lane);
  CHECK(world.shared.consumed == 6);
  ibv_wc wc[64];
  int got = 0;
  for (int now; (now = poll_cq(world.verbs(), 64 - got, wc + got)) > 0;) got += now;
  CHECK(got == 15);
  for (int i = 0; i < got; ++i) CHECK((number_of(wc[i]) != 0 && number_of(wc[i]) != 5));
  CHECK(world.shared.consumed == 21);
}

// Of a peer in direct mode, which was at it as the service went. Events ask the readers, too (any_outstanding): an arm would bring one with nothing to poll.
TEST_CASE("what is written to a lane after the service's death, and after all was flushed, is nobody's completion") {
  for (const std::uint32_t lanes : {1u, 3u}) {  // and more than one in the order in which they were written
    CAPTURE(lanes);
    World world(lanes);
    ibv_comp_channel channel{};
    world.cq.verbs.channel = &channel;
    ibv_wc wc[8];
    for (auto& queue : world.queues) world.complete(*queue);
    int got = 0;
    for (int now; (now = poll_cq(world.verbs(), 8, wc)) > 0;) got += now;
    CHECK(got == static_cast<int>(lanes));
    for (auto& queue : world.queues) queue->qp.send.forget_all();  // what was completed here was never posted
    service_died = true;
    world.liveness.mark_dead();
    CHECK(poll_cq(world.verbs(), 8, wc) == 0);
    for (auto& queue : world.queues) world.complete(*queue);
    CHECK(poll_cq(world.verbs(), 8, wc) == 0);
    for (auto& queue : world.queues) CHECK(queue->qp.send_lane.reader.next() == nullptr);
    CHECK(req_notify_cq(world.verbs(), 0) == 0);  // and raises no event that was missed
    CHECK(poll_cq(world.verbs(), 8, wc) == 0);
    world.cq.verbs.channel = nullptr;
    service_died = false;
  }
}

TEST_CASE("an array smaller than what is ready starves no lane") {
  World world(9);
  std::vector<int> seen(9);
  for (int round = 0; round < 400; ++round) {
    for (auto& queue : world.queues)
      if (queue->lane_has_room()) world.complete(*queue);
    ibv_wc wc;
    for (int i = 0; i < 2; ++i)
      if (poll_cq(world.verbs(), 1, &wc) == 1) ++seen[number_of(wc)];
  }
  for (const int count : seen) CHECK(count > 0);
}

TEST_CASE("a poll that finds nothing visits every queue pair whose offer has ended, once, or later where its program is about to post") {
  World world(5);
  const auto visited = [&] {
    taken_up.clear();
    ibv_wc wc{};
    for (int polls = 0; polls < 2; ++polls) CHECK(poll_cq(world.verbs(), 1, &wc) == 0);
    return taken_up;
  };
  for (const std::size_t direct : {std::size_t{0}, std::size_t{1}, std::size_t{3}}) {
    Qp& qp = world.queues[direct]->qp;
    qp.direct_offer = 7;
    qp.send.direct_offer() = direct == 1 ? 7 : 0;
  }
  CHECK(visited().empty());
  Qp &first = world.queues[0]->qp, &last = world.queues[3]->qp;
  last.send_lock.lock();
  world.shared.offers_ended = 1;
  CHECK(visited() == std::vector<const Qp*>{&first});
  last.send_lock.unlock();
  CHECK(visited() == std::vector<const Qp*>{&last});
  CHECK(visited().empty());
  CHECK(world.shared.offers_ended == 0);
}

TEST_CASE("a poll that finds nothing takes up the send queue that the service names, once, and nothing else") {
  World world(3);
  Qp& qp = world.queues[1]->qp;
  ibv_wc wc{};
  const auto left = [&](std::uint32_t word) {
    taken_up.clear();
    world.shared.left_work = word;
    CHECK(poll_cq(world.verbs(), 1, &wc) == 0);
    CHECK(poll_cq(world.verbs(), 1, &wc) == 0);
    CHECK(world.shared.left_work == 0);
    return taken_up;
  };
  CHECK(left(2) == std::vector<const Qp*>{&qp});
  for (const std::uint32_t no_lane_of_it : {4u, 5u, 1u << 31, ~0u}) CHECK(left(no_lane_of_it).empty());
  qp.send_lock.lock();  // its program is about to post
  CHECK(left(2).empty());
  qp.send_lock.unlock();
  qp.send_lane.send = nullptr;  // where it receives
  CHECK(left(2).empty());
  qp.send_lane.send = &qp.send;
  world.cq.remove_lane(qp.send_lane);
  CHECK(left(2).empty());
}

TEST_CASE("both directions of one queue pair complete in one order once it receives, and carry no stamps before") {
  World world(1);
  Queue& queue = *world.queues[0];
  Queue receives(1);  // lends its lane
  Qp& qp = queue.qp;
  qp.verbs.qp_base.send_cq = qp.verbs.qp_base.recv_cq = world.verbs();
  Lane& lane = qp.receive_lane;
  lane.reader = vmci::LaneReader(receives.view.consume_completions(), lane_entries);
  lane.header = &receives.view.header();
  lane.qp = &qp;
  lane.qpn = lane.number = 1;
  lane.receive = &qp.receive;
  world.add(lane);
  const auto push = [&](Queue& to, WcOpcode opcode, WcStatus status = WcStatus::success) {
    Cqe cqe{};
    cqe.queue_position = 1;
    CqeState state{status, opcode, 0};
    const std::uint64_t before = vmci::stamp_now();
    while (vmci::stamp_now() == before) {
    }
    if (vmci::wants_stamps(world.shared)) vmci::put_stamp(cqe, state, opcode == WcOpcode::send, vmci::stamp_now());
    to.writer.push(cqe, pack(state));
  };
  const auto polled = [&](int room) {
    ibv_wc wc[8];
    std::vector<ibv_wc_opcode> opcodes;
    for (int got; (got = poll_cq(world.verbs(), room, wc)) > 0;)
      for (int i = 0; i < got; ++i) opcodes.push_back(wc[i].opcode);
    return opcodes;
  };
  push(queue, WcOpcode::send);
  CHECK(polled(1) == std::vector{IBV_WC_SEND});
  push(queue, WcOpcode::send);
  CHECK(world.shared.wants_stamps == 0);
  world.cq.ask_for_stamps();  // as the first receive is posted
  CHECK(world.shared.wants_stamps == 1);
  for (int i = 0; i < 2; ++i) push(receives, WcOpcode::recv), push(queue, WcOpcode::send);
  CHECK(polled(1) == std::vector{IBV_WC_SEND, IBV_WC_RECV, IBV_WC_SEND, IBV_WC_RECV, IBV_WC_SEND});
  for (const int room : {1, 2, 3, 8}) {
    CAPTURE(room);
    for (int i = 0; i < 2; ++i) push(queue, WcOpcode::send);
    for (int i = 0; i < 2; ++i) push(receives, WcOpcode::recv);
    CHECK(polled(room) == std::vector{IBV_WC_SEND, IBV_WC_SEND, IBV_WC_RECV, IBV_WC_RECV});
    // What is flushed was there last.
    push(receives, WcOpcode::recv);
    push(queue, WcOpcode::send, WcStatus::wr_flush_err);
    push(receives, WcOpcode::recv, WcStatus::wr_flush_err);
    CHECK(polled(room) == std::vector{IBV_WC_RECV, IBV_WC_SEND, IBV_WC_RECV});
  }
  // Who has not looked for so long that stamps cannot tell gets what was sent first; and then no receive waits, either.
  world.cq.emptied = vmci::stamp_now() - (std::uint64_t{1} << cqe_stamp_bits);
  push(receives, WcOpcode::recv);
  push(queue, WcOpcode::send);
  push(receives, WcOpcode::recv);
  push(queue, WcOpcode::send);
  CHECK(polled(1) == std::vector{IBV_WC_SEND, IBV_WC_RECV, IBV_WC_RECV, IBV_WC_SEND});
  // A receive waits for nothing, however many sends complete.
  push(receives, WcOpcode::recv);
  for (int i = 0; i < 4; ++i) push(queue, WcOpcode::send);
  ibv_wc wc;
  CHECK(poll_cq(world.verbs(), 1, &wc) == 1);
  CHECK(wc.opcode == IBV_WC_RECV);
}
