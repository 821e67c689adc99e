// On-demand paging: regions of addresses, of which nothing need be mapped; and advice about them.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

constexpr std::size_t area_bytes = 64 * 1024;

bool offers_on_demand(const Device& dev) {
  ibv_device_attr_ex attr{};
  EXPECT_OK(ibv_query_device_ex(dev.ctx, nullptr, &attr));
  return (attr.odp_caps.general_caps & IBV_ODP_SUPPORT_IMPLICIT) != 0;
}
void need_on_demand(const Device& dev) {
  if (!offers_on_demand(dev)) skip("the device has no on-demand paging");
}

// Addresses that are this test's: mapped, taken away and mapped anew at will.
struct Area {
  Area() : at(static_cast<std::byte*>(::mmap(nullptr, area_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) { EXPECT(at != MAP_FAILED); }
  ~Area() { ::munmap(at, area_bytes); }
  Area(const Area&) = delete;
  Area& operator=(const Area&) = delete;
  void map() { EXPECT(::mmap(at, area_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at); }
  // Of an empty file: nobody's accesses succeed, and nothing else comes to lie there meanwhile.
  void empty() {
    const int file = ::memfd_create("empty", MFD_CLOEXEC);
    EXPECT(file >= 0);
    EXPECT(::mmap(at, area_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == at);
    ::close(file);
  }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(at); }
  ibv_sge sge(const ibv_mr* mr, std::size_t offset, std::uint32_t bytes) const { return {address() + offset, bytes, mr->lkey}; }
  std::byte* at;
};

ibv_mr* register_on_demand(Pd& pd, void* start, std::size_t bytes, int access) {
  errno = 0;
  ibv_mr* const mr = ibv_reg_mr(pd, start, bytes, access | IBV_ACCESS_ON_DEMAND);
  EXPECT(mr != nullptr);
  return mr;
}

}  // namespace

// `mr` was registered when nothing could be reached there.
static void follows_its_addresses(Run& run, Link& link, Area& area, ibv_mr* mr) {
  const auto request = [&](ibv_wr_opcode opcode, std::uint64_t id, const Remote& remote, std::uint32_t bytes) {
    return Send{.opcode = opcode, .id = id, .sges = {link.mem.sge(0, bytes)}, .remote_address = remote.address, .rkey = remote.rkey};
  };
  const Remote theirs = run.peer.exchange(Remote{area.address(), area_bytes, mr->rkey, 0});
  std::vector<std::byte> wanted(area_bytes);
  for (int round = 0; round < 3; ++round) {
    const Note note("mapping ", round);
    fill_pattern(wanted, run.seed + static_cast<unsigned>(round));
    area.map();  // other pages each time
    run.peer.barrier();
    if (run.a()) {
      std::memcpy(link.mem.data(), wanted.data(), area_bytes);
      EXPECT_OK(post(link.qp, request(IBV_WR_RDMA_WRITE, 1, theirs, area_bytes)));
      link.scq.expect(1);
      std::memset(link.mem.data(), 0, area_bytes);
      EXPECT_OK(post(link.qp, request(IBV_WR_RDMA_READ, 2, theirs, area_bytes)));
      link.scq.expect(2);
      expect_bytes({link.mem.data(), area_bytes}, wanted, "read back");
    }
    run.peer.barrier();
    if (run.b()) expect_bytes({area.at, area_bytes}, wanted, "written");
    // Both ways by SEND, from and to it.
    if (run.b()) {
      std::memset(area.at, 0, 4096);
      EXPECT_OK(post(link.qp, Recv{3, {area.sge(mr, 0, 4096)}}));
    }
    run.peer.barrier();
    if (run.a()) {
      std::memcpy(area.at + 1, wanted.data(), 4096);
      EXPECT_OK(post(link.qp, Send{.id = 4, .sges = {area.sge(mr, 1, 4096)}}));
      link.scq.expect(4);
    } else {
      EXPECT_EQ(link.rcq.expect(3).byte_len, 4096u);
      expect_bytes({area.at, 4096}, std::span(wanted).first(4096), "received");
      std::uint64_t first = 40;
      std::memcpy(area.at + 8, &first, sizeof(first));
    }
    run.peer.barrier();
    if (run.a()) {
      Send add = request(IBV_WR_ATOMIC_FETCH_AND_ADD, 5, theirs, 8);
      add.remote_address += 8;
      add.compare_add = 2;
      EXPECT_OK(post(link.qp, add));
      link.scq.expect(5);
      EXPECT_EQ(*reinterpret_cast<const std::uint64_t*>(link.mem.data()), 40u);
    }
    run.peer.barrier();
    if (run.b()) EXPECT_EQ(*reinterpret_cast<const std::uint64_t*>(area.at + 8), 42u);
  }
  // Nothing to write to any more.
  area.empty();
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, request(IBV_WR_RDMA_WRITE, 6, theirs, 64)));
    const ibv_wc wc = link.scq.next();
    EXPECT_EQ(wc.wr_id, 6u);
    EXPECT(wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_REM_OP_ERR);
  }
  link.reconnect();
  if (run.a()) {
    Send nothing = link.write(7, 0, 0, 64);
    nothing.sges = {area.sge(mr, 0, 64)};
    EXPECT_OK(post(link.qp, nothing));
    link.scq.expect(7, IBV_WC_LOC_PROT_ERR);
  }
  link.reconnect();
}

