// Thread domains and parent domains: what carries a parent domain's name is of the protection domain that it was made of, and none of
// them goes before what was made of it. Skipped aloud where the device has none.
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

// As other objects of tests: made, or the test fails or skips; gone at the end, or the test fails.
class ThreadDomain {
 public:
  explicit ThreadDomain(Device& device) {
    ibv_td_init_attr init{};
    errno = 0;
    p = ibv_alloc_td(device.ctx, &init);
    if (p == nullptr && errno == EOPNOTSUPP) skip("ibv_alloc_td: EOPNOTSUPP");
    EXPECT(p != nullptr && p->context == device.ctx);
  }
  ~ThreadDomain() { EXPECT_OK(ibv_dealloc_td(p)); }
  ThreadDomain(const ThreadDomain&) = delete;
  ThreadDomain& operator=(const ThreadDomain&) = delete;
  ibv_td* p;
};

class ParentDomain {
 public:
  ParentDomain(Device& device, ibv_parent_domain_init_attr init) {
    errno = 0;
    p = ibv_alloc_parent_domain(device.ctx, &init);
    if (p == nullptr && errno == EOPNOTSUPP) skip("ibv_alloc_parent_domain: EOPNOTSUPP");
    EXPECT(p != nullptr && p != init.pd && p->context == device.ctx);
  }
  ParentDomain(Device& device, ibv_pd* pd, ibv_td* td = nullptr) : ParentDomain(device, of(pd, td)) {}
  ~ParentDomain() { EXPECT_OK(ibv_dealloc_pd(p)); }
  ParentDomain(const ParentDomain&) = delete;
  ParentDomain& operator=(const ParentDomain&) = delete;
  operator ibv_pd*() const { return p; }

  static ibv_parent_domain_init_attr of(ibv_pd* pd, ibv_td* td = nullptr) {
    ibv_parent_domain_init_attr init{};
    init.pd = pd;
    init.td = td;
    return init;
  }
  ibv_pd* p;
};

// One made on a parent domain.
class DomainCq {
 public:
  DomainCq(Device& device, ibv_pd* domain, std::uint32_t flags = 0) {
    errno = 0;
    p = make(device, domain, flags);
    if (p == nullptr && errno == EOPNOTSUPP) skip("ibv_create_cq_ex on a parent domain: EOPNOTSUPP");
    EXPECT(p != nullptr);
  }
  ~DomainCq() { EXPECT_OK(ibv_destroy_cq(*this)); }
  DomainCq(const DomainCq&) = delete;
  DomainCq& operator=(const DomainCq&) = delete;
  operator ibv_cq*() const { return ibv_cq_ex_to_cq(p); }

  static ibv_cq_ex* make(Device& device, ibv_pd* domain, std::uint32_t flags = 0) {
    ibv_cq_init_attr_ex init{};
    init.cqe = 64;
    init.wc_flags = IBV_WC_STANDARD_FLAGS;
    init.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD | IBV_CQ_INIT_ATTR_MASK_FLAGS;
    init.flags = flags;
    init.parent_domain = domain;
    return ibv_create_cq_ex(device.ctx, &init);
  }
  // By steps.
  std::uint32_t expect_bytes_of(std::uint64_t id) {
    std::uint32_t bytes = 0;
    wait_until("a completion", [&] {
      ibv_poll_cq_attr attr{};
      const int rc = ibv_start_poll(p, &attr);
      if (rc == ENOENT) return false;
      EXPECT_OK(rc);
      EXPECT_EQ(p->status, IBV_WC_SUCCESS);
      EXPECT_EQ(p->wr_id, id);
      bytes = ibv_wc_read_byte_len(p);
      ibv_end_poll(p);
      return true;
    });
    return bytes;
  }
  ibv_cq_ex* p;
};

Remote remote_of(const Region& region) { return {region.buffer.address(), region.buffer.size(), region.mr.p->rkey, 0}; }

}  // namespace

