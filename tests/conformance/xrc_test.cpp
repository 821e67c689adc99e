// Extended reliable connections: an initiator, a target, and SRQs of the target's domain.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

namespace {

void need_xrc(const Device& dev) {
  if ((dev.attr.device_cap_flags & IBV_DEVICE_XRC) == 0) skip("the device has no XRC");
}

ibv_xrcd* open_domain(Device& dev, int fd, int flags) {
  ibv_xrcd_init_attr wanted{};
  wanted.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
  wanted.fd = fd;
  wanted.oflags = flags;
  errno = 0;
  return ibv_open_xrcd(dev.ctx, &wanted);
}

struct Domain {
  explicit Domain(Device& dev, int fd = -1) : p(open_domain(dev, fd, O_CREAT)) { EXPECT(p != nullptr); }
  ~Domain() { EXPECT_OK(ibv_close_xrcd(p)); }
  Domain(const Domain&) = delete;
  Domain& operator=(const Domain&) = delete;
  ibv_xrcd* p;
};

// An SRQ of a domain with all that receiving by it takes: a protection domain, a completion queue and memory of its own.
struct Receives {
  Receives(Device& dev, const Domain& domain) : pd(dev), cq(dev, 64), region(pd, 64 * 1024) {
    ibv_srq_init_attr_ex wanted{};
    wanted.attr = {32, 1, 0};
    wanted.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    wanted.srq_type = IBV_SRQT_XRC;
    wanted.pd = pd;
    wanted.xrcd = domain.p;
    wanted.cq = cq;
    srq = ibv_create_srq_ex(dev.ctx, &wanted);
    EXPECT(srq != nullptr);
    EXPECT_OK(ibv_get_srq_num(srq, &number));
  }
  ~Receives() {
    if (srq != nullptr) EXPECT_OK(ibv_destroy_srq(srq));
  }
  Receives(const Receives&) = delete;
  Receives& operator=(const Receives&) = delete;
  void receive(std::uint64_t id, std::size_t offset, std::size_t bytes) { EXPECT_OK(post(srq, Recv{id, {region.sge(offset, bytes)}})); }
  Remote remote() const { return {region.buffer.address(), region.buffer.size(), region.mr.p->rkey, number}; }

