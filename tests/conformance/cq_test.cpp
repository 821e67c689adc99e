// Completion queues and channels: size, overflow, arming.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

CONFORMANCE(CqArgumentsAreChecked, "CQ-07 OBJ-03", .solo = true) {
  Device dev(run.settings);
  EXPECT_NULL(ibv_create_cq(dev.ctx, 0, nullptr, nullptr, 0), EINVAL);
  EXPECT_NULL(ibv_create_cq(dev.ctx, -1, nullptr, nullptr, 0), EINVAL);
  EXPECT_NULL(ibv_create_cq(dev.ctx, dev.attr.max_cqe + 1, nullptr, nullptr, 0), EINVAL);
  EXPECT_NULL(ibv_create_cq(dev.ctx, 8, nullptr, nullptr, dev.ctx->num_comp_vectors), EINVAL);
  EXPECT_NULL(ibv_create_cq(dev.ctx, 8, nullptr, nullptr, -1), EINVAL);
  EXPECT_GE(dev.ctx->num_comp_vectors, 1);
  for (int vector = 0; vector < dev.ctx->num_comp_vectors; ++vector) {
    ibv_cq* cq = ibv_create_cq(dev.ctx, 1, &dev, nullptr, vector);
    EXPECT(cq != nullptr);
    EXPECT(cq->cq_context == &dev && cq->channel == nullptr && cq->context == dev.ctx);
    EXPECT_GE(cq->cqe, 1);
    EXPECT_OK(ibv_destroy_cq(cq));
  }
}

CONFORMANCE(PollCqGivesAtMostWhatIsAskedFor, "WC-06 CQ-09") {
  LinkSpec spec;
  Link link(run, spec);
  ibv_wc wc[16];
  EXPECT_EQ(ibv_poll_cq(link.scq, 16, wc), 0);
  if (run.a()) {
    for (std::uint64_t i = 0; i < 10; ++i) EXPECT_OK(post(link.qp, link.write(i, 0, 0, 8)));
    std::uint64_t done = 0;
    wait_until("all completions", [&] {
      const int n = ibv_poll_cq(link.scq, 3, wc);
      EXPECT(n >= 0 && n <= 3);
      for (int i = 0; i < n; ++i) EXPECT_EQ(wc[i].wr_id, done++);
      return done == 10;
    });
    EXPECT_EQ(ibv_poll_cq(link.scq, 0, wc), 0);
  }
  run.peer.barrier();
}

namespace {
// Two connected QPs of one process, of which one has one CQ for both of its queues.
struct OneCqPair {
  explicit OneCqPair(Run& run)
      : dev(run.settings), pd(dev), one(dev, 256), far_sends(dev, 256), far_receives(dev, 256), mem(pd, 4096), qp(pd, one, one), far(pd, far_sends, far_receives) {
    to_init(dev, qp);
    to_init(dev, far);
    bring_up(dev, qp, address_of(dev, far));
    bring_up(dev, far, address_of(dev, qp));
  }
  Device dev;
  Pd pd;
  Cq one, far_sends, far_receives;
  Region mem;
  Qp qp, far;
};
}  // namespace

