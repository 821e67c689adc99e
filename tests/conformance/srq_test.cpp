// Shared receive queues.
#include <cerrno>
#include <memory>
#include <set>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

namespace {
// A connection that receives from an SRQ at b.
struct SharedReceives {
  explicit SharedReceives(Run& run, const Path& path = {})
      : dev(run.settings), pd(dev), cq(dev, 256), region(pd, 4096), srq(pd, 64), qp(pd, cq, cq, run.b() ? QpSpec{.srq = srq} : QpSpec{}) {
    to_init(dev, qp);
    bring_up(dev, qp, run.peer.exchange(address_of(dev, qp)), path);
  }
  Device dev;
  Pd pd;
  Cq cq;
  Region region;
  Srq srq;
  Qp qp;
};
}  // namespace

CONFORMANCE(SrqLimitsAreChecked, "SRQ-05 SRQ-07 SRQ-02 SRQ-06", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  ibv_srq_init_attr init{};
  init.attr.max_wr = static_cast<std::uint32_t>(dev.attr.max_srq_wr) + 1;
  init.attr.max_sge = 1;
  EXPECT_NULL(ibv_create_srq(pd, &init), EINVAL);
  init.attr.max_wr = 8;
  init.attr.max_sge = static_cast<std::uint32_t>(dev.attr.max_srq_sge) + 1;
  EXPECT_NULL(ibv_create_srq(pd, &init), EINVAL);
  Srq srq(pd, 10, 2);
  ibv_srq_attr attr{};
  EXPECT_OK(ibv_query_srq(srq, &attr));
  EXPECT_EQ(attr.max_wr, srq.attr.max_wr);
  EXPECT_EQ(attr.max_sge, srq.attr.max_sge);
  EXPECT_EQ(attr.srq_limit, 0u);
  attr.srq_limit = srq.attr.max_wr + 1;
  EXPECT_ERRNO(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT), EINVAL);
  attr.srq_limit = srq.attr.max_wr;
  EXPECT_OK(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
  EXPECT_OK(ibv_query_srq(srq, &attr));
  EXPECT_EQ(attr.srq_limit, srq.attr.max_wr);
  attr.max_wr = srq.attr.max_wr * 2;
  const int rc = ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR);
  if (dev.attr.device_cap_flags & IBV_DEVICE_SRQ_RESIZE) {
    EXPECT_OK(rc);
  } else {
    EXPECT(rc == EINVAL || rc == EOPNOTSUPP);
    EXPECT_OK(ibv_query_srq(srq, &attr));
    EXPECT_EQ(attr.max_wr, srq.attr.max_wr);
  }
  Srq small(pd, 10, 2);
  Region region(pd, 4096);
  for (std::uint32_t i = 0; i < small.attr.max_wr; ++i) EXPECT_OK(post(small, Recv{i, {region.sge(0, 8)}}));
  EXPECT_ERRNO(post(small, Recv{1, {region.sge(0, 8)}}), ENOMEM);
  Srq narrow(pd, 10, 1);
  EXPECT_ERRNO(post(narrow, Recv{1, std::vector<ibv_sge>(narrow.attr.max_sge + 1, region.sge(0, 8))}), EINVAL);
}

