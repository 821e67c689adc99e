// Memory windows: bound by a request, used by the peer, invalidated by a request of either side.
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

constexpr std::size_t window_at = 4096, window_bytes = 4096;  // what windows are bound to
constexpr int bindable = static_cast<int>(all_access) | IBV_ACCESS_MW_BIND;

bool offers_windows(const Device& dev) { return (dev.attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW) != 0; }
void need_windows(Run& run, const Device& dev) {
  const bool mine = offers_windows(dev);
  if (!run.peer.exchange(mine) || !mine) skip("a device has no memory windows");
}

struct Window {
  Window(Pd& pd, ibv_mw_type type) : p(ibv_alloc_mw(pd, type)) { EXPECT(p != nullptr); }
  ~Window() {
    if (p != nullptr) EXPECT_OK(ibv_dealloc_mw(p));
  }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  ibv_mw* p;
};

ibv_mw_bind_info part(ibv_mr* mr, std::uint64_t address, std::uint64_t length, unsigned access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ) {
  ibv_mw_bind_info info{};
  info.mr = mr;
  info.addr = address;
  info.length = length;
  info.mw_access_flags = access;
  return info;
}
int bind_1(Qp& qp, Window& window, std::uint64_t id, const ibv_mw_bind_info& info) {
  ibv_mw_bind wanted{};
  wanted.wr_id = id;
  wanted.send_flags = IBV_SEND_SIGNALED;
  wanted.bind_info = info;
  return ibv_bind_mw(qp, window.p, &wanted);
}
int post_raw(Qp& qp, ibv_send_wr wr, std::uint64_t id) {
  wr.wr_id = id;
  wr.send_flags |= IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(qp, &wr, &bad);
}
int bind_2(Qp& qp, Window& window, std::uint64_t id, std::uint32_t rkey, const ibv_mw_bind_info& info) {
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_BIND_MW;
  wr.bind_mw = {window.p, rkey, info};
  return post_raw(qp, wr, id);
}
int invalidate(Qp& qp, std::uint64_t id, std::uint32_t rkey) {
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_LOCAL_INV;
  wr.invalidate_rkey = rkey;
  return post_raw(qp, wr, id);
}

// What a request of A's to B's window comes to; both queue pairs work again afterwards.
void expect_access(Link& link, ibv_wr_opcode opcode, std::uint64_t address, std::uint32_t length, std::uint32_t rkey, ibv_wc_status status, Where where = Where::current()) {
  Run& run = link.run;
  if (run.a()) {
    EXPECT_OK(post(link.qp, Send{.opcode = opcode, .id = 77, .sges = {link.mem.sge(0, length)}, .remote_address = address, .rkey = rkey}));
    link.scq.expect(77, status, where);
  }
  if (status != IBV_WC_SUCCESS) link.reconnect();
  else run.peer.barrier();
}

LinkSpec with_bindable_memory() {
  LinkSpec spec;
  spec.access = static_cast<unsigned>(bindable);
  return spec;
}

}  // namespace

