// When and how keys, bounds and rights of a registration are checked; mr_test.cpp has registration itself.
#include <cstring>
#include <memory>
#include <set>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

CONFORMANCE(KeysAreCheckedWhenARequestExecutes, "MR-11 ERR-05") {
  Link link(run);
  if (run.b()) {
    auto doomed = std::make_unique<Region>(link.pd, 4096);
    EXPECT_OK(post(link.qp, Recv{7, {doomed->sge(0, 4096)}}));
    doomed->mr.dereg();
    run.peer.barrier();
    link.rcq.expect(7, IBV_WC_LOC_PROT_ERR);
    link.qp.wait_state(IBV_QPS_ERR);
  } else {
    run.peer.barrier();
    EXPECT_OK(post(link.qp, link.send(1, 0, 64)));
    link.scq.expect(1, IBV_WC_REM_OP_ERR);
    link.qp.wait_state(IBV_QPS_ERR);
  }
  link.reconnect();
  run.peer.barrier();
}

CONFORMANCE(KeysOfAnotherPdAreRefused, "MR-12 ERR-01 ERR-05 ERR-06") {
  Link link(run);
  Pd other(link.dev);
  Region foreign(other, 4096);
  const Remote theirs = run.peer.exchange(Remote{foreign.buffer.address(), 4096, foreign.mr.p->rkey, 0});
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    Send request = link.write(1, 0, 0, 64);
    request.opcode = opcode;
    request.remote_address = theirs.address;
    request.rkey = theirs.rkey;
    expect_fault(link, {"remote key of another PD", request});
  }
  // Local key of another PD, requester.
  if (run.a()) {
    EXPECT_OK(post(link.qp, Send{.id = 2, .sges = {foreign.sge(0, 64)}}));
    link.scq.expect(2, IBV_WC_LOC_PROT_ERR);
  }
  link.reconnect();
  // Local key of another PD, receiver.
  if (run.b()) EXPECT_OK(post(link.qp, Recv{3, {foreign.sge(0, 64)}}));
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, link.send(4, 0, 64)));
    link.scq.expect(4, IBV_WC_REM_OP_ERR);
  } else {
    link.rcq.expect(3, IBV_WC_LOC_PROT_ERR);
  }
  link.reconnect();
}

CONFORMANCE(BoundsAreCheckedToTheByte, "MR-13 ERR-02") {
  LinkSpec spec;
  Link link(run, spec);
  constexpr std::size_t begin = 16384;
  constexpr std::size_t bytes = 10007;
  Mr window(link.pd, link.mem.data(begin), bytes);
  const Remote target = run.peer.exchange(Remote{link.mem.buffer.address(begin), bytes, window.p->rkey, 0});
  fill_pattern(link.mem.buffer.span(), run.seed + (run.a() ? 1 : 2));
  run.peer.barrier();
  struct Case {
    std::int64_t from;
    std::size_t bytes;
    bool legal;
  };
  const Case cases[] = {{0, bytes, true},
                        {0, 1, true},
                        {bytes - 1, 1, true},
                        {bytes - 8, 8, true},
                        {-1, 1, false},
                        {-1, 2, false},
                        {bytes, 1, false},
                        {bytes - 1, 2, false},
                        {0, bytes + 1, false},
                        {bytes - 7, 8, false},
                        {-4096, 4096, false},
                        {bytes + 100000, 8, false}};
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    for (const Case& c : cases) {
      const Note note("opcode ", opcode, " from ", c.from, " length ", c.bytes);
      Send request{.opcode = opcode,
                   .id = 1,
                   .sges = {link.mem.sge(32768, c.bytes)},
                   .remote_address = target.address + static_cast<std::uint64_t>(c.from),
                   .rkey = target.rkey};
      if (!c.legal) {
        expect_fault(link, {"out of bounds", request});
      } else {
        if (run.a()) {
          EXPECT_OK(post(link.qp, request));
          link.scq.expect(1);
        }
        run.peer.barrier();
      }
    }
    // Addresses that wrap around must not pass a naive sum.
    for (const std::uint64_t address : {~std::uint64_t{0}, ~std::uint64_t{0} - 7, ~std::uint64_t{0} - 63}) {
      expect_fault(link, {"wrap-around", Send{.opcode = opcode,
                                              .id = 1,
                                              .sges = {link.mem.sge(0, 64)},
                                              .remote_address = address,
                                              .rkey = target.rkey}});
    }
  }
  // Local bounds, at both ends.
  if (run.a()) fill_pattern(link.mem.buffer.span(), 5);
  for (const bool before : {false, true}) {
    if (run.a()) {
      ibv_sge sge{link.mem.buffer.address(begin) - (before ? 1 : 0), static_cast<std::uint32_t>(bytes + (before ? 0 : 1)), window.p->lkey};
      EXPECT_OK(post(link.qp, Send{.opcode = IBV_WR_RDMA_WRITE,
                                   .id = 5,
                                   .sges = {sge},
                                   .remote_address = link.remote.address,
                                   .rkey = link.remote.rkey}));
      link.scq.expect(5, IBV_WC_LOC_PROT_ERR);
    }
    link.reconnect();
  }
}

