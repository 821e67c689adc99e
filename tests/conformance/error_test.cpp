// The table of errors: what the requester's completion says, what happens at the responder, what becomes of both QPs.
#include <atomic>
#include <cerrno>
#include <cstring>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

CONFORMANCE(AccessErrorsEndBothQps, "ERR-01 ERR-02 ERR-12 WC-02") {
  Link link(run);
  Mr gone(link.pd, link.mem.data(), 4096);
  const Remote dead = run.peer.exchange(Remote{link.mem.buffer.address(), 4096, gone.p->rkey, 0});
  const std::uint32_t lkey = run.peer.exchange(link.mem.mr.p->lkey);
  gone.dereg();
  run.peer.barrier();
  for (const ibv_wr_opcode opcode :
       {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP}) {
    if (opcode >= IBV_WR_ATOMIC_CMP_AND_SWP && link.dev.attr.atomic_cap == IBV_ATOMIC_NONE) continue;
    for (const std::uint32_t key : {link.remote.rkey ^ 1, link.remote.rkey + 0x100, 0u, ~0u, dead.rkey}) {
      if (key == link.remote.rkey || key == lkey) continue;
      const Note note("opcode ", opcode, " rkey ", hex(key));
      Send request = link.read(1, 0, 0, 8);
      request.opcode = opcode;
      request.rkey = key;
      expect_fault(link, {"wrong rkey", request});
    }
  }
  // A WRITE_WITH_IMM with a wrong key ends the receive that its immediate was for (IBA 11.6.2, Local Access Error); what is behind it is flushed.
  Send request = link.write(5, 0, 0, 8);
  request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  request.rkey ^= 0x7f00;
  if (run.b()) {
    EXPECT_OK(post(link.qp, link.recv(77, 0, 64)));
    EXPECT_OK(post(link.qp, link.recv(78, 0, 64)));
  }
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, request));
    link.scq.expect(5, IBV_WC_REM_ACCESS_ERR);
  } else {
    link.rcq.expect(77, IBV_WC_LOC_ACCESS_ERR);
    link.rcq.expect(78, IBV_WC_WR_FLUSH_ERR);
    (void)link.dev.wait_event(IBV_EVENT_QP_ACCESS_ERR);
  }
  link.reconnect();
  expect_fault(link, {"wrong rkey of a WRITE with immediate, no receive posted", request});  // not kept waiting for one
}

CONFORMANCE(MisalignedAtomicsAreInvalidRequests, "ERR-03") {
  Link link(run);
  if (link.dev.attr.atomic_cap == IBV_ATOMIC_NONE) skip("no atomics");
  fill_pattern(link.mem.buffer.span(), 4);
  run.peer.barrier();
  for (const ibv_wr_opcode opcode : {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP}) {
    for (std::size_t offset = 1; offset < 8; ++offset) {
      Send request = link.read(1, 4096, 1024 + offset, 8);
      request.opcode = opcode;
      request.compare_add = 1;
      expect_fault(link, {"misaligned atomic", request, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR});
    }
  }
  std::vector<std::byte> wanted(link.mem.buffer.size());
  fill_pattern(wanted, 4);
  expect_bytes(link.mem.buffer.span(), wanted, "memory after refused atomics");
}

CONFORMANCE(AReceiveBufferTooSmallEndsBothQps, "ERR-04 ERR-12") {
  Link link(run);
  for (const std::size_t room : {0u, 1u, 63u, 4096u}) {
    const Note note("room ", room);
    std::vector<std::byte> before(link.mem.buffer.span().begin(), link.mem.buffer.span().end());
    if (run.b()) {
      EXPECT_OK(post(link.qp, Recv{1, room ? std::vector{link.mem.sge(128, room)} : std::vector<ibv_sge>{}}));
      EXPECT_OK(post(link.qp, link.recv(2, 0, 64)));
    }
    run.peer.barrier();
    if (run.a()) {
      EXPECT_OK(post(link.qp, link.send(10, 0, room + 1)));
      EXPECT_OK(post(link.qp, link.send(11, 0, 1)));
      link.scq.expect(10, IBV_WC_REM_INV_REQ_ERR);
      link.scq.expect(11, IBV_WC_WR_FLUSH_ERR);
    } else {
      link.rcq.expect(1, IBV_WC_LOC_LEN_ERR);
      link.rcq.expect(2, IBV_WC_WR_FLUSH_ERR);
      link.qp.wait_state(IBV_QPS_ERR);
      // Behind the room given, nothing was touched.
      expect_bytes({link.mem.data(128 + room), 4096}, std::span(before).subspan(128 + room, 4096), "behind the buffer");
      ibv_async_event event{};
      while (link.dev.take_event(event)) ibv_ack_async_event(&event);  // QP_REQ_ERR is allowed beside the completion
    }
    link.reconnect();
  }
}

