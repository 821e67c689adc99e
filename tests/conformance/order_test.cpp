// Order: fence, visibility, last byte last, completions as posted.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

CONFORMANCE(FenceWaitsForReadsAndAtomics, "WR-11") {
  Link link(run);
  constexpr std::size_t bytes = 16 * 1024;
  for (std::uint64_t round = 0; round < 200; ++round) {
    const Note note("round ", round);
    std::vector<std::byte> wanted(bytes);
    fill_pattern(wanted, run.seed + round);
    const bool atomic = round % 4 == 3 && link.dev.attr.atomic_cap != IBV_ATOMIC_NONE;
    if (run.b()) {
      std::memcpy(link.mem.data(), wanted.data(), bytes);
      EXPECT_OK(post(link.qp, link.recv(round, bytes, bytes)));
      run.peer.barrier();
      link.rcq.expect(round);
      // What came back is what was read, never what lay there before.
      expect_bytes({link.mem.data(bytes), atomic ? 8 : bytes}, std::span(wanted).first(atomic ? 8 : bytes), "sent after a fenced read");
      run.peer.barrier();
    } else {
      std::memset(link.mem.data(), 0xdd, bytes);
      run.peer.barrier();
      Send first = link.read(1, 0, 0, bytes);
      first.flags = 0;
      if (atomic) {
        first.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        first.sges = {link.mem.sge(0, 8)};
        first.compare_add = 1;
      }
      Send second = link.send(2, 0, bytes);
      second.flags |= IBV_SEND_FENCE;
      EXPECT_OK(post(link.qp, first));
      EXPECT_OK(post(link.qp, second));
      link.scq.expect(2);
      run.peer.barrier();
    }
  }
}

// What a READ brings takes its time where its memory begins and ends within a page; what is sent meanwhile is the sender's own all the same.
CONFORMANCE(SendsBesideReadsKeepTheirBytes, "WR-12", .timeout_s = 120) {
  constexpr std::size_t bytes = 2000, slots = 32, sends = 3000, read_bytes = 3 * 4096, under_way = 12;
  LinkSpec spec;
  spec.bytes = 128 * 1024;
  Link link(run, spec);
  Buffer aside(read_bytes + 4096);
  const Mr within(link.pd, aside.data() + 100, read_bytes);
  const std::size_t source = slots * 2048;  // what is read, of b's
  const auto pattern = [&](std::size_t which) {
    std::vector<std::byte> wanted(bytes - which % 64);
    fill_pattern(wanted, run.seed + which);
    return wanted;
  };
  std::vector<std::byte> to_read(read_bytes);
  fill_pattern(to_read, run.seed ^ 1);
  if (run.b()) {
    std::memcpy(link.mem.data(source), to_read.data(), read_bytes);
    for (std::size_t i = 0; i < slots; ++i) EXPECT_OK(post(link.qp, link.recv(i, i * 2048, 2048)));
  }
  run.peer.barrier();
  if (run.b()) {
    for (std::size_t i = 0; i < sends; ++i) {
      const Note note("message ", i);
      const std::vector<std::byte> wanted = pattern(i);
      EXPECT_EQ(link.rcq.expect(i).byte_len, wanted.size());
      expect_bytes({link.mem.data(i % slots * 2048), wanted.size()}, wanted, "sent beside reads");
      EXPECT_OK(post(link.qp, link.recv(i + slots, i % slots * 2048, 2048)));
    }
  } else {
    std::size_t posted = 0, done = 0;
    const auto finish = [&] {
      EXPECT_EQ(link.scq.next().status, IBV_WC_SUCCESS);
      ++done;
    };
    for (std::size_t i = 0; i < sends; ++i) {
      const Note note("message ", i);
      if (i % 4 == 0) {
        Send read = link.read(i, 0, source, read_bytes);
        read.sges = {{reinterpret_cast<std::uint64_t>(aside.data()) + 100, read_bytes, within.p->lkey}};
        EXPECT_OK(post(link.qp, read));
        ++posted;
      }
      const std::vector<std::byte> wanted = pattern(i);
      std::memcpy(link.mem.data(i % slots * 2048), wanted.data(), wanted.size());
      EXPECT_OK(post(link.qp, link.send(i, i % slots * 2048, wanted.size())));
      ++posted;
      while (posted - done > under_way) finish();
    }
    while (done < posted) finish();
    expect_bytes({aside.data() + 100, read_bytes}, to_read, "read");
  }
  run.peer.barrier();
}

