// Posting: limits, exact errno values, bad_wr, what each state takes, inline.
#include <cerrno>
#include <cstring>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

CONFORMANCE(ReceivesBeyondTheDepthAreRefused, "WR-01 QP-15", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 16);
  Region region(pd, 4096);
  for (const ibv_qp_type type : {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD}) {
    const Note note("qp_type ", type);
    Qp qp(pd, cq, cq, {.type = type, .recv_wr = 10});
    to_init(dev, qp);
    // As one list: all that fit are posted, bad_wr is the first that does not.
    std::vector<ibv_recv_wr> wrs(qp.cap.max_recv_wr + 3);
    ibv_sge sge = region.sge(0, 64);
    for (std::size_t i = 0; i < wrs.size(); ++i) {
      wrs[i] = {i, i + 1 < wrs.size() ? &wrs[i + 1] : nullptr, &sge, 1};
    }
    ibv_recv_wr* bad = nullptr;
    EXPECT_ERRNO(ibv_post_recv(qp, wrs.data(), &bad), ENOMEM);
    EXPECT(bad == &wrs[qp.cap.max_recv_wr]);
    EXPECT_ERRNO(post(qp, Recv{1, {sge}}), ENOMEM);
  }
}

CONFORMANCE(TooManySgesAreRefused, "WR-02", .solo = true) {
  LinkSpec spec;
  Loop loop(run, spec);
  const auto sges = [&](std::uint32_t n) { return std::vector<ibv_sge>(n, loop.mem.sge(0, 1)); };
  EXPECT_ERRNO(post(loop.other, Recv{1, sges(loop.other.cap.max_recv_sge + 1)}), EINVAL);
  EXPECT_ERRNO(post(loop.qp, Send{.id = 1, .sges = sges(loop.qp.cap.max_send_sge + 1)}), EINVAL);
  EXPECT_OK(post(loop.other, Recv{2, sges(loop.other.cap.max_recv_sge)}));
  EXPECT_OK(post(loop.qp, Send{.id = 3, .sges = sges(loop.qp.cap.max_send_sge)}));
  // The refused ones left no trace.
  loop.scq.expect(3, loop.other.cap.max_recv_sge >= loop.qp.cap.max_send_sge ? IBV_WC_SUCCESS : IBV_WC_REM_INV_REQ_ERR);
}

CONFORMANCE(StatesTakeWhatTheyMust, "WR-03 QP-15 ERR-12 WR-08", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq scq(dev, 64);
  Cq rcq(dev, 64);
  Region region(pd, 4096);
  Qp qp(pd, scq, rcq);
  const Recv recv{1, {region.sge(0, 64)}};
  const Send send{.id = 2, .sges = {region.sge(0, 64)}};
  EXPECT_ERRNO(post(qp, recv), EINVAL);
  EXPECT_ERRNO(post(qp, send), EINVAL);
  to_init(dev, qp);
  EXPECT_OK(post(qp, recv));
  EXPECT_ERRNO(post(qp, send), EINVAL);
  to_rtr(dev, qp, address_of(dev, qp));
  EXPECT_OK(post(qp, recv));
  EXPECT_ERRNO(post(qp, send), EINVAL);
  rcq.expect_empty();
  qp.set_state(IBV_QPS_ERR);
  rcq.expect(1, IBV_WC_WR_FLUSH_ERR);
  rcq.expect(1, IBV_WC_WR_FLUSH_ERR);
  for (std::uint64_t i = 10; i < 15; ++i) {
    EXPECT_OK(post(qp, Recv{i, {region.sge(0, 64)}}));
    EXPECT_OK(post(qp, Send{.id = i, .sges = {region.sge(0, 64)}, .flags = 0}));
  }
  for (std::uint64_t i = 10; i < 15; ++i) {
    EXPECT_EQ(rcq.expect(i, IBV_WC_WR_FLUSH_ERR).qp_num, qp.p->qp_num);
    EXPECT_EQ(scq.expect(i, IBV_WC_WR_FLUSH_ERR).qp_num, qp.p->qp_num);
  }
  qp.set_state(IBV_QPS_RESET);
  EXPECT_ERRNO(post(qp, recv), EINVAL);
  EXPECT_ERRNO(post(qp, send), EINVAL);
}