  Pd pd;
  Cq cq;
  Region region;
  ibv_srq* srq = nullptr;
  std::uint32_t number = 0;
};

ibv_qp* make_target(Device& dev, const Domain& domain) {
  ibv_qp_init_attr_ex wanted{};
  wanted.qp_type = IBV_QPT_XRC_RECV;
  wanted.comp_mask = IBV_QP_INIT_ATTR_XRCD;
  wanted.xrcd = domain.p;
  return ibv_create_qp_ex(dev.ctx, &wanted);
}

ibv_qp* open_target(Device& dev, const Domain& domain, std::uint32_t number) {
  ibv_qp_open_attr wanted{};
  wanted.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
  wanted.qp_num = number;
  wanted.xrcd = domain.p;
  wanted.qp_type = IBV_QPT_XRC_RECV;
  errno = 0;
  return ibv_open_qp(dev.ctx, &wanted);
}

// What an initiator sends from.
struct Initiator {
  explicit Initiator(Device& dev) : pd(dev), cq(dev, 64), region(pd, 64 * 1024), qp(pd, cq, cq, {.type = IBV_QPT_XRC_SEND}) {}
  Send to(std::uint32_t srqn, std::uint64_t id, ibv_wr_opcode opcode, std::size_t bytes, const Remote& remote = {}) const {
    return {.opcode = opcode, .id = id, .sges = {region.sge(0, bytes)}, .imm = static_cast<std::uint32_t>(id * 3), .remote_address = remote.address, .rkey = remote.rkey, .compare_add = 5, .srqn = srqn};
  }
  Pd pd;
  Cq cq;
  Region region;
  Qp qp;
};

// An initiator and its target in one process.
struct Pair {
  Pair(Device& dev, const Domain& domain) : initiator(dev), target(make_target(dev, domain)) {
    EXPECT(target != nullptr);
    connect(dev);
  }
  ~Pair() {
    if (target != nullptr) EXPECT_OK(ibv_destroy_qp(target));
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;
  void connect(Device& dev) {
    for (ibv_qp* qp : {initiator.qp.p, target}) EXPECT_OK(apply(qp, {{}, IBV_QP_STATE}));
    bring_up(dev, target, address_of(dev, initiator.qp));
    bring_up(dev, initiator.qp, address_of(dev, target), {.timeout = 10, .retry_count = 2});
  }
  void send(std::uint32_t srqn, std::uint64_t id, ibv_wc_status status = IBV_WC_SUCCESS) {
    EXPECT_OK(post(initiator.qp, initiator.to(srqn, id, IBV_WR_SEND, 8)));
    initiator.cq.expect(id, status);
  }
  Initiator initiator;
  ibv_qp* target;
};

struct File {
  File() : fd(::memfd_create("an XRC domain", MFD_CLOEXEC)) { EXPECT(fd >= 0); }
  ~File() { ::close(fd); }
  int fd;
};

}  // namespace

CONFORMANCE(AnXrcRequestIsForTheSrqThatItNames, "XRC-01 XRC-03") {
  Device dev(run.settings);
  need_xrc(dev);
  struct Told {
    Address address;
    Remote first, second;
  };
  if (run.a()) {
    Initiator from(dev);
    fill_pattern(from.region.buffer.span(), run.seed);
    const Told there = run.peer.exchange(Told{address_of(dev, from.qp), {}, {}});
    const std::uint32_t one = there.first.reserved, two = there.second.reserved;
    bring_up(dev, from.qp, there.address);
    run.peer.barrier();
    const auto done = [&](const Send& request, ibv_wc_opcode opcode) {
      EXPECT_OK(post(from.qp, request));
      EXPECT_EQ(from.cq.expect(request.id).opcode, opcode);
    };
    done(from.to(one, 1, IBV_WR_SEND, 100), IBV_WC_SEND);
    done(from.to(two, 2, IBV_WR_SEND_WITH_IMM, 20000), IBV_WC_SEND);
    done(from.to(two, 3, IBV_WR_RDMA_WRITE, 3000, there.second), IBV_WC_RDMA_WRITE);
    done(from.to(one, 4, IBV_WR_RDMA_WRITE_WITH_IMM, 500, there.first), IBV_WC_RDMA_WRITE);
    run.peer.barrier();  // b has looked
    run.peer.barrier();  // b has put other bytes there
    done(from.to(one, 5, IBV_WR_RDMA_READ, 4000, there.first), IBV_WC_RDMA_READ);
    std::vector<std::byte> wanted(4000);
    fill_pattern(wanted, run.seed + 1);
    expect_bytes({from.region.data(), 4000}, wanted, "what was read");
    done(from.to(two, 6, IBV_WR_ATOMIC_FETCH_AND_ADD, 8, there.second), IBV_WC_FETCH_ADD);
    run.peer.barrier();
    // The key is good, but of the other SRQ's protection domain.
    EXPECT_OK(post(from.qp, from.to(one, 7, IBV_WR_RDMA_WRITE, 8, there.second)));
    from.cq.expect(7, IBV_WC_REM_ACCESS_ERR);
    run.peer.barrier();
  } else {
    Domain domain(dev);
    Receives first(dev, domain), second(dev, domain);
    ibv_qp* const target = make_target(dev, domain);
    EXPECT(target != nullptr);
    const Told there = run.peer.exchange(Told{address_of(dev, target), first.remote(), second.remote()});
    bring_up(dev, target, there.address);
    first.receive(11, 1000, 4096), first.receive(12, 0, 0);
    second.receive(21, 30000, 30000);
    run.peer.barrier();
    std::vector<std::byte> wanted(20000);
    fill_pattern(wanted, run.seed);
    const auto sent = [&](std::size_t bytes) { return std::span(wanted).first(bytes); };
    const auto came = [&](Receives& by, std::uint64_t id, std::size_t bytes, ibv_wc_opcode opcode) {
      const ibv_wc wc = by.cq.expect(id);
      EXPECT_EQ(wc.opcode, opcode);
      EXPECT_EQ(wc.byte_len, bytes);
      EXPECT_EQ(wc.qp_num, target->qp_num);
      return wc;
    };
    came(first, 11, 100, IBV_WC_RECV);
    expect_bytes({first.region.data(1000), 100}, sent(100), "a SEND to the first SRQ");
    EXPECT_EQ(came(second, 21, 20000, IBV_WC_RECV).imm_data, 6u);
    expect_bytes({second.region.data(30000), 20000}, sent(20000), "a SEND to the second SRQ");
    EXPECT_EQ(came(first, 12, 500, IBV_WC_RECV_RDMA_WITH_IMM).imm_data, 12u);
    expect_bytes({first.region.data(), 500}, sent(500), "a WRITE to the first's memory");
    expect_bytes({second.region.data(), 3000}, sent(3000), "a WRITE to the second's memory");
    run.peer.barrier();
    fill_pattern({first.region.data(), 4000}, run.seed + 1);
    std::uint64_t counter = 37;
    std::memcpy(second.region.data(), &counter, sizeof(counter));
    run.peer.barrier();
    run.peer.barrier();
    std::memcpy(&counter, second.region.data(), sizeof(counter));
    EXPECT_EQ(counter, 42u);
    run.peer.barrier();
    EXPECT_EQ(dev.wait_event(IBV_EVENT_QP_ACCESS_ERR).element.qp, target);
    first.cq.expect_empty(), second.cq.expect_empty();
    EXPECT_OK(ibv_destroy_qp(target));
  }
  run.peer.barrier();
}

CONFORMANCE(AnXrcDomainIsOneForAllWhoNameItsFile, "XRC-02", .solo = true) {
  Device dev(run.settings), other(run.settings);
  need_xrc(dev);
  const File file;
  EXPECT(open_domain(dev, file.fd, 0) == nullptr);
  EXPECT_EQ(errno, EAGAIN);
  Domain domain(dev, file.fd);
  EXPECT(open_domain(other, file.fd, O_CREAT | O_EXCL) == nullptr);
  EXPECT_EQ(errno, EINVAL);
  ibv_xrcd* const found = open_domain(other, file.fd, 0);
  EXPECT(found != nullptr);
  EXPECT_OK(ibv_close_xrcd(found));

  // Received by an SRQ of one, through a target of the other.
  Domain same(other, file.fd);
  Receives receives(other, same);
  Pair pair(dev, domain);
  receives.receive(1, 0, 64);
  pair.send(receives.number, 1);
  EXPECT_EQ(receives.cq.expect(1).qp_num, pair.target->qp_num);

  // Another handle is the same queue pair, and keeps it.
  const std::uint32_t number = pair.target->qp_num;
  EXPECT(open_target(other, same, number + 1000) == nullptr);
  EXPECT_EQ(errno, EINVAL);
  ibv_qp* const opened = open_target(other, same, number);
  EXPECT(opened != nullptr);
  EXPECT_EQ(opened->qp_num, number);
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  EXPECT_OK(ibv_query_qp(opened, &attr, IBV_QP_STATE | IBV_QP_DEST_QPN, &init));
  EXPECT_EQ(attr.qp_state, IBV_QPS_RTS);
  EXPECT_EQ(attr.dest_qp_num, pair.initiator.qp.p->qp_num);
  EXPECT_OK(ibv_destroy_qp(std::exchange(pair.target, nullptr)));
  receives.receive(2, 0, 64);
  pair.send(receives.number, 2);
  EXPECT_EQ(receives.cq.expect(2).qp_num, number);
  EXPECT_OK(ibv_destroy_qp(opened));
  pair.send(receives.number, 3, IBV_WC_RETRY_EXC_ERR);
}

CONFORMANCE(WhatXrcDoesNotDoIsRefused, "XRC-03", .solo = true) {
  Device dev(run.settings);
  need_xrc(dev);
  Domain domain(dev), stranger(dev);
  Receives receives(dev, domain), elsewhere(dev, stranger);
  Pair pair(dev, domain);
  EXPECT_ERRNO(ibv_close_xrcd(domain.p), EBUSY);
  EXPECT_ERRNO(ibv_destroy_cq(receives.cq.p), EBUSY);
  EXPECT_NE(post(pair.target, Send{.sges = {pair.initiator.region.sge(0, 8)}}), 0);
  EXPECT_NE(post(pair.target, Recv{1, {pair.initiator.region.sge(0, 8)}}), 0);
  EXPECT_NE(post(pair.initiator.qp, Recv{1, {pair.initiator.region.sge(0, 8)}}), 0);

  // An SRQ of a domain serves its targets, and no queue pair that names it.
  for (const ibv_qp_type type : {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD}) {
    ibv_qp_init_attr wanted{};
    wanted.qp_type = type;
    wanted.srq = receives.srq;
    wanted.send_cq = wanted.recv_cq = receives.cq;
    wanted.cap = {1, 0, 1, 0, 0};
    EXPECT_NULL(ibv_create_qp(receives.pd, &wanted), EINVAL);
  }

  // An SRQ of another domain, none at all, a queue pair's number, and one that is gone.
  receives.receive(1, 0, 64), elsewhere.receive(1, 0, 64);
  std::uint64_t id = 100;
  for (const std::uint32_t number : {elsewhere.number, 0u, pair.target->qp_num}) {
    const Note note("SRQ number ", number);
    pair.send(number, ++id, IBV_WC_REM_INV_REQ_ERR);
    EXPECT_EQ(dev.wait_event(IBV_EVENT_QP_REQ_ERR).element.qp, pair.target);
    pair.connect(dev);
  }
  pair.send(receives.number, 1);
  receives.cq.expect(1);
  elsewhere.cq.expect_empty();
  receives.receive(2, 0, 4);
  pair.send(receives.number, 2, IBV_WC_REM_INV_REQ_ERR);  // it does not fit
  receives.cq.expect(2, IBV_WC_LOC_LEN_ERR);
  pair.connect(dev);
  EXPECT_OK(ibv_destroy_srq(std::exchange(receives.srq, nullptr)));
  pair.send(receives.number, 3, IBV_WC_REM_INV_REQ_ERR);
}

}  // namespace vrdma::conformance