CONFORMANCE(DomainsInUseAreBusy, "OBJ-19 OBJ-07", .solo = true) {
  Device dev(run.settings);
  Cq cq(dev, 8);
  Pd pd(dev);
  ThreadDomain td(dev), unused(dev);
  EXPECT(td.p != unused.p);
  {
    ParentDomain domain(dev, pd, td.p), second(dev, pd, td.p);
    EXPECT(domain.p != second.p);
    EXPECT_ERRNO(ibv_dealloc_td(td.p), EBUSY);
    EXPECT_ERRNO(ibv_dealloc_pd(pd), EBUSY);
    {
      Region region(domain, 4096);
      EXPECT(region.mr.p->pd == domain.p);
      EXPECT_ERRNO(ibv_dealloc_pd(domain), EBUSY);
      EXPECT_ERRNO(ibv_dealloc_td(td.p), EBUSY);
    }
    {
      Qp qp(domain, cq, cq);
      EXPECT(qp.p->pd == domain.p);
      EXPECT_ERRNO(ibv_dealloc_pd(domain), EBUSY);
    }
    {
      Srq srq(domain, 8);
      EXPECT(srq.p->pd == domain.p);
      EXPECT_ERRNO(ibv_dealloc_pd(domain), EBUSY);
    }
    {
      Address self{};
      self.gid = dev.gid;
      self.lid = dev.port.lid;
      Ah ah(domain, ah_to(dev, self));
      EXPECT(ah.p->pd == domain.p);
      EXPECT_ERRNO(ibv_dealloc_pd(domain), EBUSY);
    }
    {
      ParentDomain of_domain(dev, domain);
      EXPECT_ERRNO(ibv_dealloc_pd(domain), EBUSY);
    }
  }
  // Whatever is gone keeps nothing.
  ParentDomain domain(dev, pd, td.p);
  {
    DomainCq made(dev, domain);
    EXPECT_ERRNO(ibv_dealloc_pd(domain), EBUSY);
  }
}

CONFORMANCE(DomainsCheckTheirArguments, "OBJ-19 OBJ-20", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  ThreadDomain td(dev);
  ibv_td_init_attr unknown_td{.comp_mask = 1u << 30};
  EXPECT(ibv_alloc_td(dev.ctx, &unknown_td) == nullptr);
  EXPECT(errno == EINVAL || errno == EOPNOTSUPP);
  { ParentDomain domain(dev, pd, td.p); }
  ibv_parent_domain_init_attr of_nothing{};
  of_nothing.td = td.p;
  EXPECT_NULL(ibv_alloc_parent_domain(dev.ctx, &of_nothing), EINVAL);
  ibv_parent_domain_init_attr unknown = ParentDomain::of(pd, td.p);
  unknown.comp_mask = 1u << 30;
  EXPECT(ibv_alloc_parent_domain(dev.ctx, &unknown) == nullptr);
  EXPECT(errno == EINVAL || errno == EOPNOTSUPP);
  // What was refused keeps nothing busy: all of them go at the end.
  if (ibv_cq_ex* const cq = DomainCq::make(dev, nullptr)) {
    EXPECT_OK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
    fail(__FILE__, __LINE__, "a completion queue on a parent domain that is none");
  }
  EXPECT(errno == EINVAL || errno == EOPNOTSUPP);
}