CONFORMANCE(RightsOfTheMrAreCheckedForEachOperation, "MR-14 ERR-02") {
  Link link(run);
  constexpr unsigned lw = IBV_ACCESS_LOCAL_WRITE;
  for (const unsigned access : {0u, lw, lw | IBV_ACCESS_REMOTE_WRITE, lw | IBV_ACCESS_REMOTE_ATOMIC,
                                static_cast<unsigned>(IBV_ACCESS_REMOTE_READ), lw | IBV_ACCESS_REMOTE_READ, all_access}) {
    Region region(link.pd, 4096, access);
    const Remote target = run.peer.exchange(Remote{region.buffer.address(), 4096, region.mr.p->rkey, 0});
    struct Operation {
      ibv_wr_opcode opcode;
      unsigned needs;
    };
    for (const Operation op : {Operation{IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE},
                               Operation{IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ},
                               Operation{IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_REMOTE_ATOMIC},
                               Operation{IBV_WR_ATOMIC_CMP_AND_SWP, IBV_ACCESS_REMOTE_ATOMIC}}) {
      if (op.needs == IBV_ACCESS_REMOTE_ATOMIC && link.dev.attr.atomic_cap == IBV_ATOMIC_NONE) continue;
      const Note note("MR access ", access, " opcode ", op.opcode);
      const Send request{.opcode = op.opcode,
                         .id = 1,
                         .sges = {link.mem.sge(0, 8)},
                         .remote_address = target.address + 64,
                         .rkey = target.rkey,
                         .compare_add = 1,
                         .swap = 2};
      if (!(access & op.needs)) {
        expect_fault(link, {"MR lacks the right", request});
      } else {
        if (run.a()) {
          EXPECT_OK(post(link.qp, request));
          link.scq.expect(1);
        }
        run.peer.barrier();
      }
    }
    // Nothing but permitted requests touched the memory.
    if (run.b() && !(access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC))) {
      for (std::size_t i = 0; i < 4096; ++i) EXPECT(region.data()[i] == std::byte{0});
    }
    // A receive needs LOCAL_WRITE, a send needs nothing.
    if (run.b()) EXPECT_OK(post(link.qp, Recv{2, {region.sge(0, 64)}}));
    run.peer.barrier();
    if (run.a()) {
      EXPECT_OK(post(link.qp, Send{.id = 3, .sges = {region.sge(128, 32)}}));
      link.scq.expect(3, access & lw ? IBV_WC_SUCCESS : IBV_WC_REM_OP_ERR);
    } else {
      link.rcq.expect(2, access & lw ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR);
    }
    link.reconnect();
  }
}

CONFORMANCE(ReadIntoMemoryWithoutLocalWriteIsALocalError, "MR-14 ERR-06") {
  Link link(run);
  if (run.a()) {
    Region target(link.pd, 4096, 0);
    fill_pattern(target.buffer.span(), 3);
    Send read = link.read(1, 0, 0, 64);
    read.sges = {target.sge(0, 64)};
    EXPECT_OK(post(link.qp, read));
    const ibv_wc wc = link.scq.next();
    EXPECT_EQ(wc.wr_id, 1u);
    EXPECT(wc.status == IBV_WC_LOC_PROT_ERR || wc.status == IBV_WC_LOC_ACCESS_ERR);
    std::vector<std::byte> wanted(4096);
    fill_pattern(wanted, 3);
    expect_bytes(target.buffer.span(), wanted, "memory without LOCAL_WRITE");
  }
  link.reconnect();
}

