// Atomics: contended from both processes, several QPs and threads; exact totals, every old value seen exactly once.
#include <algorithm>
#include <cstring>
#include <memory>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

constexpr std::size_t lanes = 4;  // QPs, and threads, per process
constexpr std::uint64_t per_lane = 400;

// In each process `lanes` QPs reach a counter in b's memory: a's over the link, b's through a loop of its own.
struct Contenders {
  explicit Contenders(Run& the_run) : run(the_run), dev(run.settings), pd(dev), mem(pd, 4096) {
    if (dev.attr.atomic_cap == IBV_ATOMIC_NONE) skip("no atomics");
    for (std::size_t i = 0; i < lanes; ++i) {
      cqs.push_back(std::make_unique<Cq>(dev, 64));
      active.push_back(std::make_unique<Qp>(pd, *cqs[i], *cqs[i]));
      passive.push_back(std::make_unique<Qp>(pd, *cqs[i], *cqs[i]));
      to_init(dev, *active[i]);
      to_init(dev, *passive[i]);
      const Address theirs = run.peer.exchange(address_of(dev, *passive[i]));
      const Address their_active = run.peer.exchange(address_of(dev, *active[i]));
      if (run.a()) {
        bring_up(dev, *active[i], theirs);
      } else {
        bring_up(dev, *passive[i], their_active);
        loops.push_back(std::make_unique<Qp>(pd, *cqs[i], *cqs[i]));
        to_init(dev, *loops[i]);
        bring_up(dev, *active[i], address_of(dev, *loops[i]));
        bring_up(dev, *loops[i], address_of(dev, *active[i]));
      }
    }
    const Remote mine{mem.buffer.address(), 4096, mem.mr.p->rkey, 0};
    const Remote theirs = run.peer.exchange(mine);
    targets.assign(lanes, run.a() ? theirs : mine);
    run.peer.barrier();
  }
  std::uint64_t once(std::size_t lane, ibv_wr_opcode opcode, std::uint64_t compare_add, std::uint64_t swap, std::size_t offset = 0) {
    const std::size_t slot = 1024 + lane * 64;
    EXPECT_OK(post(*active[lane], Send{.opcode = opcode,
                                       .id = lane,
                                       .sges = {mem.sge(slot, 8)},
                                       .remote_address = targets[lane].address + offset,
                                       .rkey = targets[lane].rkey,
                                       .compare_add = compare_add,
                                       .swap = swap}));
    const ibv_wc wc = cqs[lane]->expect(lane);
    EXPECT_EQ(wc.opcode, opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? IBV_WC_FETCH_ADD : IBV_WC_COMP_SWAP);
    std::uint64_t old = 0;
    std::memcpy(&old, mem.data(slot), 8);
    return old;
  }
  Run& run;
  Device dev;
  Pd pd;
  Region mem;
  std::vector<std::unique_ptr<Cq>> cqs;
  std::vector<std::unique_ptr<Qp>> active, passive, loops;
  std::vector<Remote> targets;  // a lane's
};

// Every lane counts up, so many times; the old values that they saw.
std::vector<std::uint64_t> count_up(Contenders& c, const std::vector<std::uint64_t>& times) {
  std::vector<std::vector<std::uint64_t>> old(lanes);
  Threads threads;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    threads.start([&, lane] {
      for (std::uint64_t i = 0; i < times[lane]; ++i) old[lane].push_back(c.once(lane, IBV_WR_ATOMIC_FETCH_AND_ADD, 1, 0));
      EXPECT(std::is_sorted(old[lane].begin(), old[lane].end()));
    });
  }
  threads.join();
  std::vector<std::uint64_t> all;
  for (const auto& lane : old) all.insert(all.end(), lane.begin(), lane.end());
  return all;
}

// Both processes' old values together are 0 .. n-1, each once.
void expect_permutation(Run& run, std::vector<std::uint64_t> mine) {
  const std::size_t count = 2 * mine.size();
  run.peer.send_bytes(std::as_bytes(std::span(mine)));
  const std::vector<std::byte> bytes = run.peer.receive_bytes();
  std::vector<std::uint64_t> all(bytes.size() / 8);
  std::memcpy(all.data(), bytes.data(), all.size() * 8);
  all.insert(all.end(), mine.begin(), mine.end());
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all.size(), count);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Note note("sorted old value #", i);
    EXPECT_EQ(all[i], i);
  }
}

}  // namespace

CONFORMANCE(ContendedFetchAddCountsExactly, "ATM-01 ATM-02 THR-01") {
  Contenders c(run);
  const std::vector<std::uint64_t> mine = count_up(c, std::vector(lanes, per_lane));
  run.peer.barrier();
  std::uint64_t total = 0;
  std::memcpy(&total, c.mem.data(), 8);
  if (run.b()) EXPECT_EQ(total, 2 * mine.size());
  expect_permutation(run, mine);
  run.peer.barrier();
}