CONFORMANCE(TheLimitEventComesOnceAndIsRearmedByHand, "SRQ-01 SRQ-02") {
  SharedReceives link(run);
  run.peer.barrier();
  for (int round = 0; round < 3; ++round) {
    const Note note("round ", round);
    if (run.b()) {
      for (std::uint64_t i = 0; i < 10; ++i) EXPECT_OK(post(link.srq, Recv{i, {link.region.sge(0, 64)}}));
      ibv_srq_attr attr{};
      attr.srq_limit = 5;
      EXPECT_OK(ibv_modify_srq(link.srq, &attr, IBV_SRQ_LIMIT));
    }
    run.peer.barrier();
    for (std::uint64_t i = 0; i < 5; ++i) {  // ten down to five: not below the limit
      if (run.a()) {
        EXPECT_OK(post(link.qp, Send{.id = i, .sges = {link.region.sge(0, 8)}}));
        link.cq.expect(i);
      } else {
        link.cq.expect(i);
      }
    }
    run.peer.barrier();
    if (run.b()) {
      link.dev.expect_no_event();
      ibv_srq_attr attr{};
      EXPECT_OK(ibv_query_srq(link.srq, &attr));
      EXPECT_EQ(attr.srq_limit, 5u);
    }
    run.peer.barrier();
    for (std::uint64_t i = 5; i < 10; ++i) {  // the first of these crosses it, the others must not repeat the event
      if (run.a()) EXPECT_OK(post(link.qp, Send{.id = i, .sges = {link.region.sge(0, 8)}}));
      link.cq.expect(i);
    }
    if (run.b()) {
      EXPECT(link.dev.wait_event(IBV_EVENT_SRQ_LIMIT_REACHED).element.srq == link.srq.p);
      link.dev.expect_no_event();
      ibv_srq_attr attr{};
      EXPECT_OK(ibv_query_srq(link.srq, &attr));
      EXPECT_EQ(attr.srq_limit, 0u);
    }
    run.peer.barrier();
  }
}

CONFORMANCE(ALimitOfAnEmptySrqIsNotReachedByWaiting, "SRQ-01") {
  Path path;
  path.rnr_retry = 1;
  SharedReceives link(run, path);
  ibv_srq_attr attr{};
  attr.srq_limit = 2;
  if (run.b()) EXPECT_OK(ibv_modify_srq(link.srq, &attr, IBV_SRQ_LIMIT));
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, Send{.id = 1, .sges = {link.region.sge(0, 8)}}));
    link.cq.expect(1, IBV_WC_RNR_RETRY_EXC_ERR);
  }
  run.peer.barrier();
  if (run.b()) {
    link.dev.expect_no_event();
    attr = {};
    EXPECT_OK(ibv_query_srq(link.srq, &attr));
    EXPECT_EQ(attr.srq_limit, 2u);
  }
  run.peer.barrier();
}

// Kept for a smaller message, as a UD queue pair keeps one of its own, it would keep all others of the SRQ from those that come.
CONFORMANCE(AnSrqReceiveTooSmallForADatagramEndsInAnError, "ERR-14 SRQ-03") {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 64);
  Region region(pd, 8192);
  Srq srq(pd, 16);
  QpSpec spec{.type = IBV_QPT_UD};
  if (run.b()) spec.srq = srq;
  Qp qp(pd, cq, cq, spec);
  Path path;
  path.qkey = test_qkey;
  bring_up(dev, qp, {}, path);
  const Address theirs = run.peer.exchange(address_of(dev, qp));
  if (run.b()) {
    EXPECT_OK(post(srq, Recv{1, {region.sge(0, grh_bytes + 7)}}));
    EXPECT_OK(post(srq, Recv{2, {region.sge(4096, 1000)}}));
  }
  run.peer.barrier();
  if (run.a()) {
    const Ah ah(pd, ah_to(dev, theirs));
    for (std::uint64_t id = 1; id <= 2; ++id) {
      EXPECT_OK(post(qp, Send{.id = id, .sges = {region.sge(0, 8)}, .ah = ah, .qpn = theirs.qpn, .qkey = test_qkey}));
      cq.expect(id);
    }
  } else {
    cq.expect(1, IBV_WC_LOC_LEN_ERR);
    EXPECT_EQ(cq.expect(2).byte_len, grh_bytes + 8);
    EXPECT_EQ(qp.state(), IBV_QPS_RTS);
  }
  run.peer.barrier();
}

