// What a device may lack (extended CQ and QP, memory windows, device memory): tested where the device has it, skipped aloud else.
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

template <class T>
T* real_or_skip(const char* what, T* object) {
  if (!object) {
    if (errno == EOPNOTSUPP) skip(text(what, ": EOPNOTSUPP"));
    fail(__FILE__, __LINE__, text(what, ": NULL and ", errno_name(errno)));
  }
  return object;
}

}  // namespace

CONFORMANCE(ExtendedCqIsPolledInSteps, "CQX-01 CQX-02", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Region region(pd, 4096);
  ibv_cq_init_attr_ex init{};
  init.cqe = 32;
  init.wc_flags = IBV_WC_EX_WITH_BYTE_LEN;
  errno = 0;
  ibv_cq_ex* cq = real_or_skip("ibv_create_cq_ex", ibv_create_cq_ex(dev.ctx, &init));
  {
    Qp qp(pd, ibv_cq_ex_to_cq(cq), ibv_cq_ex_to_cq(cq));
    to_init(dev, qp);
    ibv_poll_cq_attr attr{};
    EXPECT_EQ(ibv_start_poll(cq, &attr), ENOENT);
    for (std::uint64_t i = 0; i < 5; ++i) EXPECT_OK(post(qp, Recv{i, {region.sge(0, 8)}}));
    qp.set_state(IBV_QPS_ERR);
    std::uint64_t seen = 0;
    wait_until("five completions", [&] {
      int rc = ibv_start_poll(cq, &attr);
      if (rc == ENOENT) return false;
      EXPECT_OK(rc);
      for (; rc == 0; rc = ibv_next_poll(cq)) {
        EXPECT_EQ(cq->wr_id, seen++);
        EXPECT_EQ(cq->status, IBV_WC_WR_FLUSH_ERR);
        EXPECT_EQ(ibv_wc_read_vendor_err(cq), ibv_wc_read_vendor_err(cq));
      }
      EXPECT_EQ(rc, ENOENT);
      ibv_end_poll(cq);
      return seen == 5;
    });
    EXPECT_EQ(ibv_start_poll(cq, &attr), ENOENT);
  }
  EXPECT_OK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
}