CONFORMANCE(AWriteIsVisibleBeforeTheSendBehindIt, "WR-12") {
  LinkSpec spec;
  spec.bytes = 256 * 1024;
  Link link(run, spec);
  for (std::uint64_t round = 0; round < 300; ++round) {
    const std::size_t bytes = run.rng.between(1, 100'000);
    const Note note("round ", round, " bytes ", bytes);
    if (run.b()) EXPECT_OK(post(link.qp, link.recv(round, 200'000, 8)));
    run.peer.barrier();
    if (run.a()) {
      fill_pattern({link.mem.data(), bytes}, run.seed + round);
      Send write = link.write(1, 0, 0, bytes);
      write.flags = 0;
      EXPECT_OK(post(link.qp, write));
      EXPECT_OK(post(link.qp, link.send(2, 0, 1)));
      link.scq.expect(2);
    } else {
      link.rcq.expect(round);
      std::vector<std::byte> wanted(bytes);
      fill_pattern(wanted, run.seed + round);
      expect_bytes({link.mem.data(), bytes}, wanted, "written before the send");
    }
    run.peer.barrier();
  }
}

CONFORMANCE(TheLastByteOfAWriteComesLast, "WR-14", .timeout_s = 120) {
  LinkSpec spec;
  spec.bytes = 2 << 20;
  Link link(run, spec);
  for (unsigned round = 1; round <= 400; ++round) {
    const std::size_t bytes = round % 8 == 0 ? run.rng.between(1, 1 << 20) : run.rng.between(1, 9000);
    const std::size_t offset = run.rng.below(4096);
    const Note note("round ", round, " bytes ", bytes, " offset ", offset);
    const auto mark = static_cast<std::byte>(1 + round % 255);
    std::byte* const target = link.mem.data(offset);
    if (run.b()) std::memset(target, 0, bytes);
    run.peer.barrier();
    if (run.a()) {
      std::memset(link.mem.data(), static_cast<int>(mark), bytes);
      EXPECT_OK(post(link.qp, link.write(round, 0, offset, bytes)));
      link.scq.expect(round);
    } else {
      auto* const last = reinterpret_cast<unsigned char*>(target + bytes - 1);
      wait_until("the last byte", [&] { return __atomic_load_n(last, __ATOMIC_ACQUIRE) == static_cast<unsigned char>(mark); });
      for (std::size_t i = 0; i < bytes; ++i) {
        if (target[i] != mark) fail(__FILE__, __LINE__, text("the last byte is there, byte ", i, " of ", bytes, " is not"));
      }
    }
    run.peer.barrier();
  }
}

namespace {
// Consecutive numbers differ in every byte, and one half tells the other: a mixture of two values shows.
constexpr std::uint32_t spread = 2654435761u;
constexpr std::uint32_t spread_inverse = 244002641u;
static_assert(spread * spread_inverse == 1u);
std::uint64_t encode(std::uint32_t number) {
  const std::uint32_t low = number * spread;
  return std::uint64_t{static_cast<std::uint32_t>(~low)} << 32 | low;
}
}  // namespace

CONFORMANCE(AlignedEightByteWritesAreNeverTorn, "WR-19") {
  Link link(run);
  constexpr std::uint64_t rounds = 5'000;
  if (run.a()) {
    for (std::uint64_t i = 1; i <= rounds; ++i) {
      const std::uint64_t value = encode(static_cast<std::uint32_t>(i));
      std::memcpy(link.mem.data((i % 32) * 8), &value, 8);
      Send write = link.write(i, (i % 32) * 8, 64, 8);
      write.flags = i % 16 == 0 ? static_cast<unsigned>(IBV_SEND_SIGNALED) : 0u;
      EXPECT_OK(post(link.qp, write));
      if (i % 16 == 0) link.scq.expect(i);
    }
  } else {
    auto* const cell = reinterpret_cast<std::uint64_t*>(link.mem.data(64));
    std::uint64_t last = 0;
    wait_until("the last value", [&] {
      for (int i = 0; i < 100; ++i) {
        const std::uint64_t value = __atomic_load_n(cell, __ATOMIC_ACQUIRE);
        if (value == 0) continue;  // nothing has come yet
        const auto low = static_cast<std::uint32_t>(value);
        const std::uint64_t number = low * spread_inverse;
        if (value >> 32 != static_cast<std::uint32_t>(~low) || number < last) {
          fail(__FILE__, __LINE__, text("saw ", hex(value), " after number ", last));
        }
        last = number;
      }
      return last == rounds;
    });
  }
  run.peer.barrier();
}

CONFORMANCE(CompletionsComeInTheOrderOfPosting, "WR-13 WR-16") {
  LinkSpec spec;
  spec.qp.send_wr = 64;
  spec.qp.recv_wr = 512;
  spec.cq_depth = 1024;
  Link link(run, spec);
  constexpr std::uint64_t count = 3000;
  const bool atomics = link.dev.attr.atomic_cap != IBV_ATOMIC_NONE;
  // Both roles know which requests take a receive.
  std::vector<int> kinds;
  std::uint64_t receives = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    kinds.push_back(static_cast<int>(run.rng.below(atomics ? 6 : 5)));
    receives += kinds.back() >= 3 && kinds.back() <= 4;
  }
  if (run.a()) {
    std::uint64_t posted = 0;
    std::uint64_t done = 0;
    wait_until("all completions", [&] {
      if (posted < count && posted - done < link.qp.cap.max_send_wr && posted - done < 64) {
        Send s;
        switch (kinds[posted]) {
          case 0: s = link.write(posted, 0, 0, run.rng.between(1, 20'000)); break;
          case 1: s = link.read(posted, 32768, 0, run.rng.between(1, 20'000)); break;
          case 2: s = link.write(posted, 0, 0, 8); break;
          case 3: s = link.send(posted, 0, 100); break;
          case 4: s = link.write(posted, 0, 0, 50); s.opcode = IBV_WR_RDMA_WRITE_WITH_IMM; break;
          default: s = link.read(posted, 60'000, 0, 8); s.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD; break;
        }
        EXPECT_OK(post(link.qp, s));
        ++posted;
      }
      ibv_wc wc[8];
      const int n = ibv_poll_cq(link.scq, 8, wc);
      EXPECT_GE(n, 0);
      for (int i = 0; i < n; ++i) {
        EXPECT_EQ(wc[i].status, IBV_WC_SUCCESS);
        EXPECT_EQ(wc[i].wr_id, done);
        ++done;
      }
      return done == count;
    }, 40);
  } else {
    std::uint64_t posted = 0;
    std::uint64_t done = 0;
    wait_until("all receives", [&] {
      while (posted < receives && posted - done < 256) EXPECT_OK(post(link.qp, link.recv(posted++, 0, 256)));
      ibv_wc wc[8];
      const int n = ibv_poll_cq(link.rcq, 8, wc);
      for (int i = 0; i < n; ++i) {
        EXPECT_EQ(wc[i].status, IBV_WC_SUCCESS);
        EXPECT_EQ(wc[i].wr_id, done);
        ++done;
      }
      return done == receives;
    }, 40);
  }
  run.peer.barrier();
}

// A control queue pair tells of what came by the others, and all complete on one queue.
CONFORMANCE(OneCqKeepsTheOrderOfSeveralQps, "CQ-12 CQ-09", .timeout_s = 120) {
  constexpr std::uint64_t count = 3000;
  constexpr std::uint32_t receives_each = 64;
  Device dev(run.settings);
  Pd pd(dev);
  Region region(pd, 4096);
  for (const std::size_t qp_count : {std::size_t{2}, std::size_t{3}, std::size_t{9}}) {
    const Note note("of ", qp_count, " QPs");
    Cq cq(dev, static_cast<int>(qp_count) * 256);
    std::vector<std::unique_ptr<Qp>> qps;
    for (std::size_t i = 0; i < qp_count; ++i) {
      qps.push_back(std::make_unique<Qp>(pd, cq, cq));
      to_init(dev, *qps.back());
      bring_up(dev, *qps.back(), run.peer.exchange(address_of(dev, *qps.back())));
      if (run.b())
        for (std::uint32_t n = 0; n < receives_each; ++n) EXPECT_OK(post(*qps.back(), Recv{i, {region.sge(0, 8)}}));
    }
    run.peer.barrier();
    if (run.a()) {
      for (std::uint64_t message = 0; message < count; ++message) {
        Send one{.opcode = IBV_WR_SEND_WITH_IMM, .id = message, .sges = {region.sge(0, 8)}, .imm = static_cast<std::uint32_t>(message)};
        EXPECT_OK(post(*qps[run.rng.below(qp_count)], one));
        cq.expect(message);  // it has arrived, and what is sent from now on comes after it
      }
    } else {
      for (std::uint64_t done = 0; done < count;) {
        ibv_wc wc[8];
        const int got = ibv_poll_cq(cq, 1 + static_cast<int>(done % 8), wc);
        EXPECT_GE(got, 0);
        for (int i = 0; i < got; ++i, ++done) {
          EXPECT_EQ(wc[i].status, IBV_WC_SUCCESS);
          EXPECT_EQ(wc[i].imm_data, static_cast<std::uint32_t>(done));
          EXPECT_EQ(wc[i].wc_flags, unsigned{IBV_WC_WITH_IMM});
          EXPECT_OK(post(*qps[wc[i].wr_id], Recv{wc[i].wr_id, {region.sge(0, 8)}}));
        }
        // So that several wait at a time.
        if (run.rng.one_in(4)) std::this_thread::sleep_for(std::chrono::microseconds(run.rng.below(100)));
      }
    }
    run.peer.barrier();
  }
}

// Memory is its owner's again, also where it is not whole pages and whoever moves the bytes is slow.
CONFORMANCE(NothingComesAfterResetDestroyOrFlush, "QP-20", .timeout_s = 120) {
  constexpr int rounds = 150;
  constexpr std::size_t bytes = 512;
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 256);
  Buffer buffer(2 * 4096);
  const bool atomics = dev.attr.atomic_cap != IBV_ATOMIC_NONE;
  const Path path{.timeout = 8, .retry_count = 1};
  for (int round = 0; round < rounds; ++round) {
    const Note note("round ", round);
    std::byte* const data = buffer.data() + (round % 3 == 0 ? 0 : 64);  // of its page, or within one
    const Mr mr(pd, data, round % 3 == 0 ? 4096 : bytes);
    std::optional<Qp> qp(std::in_place, pd, cq, cq, QpSpec{.send_wr = 32, .recv_wr = 128});
    to_init(dev, *qp, path);
    const Address theirs = run.peer.exchange(address_of(dev, *qp));
    const Remote remote = run.peer.exchange(Remote{reinterpret_cast<std::uint64_t>(data), bytes, mr.p->rkey, 0});
    bring_up(dev, *qp, theirs, path);
    const ibv_sge all{reinterpret_cast<std::uint64_t>(data), bytes, mr.p->lkey};
    if (run.b())
      for (std::uint64_t id = 0; id < 100; ++id) EXPECT_OK(post(*qp, Recv{id, {all}}));
    run.peer.barrier();
    const auto kind = static_cast<std::uint64_t>(round) / 3 % 3;
    if (run.a()) {
      Send request{.opcode = kind == 0 ? IBV_WR_RDMA_WRITE : kind == 1 && atomics ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_SEND, .sges = {all},
                   .remote_address = remote.address, .rkey = remote.rkey, .compare_add = 1};
      if (request.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) request.sges[0].length = 8;
      int outstanding = 0;
      for (bool failed = false; !failed;) {
        for (; outstanding < 16; ++outstanding) EXPECT_OK(post(*qp, request));
        ibv_wc wc;
        const int got = ibv_poll_cq(cq, 1, &wc);
        outstanding -= got;
        failed = got == 1 && wc.status != IBV_WC_SUCCESS;
      }
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(run.rng.below(1500)));
      const auto way = run.rng.below(3);
      if (way == 0) qp->set_state(IBV_QPS_RESET);
      if (way == 1) qp.reset();
      if (way == 2) {
        qp->set_state(IBV_QPS_ERR);
        EXPECT_OK(post(*qp, Recv{1000, {}}));
        while (cq.next().wr_id != 1000) continue;
      }
      // Ours alone from here on.
      std::vector<std::byte> ours(bytes);
      fill_pattern(ours, run.seed + static_cast<std::uint64_t>(round));
      std::memcpy(data, ours.data(), bytes);
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(3);
      do expect_bytes({data, bytes}, ours, "after the verb had returned");
      while (std::chrono::steady_clock::now() < end);
    }
    run.peer.barrier();
    qp.reset();
    for (ibv_wc wc; ibv_poll_cq(cq, 1, &wc) > 0;) continue;
  }
}

}  // namespace vrdma::conformance
