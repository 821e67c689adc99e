// Threads, and forked children.
#include <limits.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

CONFORMANCE(EveryVerbFromManyThreads, "THR-01", .solo = true, .timeout_s = 120) {
  Device dev(run.settings);
  Pd shared_pd(dev);
  Channel channel(dev);
  Threads threads;
  for (std::uint64_t t = 0; t < 6; ++t) {
    threads.start([&, t] {
      Rng rng(run.seed + t);
      for (int round = 0; round < 40; ++round) {
        Pd own_pd(dev);
        ibv_pd* const pd = rng.one_in(2) ? own_pd.p : shared_pd.p;
        ibv_port_attr port{};
        EXPECT_OK(ibv_query_port(dev.ctx, dev.port_num, &port));
        ibv_gid gid{};
        EXPECT_EQ(ibv_query_gid(dev.ctx, dev.port_num, 0, &gid), 0);
        Cq cq(dev, static_cast<int>(rng.between(1, 64)), rng.one_in(2) ? &channel : nullptr);
        Region region(pd, rng.between(1, 64 * 1024));
        Srq srq(pd, 16);
        const ibv_qp_type type = rng.one_in(3) ? IBV_QPT_UD : rng.one_in(2) ? IBV_QPT_UC : IBV_QPT_RC;
        Qp qp(pd, cq, cq, {.type = type, .srq = rng.one_in(3) ? srq.p : nullptr});
        to_init(dev, qp);
        if (!rng.one_in(3)) bring_up(dev, qp, address_of(dev, qp));
        Address self = address_of(dev, qp);
        Ah ah(pd, ah_to(dev, self));
        EXPECT_EQ(qp.state(), qp.p->state);
        EXPECT_OK(post(srq, Recv{1, {region.sge(0, 1)}}));
        if (rng.one_in(2)) {
          qp.set_state(IBV_QPS_ERR);
          ibv_wc wc{};
          EXPECT_GE(ibv_poll_cq(cq, 1, &wc), 0);
        }
        if (rng.one_in(4)) {
          Device another(run.settings);
          Pd pd_of_it(another);
        }
        ibv_async_event event{};
        (void)event;
      }
    });
  }
  threads.join();
}

// As user-level threads and coroutines have them.
CONFORMANCE(AThreadWithASmallStackMayCallEveryVerb, "THR-01", .solo = true) {
#ifdef __OPTIMIZE__
  constexpr std::size_t stack_bytes = 32 * 1024;
#else
  constexpr std::size_t stack_bytes = 64 * 1024;
#endif
  Device dev(run.settings);
  Pd pd(dev);
  const auto use = [&] {
    Cq cq(dev, 16);
    Region region(pd, 1 << 20);
    Qp qp(pd, cq, cq);
    bring_up(dev, qp, address_of(dev, qp));
    EXPECT_OK(post(qp, Recv{1, {region.sge(0, 64)}}));
    EXPECT_OK(post(qp, Send{.id = 2, .sges = {region.sge(4096, 64)}}));
    for (int got = 0; got < 2;) {
      ibv_wc wc{};
      const int polled = ibv_poll_cq(cq, 1, &wc);
      EXPECT_GE(polled, 0);
      if (polled == 1) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
      got += polled;
    }
  };
  pthread_attr_t small;
  EXPECT_OK(pthread_attr_init(&small));
  EXPECT_OK(pthread_attr_setstacksize(&small, std::max(stack_bytes, static_cast<std::size_t>(PTHREAD_STACK_MIN))));  // 128 KiB on aarch64
  pthread_t thread{};
  EXPECT_OK(pthread_create(&thread, &small, [](void* body) -> void* { return (*static_cast<decltype(use)*>(body))(), nullptr; },
                           const_cast<void*>(static_cast<const void*>(&use))));
  EXPECT_OK(pthread_join(thread, nullptr));
  pthread_attr_destroy(&small);
}

