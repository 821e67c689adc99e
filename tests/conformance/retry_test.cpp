// Receiver not ready, and peers that do not answer: statuses, counts, and never earlier than the timers allow.
#include <chrono>
#include <memory>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

}  // namespace

CONFORMANCE(RnrEndsAfterItsRetriesAndNotBefore, "ERR-08 ERR-12") {
  struct Case {
    std::uint8_t retries;
    std::uint8_t timer;  // the responder's, by code
    double wait_ms;
  };
  for (const Case c : {Case{0, 20, 10.24}, Case{1, 22, 20.48}, Case{3, 22, 20.48}, Case{6, 18, 5.12}}) {
    const Note note("rnr_retry ", static_cast<int>(c.retries), " timer code ", static_cast<int>(c.timer));
    LinkSpec spec;
    spec.path.rnr_retry = c.retries;
    spec.path.min_rnr_timer = c.timer;
    Link link(run, spec);
    if (run.a()) {
      const auto begin = Clock::now();
      EXPECT_OK(post(link.qp, link.send(1, 0, 16)));
      EXPECT_OK(post(link.qp, link.send(2, 0, 16)));
      link.scq.expect(1, IBV_WC_RNR_RETRY_EXC_ERR);
      EXPECT_GE(seconds_since(begin) * 1000, c.retries * c.wait_ms);
      link.scq.expect(2, IBV_WC_WR_FLUSH_ERR);
      link.qp.wait_state(IBV_QPS_ERR);
      run.peer.barrier();
    } else {
      run.peer.barrier();
      EXPECT_EQ(link.qp.state(), IBV_QPS_RTS);
      link.rcq.expect_empty();
      link.dev.expect_no_event();
    }
    run.peer.barrier();
  }
}

CONFORMANCE(RnrRetrySevenWaitsForEver, "ERR-09") {
  LinkSpec spec;
  spec.path.rnr_retry = 7;
  spec.path.min_rnr_timer = 14;  // 1.28 ms: seven of them pass quickly
  Link link(run, spec);
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    const Note note("opcode ", opcode);
    if (run.a()) {
      Send request = link.write(1, 0, 0, 100);
      request.opcode = opcode;
      EXPECT_OK(post(link.qp, request));
      holds_for(0.15, "the request neither fails nor completes", [&] {
        link.scq.expect_empty();
        return true;
      });
      run.peer.barrier();
      link.scq.expect(1);
    } else {
      run.peer.barrier();
      link.rcq.expect_empty();
      EXPECT_OK(post(link.qp, link.recv(2, 4096, 100)));
      link.rcq.expect(2);
    }
    run.peer.barrier();
  }
}

CONFORMANCE(RnrHoldsUpEverythingBehindIt, "ERR-09 WR-13") {
  LinkSpec spec;
  spec.path.min_rnr_timer = 10;
  Link link(run, spec);
  for (std::uint64_t round = 0; round < 50; ++round) {
    if (run.a()) {
      EXPECT_OK(post(link.qp, link.send(1, 0, 16)));
      EXPECT_OK(post(link.qp, link.write(2, 0, 0, 16)));
      EXPECT_OK(post(link.qp, link.read(3, 64, 0, 16)));
      run.peer.barrier();
      for (std::uint64_t i = 1; i <= 3; ++i) link.scq.expect(i);
    } else {
      run.peer.barrier();
      EXPECT_OK(post(link.qp, link.recv(9, 4096, 16)));
      link.rcq.expect(9);
    }
    run.peer.barrier();
  }
}