CONFORMANCE(OnDemandRegionsFollowTheirAddresses, "MR-26") {
  Link link(run);
  if (!run.peer.exchange(offers_on_demand(link.dev)) || !offers_on_demand(link.dev)) skip("a device has no on-demand paging");
  Area area;
  ibv_mr* const mr = register_on_demand(link.pd, area.at, area_bytes, all_access);
  EXPECT(mr->addr == area.at && mr->length == area_bytes);
  follows_its_addresses(run, link, area, mr);
  EXPECT_OK(ibv_dereg_mr(mr));
  run.peer.barrier();
}

CONFORMANCE(AnImplicitRegionReachesEverything, "MR-21 MR-26") {
  Link link(run);
  if (!run.peer.exchange(offers_on_demand(link.dev)) || !offers_on_demand(link.dev)) skip("a device has no on-demand paging");
  Area area;
  ibv_mr* const mr = register_on_demand(link.pd, nullptr, SIZE_MAX, all_access);
  EXPECT(mr->addr == nullptr && mr->length == SIZE_MAX);
  follows_its_addresses(run, link, area, mr);
  // The stack, and memory that is registered otherwise as well.
  char here[64] = "here";
  const Remote stack = run.peer.exchange(Remote{reinterpret_cast<std::uint64_t>(here), sizeof(here), mr->rkey, 0});
  const Remote registered = run.peer.exchange(Remote{link.mem.buffer.address(), 4096, mr->rkey, 0});
  if (run.a()) {
    std::memcpy(link.mem.data(), "there", 6);
    for (const Remote& to : {stack, registered}) {
      EXPECT_OK(post(link.qp, Send{.opcode = IBV_WR_RDMA_WRITE, .id = 8, .sges = {link.mem.sge(0, 6)}, .remote_address = to.address, .rkey = to.rkey}));
      link.scq.expect(8);
    }
  }
  run.peer.barrier();
  if (run.b()) {
    EXPECT_EQ(std::strcmp(here, "there"), 0);
    EXPECT_EQ(std::memcmp(link.mem.data(), "there", 6), 0);
  }
  EXPECT_OK(ibv_dereg_mr(mr));
  run.peer.barrier();
}

CONFORMANCE(AdviceIsCheckedAndBringsPages, "MR-22", .solo = true) {
  Device dev(run.settings);
  need_on_demand(dev);
  Pd pd(dev), other(dev);
  Area area;
  area.map();
  ibv_mr* const mr = register_on_demand(pd, area.at, area_bytes, local_write);
  ibv_mr* const readable = register_on_demand(pd, area.at, area_bytes, 0);
  ibv_sge all[] = {area.sge(mr, 0, area_bytes)}, beyond[] = {area.sge(mr, 1, area_bytes)}, before[] = {{area.address() - 1, 2, mr->lkey}};
  ibv_sge unknown[] = {{area.address(), 64, mr->lkey + 1}}, not_to_write[] = {area.sge(readable, 0, 64)};
  for (const auto advice : {IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT}) {
    const Note note("advice ", static_cast<int>(advice));
    EXPECT_OK(ibv_advise_mr(pd, advice, 0, all, 1));
    EXPECT_OK(ibv_advise_mr(pd, advice, IBV_ADVISE_MR_FLAG_FLUSH, all, 1));
    EXPECT_EQ(ibv_advise_mr(pd, advice, 1u << 7, all, 1), EINVAL);
    EXPECT_EQ(ibv_advise_mr(pd, advice, 0, all, 0), EINVAL);
    EXPECT_EQ(ibv_advise_mr(pd, advice, 0, beyond, 1), EFAULT);
    EXPECT_EQ(ibv_advise_mr(pd, advice, 0, before, 1), EFAULT);
    EXPECT_EQ(ibv_advise_mr(pd, advice, 0, unknown, 1), ENOENT);
    EXPECT_EQ(ibv_advise_mr(other, advice, 0, all, 1), ENOENT);
  }
  volatile int unknown_advice = 77;
  EXPECT_EQ(ibv_advise_mr(pd, static_cast<ibv_advise_mr_advice>(unknown_advice), 0, all, 1), EOPNOTSUPP);
  EXPECT_EQ(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, not_to_write, 1), EPERM);
  area.map();
  unsigned char resident[area_bytes / 4096] = {};
  EXPECT_OK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, all, 1));
  EXPECT_EQ(::mincore(area.at, area_bytes, resident), 0);
  for (const unsigned char page : resident) EXPECT_EQ(page & 1, 1);
  area.empty();
  EXPECT_EQ(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH, all, 1), EFAULT);
  EXPECT_OK(ibv_dereg_mr(readable));
  EXPECT_OK(ibv_dereg_mr(mr));
}