CONFORMANCE(ReceivesOfAnSrqAreCheckedAgainstItsOwnPd, "SRQ-03 MR-12") {
  Device dev(run.settings);
  Pd queue_pairs(dev), receives(dev);
  Cq cq(dev, 64);
  Region sent(queue_pairs, 4096), own(receives, 4096), foreign(queue_pairs, 4096);
  Srq srq(receives, 8);
  Qp qp(queue_pairs, cq, cq, run.b() ? QpSpec{.srq = srq} : QpSpec{});
  to_init(dev, qp);
  const Address theirs = run.peer.exchange(address_of(dev, qp));
  bring_up(dev, qp, theirs);
  if (run.b()) {
    EXPECT_OK(post(srq, Recv{1, {own.sge(0, 64)}}));
    EXPECT_OK(post(srq, Recv{2, {foreign.sge(0, 64)}}));
  }
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(qp, Send{.id = 1, .sges = {sent.sge(0, 64)}}));
    cq.expect(1);
    EXPECT_OK(post(qp, Send{.id = 2, .sges = {sent.sge(0, 64)}}));
    cq.expect(2, IBV_WC_REM_OP_ERR);
  } else {
    cq.expect(1);
    cq.expect(2, IBV_WC_LOC_PROT_ERR);
  }
  run.peer.barrier();
}

CONFORMANCE(SeveralQpsShareOneSrq, "SRQ-03 CQ-09 WC-01") {
  constexpr std::size_t qps = 6;
  constexpr std::uint64_t messages = 200;  // per QP
  constexpr std::uint64_t depth = 32;
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 2048);
  Region region(pd, 64 * 1024);
  Srq srq(pd, static_cast<std::uint32_t>(depth));
  std::vector<std::unique_ptr<Qp>> mine;
  for (std::size_t i = 0; i < qps; ++i) {
    mine.push_back(std::make_unique<Qp>(pd, cq, cq, run.b() ? QpSpec{.srq = srq} : QpSpec{}));
    to_init(dev, *mine[i]);
    const Address theirs = run.peer.exchange(address_of(dev, *mine[i]));
    bring_up(dev, *mine[i], theirs);
  }
  run.peer.barrier();
  if (run.a()) {
    std::vector<std::uint64_t> sent(qps), done(qps);
    std::uint64_t total = 0;
    wait_until("all sends", [&] {
      const std::size_t q = run.rng.below(qps);
      if (sent[q] < messages && sent[q] - done[q] < 16) {
        // The message says which QP and which number it is.
        auto* const cell = reinterpret_cast<std::uint64_t*>(region.data((q * 16 + sent[q] % 16) * 16));
        cell[0] = q;
        cell[1] = sent[q];
        EXPECT_OK(post(*mine[q], Send{.id = q << 32 | sent[q], .sges = {region.sge((q * 16 + sent[q] % 16) * 16, 16)}}));
        ++sent[q];
      }
      ibv_wc wc{};
      while (ibv_poll_cq(cq, 1, &wc) == 1) {
        EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
        const std::size_t from = wc.wr_id >> 32;
        EXPECT_EQ(wc.wr_id & 0xffffffff, done[from]);
        EXPECT_EQ(wc.qp_num, mine[from]->p->qp_num);
        ++done[from];
        ++total;
      }
      return total == qps * messages;
    }, 40);
  } else {
    std::set<std::uint64_t> outstanding;
    std::vector<std::uint64_t> seen(qps);
    std::uint64_t posted = 0;
    std::uint64_t total = 0;
    std::vector<std::uint64_t> free_slots;
    for (std::uint64_t i = 0; i < depth; ++i) free_slots.push_back(i);
    wait_until("all receives", [&] {
      while (!free_slots.empty() && posted < qps * messages) {
        const std::uint64_t slot = free_slots.back();
        free_slots.pop_back();
        EXPECT_OK(post(srq, Recv{slot, {region.sge(slot * 16, 16)}}));
        EXPECT(outstanding.insert(slot).second);
        ++posted;
      }
      ibv_wc wc{};
      while (ibv_poll_cq(cq, 1, &wc) == 1) {
        EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
        EXPECT_EQ(wc.byte_len, 16u);
        EXPECT_EQ(outstanding.erase(wc.wr_id), 1u);  // each request is used exactly once
        const auto* const cell = reinterpret_cast<const std::uint64_t*>(region.data(wc.wr_id * 16));
        EXPECT(cell[0] < qps);
        EXPECT_EQ(wc.qp_num, mine[cell[0]]->p->qp_num);
        EXPECT_EQ(cell[1], seen[cell[0]]);  // in order per QP
        ++seen[cell[0]];
        ++total;
        free_slots.push_back(wc.wr_id);
      }
      return total == qps * messages;
    }, 40);
  }
  run.peer.barrier();
}

