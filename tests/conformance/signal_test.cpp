// Which requests complete: signalled, unsignalled, sq_sig_all, over many turns of the ring.
#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

void turn_the_ring(Run& run, bool sig_all) {
  LinkSpec spec;
  spec.qp.send_wr = 13;
  spec.qp.sig_all = sig_all;
  spec.cq_depth = 256;
  Link link(run, spec);
  if (run.a()) {
    const std::uint32_t depth = link.qp.cap.max_send_wr;
    constexpr std::uint64_t count = 5000;
    std::vector<std::uint64_t> owed;  // ids that must complete, in order
    std::size_t next = 0;
    std::uint64_t posted = 0;
    std::uint64_t freed = 0;  // slots known to be free again
    while (posted < count || next < owed.size()) {
      // Post in bursts of random length, the last slot of a full ring always signalled, so that it can turn.
      for (std::uint64_t burst = run.rng.between(1, depth); burst > 0 && posted < count && posted - freed < depth; --burst) {
        const bool must = posted - freed == depth - 1 || posted == count - 1;
        const bool signalled = must || run.rng.one_in(3);
        Send write = link.write(posted, 0, 0, run.rng.below(300));
        write.flags = signalled ? static_cast<unsigned>(IBV_SEND_SIGNALED) : 0u;
        EXPECT_OK(post(link.qp, write));
        if (signalled || sig_all) owed.push_back(posted);
        ++posted;
      }
      // Poll some; all when the ring is full.
      const bool full = posted - freed == depth || posted == count;
      while (next < owed.size() && (full || run.rng.one_in(2))) {
        link.scq.expect(owed[next]);
        freed = owed[next] + 1;
        ++next;
      }
    }
    link.scq.expect_empty();
  }
  run.peer.barrier();
}

}  // namespace

CONFORMANCE(OnlySignalledRequestsComplete, "WR-05 WR-06 WR-16") { turn_the_ring(run, false); }
CONFORMANCE(SqSigAllCompletesEveryRequest, "WR-06 WR-16") { turn_the_ring(run, true); }

CONFORMANCE(AnUnsignalledErrorStillCompletes, "WR-07 ERR-12 WR-08") {
  Link link(run);
  if (run.b()) {
    for (std::uint64_t i = 0; i < 4; ++i) EXPECT_OK(post(link.qp, link.recv(i, 0, 64)));
  }
  run.peer.barrier();
  if (run.a()) {
    std::vector<Send> sends;
    for (std::uint64_t i = 0; i < 10; ++i) {
      sends.push_back(link.write(i, 0, 0, 64));
      sends.back().flags = 0;
      if (i == 4) sends.back().rkey ^= 0x00ff00;
    }
    for (const Send& s : sends) EXPECT_OK(post(link.qp, s));
    link.scq.expect(4, IBV_WC_REM_ACCESS_ERR);  // 0 to 3 succeeded without a word
    for (std::uint64_t i = 5; i < 10; ++i) EXPECT_EQ(link.scq.expect(i, IBV_WC_WR_FLUSH_ERR).qp_num, link.qp.p->qp_num);
    link.scq.expect_empty();
  } else {
    (void)link.dev.wait_event(IBV_EVENT_QP_ACCESS_ERR);
    for (std::uint64_t i = 0; i < 4; ++i) EXPECT_EQ(link.rcq.expect(i, IBV_WC_WR_FLUSH_ERR).qp_num, link.qp.p->qp_num);
    link.rcq.expect_empty();
  }
  run.peer.barrier();
}

}  // namespace vrdma::conformance