// Where a worker reaches the memory, it is given so much at a time, and who finds no room waits; both ends' memory is reached so.
CONFORMANCE(ManyQueuePairsReachOneProgramsMemoryAtOnce, "MR-26", .timeout_s = 120) {
  constexpr std::size_t count = 700, bytes = 4096;
  Device dev(run.settings);
  need_on_demand(dev);
  Pd pd(dev);
  Cq cq(dev, 1024);
  Buffer buffer(count * bytes);
  const Mr mr(pd, buffer.data(), count * bytes, all_access | IBV_ACCESS_ON_DEMAND);
  const Remote remote = run.peer.exchange(Remote{buffer.address(0), count * bytes, mr.p->rkey, 0});
  std::vector<std::unique_ptr<Qp>> qps;
  for (std::size_t i = 0; i < count; ++i) {
    qps.push_back(std::make_unique<Qp>(pd, cq, cq, QpSpec{.send_wr = 1, .recv_wr = 1}));
    to_init(dev, *qps.back());
    bring_up(dev, *qps.back(), run.peer.exchange(address_of(dev, *qps.back())));
  }
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    const Note note("opcode ", static_cast<int>(opcode));
    const bool from_a = opcode == IBV_WR_RDMA_WRITE;
    std::vector<std::byte> wanted(count * bytes);
    fill_pattern(wanted, run.seed + static_cast<unsigned>(opcode));
    std::memset(buffer.data(), 0, count * bytes);
    if (run.a() == from_a) std::memcpy(buffer.data(), wanted.data(), wanted.size());
    run.peer.barrier();
    if (run.a()) {
      for (std::size_t i = 0; i < count; ++i)
        EXPECT_OK(post(*qps[i], Send{.opcode = opcode, .id = i, .sges = {{buffer.address(i * bytes), bytes, mr.p->lkey}}, .remote_address = remote.address + i * bytes, .rkey = remote.rkey}));
      for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(cq.next().status, IBV_WC_SUCCESS);
    }
    run.peer.barrier();
    if (run.a() != from_a) expect_bytes({buffer.data(), count * bytes}, wanted, "copied");
    run.peer.barrier();
  }
}

// UC: a message whose target goes while its bytes are on their way is lost, and leaves nothing behind that the next one could take for its own.
CONFORMANCE(AMessageThatIsLostLeavesTheNextOneItsBytes, "MR-26 MR-19", .timeout_s = 120) {
  constexpr int rounds = 60, lost_each = 20;
  constexpr std::size_t bytes = 64 * 1024;
  Device dev(run.settings);
  need_on_demand(dev);
  Pd pd(dev);
  Cq cq(dev, 64);
  Buffer buffer(bytes + 4096);
  const Mr mr(pd, buffer.data(), buffer.size(), all_access | IBV_ACCESS_ON_DEMAND);
  Buffer changing(4096);
  const Mr of_changing(pd, changing.data(), changing.size(), all_access);
  const Remote remote = run.peer.exchange(Remote{buffer.address(0), bytes, mr.p->rkey, 0});
  const Remote unsteady = run.peer.exchange(Remote{changing.address(0), 4096, of_changing.p->rkey, 0});
  Qp qp(pd, cq, cq, QpSpec{.type = IBV_QPT_UC});
  to_init(dev, qp);
  bring_up(dev, qp, run.peer.exchange(address_of(dev, qp)));
  std::vector<std::byte> wanted(bytes);
  for (int round = 0; round < rounds; ++round) {
    const Note note("round ", round);
    fill_pattern(wanted, run.seed + static_cast<unsigned>(round));
    run.peer.barrier();
    if (run.a()) {
      std::memcpy(buffer.data(), wanted.data(), bytes);
      for (int i = 0; i < lost_each; ++i) {
        EXPECT_OK(post(qp, Send{.opcode = IBV_WR_RDMA_WRITE, .id = 1, .sges = {{buffer.address(bytes), 8, mr.p->lkey}}, .remote_address = unsteady.address, .rkey = unsteady.rkey}));
        cq.expect(1);
      }
      EXPECT_OK(post(qp, Send{.opcode = IBV_WR_RDMA_WRITE, .id = 2, .sges = {{buffer.address(0), bytes, mr.p->lkey}}, .remote_address = remote.address, .rkey = remote.rkey}));
      cq.expect(2);
    } else {
      for (int i = 0; i < 2 * lost_each; ++i) EXPECT_EQ(ibv_rereg_mr(of_changing.p, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, static_cast<int>(all_access)), 0);
    }
    run.peer.barrier();
    if (run.b()) expect_bytes({buffer.data(), bytes}, wanted, "the message after those");
  }
}

}  // namespace vrdma::conformance