// What is polled a while later says when it completed, not when it was polled.
CONFORMANCE(TimesAreThoseOfCompletion, "CQX-03 CQX-04") {
  Device dev(run.settings);
  Pd pd(dev);
  Region region(pd, 4096);
  ibv_device_attr_ex attr{};
  EXPECT_OK(ibv_query_device_ex(dev.ctx, nullptr, &attr));
  const bool offered = attr.completion_timestamp_mask != 0;
  if (!run.peer.exchange(offered) || !offered) skip("a device has no times of completions");
  EXPECT(attr.hca_core_clock != 0);
  ibv_cq_init_attr_ex init{};
  init.cqe = 64;
  ibv_comp_channel* const channel = ibv_create_comp_channel(dev.ctx);
  EXPECT(channel != nullptr);
  init.channel = channel;
  init.wc_flags = std::uint64_t{IBV_WC_STANDARD_FLAGS} | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
  errno = 0;
  ibv_cq_ex* const cq = real_or_skip("ibv_create_cq_ex with times", ibv_create_cq_ex(dev.ctx, &init));
  const auto clock_ticks = [&] {
    ibv_values_ex values{};
    values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
    EXPECT_OK(ibv_query_rt_values_ex(dev.ctx, &values));
    EXPECT_EQ(values.comp_mask, std::uint32_t{IBV_VALUES_MASK_RAW_CLOCK});
    return static_cast<std::uint64_t>(values.raw_clock.tv_nsec);
  };
  const auto wallclock_ns = [] {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
  };
  {
    Qp qp(pd, ibv_cq_ex_to_cq(cq), ibv_cq_ex_to_cq(cq));
    to_init(dev, qp);
    const Address theirs = run.peer.exchange(address_of(dev, qp));
    for (std::uint64_t i = 0; run.b() && i < 4; ++i) EXPECT_OK(post(qp, Recv{i, {region.sge(0, 64)}}));
    bring_up(dev, qp, theirs);
    std::uint64_t before = clock_ticks();
    for (std::uint64_t i = 0; i < 4; ++i) {
      const std::uint64_t wall_before = wallclock_ns();
      EXPECT_OK(ibv_req_notify_cq(ibv_cq_ex_to_cq(cq), 0));
      run.peer.barrier();
      if (run.a()) EXPECT_OK(post(qp, Send{.id = i, .sges = {region.sge(64, 64)}}));
      ibv_cq* event_of = nullptr;
      void* context = nullptr;
      EXPECT_OK(ibv_get_cq_event(channel, &event_of, &context));  // it has completed
      ibv_ack_cq_events(event_of, 1);
      const std::uint64_t after = clock_ticks(), wall_after = wallclock_ns();
      ::usleep(20'000);  // so that a time of the poll is one of later
      ibv_poll_cq_attr poll{};
      EXPECT_OK(ibv_start_poll(cq, &poll));
      EXPECT_EQ(cq->status, IBV_WC_SUCCESS);
      EXPECT_EQ(cq->wr_id, i);
      const std::uint64_t at = ibv_wc_read_completion_ts(cq), wall = ibv_wc_read_completion_wallclock_ns(cq);
      EXPECT(before <= at && at <= after);
      EXPECT(wall_before - 1'000'000 < wall && wall < wall_after + 1'000'000);  // the wall's clock is read apart from the other
      ibv_end_poll(cq);
      before = at;
    }
    run.peer.barrier();
  }
  EXPECT_OK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
  EXPECT_OK(ibv_destroy_comp_channel(channel));
}

CONFORMANCE(ExtendedCqRefusesUnknownFields, "CQX-03", .solo = true) {
  Device dev(run.settings);
  ibv_cq_init_attr_ex init{};
  init.cqe = 8;
  init.wc_flags = std::uint64_t{1} << 40;
  errno = 0;
  EXPECT(ibv_create_cq_ex(dev.ctx, &init) == nullptr);
  EXPECT(errno == EOPNOTSUPP || errno == EINVAL);
}

CONFORMANCE(ExtendedQpSendsAndWrites, "QP-19") {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 64);
  Region region(pd, 8192);
  ibv_qp_init_attr_ex init{};
  init.send_cq = cq;
  init.recv_cq = cq;
  init.cap = {16, 16, 4, 4, 0};
  init.qp_type = IBV_QPT_RC;
  init.pd = pd;
  init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  init.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE;
  errno = 0;
  ibv_qp* qp = real_or_skip("ibv_create_qp_ex with SEND_OPS_FLAGS", ibv_create_qp_ex(dev.ctx, &init));
  ibv_qp_ex* ex = ibv_qp_to_qp_ex(qp);
  EXPECT(ex != nullptr);
  to_init(dev, qp);
  const Address theirs = run.peer.exchange(address_of(dev, qp));
  const Remote remote = run.peer.exchange(Remote{region.buffer.address(), 8192, region.mr.p->rkey, 0});
  bring_up(dev, qp, theirs);
  std::vector<std::byte> wanted(100);
  fill_pattern(wanted, run.seed);
  if (run.b()) EXPECT_OK(post(qp, Recv{1, {region.sge(4096, 100)}}));
  run.peer.barrier();
  if (run.a()) {
    std::memcpy(region.data(), wanted.data(), 100);
    ibv_wr_start(ex);
    ex->wr_id = 10;
    ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(ex, remote.rkey, remote.address);
    ibv_wr_set_sge(ex, region.mr.p->lkey, region.buffer.address(), 100);
    ex->wr_id = 11;
    ibv_wr_send(ex);
    ibv_wr_set_sge(ex, region.mr.p->lkey, region.buffer.address(), 100);
    EXPECT_OK(ibv_wr_complete(ex));
    cq.expect(10);
    cq.expect(11);
    // What is aborted never happened.
    ibv_wr_start(ex);
    ex->wr_id = 12;
    ibv_wr_send(ex);
    ibv_wr_set_sge(ex, region.mr.p->lkey, region.buffer.address(), 100);
    ibv_wr_abort(ex);
    cq.expect_empty();
  } else {
    EXPECT_EQ(cq.expect(1).byte_len, 100u);
    expect_bytes({region.data(4096), 100}, wanted, "sent");
    expect_bytes({region.data(), 100}, wanted, "written");
  }
  run.peer.barrier();
  EXPECT_OK(ibv_destroy_qp(qp));
  run.peer.barrier();
}