CONFORMANCE(ABadReceiveSgeIsTheReceiversError, "ERR-05 ERR-12") {
  Link link(run);
  Region small(link.pd, 100);
  const struct {
    const char* name;
    ibv_sge sge;
  } cases[] = {{"wrong key", {link.mem.buffer.address(), 64, link.mem.mr.p->lkey ^ 0x3300}},
               {"beyond the end", {small.buffer.address(50), 64, small.mr.p->lkey}},
               {"before the beginning", {small.buffer.address() - 1, 64, small.mr.p->lkey}},
               {"wraps around", {~std::uint64_t{0} - 10, 64, small.mr.p->lkey}}};
  for (const auto& c : cases) {
    const Note note(c.name);
    if (run.b()) EXPECT_OK(post(link.qp, Recv{1, {c.sge}}));
    run.peer.barrier();
    if (run.a()) {
      EXPECT_OK(post(link.qp, link.send(2, 0, 64)));
      link.scq.expect(2, IBV_WC_REM_OP_ERR);
      link.qp.wait_state(IBV_QPS_ERR);
    } else {
      link.rcq.expect(1, IBV_WC_LOC_PROT_ERR);
      link.qp.wait_state(IBV_QPS_ERR);
      ibv_async_event event{};
      while (link.dev.take_event(event)) ibv_ack_async_event(&event);
    }
    link.reconnect();
  }
}

CONFORMANCE(ABadReceiveSgeEndsAnUnconfirmedConnectionToo, "ERR-05 ERR-12") {
  LinkSpec spec;
  spec.qp.type = IBV_QPT_UC;
  Link link(run, spec);
  if (run.b()) {
    EXPECT_OK(post(link.qp, Recv{1, {{link.mem.buffer.address(), 64, link.mem.mr.p->lkey ^ 0x3300}}}));
    EXPECT_OK(post(link.qp, link.recv(2, 0, 64)));
  }
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, link.send(3, 0, 64)));
    link.scq.expect(3);  // nobody tells the sender
  } else {
    link.rcq.expect(1, IBV_WC_LOC_PROT_ERR);
    link.rcq.expect(2, IBV_WC_WR_FLUSH_ERR);
    link.qp.wait_state(IBV_QPS_ERR);
  }
  run.peer.barrier();
}

// What an adapter does not write to it does not look at: perftest's shared receive queues count on that.
CONFORMANCE(AReceiveSgeMayEndBeyondItsRegionWhereNoMessageGetsThere, "ERR-05 ERR-12") {
  constexpr std::uint64_t fitting = 40;
  Link link(run);
  Region small(link.pd, 100);
  const ibv_sge beyond{small.buffer.address(50), 4096, small.mr.p->lkey};
  for (std::uint64_t id = 1; id <= fitting; ++id) {
    if (run.b()) EXPECT_OK(post(link.qp, id % 2 != 0 ? Recv{id, {beyond}} : Recv{id, {small.sge(0, 10), beyond}}));
    run.peer.barrier();
    const std::size_t bytes = id % 2 != 0 ? 50 : 60;
    if (run.a()) {
      link.mem.buffer.span()[bytes - 1] = static_cast<std::byte>(id);
      EXPECT_OK(post(link.qp, link.send(id, 0, bytes)));
      link.scq.expect(id);
    } else {
      EXPECT_EQ(link.rcq.expect(id).byte_len, bytes);
      EXPECT_EQ(std::to_integer<std::uint64_t>(small.buffer.span()[99]), id);
    }
  }
  if (run.b()) EXPECT_OK(post(link.qp, Recv{fitting + 1, {beyond}}));
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, link.send(fitting + 1, 0, 51)));
    link.scq.expect(fitting + 1, IBV_WC_REM_OP_ERR);
  } else {
    link.rcq.expect(fitting + 1, IBV_WC_LOC_PROT_ERR);
  }
  link.qp.wait_state(IBV_QPS_ERR);
  run.peer.barrier();
}