// Each step is posted when the one before it has been seen to be done at the far end, so there is one order only: an adapter's queue has it, however
// late the program looks, and however little it takes at a time.
CONFORMANCE(BothQueuesOfOneQpCompleteInOneOrder, "CQ-14", .solo = true) {
  constexpr std::uint64_t received = 1000;
  OneCqPair pair(run);
  Cq &one = pair.one, &far_sends = pair.far_sends;
  Region& mem = pair.mem;
  Qp &qp = pair.qp, &far = pair.far;
  std::uint64_t next = 0;
  for (int round = 0; round < 200; ++round) {
    const Note note("round ", round);
    // At first the queue pair only writes, as programs do that never receive.
    if (round < 20) {
      EXPECT_OK(post(qp, Send{.opcode = IBV_WR_RDMA_WRITE, .id = next, .sges = {mem.sge(0, 8)}, .remote_address = mem.buffer.address(8), .rkey = mem.mr.p->rkey}));
      one.expect(next++);
      continue;
    }
    std::vector<std::uint64_t> wanted;
    const std::size_t steps = run.rng.between(1, 24);
    for (std::size_t step = 0; step < steps; ++step) {
      if (run.rng.one_in(3)) {
        EXPECT_OK(post(qp, Recv{received + next, {mem.sge(64, 8)}}));
        EXPECT_OK(post(far, Send{.id = next, .sges = {mem.sge(0, 8)}}));
        far_sends.expect(next);
        wanted.push_back(received + next++);
      } else {
        EXPECT_OK(post(far, Recv{next, {mem.sge(64, 8)}}));
        EXPECT_OK(post(qp, Send{.id = next, .sges = {mem.sge(0, 8)}}));
        pair.far_receives.expect(next);
        wanted.push_back(next++);
      }
    }
    const int room = static_cast<int>(run.rng.between(1, 8));
    std::vector<std::uint64_t> got;
    wait_until("all completions", [&] {
      ibv_wc wc[8];
      const int n = ibv_poll_cq(one, room, wc);
      EXPECT_GE(n, 0);
      for (int i = 0; i < n; ++i) got.push_back(wc[i].wr_id);
      return got.size() >= wanted.size();
    });
    for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_EQ(got[i], wanted[i]);
    next %= received;
  }
}

// A receive that is there waits for nothing, whatever else completes all the time.
CONFORMANCE(AReceiveIsPolledThoughSendsKeepCompleting, "CQ-14", .solo = true) {
  OneCqPair pair(run);
  Cq &one = pair.one, &far_sends = pair.far_sends;
  Region& mem = pair.mem;
  Qp &qp = pair.qp, &far = pair.far;
  const Send write{.opcode = IBV_WR_RDMA_WRITE, .id = 1, .sges = {mem.sge(0, 8)}, .remote_address = mem.buffer.address(8), .rkey = mem.mr.p->rkey};
  for (const int under_way : {1, 2, 8}) {
    const Note note(under_way, " writes under way");
    EXPECT_OK(post(qp, Recv{2, {mem.sge(64, 8)}}));
    EXPECT_OK(post(far, Send{.id = 3, .sges = {mem.sge(0, 8)}}));
    far_sends.expect(3);
    int written = 0, left = under_way;
    for (; left > 0; --left) EXPECT_OK(post(qp, write));
    for (std::uint64_t id = 1; id == 1;) {
      id = one.next().wr_id;
      if (id == 1 && ++written < 1000) EXPECT_OK(post(qp, write));
    }
    EXPECT(written <= 1);  // what was there before these is polled before them
    for (left = under_way; left > 0; --left) one.expect(1);
    one.expect_empty();
  }
}

CONFORMANCE(AFullCqRaisesCqErrAndStopsItsQps, "CQ-05 ASY-01 ERR-12") {
  Device dev(run.settings);
  Pd pd(dev);
  Cq small(dev, 4);
  Cq other(dev, 64);
  Region region(pd, 4096);
  const std::uint32_t room = static_cast<std::uint32_t>(small.p->cqe);
  if (room > 4096) skip("the smallest CQ is too large to fill");
  Qp qp(pd, small, other, {.send_wr = room + 8});
  to_init(dev, qp);
  const Address theirs = run.peer.exchange(address_of(dev, qp));
  const Remote remote = run.peer.exchange(Remote{region.buffer.address(), 4096, region.mr.p->rkey, 0});
  bring_up(dev, qp, theirs);
  run.peer.barrier();
  if (run.a()) {
    for (std::uint64_t i = 0; i < room + 4; ++i) {
      EXPECT_OK(post(qp, Send{.opcode = IBV_WR_RDMA_WRITE,
                              .id = i,
                              .sges = {region.sge(0, 8)},
                              .remote_address = remote.address,
                              .rkey = remote.rkey}));
    }
    EXPECT(dev.wait_event(IBV_EVENT_CQ_ERR).element.cq == small.p);
    qp.wait_state(IBV_QPS_ERR);
    // What had been completed before is intact and in order, as far as the device still shows it.
    ibv_wc wc{};
    std::uint64_t done = 0;
    while (ibv_poll_cq(small, 1, &wc) == 1 && done < room) {
      EXPECT_EQ(wc.wr_id, done);
      EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
      ++done;
    }
    ibv_async_event event{};
    while (dev.take_event(event)) ibv_ack_async_event(&event);  // QP_FATAL of the QP is allowed
  }
  run.peer.barrier();
}