CONFORMANCE(AWindowOfType1IsBoundAndUsed, "MW-01 MW-03") {
  Link link(run, with_bindable_memory());
  need_windows(run, link.dev);
  Window window(link.pd, IBV_MW_TYPE_1);
  const std::uint64_t start = link.mem.buffer.address() + window_at;
  const auto bound = [&](std::uint64_t id, const ibv_mw_bind_info& info) {  // B's; what A is told: the key
    const std::uint32_t before = window.p->rkey;
    if (run.b()) {
      EXPECT_OK(bind_1(link.qp, window, id, info));
      EXPECT_NE(window.p->rkey, before);
      EXPECT_EQ(link.scq.expect(id).opcode, IBV_WC_BIND_MW);
    }
    return run.peer.exchange(Remote{start, window_bytes, run.b() ? window.p->rkey : 0, 0});
  };
  // An unbound window gives nothing.
  const Remote unbound = run.peer.exchange(Remote{start, window_bytes, window.p->rkey, 0});
  expect_access(link, IBV_WR_RDMA_WRITE, unbound.address, 8, unbound.rkey, IBV_WC_REM_ACCESS_ERR);

  const Remote theirs = bound(1, part(link.mem.mr.p, start, window_bytes));
  fill_pattern({link.mem.data(), window_bytes}, run.seed + run.a());
  expect_access(link, IBV_WR_RDMA_WRITE, theirs.address, window_bytes, theirs.rkey, IBV_WC_SUCCESS);
  if (run.b()) {
    std::vector<std::byte> wanted(window_bytes);
    fill_pattern(wanted, run.seed + 1);
    expect_bytes({link.mem.data(window_at), window_bytes}, wanted, "written");
  }
  expect_access(link, IBV_WR_RDMA_READ, theirs.address + 8, window_bytes - 8, theirs.rkey, IBV_WC_SUCCESS);
  expect_access(link, IBV_WR_RDMA_WRITE, theirs.address + 8, window_bytes, theirs.rkey, IBV_WC_REM_ACCESS_ERR);   // a byte beyond its end
  expect_access(link, IBV_WR_RDMA_WRITE, theirs.address - 1, 8, theirs.rkey, IBV_WC_REM_ACCESS_ERR);       // and before
  expect_access(link, IBV_WR_ATOMIC_FETCH_AND_ADD, theirs.address, 8, theirs.rkey, IBV_WC_REM_ACCESS_ERR);  // a right that it does not give

  // Bound anew: the old key is no key any more, the rights are the new ones.
  const Remote again = bound(2, part(link.mem.mr.p, start + 64, 64, IBV_ACCESS_REMOTE_READ));
  expect_access(link, IBV_WR_RDMA_READ, theirs.address + 64, 8, theirs.rkey, IBV_WC_REM_ACCESS_ERR);
  expect_access(link, IBV_WR_RDMA_READ, again.address + 64, 64, again.rkey, IBV_WC_SUCCESS);
  expect_access(link, IBV_WR_RDMA_WRITE, again.address + 64, 64, again.rkey, IBV_WC_REM_ACCESS_ERR);
  if (run.b()) EXPECT_ERRNO(ibv_dereg_mr(link.mem.mr.p), EBUSY);
  // A key for peers is none for one's own buffers.
  if (run.b()) {
    Send own = link.send(3, 0, 8);
    own.sges[0].lkey = window.p->rkey;
    own.sges[0].addr = start + 64;
    EXPECT_OK(post(link.qp, own));
    link.scq.expect(3, IBV_WC_LOC_PROT_ERR);
  }
  link.reconnect();
  const Remote gone = bound(4, part(link.mem.mr.p, start, 0));
  expect_access(link, IBV_WR_RDMA_READ, again.address + 64, 8, again.rkey, IBV_WC_REM_ACCESS_ERR);
  expect_access(link, IBV_WR_RDMA_READ, gone.address, 8, gone.rkey, IBV_WC_REM_ACCESS_ERR);
}

