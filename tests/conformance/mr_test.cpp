// Registration: what is refused, what each kind of memory and address means, keys, rereg. What a key allows: mr_check_test.cpp.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {

CONFORMANCE(RemoteWritingNeedsLocalWrite, "MR-01 MR-02", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Buffer buffer(8192);
  for (unsigned flags = 0; flags < 16; ++flags) {
    for (const unsigned extra : {0u, static_cast<unsigned>(IBV_ACCESS_RELAXED_ORDERING)}) {
      const Note note("access ", flags | extra);
      const bool legal = (flags & IBV_ACCESS_LOCAL_WRITE) || !(flags & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC));
      // Not through the inline wrapper with a constant, so that optional flags reach the provider.
      volatile int access = static_cast<int>(flags | extra);
      if (legal) {
        ibv_mr* mr = ibv_reg_mr(pd, buffer.data(), buffer.size(), access);
        EXPECT(mr != nullptr);
        EXPECT(mr->addr == buffer.data() && mr->length == buffer.size() && mr->pd == pd.p && mr->context == dev.ctx);
        EXPECT_OK(ibv_dereg_mr(mr));
      } else {
        EXPECT_NULL(ibv_reg_mr(pd, buffer.data(), buffer.size(), access), EINVAL);
      }
    }
  }
}

CONFORMANCE(EmptyAndUnmappedMemoryIsRefused, "MR-04 MR-05", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Buffer buffer(64 * 1024);
  EXPECT_NULL(ibv_reg_mr(pd, buffer.data(), 0, local_write), EINVAL);
  void* hole = ::mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT(hole != MAP_FAILED);
  EXPECT_EQ(::munmap(static_cast<char*>(hole) + (512 << 10), 4096), 0);
  EXPECT_NULL(ibv_reg_mr(pd, hole, 1 << 20, local_write), EFAULT);                                // a hole within
  EXPECT_NULL(ibv_reg_mr(pd, static_cast<char*>(hole) + (512 << 10), 4096, local_write), EFAULT);  // nothing but
  EXPECT_NULL(ibv_reg_mr(pd, buffer.data() - 8, 16, local_write), EFAULT);  // reaches into a guard page
  ibv_mr* fits = ibv_reg_mr(pd, hole, 512 << 10, local_write);
  EXPECT(fits != nullptr);
  EXPECT_OK(ibv_dereg_mr(fits));
  ::munmap(hole, 1 << 20);
}

// An adapter's driver pins every page, and there is none.
CONFORMANCE(PagesBeyondTheEndOfTheirFileAreRefused, "MR-05", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  for (const int sharing : {MAP_SHARED, MAP_PRIVATE}) {
    const int file = ::memfd_create("short", MFD_CLOEXEC);
    EXPECT_EQ(::ftruncate(file, 4096 + 100), 0);  // what is left of a file's last page is memory
    auto* const at = static_cast<char*>(::mmap(nullptr, 16384, PROT_READ | PROT_WRITE, sharing, file, 0));
    EXPECT(at != MAP_FAILED);
    ibv_mr* const whole = ibv_reg_mr(pd, at, 8192, local_write);
    EXPECT(whole != nullptr);
    EXPECT_OK(ibv_dereg_mr(whole));
    EXPECT_NULL(ibv_reg_mr(pd, at, 8193, local_write), EFAULT);
    EXPECT_NULL(ibv_reg_mr(pd, at + 8192, 4096, 0), EFAULT);
    EXPECT_EQ(::ftruncate(file, 12288), 0);
    ibv_mr* const longer = ibv_reg_mr(pd, at, 12288, local_write);
    EXPECT(longer != nullptr);
    EXPECT_OK(ibv_dereg_mr(longer));
    ::munmap(at, 16384);
    ::close(file);
  }
}

CONFORMANCE(AnyLengthAndAlignmentRegistersAndIsWritten, "MR-03 MR-13") {
  Link link(run);
  constexpr std::size_t arena_bytes = 5 << 20;
  Buffer arena(arena_bytes);
  std::vector<std::byte> model(arena_bytes);
  fill_pattern(model, run.seed);
  std::memcpy(arena.data(), model.data(), arena_bytes);
  Region source(link.pd, 4 << 20);
  for (std::uint64_t round = 0; round < 40; ++round) {
    const std::size_t bytes = round < 8 ? round + 1 : run.rng.between(1, 4 << 20);
    const std::size_t offset = run.rng.below(arena_bytes - bytes);
    const Note note("round ", round, " length ", bytes, " offset ", offset);
    fill_pattern(std::span(source.data(), bytes), run.seed + round);
    if (run.b()) {
      Mr mr(link.pd, arena.data() + offset, bytes);
      run.peer.send(Remote{reinterpret_cast<std::uint64_t>(arena.data() + offset), bytes, mr.p->rkey, 0});
      run.peer.barrier();
      std::memcpy(model.data() + offset, source.data(), bytes);
      expect_bytes(arena.span(), model, "the arena around the registration");
    } else {
      const Remote target = run.peer.receive<Remote>();
      EXPECT_OK(post(link.qp, Send{.opcode = IBV_WR_RDMA_WRITE,
                                   .id = round,
                                   .sges = {source.sge(0, bytes)},
                                   .remote_address = target.address,
                                   .rkey = target.rkey}));
      link.scq.expect(round);
      run.peer.barrier();
    }
  }
  run.peer.barrier();
}