CONFORMANCE(ABadOwnSgeHarmsOnlyItsOwner, "ERR-06 ERR-12 WR-07") {
  Link link(run);
  Region small(link.pd, 100);
  const struct {
    const char* name;
    ibv_sge sge;
  } cases[] = {{"wrong key", {link.mem.buffer.address(), 64, link.mem.mr.p->lkey ^ 0x3300}},
               {"beyond the end", {small.buffer.address(50), 64, small.mr.p->lkey}},
               {"before the beginning", {small.buffer.address() - 1, 64, small.mr.p->lkey}},
               {"wraps around", {~std::uint64_t{0} - 10, 64, small.mr.p->lkey}}};
  for (const auto& c : cases) {
    for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE}) {
      const Note note(c.name, " opcode ", opcode);
      if (run.b()) EXPECT_OK(post(link.qp, link.recv(1, 0, 64)));
      run.peer.barrier();
      if (run.a()) {
        Send request = link.write(2, 0, 0, 64);
        request.opcode = opcode;
        request.sges = {c.sge};
        request.flags = 0;
        EXPECT_OK(post(link.qp, request));
        EXPECT_OK(post(link.qp, link.send(3, 0, 8)));
        link.scq.expect(2, IBV_WC_LOC_PROT_ERR);
        link.scq.expect(3, IBV_WC_WR_FLUSH_ERR);
        link.qp.wait_state(IBV_QPS_ERR);
        run.peer.barrier();
      } else {
        run.peer.barrier();
        link.rcq.expect_empty();
        EXPECT_EQ(link.qp.state(), IBV_QPS_RTS);
        link.dev.expect_no_event();
      }
      link.reconnect();
    }
  }
}

CONFORMANCE(LengthsThatCannotBeAreLocalErrors, "ERR-07") {
  Link link(run);
  struct Case {
    const char* name;
    Send request;
  };
  std::vector<Case> cases;
  const auto huge = static_cast<std::uint32_t>(link.dev.port.max_msg_sz);
  Send too_long = link.write(1, 0, 0, 0);
  // Together beyond max_msg_sz; the keys are good, the sum is what is wrong (or, first, the bounds).
  too_long.sges = {{link.mem.buffer.address(), huge, link.mem.mr.p->lkey}, {link.mem.buffer.address(), huge, link.mem.mr.p->lkey}};
  cases.push_back({"beyond max_msg_sz", too_long});
  if (link.dev.attr.atomic_cap != IBV_ATOMIC_NONE) {
    for (const std::uint32_t bytes : {0u, 4u, 7u, 9u, 16u}) {
      Send atomic = link.read(1, 0, 0, bytes);
      atomic.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
      if (bytes == 0) atomic.sges.clear();
      cases.push_back({"atomic that is not 8 bytes", atomic});
    }
  }
  for (const Case& c : cases) {
    const Note note(c.name);
    if (run.a()) {
      const int rc = post(link.qp, c.request);
      if (rc == 0) {
        const ibv_wc wc = link.scq.next();
        EXPECT(wc.status == IBV_WC_LOC_LEN_ERR || wc.status == IBV_WC_LOC_PROT_ERR || wc.status == IBV_WC_LOC_QP_OP_ERR);
      } else {
        EXPECT_ERRNO(rc, EINVAL);
      }
    }
    run.peer.barrier();
    if (run.b()) {
      EXPECT_EQ(link.qp.state(), IBV_QPS_RTS);
      link.dev.expect_no_event();
    }
    link.reconnect();
  }
}