// The word alone cannot be mapped, its page could be: much faster.
CONFORMANCE(AtomicsByTwoRegistrationsOfAWordCountExactly, "ATM-01", .timeout_s = 120) {
  Contenders c(run);
  const Buffer page(4096);
  const Mr word(c.pd, page.data(), 8), whole(c.pd, page.data(), page.size());
  std::vector<std::uint64_t> times(lanes);
  for (const bool by_word : {true, false}) {
    const Remote mine{page.address(), 8, by_word ? word.p->rkey : whole.p->rkey, 0};
    const Remote theirs = run.peer.exchange(mine);
    for (std::size_t lane = by_word; lane < lanes; lane += 2) {
      c.targets[lane] = run.a() ? theirs : mine;
      times[lane] = by_word ? 4 * per_lane : 40 * per_lane;
    }
  }
  const std::size_t counted = count_up(c, times).size();
  run.peer.barrier();
  std::uint64_t total = 0;
  std::memcpy(&total, page.data(), 8);
  if (run.b()) EXPECT_EQ(total, 2 * counted);
  run.peer.barrier();
}

CONFORMANCE(ContendedCompareAndSwapCountsExactly, "ATM-01 ATM-03 THR-01", .timeout_s = 120) {
  Contenders c(run);
  std::vector<std::vector<std::uint64_t>> won(lanes);
  Threads threads;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    threads.start([&, lane] {
      std::uint64_t guess = 0;
      while (won[lane].size() < per_lane) {
        const std::uint64_t old = c.once(lane, IBV_WR_ATOMIC_CMP_AND_SWP, guess, guess + 1);
        if (old == guess) won[lane].push_back(old);
        EXPECT_GE(old, guess);
        guess = old == guess ? guess + 1 : old;
      }
    });
  }
  threads.join();
  run.peer.barrier();
  std::uint64_t total = 0;
  std::memcpy(&total, c.mem.data(), 8);
  if (run.b()) EXPECT_EQ(total, 2 * lanes * per_lane);
  std::vector<std::uint64_t> mine;
  for (const auto& lane : won) mine.insert(mine.end(), lane.begin(), lane.end());
  expect_permutation(run, mine);
  run.peer.barrier();
}

CONFORMANCE(AtomicsFollowTheModel, "ATM-02 ATM-03") {
  Contenders c(run);
  if (run.a()) {
    std::uint64_t model[8] = {};
    for (int i = 0; i < 500; ++i) {
      const Note note("step ", i);
      const std::size_t cell = run.rng.below(8);
      const std::uint64_t operand = run.rng.next();
      if (run.rng.one_in(2)) {
        EXPECT_EQ(c.once(0, IBV_WR_ATOMIC_FETCH_AND_ADD, operand, 0, cell * 8), model[cell]);
        model[cell] += operand;  // with wrap-around
      } else {
        const std::uint64_t compare = run.rng.one_in(2) ? model[cell] : operand ^ 1;
        EXPECT_EQ(c.once(0, IBV_WR_ATOMIC_CMP_AND_SWP, compare, operand, cell * 8), model[cell]);
        if (compare == model[cell]) model[cell] = operand;
      }
    }
    run.peer.send_bytes(std::as_bytes(std::span(model)));
  } else {
    const std::vector<std::byte> model = run.peer.receive_bytes();
    expect_bytes({c.mem.data(), 64}, model, "the cells, in host order");
    for (std::size_t i = 64; i < 1024; ++i) EXPECT(*c.mem.data(i) == std::byte{0});
  }
  run.peer.barrier();
}

CONFORMANCE(AtomicWritesAreWords, "ATM-04") {
  Link link(run);
  if (run.a()) {
    std::uint64_t word = 0x0102030405060708;
    std::memcpy(link.mem.data(8), &word, sizeof(word));
    Send request = link.write(1, 8, 64, 8);
    request.opcode = IBV_WR_ATOMIC_WRITE;
    const int error = post(link.qp, request);
    const bool there = run.peer.exchange(error == 0);
    if (!there) skip("no ATOMIC_WRITE");
    EXPECT_EQ(link.scq.expect(1).opcode, static_cast<ibv_wc_opcode>(IBV_WC_ATOMIC_WRITE));
    run.peer.barrier();
    request.id = 2;
    request.sges[0].length = 4;
    EXPECT_OK(post(link.qp, request));
    link.scq.expect(2, IBV_WC_LOC_LEN_ERR);
  } else {
    run.peer.exchange(true);
    run.peer.barrier();
    std::uint64_t word = 0;
    std::memcpy(&word, link.mem.data(64), sizeof(word));
    EXPECT_EQ(word, 0x0102030405060708u);
  }
  link.reconnect();
  if (run.a()) {
    Send request = link.write(3, 8, 68, 8);
    request.opcode = IBV_WR_ATOMIC_WRITE;
    EXPECT_OK(post(link.qp, request));
    link.scq.expect(3, IBV_WC_REM_INV_REQ_ERR);
  }
  link.reconnect();
}

}  // namespace vrdma::conformance