CONFORMANCE(AFullCqEndsEachOfItsQpsWithQpFatalOnce, "CQ-13", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Region region(pd, 4096);
  enum class By { success, error, flush, receive };
  for (const By by : {By::success, By::error, By::flush, By::receive}) {
    const Note note("what finds it full: ", by);
    Cq small(dev, 4);
    const std::uint32_t room = static_cast<std::uint32_t>(small.p->cqe);
    if (room > 4096) skip("the smallest CQ is too large to fill");
    Cq large(dev, static_cast<int>(4 * room + 64));
    const QpSpec deep{.send_wr = room + 8, .recv_wr = room + 8};
    // Of each kind that there is: both of its queues complete there, or one of them; one has nothing to do with it; one is in ERR before.
    Qp both(pd, small, small, deep);
    Qp sender(pd, small, large, deep);
    Qp receiver(pd, large, small, deep);
    Qp idle(pd, small, small);
    Qp in_init(pd, large, small);
    Qp stranger(pd, large, large);
    Qp failed(pd, small, small, deep);
    bring_up(dev, both, address_of(dev, receiver));  // who cannot receive, and who is told so: both have queues in that CQ
    bring_up(dev, receiver, address_of(dev, both));
    for (Qp* qp : {&sender, &idle, &stranger}) bring_up(dev, *qp, address_of(dev, *qp));  // to itself
    to_init(dev, in_init);
    to_init(dev, failed);
    failed.set_state(IBV_QPS_ERR);
    const std::vector<ibv_qp*> affected{both, sender, receiver, idle, in_init};

    const auto write = [&](std::uint64_t id) {
      return Send{.opcode = IBV_WR_RDMA_WRITE, .id = id, .sges = {region.sge(0, 8)}, .remote_address = region.buffer.address(64), .rkey = region.mr.p->rkey};
    };
    if (by == By::receive) {
      for (std::uint64_t i = 0; i < room + 4; ++i) EXPECT_OK(post(receiver, Recv{i, {region.sge(0, 8)}}));
      for (std::uint64_t i = 0; i < room + 4; ++i) EXPECT_OK(post(both, Send{.id = i, .sges = {region.sge(64, 8)}, .flags = 0}));
    } else if (by == By::flush) {  // of one that is in ERR already, and so is not told
      for (std::uint64_t i = 0; i < room + 1; ++i) EXPECT_OK(post(failed, Recv{i, {region.sge(0, 8)}}));
    } else {
      for (std::uint64_t i = 0; i < room; ++i) EXPECT_OK(post(sender, write(i)));
      Send last = write(room);
      if (by == By::error) last.sges[0].lkey ^= 0x40;
      EXPECT_OK(post(sender, last));
      if (by == By::success) EXPECT_OK(post(both, write(0)));  // two meet the full CQ
    }

    bool cq_err = false;
    std::vector<ibv_qp*> told;
    wait_until("CQ_ERR, and QP_FATAL of each QP", [&] {
      ibv_async_event event{};
      while (dev.take_event(event)) {
        ibv_ack_async_event(&event);
        if (event.event_type == IBV_EVENT_CQ_ERR) {
          EXPECT(event.element.cq == small.p);
          EXPECT(!std::exchange(cq_err, true));
        } else if (event.event_type == IBV_EVENT_QP_FATAL) {
          EXPECT_EQ(std::count(affected.begin(), affected.end(), event.element.qp), 1);
          EXPECT_EQ(std::count(told.begin(), told.end(), event.element.qp), 0);
          told.push_back(event.element.qp);
        }
      }
      return cq_err && told.size() == affected.size();
    });
    for (const Qp* qp : {&both, &sender, &receiver, &idle, &in_init, &failed}) EXPECT_EQ(qp->state(), IBV_QPS_ERR);
    EXPECT_EQ(stranger.state(), IBV_QPS_RTS);
    dev.expect_no_event();
  }
}