CONFORMANCE(AWindowOfType2IsItsQueuePairs, "MW-02 MW-03 MW-04") {
  Link link(run, with_bindable_memory());
  need_windows(run, link.dev);
  Link other(run);  // of another protection domain; its queue pair is none of the window's
  Window window(link.pd, IBV_MW_TYPE_2);
  const std::uint64_t start = link.mem.buffer.address() + window_at;
  std::uint32_t rkey = window.p->rkey;
  const auto bound = [&](std::uint64_t id) {
    rkey = ibv_inc_rkey(rkey);
    if (run.b()) {
      EXPECT_OK(bind_2(link.qp, window, id, rkey, part(link.mem.mr.p, start, window_bytes)));
      EXPECT_EQ(link.scq.expect(id).opcode, IBV_WC_BIND_MW);
    }
    return run.peer.exchange(Remote{start, window_bytes, rkey, 0});
  };
  Remote theirs = bound(1);
  expect_access(link, IBV_WR_RDMA_WRITE, theirs.address, 64, theirs.rkey, IBV_WC_SUCCESS);
  expect_access(other, IBV_WR_RDMA_WRITE, theirs.address, 64, theirs.rkey, IBV_WC_REM_ACCESS_ERR);
  if (run.b()) {  // while it is bound it cannot be bound again
    EXPECT_OK(bind_2(link.qp, window, 2, ibv_inc_rkey(rkey), part(link.mem.mr.p, start, window_bytes)));
    link.scq.expect(2, IBV_WC_MW_BIND_ERR);
  }
  link.reconnect();
  theirs = bound(12);
  expect_access(link, IBV_WR_RDMA_WRITE, theirs.address, 64, theirs.rkey, IBV_WC_SUCCESS);
  if (run.b()) {
    EXPECT_OK(invalidate(link.qp, 3, rkey));
    EXPECT_EQ(link.scq.expect(3).opcode, IBV_WC_LOCAL_INV);
  }
  run.peer.barrier();
  expect_access(link, IBV_WR_RDMA_WRITE, theirs.address, 64, theirs.rkey, IBV_WC_REM_ACCESS_ERR);
  if (run.b()) {  // it is none any more
    EXPECT_OK(invalidate(link.qp, 4, rkey));
    link.scq.expect(4, IBV_WC_MW_BIND_ERR);
  }
  link.reconnect();

  theirs = bound(5);
  if (run.b()) EXPECT_OK(post(link.qp, link.recv(6, 0, 256)));
  run.peer.barrier();
  if (run.a()) {
    ibv_send_wr wr{};
    ibv_sge sge = link.mem.sge(0, 100);
    wr.opcode = IBV_WR_SEND_WITH_INV;
    wr.invalidate_rkey = theirs.rkey;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    EXPECT_OK(post_raw(link.qp, wr, 7));
    link.scq.expect(7);
  } else {
    const ibv_wc wc = link.rcq.expect(6);
    EXPECT_EQ(wc.opcode, IBV_WC_RECV);
    EXPECT_EQ(wc.byte_len, 100u);
    EXPECT(wc.wc_flags & IBV_WC_WITH_INV);
    EXPECT_EQ(wc.invalidated_rkey, rkey);
  }
  run.peer.barrier();
  expect_access(link, IBV_WR_RDMA_WRITE, theirs.address, 64, theirs.rkey, IBV_WC_REM_ACCESS_ERR);

  // What invalidates nothing ends the connection.
  if (run.b()) EXPECT_OK(post(link.qp, link.recv(8, 0, 256)));
  run.peer.barrier();
  if (run.a()) {
    ibv_send_wr wr{};
    wr.opcode = IBV_WR_SEND_WITH_INV;
    wr.invalidate_rkey = theirs.rkey;
    EXPECT_OK(post_raw(link.qp, wr, 9));
    EXPECT_NE(link.scq.next().status, IBV_WC_SUCCESS);
  } else {
    link.rcq.expect(8, IBV_WC_REM_INV_REQ_ERR);
  }
  link.reconnect();
  theirs = bound(10);
  expect_access(link, IBV_WR_RDMA_READ, theirs.address, 64, theirs.rkey, IBV_WC_SUCCESS);
  if (run.b()) EXPECT_OK(ibv_dealloc_mw(std::exchange(window.p, nullptr)));
  run.peer.barrier();
  expect_access(link, IBV_WR_RDMA_READ, theirs.address, 64, theirs.rkey, IBV_WC_REM_ACCESS_ERR);
}