// One of its queue pairs is connected to the other process, one to this one: they may be served in different ways.
CONFORMANCE(AnSrqServesPeersNearAndFar, "SRQ-03") {
  constexpr std::uint64_t depth = 8, rounds = 20;
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 256), sent(dev, 64);
  Region region(pd, 4096);
  Srq srq(pd, depth);
  const QpSpec shared = run.b() ? QpSpec{.srq = srq} : QpSpec{};
  Qp far(pd, sent, cq, shared), near(pd, sent, cq, shared), loop(pd, sent, sent);
  to_init(dev, far);
  const Address theirs = run.peer.exchange(address_of(dev, far));
  bring_up(dev, far, theirs);
  if (run.b()) {
    const Address here = address_of(dev, near), there = address_of(dev, loop);
    bring_up(dev, near, there);
    bring_up(dev, loop, here);
    for (std::uint64_t i = 0; i < depth; ++i) EXPECT_OK(post(srq, Recv{i, {region.sge(i * 64, 64)}}));
  }
  run.peer.barrier();
  for (std::uint64_t round = 0; round < rounds; ++round) {
    const Note note("round ", round);
    if (run.a()) {
      EXPECT_OK(post(far, Send{.id = round, .sges = {region.sge(0, 64)}}));
      sent.expect(round);
    } else {
      EXPECT_EQ(cq.expect(2 * round).qp_num, far.p->qp_num);
      EXPECT_OK(post(loop, Send{.id = round, .sges = {region.sge(2048, 64)}}));
      EXPECT_EQ(cq.expect(2 * round + 1).qp_num, near.p->qp_num);
      sent.expect(round);
      for (const std::uint64_t next : {2 * round + depth, 2 * round + depth + 1}) EXPECT_OK(post(srq, Recv{next, {region.sge(next % depth * 64, 64)}}));
    }
    run.peer.barrier();
  }
}

CONFORMANCE(AnSrqQpInErrReportsItsLastWqe, "SRQ-04 ERR-12") {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 64);
  Region region(pd, 4096);
  Srq srq(pd, 16);
  Qp qp(pd, cq, cq, run.b() ? QpSpec{.srq = srq} : QpSpec{});
  to_init(dev, qp);
  const Address theirs = run.peer.exchange(address_of(dev, qp));
  bring_up(dev, qp, theirs);
  if (run.b()) EXPECT_OK(post(srq, Recv{1, {region.sge(0, 64)}}));
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(qp, Send{.id = 2, .sges = {region.sge(0, 8)}}));
    cq.expect(2);
  } else {
    cq.expect(1);
    EXPECT_OK(post(srq, Recv{3, {region.sge(0, 64)}}));
    qp.set_state(IBV_QPS_ERR);
    EXPECT(dev.wait_event(IBV_EVENT_QP_LAST_WQE_REACHED).element.qp == qp.p);
    // The SRQ's own requests belong to no QP: they are not flushed.
    cq.expect_empty();
    dev.expect_no_event();
  }
  run.peer.barrier();
}

}  // namespace vrdma::conformance