CONFORMANCE(DeviceMemoryChecksItsBounds, "DM-01 DM-02", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  ibv_alloc_dm_attr attr{};
  attr.length = 256;
  errno = 0;
  ibv_dm* dm = real_or_skip("ibv_alloc_dm", ibv_alloc_dm(dev.ctx, &attr));
  char bytes[64] = {1, 2, 3, 4};
  char back[64] = {};
  EXPECT_OK(ibv_memcpy_to_dm(dm, 8, bytes, 64));
  EXPECT_OK(ibv_memcpy_from_dm(back, dm, 8, 64));
  EXPECT(std::memcmp(bytes, back, 64) == 0);
  EXPECT_NE(ibv_memcpy_to_dm(dm, 2, bytes, 4), 0);
  EXPECT_NE(ibv_memcpy_to_dm(dm, 252, bytes, 8), 0);
  EXPECT(ibv_reg_dm_mr(pd, dm, 0, 256, IBV_ACCESS_LOCAL_WRITE) == nullptr);
  EXPECT(ibv_reg_dm_mr(pd, dm, 0, 260, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ZERO_BASED) == nullptr);
  ibv_mr* mr = ibv_reg_dm_mr(pd, dm, 0, 256, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ZERO_BASED);
  EXPECT(mr != nullptr);
  EXPECT_ERRNO(ibv_free_dm(dm), EBUSY);
  EXPECT_OK(ibv_dereg_mr(mr));
  EXPECT_OK(ibv_free_dm(dm));
}

CONFORMANCE(DeviceMemoryIsReachedByPeers, "DM-03 DM-02") {
  Link link(run);
  constexpr std::size_t bytes = 32 * 1024, first = 64;  // the region begins behind the device memory's first bytes
  ibv_alloc_dm_attr attr{};
  attr.length = bytes + first;
  errno = 0;
  ibv_dm* const dm = real_or_skip("ibv_alloc_dm", ibv_alloc_dm(link.dev.ctx, &attr));
  const int access = static_cast<int>(all_access) | IBV_ACCESS_ZERO_BASED;
  ibv_mr* const mr = ibv_reg_dm_mr(link.pd, dm, first, bytes, static_cast<unsigned>(access));
  EXPECT(mr != nullptr);
  const Remote theirs = run.peer.exchange(Remote{0, bytes, mr->rkey, 0});
  std::vector<std::byte> wanted(bytes), found(bytes + first);
  fill_pattern(wanted, run.seed);
  if (run.a()) {
    EXPECT_OK(ibv_memcpy_to_dm(dm, first, wanted.data(), bytes));
    EXPECT_OK(post(link.qp, Send{.opcode = IBV_WR_RDMA_WRITE, .id = 1, .sges = {{0, bytes, mr->lkey}}, .remote_address = theirs.address, .rkey = theirs.rkey}));
    link.scq.expect(1);
  }
  run.peer.barrier();
  if (run.b()) {
    EXPECT_OK(ibv_memcpy_from_dm(found.data(), dm, 0, bytes + first));
    expect_bytes(std::span(found).subspan(first), wanted, "written");
    for (std::size_t i = 0; i < first; ++i) EXPECT_EQ(found[i], std::byte{0});
    const std::uint64_t count = 5;
    EXPECT_OK(ibv_memcpy_to_dm(dm, first + 16, &count, sizeof(count)));
  }
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, Send{.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = 2, .sges = {{0, 8, mr->lkey}}, .remote_address = 16, .rkey = theirs.rkey, .compare_add = 3}));
    link.scq.expect(2);
    EXPECT_OK(ibv_memcpy_from_dm(found.data(), dm, first, 8));
    EXPECT_EQ(*reinterpret_cast<const std::uint64_t*>(found.data()), 5u);
    Send beyond{.opcode = IBV_WR_RDMA_READ, .id = 3, .sges = {link.mem.sge(0, 64)}, .remote_address = bytes - 32, .rkey = theirs.rkey};
    EXPECT_OK(post(link.qp, beyond));
    link.scq.expect(3, IBV_WC_REM_ACCESS_ERR);
  }
  run.peer.barrier();
  if (run.b()) {
    EXPECT_OK(ibv_memcpy_from_dm(found.data(), dm, first + 16, 8));
    EXPECT_EQ(*reinterpret_cast<const std::uint64_t*>(found.data()), 8u);
  }
  link.reconnect();
  EXPECT_OK(ibv_dereg_mr(mr));
  EXPECT_OK(ibv_free_dm(dm));
  run.peer.barrier();
}

}  // namespace vrdma::conformance