CONFORMANCE(ResizingACqKeepsItsCompletions, "CQ-06") {
  LinkSpec spec;
  spec.cq_depth = 16;
  Link link(run, spec);
  if (run.a()) {
    const int rc = ibv_resize_cq(link.scq, 40);
    if (rc == EOPNOTSUPP || rc == ENOSYS) skip("ibv_resize_cq: EOPNOTSUPP");
    EXPECT_OK(rc);
    EXPECT_GE(link.scq.p->cqe, 40);
    for (std::uint64_t i = 0; i < 20; ++i) EXPECT_OK(post(link.qp, link.write(i, 0, 0, 8)));
    // That they were executed shows at the far end, without polling here; that they are complete, by what comes back behind it.
    *link.mem.data(8) = std::byte{1};
    EXPECT_OK(post(link.qp, link.recv(500, 8192, 8)));
    EXPECT_OK(post(link.qp, link.write(20, 8, 4096, 1)));
    link.rcq.expect(500);
    // Twenty-one are outstanding: below that it must not shrink.
    const int before = link.scq.p->cqe;
    EXPECT_ERRNO(ibv_resize_cq(link.scq, 8), EINVAL);
    EXPECT_EQ(link.scq.p->cqe, before);
    EXPECT_ERRNO(ibv_resize_cq(link.scq, 0), EINVAL);
    EXPECT_ERRNO(ibv_resize_cq(link.scq, link.dev.attr.max_cqe + 1), EINVAL);
    for (std::uint64_t i = 0; i < 5; ++i) link.scq.expect(i);
    EXPECT_OK(ibv_resize_cq(link.scq, 200));
    for (std::uint64_t i = 5; i < 10; ++i) link.scq.expect(i);
    EXPECT_OK(ibv_resize_cq(link.scq, 64));
    for (std::uint64_t i = 10; i < 21; ++i) link.scq.expect(i);
    EXPECT_OK(ibv_resize_cq(link.scq, 4));
    EXPECT_GE(link.scq.p->cqe, 4);
    for (std::uint64_t i = 30; i < 100; ++i) {
      EXPECT_OK(post(link.qp, link.write(i, 0, 0, 8)));
      link.scq.expect(i);
    }
  } else {
    const volatile std::byte* flag = link.mem.data(4096);
    wait_until("the last write", [&] { return *flag == std::byte{1}; });
    EXPECT_OK(post(link.qp, link.send(600, 0, 8)));
    link.scq.expect(600);
  }
  run.peer.barrier();
}

namespace {

struct Events : Link {
  explicit Events(Run& the_run)
      : Link(the_run), channel(dev), cq(dev, 256, &channel, this), armed_qp(pd, cq, cq) {
    to_init(dev, armed_qp);
    const Address theirs = run.peer.exchange(address_of(dev, armed_qp));
    bring_up(dev, armed_qp, theirs);
    for (std::uint64_t i = 0; i < 40; ++i) EXPECT_OK(post(armed_qp, Recv{i, {mem.sge(0, 64)}}));
    run.peer.barrier();
  }
  // a: one message for b's armed CQ, delivered when this returns at both sides (b has not polled it).
  void message(bool solicited) {
    if (run.a()) {
      Send send{.id = 1, .sges = {mem.sge(0, 8)}};
      if (solicited) send.flags |= IBV_SEND_SOLICITED;
      EXPECT_OK(post(armed_qp, send));
      cq.expect(1);
    }
    run.peer.barrier();
  }
  void expect_event() {
    EXPECT(channel.wait() == cq.p);
    ibv_ack_cq_events(cq, 1);
  }
  void expect_none() { EXPECT(!channel.readable()); }
  void drain() {
    ibv_wc wc{};
    while (ibv_poll_cq(cq, 1, &wc) == 1) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  }
  Channel channel;
  Cq cq;
  Qp armed_qp;
};

}  // namespace

