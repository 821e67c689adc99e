// The advertised limits can be used, and very large memory and messages work.
#include <sys/mman.h>

#include <cstring>
#include <memory>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

CONFORMANCE(AdvertisedLimitsCanBeUsed, "LIM-01 QP-10 QP-11", .timeout_s = 120) {
  Device dev(run.settings);
  LinkSpec spec;
  spec.qp.send_wr = static_cast<std::uint32_t>(dev.attr.max_qp_wr);
  spec.qp.recv_wr = static_cast<std::uint32_t>(dev.attr.max_qp_wr);
  spec.qp.send_sge = 1;
  spec.qp.recv_sge = 1;
  spec.cq_depth = std::min(dev.attr.max_cqe, 2 * dev.attr.max_qp_wr + 16);
  Link link(run, spec);
  // The whole receive queue is posted, the whole send queue is used.
  const std::uint64_t depth = std::min<std::uint64_t>(spec.qp.send_wr, static_cast<std::uint64_t>(spec.cq_depth) - 1);
  if (run.b()) {
    for (std::uint64_t i = 0; i < depth; ++i) EXPECT_OK(post(link.qp, link.recv(i, 0, 64)));
  }
  run.peer.barrier();
  if (run.a()) {
    for (std::uint64_t i = 0; i < depth; ++i) EXPECT_OK(post(link.qp, link.send(i, 0, 8)));
    for (std::uint64_t i = 0; i < depth; ++i) link.scq.expect(i);
  } else {
    for (std::uint64_t i = 0; i < depth; ++i) link.rcq.expect(i);
  }
  run.peer.barrier();
}

CONFORMANCE(AdvertisedSgeLimitCanBeUsed, "LIM-01 WR-17") {
  Device dev(run.settings);
  LinkSpec spec;
  const auto sges = static_cast<std::uint32_t>(dev.attr.max_sge);
  spec.qp.send_wr = 4;
  spec.qp.recv_wr = 4;
  spec.qp.send_sge = sges;
  spec.qp.recv_sge = sges;
  Link link(run, spec);
  const auto pieces = [&](std::size_t base) {
    std::vector<ibv_sge> out;
    for (std::uint32_t i = 0; i < sges; ++i) out.push_back(link.mem.sge(base + i * 16, 3));
    return out;
  };
  if (run.b()) EXPECT_OK(post(link.qp, Recv{1, pieces(0)}));
  fill_pattern(link.mem.buffer.span(), run.a() ? 5 : 6);
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, Send{.id = 2, .sges = pieces(16384)}));
    link.scq.expect(2);
  } else {
    EXPECT_EQ(link.rcq.expect(1).byte_len, sges * 3);
    std::vector<std::byte> source(link.mem.buffer.size());
    std::vector<std::byte> wanted(link.mem.buffer.size());
    fill_pattern(source, 5);
    fill_pattern(wanted, 6);
    for (std::uint32_t i = 0; i < sges; ++i) std::memcpy(&wanted[i * 16], &source[16384 + i * 16], 3);
    expect_bytes(link.mem.buffer.span(), wanted, "scattered");
  }
  run.peer.barrier();
}

CONFORMANCE(TheLargestCqAndSrqCanBeMade, "LIM-01 CQ-07 SRQ-05", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  { Cq cq(dev, dev.attr.max_cqe); }
  if (dev.attr.max_srq > 0) {
    Srq srq(pd, static_cast<std::uint32_t>(dev.attr.max_srq_wr), 1);
    Srq wide(pd, 1, static_cast<std::uint32_t>(dev.attr.max_srq_sge));
  }
}

namespace {

// Sparse memory: large in address space, small in use.
struct Sparse {
  explicit Sparse(std::size_t size) : bytes(size) {
    void* map = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) skip("not enough address space");
    data = static_cast<std::byte*>(map);
  }
  ~Sparse() { ::munmap(data, bytes); }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  std::byte* data;
  std::size_t bytes;
};

}  // namespace

CONFORMANCE(BigMessagesOfOneGibibyte, "MTU-02 QRY-12", .slow = true, .timeout_s = 300) {
  Link link(run);
  constexpr std::size_t bytes = std::size_t{1} << 30;
  Sparse memory(bytes + 8192);
  Mr mr(link.pd, memory.data, memory.bytes);
  const Remote theirs = run.peer.exchange(Remote{reinterpret_cast<std::uint64_t>(memory.data), memory.bytes, mr.p->rkey, 0});
  const auto local = [&](std::size_t offset) {
    return ibv_sge{reinterpret_cast<std::uint64_t>(memory.data) + offset, static_cast<std::uint32_t>(bytes), mr.p->lkey};
  };
  if (run.a()) {
    for (std::size_t at = 0; at + 8 <= bytes; at += 4096 - 8) {
      const std::uint64_t value = at * 0x9e3779b97f4a7c15u;
      std::memcpy(memory.data + at, &value, 8);
    }
  }
  const auto check = [&](std::size_t shift) {
    for (std::size_t at = 0; at + 8 <= bytes; at += 4096 - 8) {
      std::uint64_t value = 0;
      std::memcpy(&value, memory.data + shift + at, 8);
      if (value != at * 0x9e3779b97f4a7c15u) fail(__FILE__, __LINE__, text("wrong at ", at));
    }
    std::memset(memory.data, 0, memory.bytes);
  };
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    const Note note("opcode ", opcode);
    if (run.b()) EXPECT_OK(post(link.qp, Recv{1, {local(5)}}));
    run.peer.barrier();
    if (run.a()) {
      EXPECT_OK(post(link.qp, Send{.opcode = opcode, .id = 2, .sges = {local(0)}, .remote_address = theirs.address + 5, .rkey = theirs.rkey}));
      link.scq.expect(2);
    } else {
      EXPECT_EQ(link.rcq.expect(1).byte_len, bytes);
      check(5);
    }
    run.peer.barrier();
  }
}

CONFORMANCE(BigRegionsAboveFourGibibytes, "MR-23 MR-13", .slow = true, .timeout_s = 300) {
  Link link(run);
  constexpr std::size_t bytes = (std::size_t{5} << 30) + 12345;
  Sparse memory(bytes);
  Mr mr(link.pd, memory.data, memory.bytes);
  const Remote theirs = run.peer.exchange(Remote{reinterpret_cast<std::uint64_t>(memory.data), bytes, mr.p->rkey, 0});
  for (const std::size_t offset : {std::size_t{0}, (std::size_t{1} << 32) - 100, std::size_t{1} << 32, bytes - 4096}) {
    const Note note("offset ", offset);
    std::vector<std::byte> wanted(4096);
    fill_pattern(wanted, run.seed + offset);
    if (run.a()) {
      std::memcpy(link.mem.data(), wanted.data(), 4096);
      Send write = link.write(1, 0, 0, 4096);
      write.remote_address = theirs.address + offset;
      write.rkey = theirs.rkey;
      EXPECT_OK(post(link.qp, write));
      link.scq.expect(1);
    }
    run.peer.barrier();
    if (run.b()) expect_bytes({memory.data + offset, 4096}, wanted, "beyond 4 GiB");
    run.peer.barrier();
  }
  expect_fault(link, {"one byte beyond 5 GiB", Send{.opcode = IBV_WR_RDMA_WRITE,
                                                    .id = 2,
                                                    .sges = {link.mem.sge(0, 2)},
                                                    .remote_address = theirs.address + bytes - 1,
                                                    .rkey = theirs.rkey}});
}

}  // namespace vrdma::conformance