CONFORMANCE(AFullSendQueueIsEnomem, "WR-04 WR-05", .solo = true) {
  LinkSpec spec;
  spec.qp.send_wr = 16;
  spec.cq_depth = 4096;
  Loop loop(run, spec);
  const std::uint32_t depth = loop.qp.cap.max_send_wr;
  const auto write = [&](std::uint64_t id, unsigned flags) {
    return Send{.opcode = IBV_WR_RDMA_WRITE,
                .id = id,
                .sges = {loop.mem.sge(0, 8)},
                .flags = flags,
                .remote_address = loop.mem.buffer.address(4096),
                .rkey = loop.mem.mr.p->rkey};
  };
  for (int round = 0; round < 3; ++round) {
    const Note note("round ", round);
    // A list longer than the queue: what fits is posted.
    std::vector<Send> sends;
    std::vector<ibv_send_wr> wrs;
    for (std::uint32_t i = 0; i < depth + 2; ++i) sends.push_back(write(i, IBV_SEND_SIGNALED));
    for (const Send& s : sends) wrs.push_back(to_wr(s));
    for (std::size_t i = 0; i + 1 < wrs.size(); ++i) wrs[i].next = &wrs[i + 1];
    ibv_send_wr* bad = nullptr;
    EXPECT_ERRNO(ibv_post_send(loop.qp, wrs.data(), &bad), ENOMEM);
    EXPECT(bad == &wrs[depth]);
    EXPECT_ERRNO(post(loop.qp, write(99, IBV_SEND_SIGNALED)), ENOMEM);
    for (std::uint32_t i = 0; i < depth; ++i) loop.scq.expect(i);
    // Unsignalled slots stay taken although the requests were executed, until a signalled one behind them is polled.
    *loop.mem.data(0) = std::byte{static_cast<unsigned char>(round + 1)};
    volatile std::byte* arrived = loop.mem.data(4096);
    for (std::uint32_t i = 0; i + 1 < depth; ++i) EXPECT_OK(post(loop.qp, write(i, 0)));
    EXPECT_OK(post(loop.qp, write(1000, IBV_SEND_SIGNALED)));
    wait_until("the writes to arrive", [&] { return *arrived == std::byte{static_cast<unsigned char>(round + 1)}; });
    EXPECT_ERRNO(post(loop.qp, write(99, 0)), ENOMEM);
    loop.scq.expect(1000);
    for (std::uint32_t i = 0; i + 1 < depth; ++i) EXPECT_OK(post(loop.qp, write(i, 0)));
    EXPECT_OK(post(loop.qp, write(1001, IBV_SEND_SIGNALED)));
    loop.scq.expect(1001);
    loop.scq.expect_empty();
  }
}

CONFORMANCE(InlineDataIsCopiedAtPost, "WR-09 WR-10") {
  LinkSpec spec;
  spec.qp.inline_bytes = 64;
  spec.qp.send_sge = 4;
  spec.path.min_rnr_timer = 1;
  Link link(run, spec);
  const std::uint32_t limit = link.qp.cap.max_inline_data;
  const std::uint32_t theirs = run.peer.exchange(limit);
  EXPECT_EQ(theirs, limit);
  for (std::uint32_t bytes : {0u, 1u, 7u, 8u, 9u, 31u, 63u, 64u, limit}) {
    const Note note("inline bytes ", bytes);
    std::vector<std::byte> wanted(bytes);
    fill_pattern(wanted, run.seed + bytes);
    if (run.b()) {
      // Later than the send on purpose: what arrives must be what was there at post.
      run.peer.barrier();
      std::memset(link.mem.data(), 0, 8192);
      EXPECT_OK(post(link.qp, link.recv(bytes, 0, 8192)));
      EXPECT_EQ(link.rcq.expect(bytes).byte_len, bytes);
      expect_bytes({link.mem.data(), bytes}, wanted, "inline data");
    } else {
      // Memory that was never registered, over several SGEs with a key that does not exist.
      std::vector<std::byte> source = wanted;
      std::vector<ibv_sge> sges;
      std::size_t at = 0;
      for (int i = 0; i < 3 && at < source.size(); ++i) {
        const std::size_t part = i == 2 ? source.size() - at : run.rng.below(source.size() - at + 1);
        if (part) sges.push_back({reinterpret_cast<std::uint64_t>(source.data() + at), static_cast<std::uint32_t>(part), 0xdead});
        at += part;
      }
      if (at < source.size()) {
        sges.push_back({reinterpret_cast<std::uint64_t>(source.data() + at), static_cast<std::uint32_t>(source.size() - at), 0xdead});
      }
      EXPECT_OK(post(link.qp, Send{.id = bytes, .sges = sges, .flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE}));
      std::memset(source.data(), 0xee, source.size());
      run.peer.barrier();
      link.scq.expect(bytes);
    }
    // The roles use the generator differently; from here on they agree again.
    run.rng = Rng(run.seed + bytes);
    run.peer.barrier();
  }
  if (run.a()) {
    std::vector<std::byte> source(limit + 1);
    EXPECT_ERRNO(post(link.qp, Send{.id = 1,
                                    .sges = {{reinterpret_cast<std::uint64_t>(source.data()), limit + 1, 0}},
                                    .flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE}), EINVAL);
    link.scq.expect_empty();
  }
  run.peer.barrier();
}

CONFORMANCE(OpcodesOutsideTheQpTypeAreRefused, "ERR-15 UC-02 UD-05", .solo = true) {
  for (const ibv_qp_type type : {IBV_QPT_UC, IBV_QPT_UD}) {
    LinkSpec spec;
    spec.qp.type = type;
    for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
                                       IBV_WR_ATOMIC_FETCH_AND_ADD}) {
      if (type == IBV_QPT_UC && (opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM)) continue;
      const Note note("qp_type ", type, " opcode ", opcode);
      Loop loop(run, spec);
      std::vector<std::byte> before(loop.mem.buffer.span().begin(), loop.mem.buffer.span().end());
      const int rc = post(loop.qp, Send{.opcode = opcode,
                                        .id = 1,
                                        .sges = {loop.mem.sge(0, 8)},
                                        .remote_address = loop.mem.buffer.address(64),
                                        .rkey = loop.mem.mr.p->rkey});
      // At post, or as a completion: never silently, never executed.
      if (rc == 0) {
        const ibv_wc wc = loop.scq.next();
        EXPECT_EQ(wc.wr_id, 1u);
        EXPECT_EQ(wc.status, IBV_WC_LOC_QP_OP_ERR);
      } else {
        EXPECT(rc == EINVAL || rc == EOPNOTSUPP);
      }
      expect_bytes(loop.mem.buffer.span(), before, "memory");
    }
  }
}

}  // namespace vrdma::conformance