CONFORMANCE(AnArmedCqFiresOncePerArming, "CQ-03 CQ-04 CQ-08") {
  Events e(run);
  const auto at_b = [&](auto action) {
    if (run.b()) action();
    run.peer.barrier();
  };
  e.message(false);  // not armed: nothing
  at_b([&] { e.expect_none(); });
  at_b([&] { e.cq.arm(); });  // completions are there already: still nothing
  at_b([&] { e.expect_none(); });
  e.message(false);
  at_b([&] { e.expect_event(); });
  e.message(false);  // fired: not armed any more
  at_b([&] { e.expect_none(); });
  at_b([&] {
    e.drain();
    e.cq.arm();
    e.cq.arm();  // arming twice is arming once
  });
  e.message(false);
  e.message(false);
  at_b([&] {
    e.expect_event();
    e.expect_none();
    e.drain();
  });
}

CONFORMANCE(WhoLeavesOffInTheMiddleIsNotLeftWaiting, "CQ-11") {
  Events e(run);
  const auto at_b = [&](auto action) {
    if (run.b()) action();
    run.peer.barrier();
  };
  const auto wait_for_event = [&] {  // blocks in ibv_get_cq_event, not in poll(2)
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    EXPECT_OK(ibv_get_cq_event(e.channel.p, &cq, &context));
    EXPECT(cq == e.cq.p);
    ibv_ack_cq_events(cq, 1);
  };
  ibv_wc wc[2]{};
  for (int i = 0; i < 3; ++i) e.message(false);
  at_b([&] {
    EXPECT_EQ(ibv_poll_cq(e.cq, 2, wc), 2);
    e.cq.arm();  // after the poll: as ConnectX, this tells of what is left
    wait_for_event();
    EXPECT_EQ(ibv_poll_cq(e.cq, 1, wc), 1);
    e.expect_none();
    e.cq.arm();
  });
  for (int i = 0; i < 3; ++i) e.message(false);
  at_b([&] {
    wait_for_event();
    e.cq.arm();  // before the poll: no event for what the poll is going to find …
    e.expect_none();
    EXPECT_EQ(ibv_poll_cq(e.cq, 2, wc), 2);
    wait_for_event();  // … unless it is left there
    EXPECT_EQ(ibv_poll_cq(e.cq, 1, wc), 1);
    e.expect_none();
  });
}

CONFORMANCE(SolicitedArmingWaitsForSolicitedMessages, "CQ-01 CQ-02") {
  Events e(run);
  const auto at_b = [&](auto action) {
    if (run.b()) action();
    run.peer.barrier();
  };
  at_b([&] { e.cq.arm(true); });
  e.message(false);
  at_b([&] { e.expect_none(); });
  e.message(true);
  at_b([&] {
    e.expect_event();
    e.drain();
  });
  // Armed for any, then for solicited: still armed for any.
  at_b([&] {
    e.cq.arm(false);
    e.cq.arm(true);
  });
  e.message(false);
  at_b([&] {
    e.expect_event();
    e.drain();
  });
  // Armed for solicited, then for any: any.
  at_b([&] {
    e.cq.arm(true);
    e.cq.arm(false);
  });
  e.message(false);
  at_b([&] {
    e.expect_event();
    e.drain();
  });
  // An error completion fires a solicited arming.
  at_b([&] {
    e.cq.arm(true);
    e.armed_qp.set_state(IBV_QPS_ERR);
    e.expect_event();
    ibv_wc wc{};
    int flushed = 0;
    while (ibv_poll_cq(e.cq, 1, &wc) == 1) {
      EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
      ++flushed;
    }
    EXPECT_GE(flushed, 1);
  });
}