CONFORMANCE(PollCqFromManyThreadsGivesEachCompletionOnce, "THR-02 THR-04", .timeout_s = 120) {
  LinkSpec spec;
  spec.qp.send_wr = 128;
  spec.cq_depth = 512;
  Link link(run, spec);
  constexpr std::uint64_t count = 8000;
  constexpr std::uint64_t window = 100;
  if (run.a()) {
    std::atomic<std::uint64_t> posted{0};
    std::atomic<std::uint64_t> done{0};
    std::vector<std::atomic<int>> seen(count);
    Threads threads;
    for (int t = 0; t < 2; ++t) {
      threads.start([&] {
        const Deadline deadline(50);
        for (;;) {
          // Take a number only when there is room for it: `posted` counts what was promised.
          std::uint64_t id = posted.load();
          if (id >= count) return;
          EXPECT(!deadline.passed());
          if (id - done.load() >= window || !posted.compare_exchange_weak(id, id + 1)) {
            pause_and_check_peer();
            continue;
          }
          EXPECT_OK(post(link.qp, link.write(id, 0, 0, 16)));
        }
      });
    }
    for (int t = 0; t < 3; ++t) {
      threads.start([&] {
        const Deadline deadline(50);
        while (done.load() < count) {
          ibv_wc wc[4];
          const int n = ibv_poll_cq(link.scq, 4, wc);
          EXPECT_GE(n, 0);
          for (int i = 0; i < n; ++i) {
            EXPECT_EQ(wc[i].status, IBV_WC_SUCCESS);
            EXPECT(wc[i].wr_id < count);
            EXPECT_EQ(seen[wc[i].wr_id].fetch_add(1), 0);
            done.fetch_add(1);
          }
          if (n == 0) {
            EXPECT(!deadline.passed());
            pause_and_check_peer();
          }
        }
      });
    }
    threads.join();
    link.scq.expect_empty();
  }
  run.peer.barrier();
}

CONFORMANCE(QueriesBesideAModifyDoNotBringAnOldStateBack, "THR-05", .solo = true, .timeout_s = 120) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 64);
  Region region(pd, 4096);
  Qp qp(pd, cq, cq);
  const auto write = [&](std::uint64_t id) {
    return Send{.opcode = IBV_WR_RDMA_WRITE, .id = id, .sges = {region.sge(0, 8)}, .remote_address = region.buffer.address(64), .rkey = region.mr.p->rkey};
  };
  std::atomic<bool> stop{false};
  Threads threads;
  for (int t = 0; t < 2; ++t) {
    threads.start([&] {
      while (!stop.load()) {
        ibv_qp_attr attr{};
        ibv_qp_init_attr init{};
        EXPECT_OK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
      }
    });
  }
  for (std::uint64_t i = 0; i < 5000; ++i) {
    const Note note("cycle ", i);
    to_init(dev, qp);
    to_rtr(dev, qp, address_of(dev, qp));  // itself
    to_rts(dev, qp);
    EXPECT_OK(post(qp, write(i)));
    cq.expect(i);  // and nothing that was posted in RESET
    qp.set_state(IBV_QPS_RESET);
    EXPECT_ERRNO(post(qp, write(1'000'000 + i)), EINVAL);
    EXPECT_ERRNO(post(qp, Recv{i, {region.sge(0, 8)}}), EINVAL);
  }
  stop = true;
  threads.join();
  // What the service alone knows of still comes by a query: its peer's number is nobody's, and the write fails.
  Address nobody = address_of(dev, qp);
  Qp gone(pd, cq, cq);
  nobody.qpn = gone.p->qp_num;
  gone.destroy();
  bring_up(dev, qp, nobody, {.timeout = 8, .retry_count = 1});
  EXPECT_OK(post(qp, write(1)));
  cq.expect(1, IBV_WC_RETRY_EXC_ERR);
  qp.wait_state(IBV_QPS_ERR);
  EXPECT_EQ(qp.p->state, IBV_QPS_ERR);
}