CONFORMANCE(AParentDomainIsItsProtectionDomain, "OBJ-20 MR-12") {
  Device dev(run.settings);
  Pd pd(dev), stranger(dev);
  ThreadDomain td(dev);
  ParentDomain domain(dev, pd, td.p), second(dev, domain), strange(dev, stranger, td.p);
  Cq scq(dev, 64), rcq(dev, 64);
  Region on_pd(pd, 4096), on_domain(domain, 4096), on_second(second, 4096), foreign(strange, 4096);
  Srq srq(second, 16, 4);
  Qp qp(domain, scq, rcq, {.srq = srq}), plain(pd, scq, rcq), lost(domain, scq, rcq);
  Qp* const all[] = {&qp, &plain, &lost};
  for (Qp* one : all) bring_up(dev, *one, run.peer.exchange(address_of(dev, *one)));
  const Remote theirs[] = {run.peer.exchange(remote_of(on_pd)), run.peer.exchange(remote_of(on_domain)), run.peer.exchange(remote_of(on_second))};
  const Remote their_foreign = run.peer.exchange(remote_of(foreign));
  const std::span<std::byte> mine[] = {on_pd.buffer.span(), on_domain.buffer.span(), on_second.buffer.span()};
  constexpr std::size_t half = 2048;
  std::vector<std::byte> wanted(half);

  // Keys of each, on queue pairs of each, here and there.
  std::uint64_t id = 0;
  for (Qp* one : {&qp, &plain}) {
    for (std::size_t from = 0; from < 3; ++from) {
      const Region& local = from == 0 ? on_pd : from == 1 ? on_domain : on_second;
      const std::size_t to = (from + 1) % 3;
      const Note note("from ", from, " to ", to, one == &qp ? " by the parent domain's queue pair" : " by the protection domain's");
      fill_pattern(wanted, run.seed + ++id);
      if (run.a()) {
        std::memcpy(local.data(), wanted.data(), half);
        EXPECT_OK(post(*one, Send{.opcode = IBV_WR_RDMA_WRITE, .id = id, .sges = {local.sge(0, half)}, .remote_address = theirs[to].address + half, .rkey = theirs[to].rkey}));
        scq.expect(id);
        std::memset(local.data(), 0, half);
        EXPECT_OK(post(*one, Send{.opcode = IBV_WR_RDMA_READ, .id = id, .sges = {local.sge(0, half)}, .remote_address = theirs[to].address + half, .rkey = theirs[to].rkey}));
        scq.expect(id);
        expect_bytes({local.data(), half}, wanted, "read");
      }
      run.peer.barrier();
      if (run.b()) expect_bytes(mine[to].subspan(half), wanted, "written");
      run.peer.barrier();
    }
  }

  // A message out of memory of each, into a shared receive with memory of each.
  fill_pattern(wanted, run.seed + 100);
  if (run.b()) EXPECT_OK(post(srq, Recv{1, {on_second.sge(0, 100), on_domain.sge(0, 200), on_pd.sge(0, 300)}}));
  run.peer.barrier();
  if (run.a()) {
    std::memcpy(on_pd.data(), wanted.data(), 300);
    std::memcpy(on_domain.data(), wanted.data() + 300, 200);
    std::memcpy(on_second.data(), wanted.data() + 500, 100);
    EXPECT_OK(post(qp, Send{.id = 2, .sges = {on_pd.sge(0, 300), on_domain.sge(0, 200), on_second.sge(0, 100)}}));
    scq.expect(2);
  } else {
    EXPECT_EQ(rcq.expect(1).byte_len, 600u);
    expect_bytes({on_second.data(), 100}, std::span(wanted).first(100), "received in the first part");
    expect_bytes({on_domain.data(), 200}, std::span(wanted).subspan(100, 200), "received in the second part");
    expect_bytes({on_pd.data(), 300}, std::span(wanted).subspan(300, 300), "received in the third part");
  }
  run.peer.barrier();

  // The thread domain is the same, the protection domain is not.
  if (run.a()) {
    EXPECT_OK(post(lost, Send{.opcode = IBV_WR_RDMA_WRITE, .id = 3, .sges = {on_pd.sge(0, 8)}, .remote_address = their_foreign.address, .rkey = their_foreign.rkey}));
    scq.expect(3, IBV_WC_REM_ACCESS_ERR);
    EXPECT_OK(post(plain, Send{.id = 4, .sges = {foreign.sge(0, 8)}}));
    scq.expect(4, IBV_WC_LOC_PROT_ERR);
  }
  run.peer.barrier();
}

CONFORMANCE(DatagramsAndStepsWorkOnAParentDomain, "OBJ-20 CQX-02") {
  Device dev(run.settings);
  Pd pd(dev);
  ThreadDomain td(dev);
  ParentDomain domain(dev, pd, td.p);
  DomainCq scq(dev, domain), rcq(dev, domain, IBV_CREATE_CQ_ATTR_SINGLE_THREADED);
  Region on_pd(pd, 4096), on_domain(domain, 4096);
  Qp on_domain_qp(domain, scq, rcq, {.type = IBV_QPT_UD}), on_pd_qp(pd, scq, rcq, {.type = IBV_QPT_UD});
  std::uint64_t id = 0;
  for (Qp* qp : {&on_domain_qp, &on_pd_qp}) {
    bring_up(dev, *qp, {});
    const Address theirs = run.peer.exchange(address_of(dev, *qp));
    const Ah own(domain, ah_to(dev, theirs)), shared(pd, ah_to(dev, theirs));
    for (const Ah* ah : {&own, &shared}) {
      ++id;
      std::vector<std::byte> wanted(500);
      fill_pattern(wanted, run.seed + id);
      const Region& mem = id % 2 == 0 ? on_pd : on_domain;
      if (run.b()) EXPECT_OK(post(*qp, Recv{id, {mem.sge(0, 1000)}}));
      run.peer.barrier();
      if (run.a()) {
        std::memcpy(mem.data(), wanted.data(), 500);
        EXPECT_OK(post(*qp, Send{.id = id, .sges = {mem.sge(0, 500)}, .ah = *ah, .qpn = theirs.qpn, .qkey = test_qkey}));
        (void)scq.expect_bytes_of(id);
      } else {
        EXPECT_EQ(rcq.expect_bytes_of(id), 500 + grh_bytes);
        expect_bytes({mem.data(grh_bytes), 500}, wanted, "payload");
      }
      run.peer.barrier();
    }
  }
}