namespace {
// b offers `offered` (addresses as the registration defines them), a writes and reads back `bytes` at `offset` of it.
void write_and_read_back(Link& link, const Remote* offered, const std::byte* memory, std::size_t offset, std::size_t bytes) {
  std::vector<std::byte> wanted(bytes);
  fill_pattern(wanted, link.run.seed + offset);
  if (link.run.b()) {
    link.run.peer.send(*offered);
    link.run.peer.barrier();
    expect_bytes({memory + offset, bytes}, wanted, "memory written remotely");
    link.run.peer.barrier();
    return;
  }
  const Remote target = link.run.peer.receive<Remote>();
  std::memcpy(link.mem.data(), wanted.data(), bytes);
  std::memset(link.mem.data(bytes), 0, bytes);
  Send write = link.write(1, 0, 0, bytes);
  write.remote_address = target.address + offset;
  write.rkey = target.rkey;
  EXPECT_OK(post(link.qp, write));
  link.scq.expect(1);
  link.run.peer.barrier();
  Send read = write;
  read.opcode = IBV_WR_RDMA_READ;
  read.id = 2;
  read.sges = {link.mem.sge(bytes, bytes)};
  EXPECT_OK(post(link.qp, read));
  link.scq.expect(2);
  expect_bytes({link.mem.data(bytes), bytes}, wanted, "memory read back");
  link.run.peer.barrier();
}
}  // namespace

CONFORMANCE(ZeroBasedAddressesCountFromZero, "MR-06") {
  Link link(run);
  Buffer buffer(16384);
  if (run.a()) {
    write_and_read_back(link, nullptr, nullptr, 4001, 3333);
    run.peer.barrier();
    return;
  }
  errno = 0;
  ibv_mr* mr = ibv_reg_mr(link.pd, buffer.data() + 5, 12000, static_cast<int>(all_access | IBV_ACCESS_ZERO_BASED));
  if (!mr && errno == EOPNOTSUPP) skip("IBV_ACCESS_ZERO_BASED: EOPNOTSUPP");
  EXPECT(mr != nullptr);
  const Remote offered{0, 12000, mr->rkey, 0};
  write_and_read_back(link, &offered, buffer.data() + 5, 4001, 3333);
  EXPECT_OK(ibv_dereg_mr(mr));
  run.peer.barrier();
}

CONFORMANCE(IovaShiftsRemoteAndLocalAddresses, "MR-07") {
  Link link(run);
  Buffer buffer(16384);
  constexpr std::uint64_t iova = 0x7654'3210'0000;
  Remote offered{};
  ibv_mr* mr = nullptr;
  if (run.b()) {
    mr = ibv_reg_mr_iova(link.pd, buffer.data(), buffer.size(), iova, static_cast<int>(all_access));
    EXPECT(mr != nullptr);
    offered = {iova, buffer.size(), mr->rkey, 0};
  }
  write_and_read_back(link, &offered, buffer.data(), 777, 8000);
  // The same registration as a receive SGE: its addresses are iova, too.
  if (run.b()) {
    EXPECT_OK(post(link.qp, Recv{9, {{iova + 100, 64, mr->lkey}}}));
    run.peer.barrier();
    link.rcq.expect(9);
    std::vector<std::byte> wanted(64);
    fill_pattern(wanted, run.seed + 99);
    expect_bytes({buffer.data() + 100, 64}, wanted, "received at iova");
    EXPECT_OK(ibv_dereg_mr(mr));
  } else {
    run.peer.barrier();
    fill_pattern({link.mem.data(), 64}, run.seed + 99);
    EXPECT_OK(post(link.qp, link.send(3, 0, 64)));
    link.scq.expect(3);
  }
  run.peer.barrier();
}