CONFORMANCE(RequestsOfZeroBytesNeverCheckKeys, "MR-15 WR-15") {
  Link link(run);
  if (run.b()) {
    EXPECT_OK(post(link.qp, Recv{10, {}}));
    EXPECT_OK(post(link.qp, Recv{11, {}}));
  }
  run.peer.barrier();
  if (run.a()) {
    const std::uint64_t nowhere = 0xdead'0000'0000;
    EXPECT_OK(post(link.qp, Send{.opcode = IBV_WR_RDMA_WRITE, .id = 1, .remote_address = nowhere, .rkey = 0xbad}));
    link.scq.expect(1);
    EXPECT_OK(post(link.qp, Send{.opcode = IBV_WR_RDMA_READ, .id = 2, .remote_address = nowhere, .rkey = 0xbad}));
    link.scq.expect(2);
    EXPECT_OK(post(link.qp, Send{.id = 3}));
    link.scq.expect(3);
    EXPECT_OK(post(link.qp, Send{.opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .id = 4, .imm = 5, .remote_address = nowhere, .rkey = 0xbad}));
    link.scq.expect(4);
  } else {
    EXPECT_EQ(link.rcq.expect(10).byte_len, 0u);
    EXPECT_EQ(link.rcq.expect(11).byte_len, 0u);
  }
  run.peer.barrier();
}

namespace {
// At the responder. Hardware names this an invalid request or an access error, with the event to match.
void expect_request_refused(Link& link) {
  link.qp.wait_state(IBV_QPS_ERR);
  ibv_async_event event{};
  wait_until("an async event for the refused request", [&] {
    if (!link.dev.take_event(event)) return false;
    ibv_ack_async_event(&event);
    return event.event_type == IBV_EVENT_QP_ACCESS_ERR || event.event_type == IBV_EVENT_QP_REQ_ERR;
  });
}
}  // namespace

CONFORMANCE(QpAccessFlagsBoundRemoteOperations, "MR-16 ERR-02") {
  Link link(run);
  for (const unsigned access : {0u, static_cast<unsigned>(IBV_ACCESS_REMOTE_WRITE), static_cast<unsigned>(IBV_ACCESS_REMOTE_READ),
                                static_cast<unsigned>(IBV_ACCESS_REMOTE_ATOMIC)}) {
    link.spec.path.access = access;
    link.reconnect();
    struct Operation {
      ibv_wr_opcode opcode;
      unsigned needs;
    };
    for (const Operation op : {Operation{IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE},
                               Operation{IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ},
                               Operation{IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_REMOTE_ATOMIC}}) {
      if (op.needs == IBV_ACCESS_REMOTE_ATOMIC && link.dev.attr.atomic_cap == IBV_ATOMIC_NONE) continue;
      const Note note("QP access ", access, " opcode ", op.opcode);
      const Send request{.opcode = op.opcode,
                         .id = 1,
                         .sges = {link.mem.sge(0, 8)},
                         .remote_address = link.remote.address,
                         .rkey = link.remote.rkey};
      if (access & op.needs) {
        if (run.a()) {
          EXPECT_OK(post(link.qp, request));
          link.scq.expect(1);
        }
        run.peer.barrier();
        continue;
      }
      if (run.a()) {
        EXPECT_OK(post(link.qp, request));
        const ibv_wc wc = link.scq.next();
        EXPECT(wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_REM_INV_REQ_ERR);
      } else {
        expect_request_refused(link);
      }
      link.reconnect();
    }
  }
}