CONFORMANCE(ChannelDescriptorsBehave, "CQ-08 CQ-10 OBJ-04", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Channel channel(dev);
  EXPECT(::fcntl(channel.p->fd, F_GETFD) & FD_CLOEXEC);
  EXPECT(::fcntl(dev.ctx->async_fd, F_GETFD) & FD_CLOEXEC);
  int first_context = 0;
  int second_context = 0;
  Cq first(dev, 16, &channel, &first_context);
  Cq second(dev, 16, &channel, &second_context);
  Region region(pd, 4096);
  Qp one(pd, first, first);
  Qp two(pd, second, second);
  to_init(dev, one);
  to_init(dev, two);
  EXPECT_OK(post(one, Recv{1, {region.sge(0, 8)}}));
  EXPECT_OK(post(two, Recv{2, {region.sge(0, 8)}}));
  first.arm();
  second.arm();
  EXPECT(!channel.readable());
  one.set_state(IBV_QPS_ERR);
  two.set_state(IBV_QPS_ERR);
  // Level-triggered: readable as long as an event is left.
  for (int left = 2; left > 0; --left) {
    EXPECT(channel.readable(20'000));
    EXPECT(channel.readable(20'000));
    ibv_cq* cq = channel.wait();
    EXPECT(cq == first.p || cq == second.p);
    ibv_ack_cq_events(cq, 1);
  }
  EXPECT(!channel.readable());
  EXPECT_EQ(::fcntl(channel.p->fd, F_SETFL, ::fcntl(channel.p->fd, F_GETFL) | O_NONBLOCK), 0);
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  EXPECT_MINUS_ONE(ibv_get_cq_event(channel.p, &cq, &context), EAGAIN);
}

CONFORMANCE(NoWakeUpIsLostInEventMode, "CQ-03 CQ-04 CQ-08", .timeout_s = 120) {
  // Ping-pong with sleeping receivers: arm, poll once more, sleep. A lost event hangs, an extra one is only a waste.
  Events e(run);
  constexpr std::uint64_t rounds = 3000;
  std::uint64_t received = 0;
  std::uint64_t posted = 40;
  std::uint64_t events = 0;
  const auto receive = [&] {
    for (;;) {
      ibv_wc wc{};
      while (ibv_poll_cq(e.cq, 1, &wc) == 1) {
        EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
        if (!(wc.opcode & IBV_WC_RECV)) continue;
        ++received;
        EXPECT_OK(post(e.armed_qp, Recv{posted++, {e.mem.sge(0, 64)}}));
        return;
      }
      e.cq.arm();
      if (ibv_poll_cq(e.cq, 1, &wc) == 1) {
        EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
        if (!(wc.opcode & IBV_WC_RECV)) continue;
        ++received;
        EXPECT_OK(post(e.armed_qp, Recv{posted++, {e.mem.sge(0, 64)}}));
        return;
      }
      EXPECT(e.channel.wait() == e.cq.p);
      ++events;
    }
  };
  for (std::uint64_t i = 0; i < rounds; ++i) {
    if (run.b()) receive();
    EXPECT_OK(post(e.armed_qp, Send{.id = i, .sges = {e.mem.sge(0, 8)}, .flags = i % 16 == 0 ? static_cast<unsigned>(IBV_SEND_SIGNALED) : 0u}));
    if (run.a()) receive();
  }
  EXPECT_EQ(received, rounds);
  ibv_ack_cq_events(e.cq, static_cast<unsigned>(events));
  run.peer.barrier();
  // Events that fired for completions polled by hand are still in the channel; unread they die with the CQ.
}

}  // namespace vrdma::conformance