CONFORMANCE(OverlappingRegistrationsHaveKeysOfTheirOwn, "MR-08") {
  Link link(run);
  Buffer buffer(32768);
  std::vector<std::unique_ptr<Mr>> mrs;
  std::set<std::uint32_t> keys;
  constexpr std::size_t count = 24;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t begin = i < 4 ? 0 : run.rng.below(8192);
    const std::size_t bytes = i < 4 ? buffer.size() : 16384;
    if (run.a()) {
      write_and_read_back(link, nullptr, nullptr, 100 + i, 4096);
      continue;
    }
    mrs.push_back(std::make_unique<Mr>(link.pd, buffer.data() + begin, bytes));
    EXPECT(keys.insert(mrs.back()->p->rkey).second);
    const Remote offered{buffer.address(begin), bytes, mrs.back()->p->rkey, 0};
    write_and_read_back(link, &offered, buffer.data() + begin, 100 + i, 4096);
    if (i % 3 == 2) mrs.erase(mrs.begin());  // the others go on
  }
  // Those that are left still work although neighbours have gone.
  const std::size_t left = run.peer.exchange(mrs.size()) + mrs.size();
  for (std::size_t i = 0; i < left; ++i) {
    Remote offered{};
    const std::byte* memory = nullptr;
    if (run.b()) {
      offered = {reinterpret_cast<std::uint64_t>(mrs[i]->p->addr), mrs[i]->p->length, mrs[i]->p->rkey, 0};
      memory = static_cast<std::byte*>(mrs[i]->p->addr);
    }
    write_and_read_back(link, &offered, memory, 50 + i, 1000);
  }
  run.peer.barrier();
}

CONFORMANCE(ReadOnlyPagesCanBeReadOnly, "MR-09") {
  Link link(run);
  if (run.b()) {
    Buffer buffer(8192);
    fill_pattern(buffer.span(), run.seed);
    EXPECT_EQ(::mprotect(buffer.data(), 8192, PROT_READ), 0);
    EXPECT_NULL(ibv_reg_mr(link.pd, buffer.data(), 8192, local_write), EFAULT);
    Mr mr(link.pd, buffer.data(), 8192, IBV_ACCESS_REMOTE_READ);
    run.peer.send(Remote{buffer.address(), 8192, mr.p->rkey, 0});
    run.peer.barrier();
  } else {
    const Remote target = run.peer.receive<Remote>();
    Send read = link.read(1, 0, 0, 8192);
    read.remote_address = target.address;
    read.rkey = target.rkey;
    EXPECT_OK(post(link.qp, read));
    link.scq.expect(1);
    std::vector<std::byte> wanted(8192);
    fill_pattern(wanted, run.seed);
    expect_bytes({link.mem.data(), 8192}, wanted, "read from read-only pages");
    run.peer.barrier();
  }
}

CONFORMANCE(HugePagesCanBeRegistered, "MR-10") {
  Link link(run);
  constexpr std::size_t bytes = 2 << 20;
  void* map = nullptr;
  Remote offered{};
  std::unique_ptr<Mr> mr;
  if (run.b()) {
    map = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    if (map == MAP_FAILED) skip("no huge pages (echo 8 > /proc/sys/vm/nr_hugepages)");
    mr = std::make_unique<Mr>(link.pd, map, bytes, all_access | IBV_ACCESS_HUGETLB);
    offered = {reinterpret_cast<std::uint64_t>(map), bytes, mr->p->rkey, 0};
  }
  write_and_read_back(link, &offered, static_cast<std::byte*>(map), (1 << 20) + 3, 20000);
  run.peer.barrier();
  mr.reset();
  if (map) ::munmap(map, bytes);
}

CONFORMANCE(EveryKindOfMemoryTakesRemoteWrites, "MR-24") {
  Link link(run);
  char on_stack[12000];
  std::unique_ptr<std::byte[]> on_heap(new std::byte[12000]);
  static std::byte in_data[12000];
  char path[] = "/tmp/conformance-mr-XXXXXX";
  const int file = ::mkstemp(path);
  EXPECT_GE(file, 0);
  ::unlink(path);
  EXPECT_EQ(::ftruncate(file, 16384), 0);
  const auto mapped = [](int flags, int fd) {
    void* p = ::mmap(nullptr, 16384, PROT_READ | PROT_WRITE, flags, fd, 0);
    EXPECT(p != MAP_FAILED);
    return static_cast<std::byte*>(p);
  };
  std::byte* const file_shared = mapped(MAP_SHARED, file);
  std::byte* const file_private = mapped(MAP_PRIVATE, file);
  std::byte* const anonymous_shared = mapped(MAP_SHARED | MAP_ANONYMOUS, -1);
  const struct {
    const char* name;
    std::byte* memory;
  } kinds[] = {{"stack", reinterpret_cast<std::byte*>(on_stack)},
               {"heap", on_heap.get()},
               {"static data", in_data},
               {"shared anonymous", anonymous_shared},
               {"shared file", file_shared},
               {"private file", file_private}};
  for (const auto& kind : kinds) {
    const Note note("memory: ", kind.name);
    std::memset(kind.memory, 0, 12000);
    Mr mr(link.pd, kind.memory, 12000);
    const Remote offered{reinterpret_cast<std::uint64_t>(kind.memory), 12000, mr.p->rkey, 0};
    write_and_read_back(link, &offered, kind.memory, 1234, 10001);
    run.peer.barrier();
  }
  ::munmap(file_shared, 16384);
  ::munmap(file_private, 16384);
  ::munmap(anonymous_shared, 16384);
  ::close(file);
}