// A transition that is allowed in RTS (IBA 11.2.5.2): what was granted counts from then on, and what was taken away no longer.
CONFORMANCE(QpAccessFlagsChangeInRts, "MR-16") {
  LinkSpec spec;
  spec.path.access = 0;
  Link link(run, spec);
  const auto allow = [&](unsigned access) {
    if (run.b()) {
      Modify change{};
      change.attr.qp_access_flags = access;
      change.mask = IBV_QP_ACCESS_FLAGS;
      EXPECT_OK(apply(link.qp, change));
    }
    run.peer.barrier();
  };
  allow(IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
  if (run.a()) {
    EXPECT_OK(post(link.qp, link.write(1, 0, 0, 64)));
    link.scq.expect(1);
    EXPECT_OK(post(link.qp, link.read(2, 0, 0, 64)));
    link.scq.expect(2);
  }
  run.peer.barrier();
  allow(IBV_ACCESS_REMOTE_READ);
  if (run.a()) {
    EXPECT_OK(post(link.qp, link.read(3, 0, 0, 64)));
    link.scq.expect(3);
    EXPECT_OK(post(link.qp, link.write(4, 0, 0, 64)));
    const ibv_wc wc = link.scq.next();
    EXPECT_EQ(wc.wr_id, 4u);
    EXPECT(wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_REM_INV_REQ_ERR);
  } else {
    expect_request_refused(link);
  }
  run.peer.barrier();
}

CONFORMANCE(AfterDeregNotAByteIsWritten, "MR-17 MR-18", .timeout_s = 120) {
  LinkSpec spec;
  spec.qp.send_wr = 256;
  spec.cq_depth = 512;
  spec.bytes = 1 << 20;
  spec.path.retry_count = 1;
  Link link(run, spec);
  std::set<std::uint32_t> used;
  for (int round = 0; round < 20; ++round) {
    const Note note("round ", round);
    Buffer target(256 * 1024);
    if (run.b()) {
      Mr mr(link.pd, target.data(), target.size());
      EXPECT(used.insert(mr.p->rkey).second);  // not again within these rounds
      run.peer.send(Remote{target.address(), target.size(), mr.p->rkey, 0});
      // Wait until writes have begun to arrive, then pull the registration away from under them.
      const volatile std::byte* last = target.data() + target.size() - 1;
      wait_until("the first write", [&] { return *last != std::byte{0}; });
      mr.dereg();
      std::vector<std::byte> seen(target.size());
      std::memset(target.data(), 0x3c, target.size());
      std::memcpy(seen.data(), target.data(), seen.size());
      run.peer.barrier();  // the other side has its error: nothing is in flight any more
      expect_bytes(target.span(), seen, "memory after dereg");
      link.qp.wait_state(IBV_QPS_ERR);
      (void)link.dev.wait_event(IBV_EVENT_QP_ACCESS_ERR);
    } else {
      const Remote remote = run.peer.receive<Remote>();
      std::memset(link.mem.data(), 0xff, target.size());
      bool failed = false;
      std::uint64_t posted = 0;
      std::uint64_t done = 0;
      const Deadline deadline;
      while (!failed || done < posted) {
        EXPECT(!deadline.passed());
        if (!failed && posted - done < 64) {
          Send write = link.write(posted, 0, 0, target.size());
          write.remote_address = remote.address;
          write.rkey = remote.rkey;
          EXPECT_OK(post(link.qp, write));
          ++posted;
        }
        ibv_wc wc{};
        if (ibv_poll_cq(link.scq, 1, &wc) == 1) {
          EXPECT_EQ(wc.wr_id, done);
          ++done;
          if (failed) {
            EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
          } else if (wc.status != IBV_WC_SUCCESS) {
            EXPECT_EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
            failed = true;
          }
        }
      }
      run.peer.barrier();
    }
    link.reconnect();
  }
}

// Who takes its queue pair out of service has its memory to itself from then on; no completion would tell of a WRITE that still comes. Parts of
// pages, which the host may reach otherwise than whole ones.
CONFORMANCE(AfterErrNotAByteIsWritten, "QP-04", .timeout_s = 120) {
  LinkSpec spec;
  spec.qp.send_wr = 64;
  spec.bytes = 128 * 1024;
  spec.path.retry_count = 1;
  Link link(run, spec);
  for (const std::size_t bytes : {std::size_t{64}, std::size_t{3000}, std::size_t{100'007}})
    for (int round = 0; round < 12; ++round) {
      const Note note("round ", round, " bytes ", bytes);
      Buffer target(bytes + 64);
      std::byte* const memory = target.data() + 7;
      if (run.b()) {
        Mr mr(link.pd, memory, bytes);
        run.peer.send(Remote{reinterpret_cast<std::uint64_t>(memory), bytes, mr.p->rkey, 0});
        const volatile std::byte* const last = memory + bytes - 1;
        wait_until("the first write", [&] { return *last != std::byte{0}; });
        link.qp.set_state(IBV_QPS_ERR);
        std::memset(memory, 0x3c, bytes);
        const std::vector<std::byte> seen(memory, memory + bytes);
        run.peer.barrier();  // the other side has its error: nothing is in flight any more
        expect_bytes({memory, bytes}, seen, "memory after ERR");
      } else {
        const Remote remote = run.peer.receive<Remote>();
        std::memset(link.mem.data(), 0xff, bytes);
        std::uint64_t posted = 0, done = 0;
        bool failed = false;
        const Deadline deadline;
        while (!failed || done < posted) {
          EXPECT(!deadline.passed());
          if (!failed && posted - done < 32) {
            Send write = link.write(posted, 0, 0, bytes);
            write.remote_address = remote.address;
            write.rkey = remote.rkey;
            EXPECT_OK(post(link.qp, write));
            ++posted;
          }
          ibv_wc wc{};
          if (ibv_poll_cq(link.scq, 1, &wc) != 1) continue;
          EXPECT_EQ(wc.wr_id, done);
          ++done;
          if (failed) EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
          failed |= wc.status != IBV_WC_SUCCESS;
          if (failed && wc.status != IBV_WC_WR_FLUSH_ERR) EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
        }
        run.peer.barrier();
      }
      link.reconnect();
    }
}

}  // namespace vrdma::conformance