CONFORMANCE(APeerThatDoesNotAnswerIsRetryExceeded, "ERR-10 ERR-16 ERR-12", .timeout_s = 120) {
  enum class Why { reset, init, error, destroyed, wrong_qpn, wrong_psn, wrong_lid, not_connected_back };
  for (const Why why : {Why::reset, Why::init, Why::error, Why::destroyed, Why::wrong_qpn, Why::wrong_psn, Why::wrong_lid,
                        Why::not_connected_back}) {
    const Note note("case ", why);
    LinkSpec spec;
    spec.path.timeout = 14;  // 67 ms
    spec.path.retry_count = 2;
    Link link(run, spec);
    if (why == Why::wrong_lid && link.dev.by_gid()) {
      run.peer.barrier();
      continue;
    }
    Qp bystander(link.pd, link.scq, link.rcq);
    const std::uint32_t bystander_qpn = run.peer.exchange(bystander.p->qp_num);
    if (run.b()) {
      EXPECT_OK(post(link.qp, link.recv(7, 0, 64)));
      switch (why) {
        case Why::reset: link.qp.set_state(IBV_QPS_RESET); break;
        case Why::init:
          link.qp.set_state(IBV_QPS_RESET);
          to_init(link.dev, link.qp);
          break;
        case Why::error:
          link.qp.set_state(IBV_QPS_ERR);
          link.rcq.expect(7, IBV_WC_WR_FLUSH_ERR);
          break;
        case Why::destroyed: link.qp.destroy(); break;
        case Why::not_connected_back: {
          // b's QP listens to another QP of a: what a's QP sends is not answered to it.
          link.qp.set_state(IBV_QPS_RESET);
          Address other = link.peer_address;
          other.qpn = bystander_qpn;
          other.psn = 0x123456;
          bring_up(link.dev, link.qp, other, spec.path);
          break;
        }
        default: break;
      }
    } else if (why == Why::wrong_qpn || why == Why::wrong_psn || why == Why::wrong_lid) {
      link.qp.set_state(IBV_QPS_RESET);
      Address wrong = link.peer_address;
      if (why == Why::wrong_qpn) wrong.qpn = (wrong.qpn + 0x5000) & 0xffffff;
      if (why == Why::wrong_lid) wrong.lid = static_cast<std::uint16_t>(wrong.lid ^ 0x1f00);
      to_init(link.dev, link.qp, spec.path);
      to_rtr(link.dev, link.qp, wrong, spec.path);
      Modify rts = rts_of(link.dev, link.qp, spec.path);
      if (why == Why::wrong_psn) rts.attr.sq_psn = (rts.attr.sq_psn + 1000) & 0xffffff;
      EXPECT_OK(apply(link.qp, rts));
    }
    run.peer.barrier();
    if (run.a()) {
      const auto begin = Clock::now();
      EXPECT_OK(post(link.qp, link.send(1, 0, 16)));
      EXPECT_OK(post(link.qp, link.send(2, 0, 16)));
      link.scq.expect(1, IBV_WC_RETRY_EXC_ERR);
      // A wrong PSN is answered, by a NAK, so that only the retries count there.
      if (why != Why::wrong_psn) EXPECT_GE(seconds_since(begin), 2 * 4.096e-6 * (1 << 14));
      link.scq.expect(2, IBV_WC_WR_FLUSH_ERR);
      link.qp.wait_state(IBV_QPS_ERR);
      run.peer.barrier();
    } else {
      run.peer.barrier();
      if (why == Why::wrong_qpn || why == Why::wrong_psn || why == Why::wrong_lid || why == Why::not_connected_back) {
        link.rcq.expect_empty();
        EXPECT_EQ(link.qp.state(), IBV_QPS_RTS);
      }
      link.dev.expect_no_event();
    }
    run.peer.barrier();
  }
}

CONFORMANCE(TimeoutZeroWaitsForEver, "ERR-11") {
  LinkSpec spec;
  spec.path.timeout = 0;
  spec.path.retry_count = 1;
  Link link(run, spec);
  if (run.b()) link.qp.set_state(IBV_QPS_RESET);
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, link.write(1, 0, 0, 64)));
    holds_for(0.4, "the request neither fails nor completes", [&] {
      link.scq.expect_empty();
      return true;
    });
    link.qp.set_state(IBV_QPS_ERR);
    link.scq.expect(1, IBV_WC_WR_FLUSH_ERR);
  }
  run.peer.barrier();
}

}  // namespace vrdma::conformance