CONFORMANCE(WindowsAreRefusedWhereTheyMustBe, "MW-03 OBJ-07") {
  Link link(run, with_bindable_memory());
  need_windows(run, link.dev);
  Region plain(link.pd, 4096);  // which may not be bound to
  Pd other(link.dev);
  Region foreign(other, 4096, static_cast<unsigned>(bindable));
  const std::uint64_t start = link.mem.buffer.address();
  if (run.b()) {
    EXPECT_NULL(ibv_alloc_mw(link.pd, static_cast<ibv_mw_type>(3)), EINVAL);
    Window one(link.pd, IBV_MW_TYPE_1);
    EXPECT_EQ(bind_1(link.qp, one, 1, part(foreign.mr.p, foreign.buffer.address(), 8)), EPERM);
    EXPECT_EQ(bind_1(link.qp, one, 1, part(nullptr, start, 8)), EINVAL);
    EXPECT_EQ(bind_1(link.qp, one, 1, part(link.mem.mr.p, start, 8, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED)), EINVAL);
    Window two(link.pd, IBV_MW_TYPE_2);
    EXPECT_EQ(bind_1(link.qp, two, 1, part(link.mem.mr.p, start, 8)), EINVAL);
    ibv_pd* const lone = ibv_alloc_pd(link.dev.ctx);
    ibv_mw* const on_it = ibv_alloc_mw(lone, IBV_MW_TYPE_1);
    EXPECT(on_it != nullptr);
    EXPECT_ERRNO(ibv_dealloc_pd(lone), EBUSY);
    EXPECT_OK(ibv_dealloc_mw(on_it));
    EXPECT_OK(ibv_dealloc_pd(lone));
  }
  struct Case {
    const char* what;
    ibv_mw_bind_info info;
  };
  const Case cases[] = {{"no right to bind", part(plain.mr.p, plain.buffer.address(), 64)},
                        {"beyond the region", part(link.mem.mr.p, start + link.spec.bytes - 8, 64)},
                        {"before it", part(link.mem.mr.p, start - 8, 64)}};
  for (const Case& wrong : cases) {
    const Note note("bound with ", wrong.what);
    if (run.b()) {
      Window window(link.pd, IBV_MW_TYPE_1);
      EXPECT_OK(bind_1(link.qp, window, 5, wrong.info));
      EXPECT_EQ(link.scq.expect(5, IBV_WC_MW_BIND_ERR).wr_id, 5u);
      link.qp.wait_state(IBV_QPS_ERR);
    }
    link.reconnect();
  }
  if (run.b()) {  // IBA o10-37.2.40
    Window window(link.pd, IBV_MW_TYPE_2);
    EXPECT_OK(bind_2(link.qp, window, 6, ibv_inc_rkey(window.p->rkey), part(link.mem.mr.p, start, 0)));
    link.scq.expect(6, IBV_WC_MW_BIND_ERR);
  }
  link.reconnect();
}

// The upper 24 bits of a window's key are its adapter's; a request to bind gives the others, and may leave those out.
CONFORMANCE(ABindGivesTheLastByteOfTheKey, "MW-02 MW-03") {
  Link link(run, with_bindable_memory());
  need_windows(run, link.dev);
  Window window(link.pd, IBV_MW_TYPE_2);
  const std::uint64_t start = link.mem.buffer.address() + window_at;
  for (const std::uint32_t upper : {0u, 0x12345600u, window.p->rkey & ~0xffu}) {
    const Note note("upper bits ", upper);
    const std::uint32_t tag = (window.p->rkey + 1 + (upper >> 8) % 7) & 0xff, key = (window.p->rkey & ~0xffu) | tag;
    if (run.b()) {
      EXPECT_OK(bind_2(link.qp, window, 1, upper | tag, part(link.mem.mr.p, start, window_bytes)));
      link.scq.expect(1);
    }
    const Remote theirs = run.peer.exchange(Remote{start, window_bytes, key, 0});
    expect_access(link, IBV_WR_RDMA_WRITE, theirs.address, 64, theirs.rkey, IBV_WC_SUCCESS);
    if (run.b()) {
      EXPECT_OK(invalidate(link.qp, 2, key));
      link.scq.expect(2);
    }
    run.peer.barrier();
    expect_access(link, IBV_WR_RDMA_WRITE, theirs.address, 64, theirs.rkey, IBV_WC_REM_ACCESS_ERR);
  }
}