CONFORMANCE(ARegistrationMovesToAParentDomainAndBack, "OBJ-20 MR-19", .solo = true) {
  Loop loop(run);
  ParentDomain domain(loop.dev, loop.pd);
  Pd other(loop.dev);
  Region region(loop.pd, 4096);
  ibv_pd* const pds[] = {other, domain, other, loop.pd};
  std::uint64_t id = 0;
  for (ibv_pd* pd : pds) {
    EXPECT_OK(ibv_rereg_mr(region.mr, IBV_REREG_MR_CHANGE_PD, pd, nullptr, 0, 0));
    EXPECT(region.mr.p->pd == pd);
    EXPECT_ERRNO(ibv_dealloc_pd(pd), EBUSY);
    if (pd == other.p) continue;
    EXPECT_OK(post(loop.qp, Send{.opcode = IBV_WR_RDMA_WRITE, .id = ++id, .sges = {region.sge(0, 64)}, .remote_address = region.buffer.address(128), .rkey = region.mr.p->rkey}));
    loop.scq.expect(id);
  }
}

// A device may call them for buffers of its own, or may have none.
CONFORMANCE(AllocatorsOfAParentDomainAreCalledRightlyOrNotAtAll, "OBJ-20", .solo = true) {
  static int given, taken_back;
  static void* const expected_context = &given;
  given = taken_back = 0;
  Device dev(run.settings);
  Pd pd(dev);
  {
    ibv_parent_domain_init_attr init = ParentDomain::of(pd);
    init.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    init.pd_context = expected_context;
    init.alloc = [](ibv_pd*, void* context, std::size_t bytes, std::size_t alignment, std::uint64_t) -> void* {
      if (context != expected_context) ::abort();
      ++given;
      return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    init.free = [](ibv_pd*, void* context, void* memory, std::uint64_t) {
      if (context != expected_context) ::abort();
      ++taken_back;
      std::free(memory);
    };
    ParentDomain domain(dev, init);
    init.alloc = [](ibv_pd*, void*, std::size_t, std::size_t, std::uint64_t) { return IBV_ALLOCATOR_USE_DEFAULT; };
    ParentDomain lazy(dev, init);
    for (ibv_pd* const one : {domain.p, lazy.p}) {
      DomainCq cq(dev, one);
      Region region(one, 4096);
      Srq srq(one, 8);
      Qp qp(one, cq, cq), other(one, cq, cq, {.srq = srq});
      bring_up(dev, qp, address_of(dev, other));
      bring_up(dev, other, address_of(dev, qp));
      EXPECT_OK(post(qp, Send{.opcode = IBV_WR_RDMA_WRITE, .id = 1, .sges = {region.sge(0, 64)}, .remote_address = region.buffer.address(128), .rkey = region.mr.p->rkey}));
      (void)cq.expect_bytes_of(1);
    }
    EXPECT(taken_back <= given);
  }
  EXPECT_EQ(taken_back, given);
}

CONFORMANCE(AForkedChildUsesAParentDomain, "OBJ-17 OBJ-20", .solo = true) {
  EXPECT_OK(ibv_fork_init());
  Device dev(run.settings);
  Pd pd(dev);
  ThreadDomain td(dev);
  ParentDomain domain(dev, pd, td.p);
  const pid_t pid = ::fork();
  EXPECT_GE(pid, 0);
  if (pid == 0) {
    {
      Cq cq(dev, 8);
      ParentDomain another(dev, domain, td.p);
      Region on_domain(domain, 4096), on_pd(pd, 4096), on_another(another, 4096);
      Qp qp(another, cq, cq), other(pd, cq, cq);
      bring_up(dev, qp, address_of(dev, other));
      bring_up(dev, other, address_of(dev, qp));
      std::memset(on_pd.data(), 0x5a, 64);
      EXPECT_OK(post(qp, Send{.opcode = IBV_WR_RDMA_WRITE, .id = 1, .sges = {on_pd.sge(0, 64)}, .remote_address = on_domain.buffer.address(), .rkey = on_domain.mr.p->rkey}));
      cq.expect(1);
      expect_bytes({on_domain.data(), 64}, {on_pd.data(), 64}, "written in the child");
    }
    ::_exit(0);
  }
  int status = 0;
  wait_until("the child", [&] { return ::waitpid(pid, &status, WNOHANG) == pid; }, 40);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  Region region(domain, 4096);
  EXPECT_ERRNO(ibv_dealloc_pd(domain), EBUSY);
}

}  // namespace vrdma::conformance