CONFORMANCE(KeysAreNotReusedSoon, "MR-18", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Buffer buffer(4096);
  std::set<std::uint32_t> rkeys;
  for (int i = 0; i < 64; ++i) {
    Mr mr(pd, buffer.data(), 4096);
    const Note note("registration ", i);
    EXPECT(rkeys.insert(mr.p->rkey).second);
  }
}

CONFORMANCE(ReregChangesTranslationAccessAndPd, "MR-19 OBJ-06 MR-20") {
  Link link(run);
  Buffer first(8192);
  Buffer second(16384);
  Pd other(link.dev);
  std::unique_ptr<Mr> mr;
  Remote offered{};
  const auto offer = [&](const Buffer& memory) {
    offered = {memory.address(), memory.size(), mr->p->rkey, 0};
  };
  if (run.b()) {
    mr = std::make_unique<Mr>(link.pd, first.data(), first.size());
    offer(first);
  }
  write_and_read_back(link, &offered, first.data(), 10, 4000);
  if (run.b()) {
    EXPECT_EQ(ibv_rereg_mr(mr->p, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, second.data(), second.size(), 0), 0);
    EXPECT(mr->p->addr == second.data() && mr->p->length == second.size());
    offer(second);
  }
  write_and_read_back(link, &offered, second.data(), 9000, 5000);
  // The old memory is no longer reachable.
  Remote stale = run.peer.exchange(Remote{first.address(), first.size(), mr ? mr->p->rkey : 0, 0});
  expect_fault(link, {"address of the old translation", Send{.opcode = IBV_WR_RDMA_WRITE,
                                                             .id = 1,
                                                             .sges = {link.mem.sge(0, 8)},
                                                             .remote_address = stale.address,
                                                             .rkey = stale.rkey}});
  // Access: reads only.
  if (run.b()) {
    EXPECT_EQ(ibv_rereg_mr(mr->p, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, IBV_ACCESS_REMOTE_READ), 0);
  }
  Remote now = run.peer.exchange(Remote{second.address(), second.size(), mr ? mr->p->rkey : 0, 0});
  expect_fault(link, {"write after access was taken away", Send{.opcode = IBV_WR_RDMA_WRITE,
                                                                .id = 2,
                                                                .sges = {link.mem.sge(0, 8)},
                                                                .remote_address = now.address,
                                                                .rkey = now.rkey}});
  if (run.a()) {
    EXPECT_OK(post(link.qp, Send{.opcode = IBV_WR_RDMA_READ,
                                 .id = 3,
                                 .sges = {link.mem.sge(0, 8)},
                                 .remote_address = now.address,
                                 .rkey = now.rkey}));
    link.scq.expect(3);
  }
  run.peer.barrier();
  // PD: to another one and back, together with all the rest.
  if (run.b()) {
    EXPECT_EQ(ibv_rereg_mr(mr->p, IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS, other, nullptr, 0,
                           static_cast<int>(all_access)), 0);
    EXPECT(mr->p->pd == other.p);
  }
  now = run.peer.exchange(Remote{second.address(), second.size(), mr ? mr->p->rkey : 0, 0});
  expect_fault(link, {"write after the MR moved to another PD", Send{.opcode = IBV_WR_RDMA_WRITE,
                                                                     .id = 4,
                                                                     .sges = {link.mem.sge(0, 8)},
                                                                     .remote_address = now.address,
                                                                     .rkey = now.rkey}});
  if (run.b()) {
    EXPECT_EQ(ibv_rereg_mr(mr->p, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS,
                           link.pd, first.data(), first.size(), static_cast<int>(all_access)), 0);
    offer(first);
  }
  write_and_read_back(link, &offered, first.data(), 77, 3000);
  if (run.b()) {
    // Bad input is told apart from a failing command.
    EXPECT_EQ(ibv_rereg_mr(mr->p, 1 << 7, nullptr, nullptr, 0, 0), IBV_REREG_MR_ERR_INPUT);
    EXPECT_EQ(ibv_rereg_mr(mr->p, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, first.data(), 0, 0), IBV_REREG_MR_ERR_INPUT);
    EXPECT_EQ(ibv_rereg_mr(mr->p, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, nullptr, 4096, 0), IBV_REREG_MR_ERR_INPUT);
    const int rc = ibv_rereg_mr(mr->p, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, IBV_ACCESS_REMOTE_WRITE);
    EXPECT(rc == IBV_REREG_MR_ERR_CMD || rc == IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW);
  }
  run.peer.barrier();
}

}  // namespace vrdma::conformance