// One program's threads bind and register at once, which the service puts in an order, whoever carries the queue pair's requests out.
CONFORMANCE(WindowsAreBoundBesideRegistrations, "MW-01 THR-01") {
  Link link(run, with_bindable_memory());
  need_windows(run, link.dev);
  constexpr std::uint64_t rounds = 300;
  for (std::uint64_t i = 0; i < 64; ++i) {  // so that it may have become direct
    if (run.a()) EXPECT_OK(post(link.qp, link.write(i, 0, 0, 8)));
    if (run.a()) link.scq.expect(i);
  }
  run.peer.barrier();
  if (run.a()) {
    Window window(link.pd, IBV_MW_TYPE_1);
    Threads others;
    others.start([&] {
      Buffer buffer(64 * 1024);
      for (std::uint64_t i = 0; i < rounds; ++i) {
        ibv_mr* const mr = ibv_reg_mr(link.pd, buffer.data(), buffer.size(), local_write);
        EXPECT(mr != nullptr);
        EXPECT_OK(ibv_dereg_mr(mr));
      }
    });
    for (std::uint64_t i = 0; i < rounds; ++i) {
      EXPECT_OK(bind_1(link.qp, window, 1000 + i, part(link.mem.mr.p, link.mem.buffer.address(), 64)));
      EXPECT_OK(post(link.qp, link.write(i, 0, 0, 8)));
      link.scq.expect(1000 + i);
      link.scq.expect(i);
    }
    others.join();
  }
  run.peer.barrier();
}

// Whatever is under way by a window when its invalidation completes reaches nothing any more.
CONFORMANCE(AnInvalidatedWindowIsWrittenToNoMore, "MW-03 MW-02", .timeout_s = 120) {
  constexpr std::size_t whole = 64 << 20;
  LinkSpec spec = with_bindable_memory();
  spec.bytes = whole;
  need_windows(run, Device(run.settings));  // before so much is registered
  Link link(run, spec);
  Window window(link.pd, IBV_MW_TYPE_2);
  const std::uint32_t rkey = ibv_inc_rkey(window.p->rkey);
  if (run.b()) {
    EXPECT_OK(bind_2(link.qp, window, 1, rkey, part(link.mem.mr.p, link.mem.buffer.address(), whole)));
    link.scq.expect(1);
  }
  const Remote theirs = run.peer.exchange(Remote{link.mem.buffer.address(), whole, rkey, 0});
  if (run.a()) {
    std::memset(link.mem.data(), 0xa5, whole);
    run.peer.barrier();
    EXPECT_OK(post(link.qp, Send{.opcode = IBV_WR_RDMA_WRITE, .id = 2, .sges = {link.mem.sge(0, whole)}, .remote_address = theirs.address, .rkey = theirs.rkey}));
    const ibv_wc wc = link.scq.next();
    EXPECT(wc.status == IBV_WC_SUCCESS || wc.status == IBV_WC_REM_ACCESS_ERR);
    run.peer.exchange(Remote{0, static_cast<std::uint64_t>(wc.status), 0, 0});
  } else {
    run.peer.barrier();
    wait_until("the first bytes", [&] { return *static_cast<volatile std::byte*>(link.mem.data(4096)) == std::byte{0xa5}; });
    EXPECT_OK(invalidate(link.qp, 3, rkey));
    const ibv_wc done = link.scq.next();
    EXPECT_EQ(done.wr_id, 3u);
    EXPECT(done.status == IBV_WC_SUCCESS || done.status == IBV_WC_WR_FLUSH_ERR);  // the WRITE may already have ended in an error here
    // From its end backwards, what was not there when the invalidation had completed never comes.
    std::size_t written = whole;
    while (written > 0 && *static_cast<volatile std::byte*>(link.mem.data(written - 1)) != std::byte{0xa5}) written = written > 4096 ? written - 4096 : 0;
    const Remote outcome = run.peer.exchange(Remote{});
    EXPECT(outcome.bytes == IBV_WC_REM_ACCESS_ERR || written == whole);
    for (std::size_t at = written; at + 4096 <= whole; at += 4096) EXPECT_NE(*link.mem.data(at + 4095), std::byte{0xa5});
  }
  link.reconnect();
}