CONFORMANCE(AnErrorFlushesBothQueuesInOrder, "ERR-12 WR-08 QP-15") {
  LinkSpec spec;
  spec.path.rnr_retry = 7;
  spec.path.min_rnr_timer = 22;
  Link link(run, spec);
  // b has no receives, so that a's sends stay where they are until a's QP is moved to ERR by hand.
  if (run.a()) {
    for (std::uint64_t i = 0; i < 20; ++i) {
      Send send = link.send(i, 0, 16);
      send.flags = i % 2 ? static_cast<unsigned>(IBV_SEND_SIGNALED) : 0u;
      EXPECT_OK(post(link.qp, send));
      EXPECT_OK(post(link.qp, link.recv(100 + i, 0, 16)));
    }
    link.qp.set_state(IBV_QPS_ERR);
    for (std::uint64_t i = 0; i < 20; ++i) link.scq.expect(i, IBV_WC_WR_FLUSH_ERR);
    for (std::uint64_t i = 0; i < 20; ++i) link.rcq.expect(100 + i, IBV_WC_WR_FLUSH_ERR);
    link.scq.expect_empty();
    link.rcq.expect_empty();
  }
  run.peer.barrier();
}

// Whoever writes to the memory of a queue pair that meets an error is at its receive queue's connection in that moment, though not at its requests.
CONFORMANCE(WhatWasReceivedBeforeAnErrorStaysReceivedWhileThePeerPosts, "ERR-12 WC-02", .timeout_s = 120) {
  constexpr std::uint64_t receives = 48, sends = 24, under_way = 4;
  constexpr std::size_t bytes = 128 * 1024;
  LinkSpec spec;
  spec.bytes = 2 * bytes;
  spec.path.rnr_retry = 7;
  Link link(run, spec);
  for (std::uint64_t round = 0; round < 16; ++round) {
    const Note note("round ", round);
    if (run.a()) {
      for (std::uint64_t i = 0; i < receives; ++i) EXPECT_OK(post(link.qp, link.recv(i, bytes, 64)));
      std::memset(link.mem.data(), 0, bytes);
      run.peer.barrier();
      run.peer.barrier();  // b has sent
      std::byte* const last = link.mem.data(bytes - 1);
      wait_until("WRITEs that come", [&] { return std::atomic_ref(*last).load() == std::byte{2}; });
      Send request = link.write(1, bytes, 0, 8);
      request.rkey ^= 0x7f00;
      EXPECT_OK(post(link.qp, request));
      link.scq.expect(1, IBV_WC_REM_ACCESS_ERR);
      for (std::uint64_t i = 0; i < receives; ++i) link.rcq.expect(i, i < sends ? IBV_WC_SUCCESS : IBV_WC_WR_FLUSH_ERR);
      link.rcq.expect_empty();
    } else {
      run.peer.barrier();
      for (std::uint64_t i = 0; i < sends; ++i) {
        EXPECT_OK(post(link.qp, link.send(i, bytes, 64)));
        link.scq.expect(i);
      }
      run.peer.barrier();
      std::uint64_t posted = 0, done = 0, failed = 0;
      while (failed == 0 || done < posted) {
        while (failed == 0 && posted - done < under_way) {
          std::memset(link.mem.data(), posted < under_way ? 1 : 2, bytes);
          EXPECT_OK(post(link.qp, link.write(posted++, 0, 0, bytes)));
        }
        failed += link.scq.next().status != IBV_WC_SUCCESS;
        ++done;
      }
      (void)link.dev.wait_event(IBV_EVENT_QP_ACCESS_ERR);
    }
    link.reconnect();
  }
}

CONFORMANCE(AMessageInRtrRaisesCommEst, "ASY-02 ASY-01 QP-15") {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 16);
  Region region(pd, 4096);
  Qp qp(pd, cq, cq);
  to_init(dev, qp);
  const Address theirs = run.peer.exchange(address_of(dev, qp));
  to_rtr(dev, qp, theirs);
  if (run.b()) {
    EXPECT_OK(post(qp, Recv{1, {region.sge(0, 64)}}));
    run.peer.barrier();
    cq.expect(1);  // a QP in RTR receives
    ibv_async_event event{};
    wait_until("COMM_EST", [&] {
      if (!dev.take_event(event)) return false;
      ibv_ack_async_event(&event);
      return event.event_type == IBV_EVENT_COMM_EST;
    });
    EXPECT(event.element.qp == qp.p);
    to_rts(dev, qp);
  } else {
    to_rts(dev, qp);
    run.peer.barrier();
    EXPECT_OK(post(qp, Send{.id = 2, .sges = {region.sge(0, 16)}}));
    cq.expect(2);
  }
  run.peer.barrier();
}

}  // namespace vrdma::conformance