CONFORMANCE(PostingGoesOnWhileOtherQpsComeAndGo, "THR-03", .timeout_s = 120) {
  Link link(run);
  std::atomic<bool> stop{false};
  Threads threads;
  // Each of these makes, uses and destroys QPs on the CQ that the traffic runs through.
  for (std::uint64_t t = 0; t < 2; ++t) {
    threads.start([&] {
      while (!stop.load()) {
        Qp other(link.pd, link.scq, link.rcq);
        Qp qp(link.pd, link.scq, link.rcq);  // goes first: with nobody at the far end its requests would fail
        to_init(link.dev, qp);
        to_init(link.dev, other);
        bring_up(link.dev, qp, address_of(link.dev, other));
        bring_up(link.dev, other, address_of(link.dev, qp));
        for (std::uint64_t i = 0; i < 4; ++i) {
          Send write{.opcode = IBV_WR_RDMA_WRITE,
                     .id = ~std::uint64_t{0},
                     .sges = {link.mem.sge(1024, 64)},
                     .flags = 0,
                     .remote_address = link.mem.buffer.address(8192),
                     .rkey = link.mem.mr.p->rkey};
          EXPECT_OK(post(qp, write));
        }
      }
    });
  }
  for (std::uint64_t i = 0; i < 3000; ++i) {
    EXPECT_OK(post(link.qp, link.write(i, 0, 0, 32)));
    link.scq.expect(i);
  }
  stop = true;
  threads.join();
  run.peer.barrier();
}

CONFORMANCE(ForkedChildrenUseControlVerbs, "OBJ-17", .timeout_s = 120) {
  EXPECT_OK(ibv_fork_init());
  Link link(run);
  std::vector<pid_t> children;
  for (int i = 0; i < 5; ++i) {
    const pid_t pid = ::fork();
    EXPECT_GE(pid, 0);
    if (pid == 0) {
      // On the parent's context: objects of the child's own, made and destroyed.
      for (int round = 0; round < 10; ++round) {
        const Note note("child ", i, " round ", round);
        ibv_pd* pd = ibv_alloc_pd(link.dev.ctx);
        EXPECT(pd != nullptr);
        ibv_cq* cq = ibv_create_cq(link.dev.ctx, 16, nullptr, nullptr, 0);
        EXPECT(cq != nullptr);
        ibv_port_attr port{};
        EXPECT_OK(ibv_query_port(link.dev.ctx, link.dev.port_num, &port));
        EXPECT_OK(ibv_destroy_cq(cq));
        EXPECT_OK(ibv_dealloc_pd(pd));
      }
      ::_exit(0);
    }
    children.push_back(pid);
  }
  for (std::uint64_t i = 0; i < 500; ++i) {  // the parent's traffic goes on meanwhile
    EXPECT_OK(post(link.qp, link.write(i, 0, 0, 64)));
    link.scq.expect(i);
  }
  for (const pid_t pid : children) {
    int status = 0;
    wait_until("a forked child", [&] { return ::waitpid(pid, &status, WNOHANG) == pid; }, 40);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  Pd after(link.dev);
  run.peer.barrier();
}

CONFORMANCE(RegisteredMemorySurvivesFork, "OBJ-18", .timeout_s = 120) {
  EXPECT_OK(ibv_fork_init());
  Link link(run);
  for (std::uint64_t round = 0; round < 10; ++round) {
    const Note note("round ", round);
    // A child that stays alive holds the other copy of every page while both sides write.
    int gate[2];
    EXPECT_EQ(::pipe(gate), 0);
    const pid_t pid = ::fork();
    EXPECT_GE(pid, 0);
    if (pid == 0) {
      ::close(gate[1]);
      char byte = 0;
      (void)!::read(gate[0], &byte, 1);
      ::_exit(0);
    }
    ::close(gate[0]);
    constexpr std::size_t bytes = 16 * 1024;
    // The parent writes after the fork, the other side reads it remotely; and writes remotely, the parent sees it.
    fill_pattern({link.mem.data(), bytes}, run.seed + round * 2 + (run.a() ? 0 : 1));
    run.peer.barrier();
    EXPECT_OK(post(link.qp, link.read(1, bytes, 0, bytes)));
    link.scq.expect(1);
    std::vector<std::byte> theirs(bytes);
    fill_pattern(theirs, run.seed + round * 2 + (run.a() ? 1 : 0));
    expect_bytes({link.mem.data(bytes), bytes}, theirs, "read after fork");
    EXPECT_OK(post(link.qp, link.write(2, 0, 2 * bytes, bytes)));
    link.scq.expect(2);
    run.peer.barrier();
    expect_bytes({link.mem.data(2 * bytes), bytes}, theirs, "written after fork");
    run.peer.barrier();
    ::close(gate[1]);
    int status = 0;
    wait_until("the child", [&] { return ::waitpid(pid, &status, WNOHANG) == pid; });
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  run.peer.barrier();
}

}  // namespace vrdma::conformance