// A request that is flushed has done nothing that outlives the queue pair's reset.
// Memory that the service reaches through its process, where it always has something under way.
CONFORMANCE(AWindowThatGoesLeavesOtherTrafficAlone, "MW-02 MR-24", .timeout_s = 120) {
  constexpr std::size_t count = 8, bytes = 256;
  Device dev(run.settings);
  need_windows(run, dev);
  Pd pd(dev);
  Cq cq(dev, 1024);
  Buffer buffer(4096);
  const Mr mr(pd, buffer.data() + 64, 3 * 1024, static_cast<unsigned>(bindable));  // within a page
  const Remote remote = run.peer.exchange(Remote{buffer.address(64), 3 * 1024, mr.p->rkey, 0});
  std::vector<std::unique_ptr<Qp>> qps;
  for (std::size_t i = 0; i < count; ++i) {
    qps.push_back(std::make_unique<Qp>(pd, cq, cq));
    to_init(dev, *qps.back());
    bring_up(dev, *qps.back(), run.peer.exchange(address_of(dev, *qps.back())));
  }
  run.peer.barrier();
  const ibv_sge own{buffer.address(64), bytes, mr.p->lkey};
  const auto write_all = [&] {
    for (std::size_t i = 0; i < count; ++i)
      EXPECT_OK(post(*qps[i], Send{.opcode = IBV_WR_RDMA_WRITE, .id = i, .sges = {own}, .remote_address = remote.address + i * bytes, .rkey = remote.rkey}));
  };
  if (run.a()) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(800);
    write_all();
    while (std::chrono::steady_clock::now() < end) {
      const ibv_wc wc = cq.next();
      EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
      EXPECT_OK(post(*qps[wc.wr_id], Send{.opcode = IBV_WR_RDMA_WRITE, .id = wc.wr_id, .sges = {own}, .remote_address = remote.address + wc.wr_id * bytes, .rkey = remote.rkey}));
    }
    for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(cq.next().status, IBV_WC_SUCCESS);
  } else {
    for (int round = 0; round < 6; ++round) {
      Window window(pd, IBV_MW_TYPE_1);
      EXPECT_OK(bind_1(*qps[0], window, 1000, part(mr, buffer.address(64 + 2560), 256)));
      cq.expect(1000);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  run.peer.barrier();
}

CONFORMANCE(AFlushedBindLeavesTheWindowFree, "MW-02 ERR-12") {
  Link link(run, with_bindable_memory());
  need_windows(run, link.dev);
  Window window(link.pd, IBV_MW_TYPE_2);
  const std::uint32_t rkey = ibv_inc_rkey(window.p->rkey);
  const auto bind = [&](std::uint64_t id) { return bind_2(link.qp, window, id, rkey, part(link.mem.mr.p, link.mem.buffer.address(), 64)); };
  if (run.a()) {
    Send wrong = link.write(1, 0, 0, 64);
    wrong.rkey += 1;
    EXPECT_OK(post(link.qp, wrong));
    EXPECT_OK(bind(2));
    link.scq.expect(1, IBV_WC_REM_ACCESS_ERR);
    link.scq.expect(2, IBV_WC_WR_FLUSH_ERR);
    EXPECT_OK(bind(3));  // in ERR
    link.scq.expect(3, IBV_WC_WR_FLUSH_ERR);
  }
  link.reconnect();
  if (run.a()) {
    EXPECT_OK(bind(4));
    link.scq.expect(4);
    EXPECT_OK(invalidate(link.qp, 5, rkey));
    link.scq.expect(5);
    EXPECT_OK(bind(6));
    link.scq.expect(6);
  }
  run.peer.barrier();
}

// B's windows, A's requests.
CONFORMANCE(WindowsChangeInTheirTurn, "MW-05") {
  Link link(run, with_bindable_memory());
  need_windows(run, link.dev);
  const std::uint64_t start = link.mem.buffer.address() + window_at;
  const auto told = [&](std::uint32_t rkey) { return run.peer.exchange(Remote{start, window_bytes, rkey, 0}); };

  // Behind a SEND that waits for its receive the window is what it was.
  Window second(link.pd, IBV_MW_TYPE_2);
  const std::uint32_t key = ibv_inc_rkey(second.p->rkey);
  if (run.b()) {
    EXPECT_OK(bind_2(link.qp, second, 1, key, part(link.mem.mr.p, start, window_bytes)));
    link.scq.expect(1);
    EXPECT_OK(post(link.qp, link.send(2, 0, 8)));
    EXPECT_OK(invalidate(link.qp, 3, key));
  }
  const Remote theirs = told(key);
  for (int i = 0; i < 10; ++i) expect_access(link, IBV_WR_RDMA_WRITE, theirs.address, 64, theirs.rkey, IBV_WC_SUCCESS);
  if (run.b()) link.scq.expect_empty();
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, link.recv(4, 0, 8)));
    link.rcq.expect(4);
  } else {
    link.scq.expect(2);
    EXPECT_EQ(link.scq.expect(3).opcode, IBV_WC_LOCAL_INV);
  }
  run.peer.barrier();
  expect_access(link, IBV_WR_RDMA_WRITE, theirs.address, 64, theirs.rkey, IBV_WC_REM_ACCESS_ERR);

  // What is flushed has not happened.
  Window first(link.pd, IBV_MW_TYPE_1);
  if (run.b()) {
    EXPECT_OK(bind_1(link.qp, first, 5, part(link.mem.mr.p, start, window_bytes)));
    link.scq.expect(5);
  }
  const Remote bound = told(first.p->rkey);
  if (run.b()) {
    Send wrong = link.write(6, 0, 0, 64);
    wrong.rkey += 1;
    EXPECT_OK(post(link.qp, wrong));
    EXPECT_OK(bind_1(link.qp, first, 7, part(link.mem.mr.p, start, 64)));
    link.scq.expect(6, IBV_WC_REM_ACCESS_ERR);
    link.scq.expect(7, IBV_WC_WR_FLUSH_ERR);
  }
  const Remote flushed = told(first.p->rkey);
  link.reconnect();
  expect_access(link, IBV_WR_RDMA_WRITE, bound.address + 128, 8, bound.rkey, IBV_WC_SUCCESS);
  expect_access(link, IBV_WR_RDMA_WRITE, flushed.address, 8, flushed.rkey, IBV_WC_REM_ACCESS_ERR);
}

CONFORMANCE(SharedReceivesTakeInvalidatingSends, "MW-04 SRQ-01") {
  constexpr std::uint64_t messages = 24;
  Device dev(run.settings);
  need_windows(run, dev);
  Pd pd(dev);
  Cq scq(dev, 128), rcq(dev, 128);
  Region mem(pd, 64 * 1024, static_cast<unsigned>(bindable));
  ibv_srq_init_attr init{};
  init.attr = {messages, 1, 0};
  ibv_srq* const srq = ibv_create_srq(pd, &init);
  EXPECT(srq != nullptr);
  {
    QpSpec spec;
    spec.srq = srq;
    Qp qp(pd, scq, rcq, spec);
    to_init(dev, qp);
    bring_up(dev, qp, run.peer.exchange(address_of(dev, qp)));
    Window window(pd, IBV_MW_TYPE_2);
    for (std::uint64_t i = 0; run.b() && i < messages; ++i) EXPECT_OK(post(srq, Recv{i, {mem.sge(i * 64, 64)}}));
    for (std::uint64_t i = 0; i < messages; ++i) {
      const std::uint32_t rkey = ibv_inc_rkey(window.p->rkey) + static_cast<std::uint32_t>(i % 200);
      if (run.b()) {
        EXPECT_OK(bind_2(qp, window, i, rkey, part(mem.mr.p, mem.buffer.address(), 64)));
        scq.expect(i);
      }
      const Remote theirs = run.peer.exchange(Remote{0, 0, rkey, 0});
      if (run.a()) {
        ibv_send_wr wr{};
        ibv_sge sge = mem.sge(0, 32);
        wr.opcode = i % 2 == 0 ? IBV_WR_SEND_WITH_INV : IBV_WR_SEND;
        wr.invalidate_rkey = theirs.rkey;
        wr.sg_list = &sge;
        wr.num_sge = 1;
        EXPECT_OK(post_raw(qp, wr, i));
        scq.expect(i);
      } else {
        rcq.expect(i);
        if (i % 2 != 0) {
          EXPECT_OK(invalidate(qp, 1000 + i, rkey));
          scq.expect(1000 + i);
        }
      }
    }
    run.peer.barrier();
  }
  EXPECT_OK(ibv_destroy_srq(srq));
}

}  // namespace vrdma::conformance
