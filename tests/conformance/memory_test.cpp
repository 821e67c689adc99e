// Every kind of memory a program may register, at either end of a transfer.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "tests/conformance/role.hpp"
#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

constexpr std::size_t small_bytes = 12000, huge_page_bytes = 2 << 20;

// Addresses that are given back at the end, whatever was mapped there.
struct Addresses {
  explicit Addresses(std::size_t bytes_in, std::size_t alignment = 4096) : bytes(bytes_in) {
    map_bytes = bytes + alignment;
    map = ::mmap(nullptr, map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT(map != MAP_FAILED);
    const auto begin = reinterpret_cast<std::uintptr_t>(map);
    data = reinterpret_cast<std::byte*>((begin + alignment - 1) / alignment * alignment);
  }
  ~Addresses() { ::munmap(map, map_bytes); }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  void put(std::size_t offset, std::size_t length, int flags, int fd) {
    EXPECT(::mmap(data + offset, length, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0) != MAP_FAILED);
  }
  std::size_t bytes, map_bytes;
  void* map;
  std::byte* data;
};

int file_of(std::size_t bytes) {
  const char* const folder = std::getenv("TMPDIR");
  std::string path = text(folder ? folder : "/tmp", "/conformance-memory-XXXXXX");
  const int file = ::mkstemp(path.data());
  EXPECT_GE(file, 0);
  ::unlink(path.c_str());
  EXPECT_EQ(::ftruncate(file, static_cast<off_t>(bytes)), 0);
  return file;
}

int memfd_of(std::size_t bytes) {
  const int file = ::memfd_create("conformance-memory", MFD_CLOEXEC);
  EXPECT_GE(file, 0);
  EXPECT_EQ(::ftruncate(file, static_cast<off_t>(bytes)), 0);
  return file;
}

std::string object_name() { return text("/vrdma-conformance-", ::getpid()); }
int object_of(const std::string& name, std::size_t bytes) {
  const int object = ::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  EXPECT_GE(object, 0);
  EXPECT_OK(::ftruncate(object, static_cast<off_t>(bytes)));
  return object;
}

// The sender's bytes arrive in the receiver's memory, and no other byte of it changes; by each operation that moves any.
// Both roles call this with memory of their own, registered for everything.
void move_each_way(Link& link, std::span<std::byte> memory, const ibv_mr* mr, std::size_t offset, std::size_t bytes) {
  Run& run = link.run;
  const Remote theirs = run.peer.exchange(Remote{reinterpret_cast<std::uint64_t>(memory.data()), memory.size(), mr->rkey, 0});
  const ibv_sge here{reinterpret_cast<std::uint64_t>(memory.data()) + offset, static_cast<std::uint32_t>(bytes), mr->lkey};
  std::uint64_t round = 0;
  for (const bool a_sends : {true, false}) {
    const bool sender = run.a() == a_sends;
    for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND}) {
      ++round;
      const Note note(a_sends ? "from a, " : "from b, ", opcode == IBV_WR_SEND ? "SEND" : opcode == IBV_WR_RDMA_READ ? "READ" : "WRITE");
      std::vector<std::byte> moved(bytes), wanted(memory.size());
      fill_pattern(moved, run.seed + round);
      fill_pattern(wanted, run.seed ^ (sender ? 1 : 2));
      std::memcpy(memory.data(), wanted.data(), memory.size());
      if (sender) std::memcpy(memory.data() + offset, moved.data(), bytes);
      if (!sender && opcode == IBV_WR_SEND) EXPECT_OK(post(link.qp, Recv{round, {here}}));
      run.peer.barrier();
      // A READ is the receiver's to post.
      if (sender == (opcode != IBV_WR_RDMA_READ)) {
        EXPECT_OK(post(link.qp, Send{.opcode = opcode, .id = round, .sges = {here}, .remote_address = theirs.address + offset, .rkey = theirs.rkey}));
        link.scq.expect(round);
      }
      if (!sender && opcode == IBV_WR_SEND) EXPECT_EQ(link.rcq.expect(round).byte_len, bytes);
      run.peer.barrier();
      std::memcpy(wanted.data() + offset, moved.data(), bytes);
      expect_bytes(memory, wanted, sender ? "the sender's memory" : "the receiver's memory");
    }
  }
  run.peer.barrier();
}

void move_of(Link& link, const char* kind, std::span<std::byte> memory, std::size_t offset, std::size_t bytes) {
  const Note note("memory: ", kind);
  const Mr mr(link.pd, memory.data(), memory.size());
  move_each_way(link, memory, mr.p, offset, bytes);
}

}  // namespace

CONFORMANCE(EveryKindOfMemoryMovesBothWays, "MR-24 WR-01") {
  Link link(run);
  std::byte on_stack[small_bytes];
  move_of(link, "stack", on_stack, 1234, 10001);
  const std::unique_ptr<std::byte[]> on_heap(new std::byte[small_bytes]);
  move_of(link, "heap", {on_heap.get(), small_bytes}, 1234, 10001);
  const std::unique_ptr<std::byte[]> large_heap(new std::byte[1 << 20]);
  move_of(link, "large heap", {large_heap.get(), 1 << 20}, 77, 1'000'003);
  static std::byte in_data[small_bytes];
  move_of(link, "static data", in_data, 1234, 10001);

  const Addresses anonymous(small_bytes);
  move_of(link, "anonymous pages", {anonymous.data, small_bytes}, 1, 11111);
  Addresses shared(small_bytes);
  shared.put(0, small_bytes, MAP_SHARED | MAP_ANONYMOUS, -1);
  move_of(link, "shared anonymous pages", {shared.data, small_bytes}, 1, 11111);
  const Addresses transparent(2 * huge_page_bytes, huge_page_bytes);
  (void)::madvise(transparent.data, transparent.bytes, MADV_HUGEPAGE);  // where the kernel has none, they are ordinary ones
  move_of(link, "transparent huge pages", {transparent.data, transparent.bytes}, 4097, 3 << 20);

  const Fd file(file_of(2 * small_bytes)), memfd(memfd_of(2 * small_bytes));
  Addresses file_shared(small_bytes), file_private(small_bytes), memfd_shared(small_bytes), memfd_private(small_bytes);
  file_shared.put(0, small_bytes, MAP_SHARED, file.get());
  move_of(link, "shared mapping of a file", {file_shared.data, small_bytes}, 1234, 10001);
  std::vector<std::byte> in_file(small_bytes);
  EXPECT_EQ(::pread(file.get(), in_file.data(), small_bytes, 0), small_bytes);
  expect_bytes(in_file, {file_shared.data, small_bytes}, "the file");
  file_private.put(0, small_bytes, MAP_PRIVATE, file.get());
  move_of(link, "private mapping of a file", {file_private.data, small_bytes}, 1234, 10001);
  EXPECT_EQ(::pread(file.get(), in_file.data(), small_bytes, 0), small_bytes);
  expect_bytes(in_file, {file_shared.data, small_bytes}, "the file, which a private mapping leaves alone");
  memfd_shared.put(0, small_bytes, MAP_SHARED, memfd.get());
  move_of(link, "shared mapping of a memfd", {memfd_shared.data, small_bytes}, 1234, 10001);
  memfd_private.put(0, small_bytes, MAP_PRIVATE, memfd.get());
  move_of(link, "private mapping of a memfd", {memfd_private.data, small_bytes}, 1234, 10001);

  const Fd unsealable(static_cast<int>(::syscall(SYS_memfd_create, "unsealable", MFD_CLOEXEC)));  // as the kernel makes it
  EXPECT_OK(::ftruncate(unsealable.get(), small_bytes));
  Addresses unsealed(small_bytes), posix(small_bytes);
  unsealed.put(0, small_bytes, MAP_SHARED, unsealable.get());
  move_of(link, "memfd that cannot be sealed", {unsealed.data, small_bytes}, 1234, 10001);

  const std::string name = object_name();
  posix.put(0, small_bytes, MAP_SHARED, Fd(object_of(name, small_bytes)).get());
  move_of(link, "shared memory object, closed", {posix.data, small_bytes}, 1234, 10001);
  EXPECT_OK(::shm_unlink(name.c_str()));
  move_of(link, "shared memory object, unlinked", {posix.data, small_bytes}, 1500, 10001);

  const int segment = ::shmget(IPC_PRIVATE, small_bytes, IPC_CREAT | 0600);
  EXPECT_GE(segment, 0);
  void* const attached = ::shmat(segment, nullptr, 0);
  ::shmctl(segment, IPC_RMID, nullptr);
  EXPECT(attached != reinterpret_cast<void*>(-1));
  move_of(link, "System V segment", {static_cast<std::byte*>(attached), small_bytes}, 1234, 10001);
  ::shmdt(attached);

  // One registration over neighbours of different kinds.
  Addresses mixed(4 * 4096);
  mixed.put(4096, 4096, MAP_SHARED, memfd.get());
  mixed.put(2 * 4096, 4096, MAP_SHARED, file.get());
  move_of(link, "anonymous, memfd, file and anonymous pages", {mixed.data + 100, 4 * 4096 - 300}, 50, 4 * 4096 - 400);
}

// An HCA has the pages. Where a registration leads to what the file has now, what is not there any more is the fault of the side that it belongs to.
CONFORMANCE(AFileThatShrinksFailsItsOwnerOnly, "MR-24") {
  constexpr std::size_t bytes = 4 * 4096;
  const std::string name = object_name();
  const Fd object(object_of(name, bytes));
  EXPECT_OK(::shm_unlink(name.c_str()));
  Addresses memory(bytes);
  memory.put(0, bytes, MAP_SHARED, object.get());
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
    for (const bool posts_owner : {false, true}) {
      const Note note(posts_owner ? "by its owner, opcode " : "by the peer, opcode ", static_cast<int>(opcode));
      Link link(run);
      EXPECT_OK(::ftruncate(object.get(), bytes));
      const Mr mr(link.pd, memory.data, bytes);
      const Remote theirs = run.peer.exchange(Remote{reinterpret_cast<std::uint64_t>(memory.data), bytes, mr.p->rkey, 0});
      if (run.b()) EXPECT_OK(::ftruncate(object.get(), 0));
      run.peer.barrier();
      if (run.a() != posts_owner) {
        const std::uint32_t size = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? 8 : 5000;
        const ibv_sge own{reinterpret_cast<std::uint64_t>(memory.data) + 4096, size, mr.p->lkey};
        EXPECT_OK(post(link.qp, Send{.opcode = opcode, .id = 1, .sges = {posts_owner ? own : link.mem.sge(0, size)},
                                     .remote_address = posts_owner ? link.remote.address : theirs.address + 4096,
                                     .rkey = posts_owner ? link.remote.rkey : theirs.rkey}));
        const ibv_wc_status status = link.scq.next().status;
        if (status != IBV_WC_SUCCESS) EXPECT_EQ(status, posts_owner ? IBV_WC_LOC_PROT_ERR : IBV_WC_REM_ACCESS_ERR);
      }
      run.peer.barrier();
    }
  }
}

CONFORMANCE(HugeTlbPagesMoveBothWays, "MR-10 MR-24") {
  Link link(run);
  constexpr std::size_t bytes = 2 * huge_page_bytes;
  for (const int kind : {MAP_PRIVATE, MAP_SHARED}) {  // shared ones are a file's
    void* const map = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    if (map == MAP_FAILED) skip("no huge pages (echo 8 > /proc/sys/vm/nr_hugepages)");
    const Note note(kind == MAP_SHARED ? "shared" : "private");
    move_of(link, "huge pages", {static_cast<std::byte*>(map), bytes}, (1 << 20) + 3, huge_page_bytes);
    move_of(link, "a part of huge pages", {static_cast<std::byte*>(map) + huge_page_bytes - 5000, 10000}, 1, 9998);
    ::munmap(map, bytes);
  }
}

// Registered by b, as large as a physical HCA's users make them; reached at its ends and at places that both draw.
CONFORMANCE(AGibibyteIsRegisteredAndReachedAnywhere, "MR-23 MR-13", .slow = true, .timeout_s = 300) {
  Link link(run);
  constexpr std::size_t bytes = std::size_t{1} << 30, block = 5000;
  std::unique_ptr<Addresses> memory;
  std::unique_ptr<Mr> mr;
  Remote target{};
  if (run.b()) {
    memory = std::make_unique<Addresses>(bytes);
    for (std::size_t at = 0; at < bytes; at += 4096) {  // every page is there, and is another one
      const std::uint64_t mark = run.seed + at;
      std::memcpy(memory->data + at, &mark, sizeof(mark));
    }
    const auto begin = std::chrono::steady_clock::now();
    mr = std::make_unique<Mr>(link.pd, memory->data, bytes);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("1 GiB is registered after %.3f s\n", took.count());
    std::fflush(stdout);
    run.peer.send(Remote{reinterpret_cast<std::uint64_t>(memory->data), bytes, mr->p->rkey, 0});
  } else {
    target = run.peer.receive<Remote>();
  }
  std::vector<std::size_t> places{0, bytes - block};
  for (int i = 0; i < 30; ++i) places.push_back(run.rng.below(bytes - block));
  std::uint64_t id = 0;
  for (const std::size_t offset : places) {
    const Note note("offset ", offset);
    std::vector<std::byte> wanted(block);
    fill_pattern(wanted, run.seed + offset);
    // First what lies there is read, marks of its pages in it.
    if (run.a()) {
      Send read = link.read(++id, 0, 0, block);
      read.remote_address = target.address + offset;
      read.rkey = target.rkey;
      EXPECT_OK(post(link.qp, read));
      link.scq.expect(id);
    }
    run.peer.barrier();
    if (run.b()) {
      run.peer.send_bytes({memory->data + offset, block});
      run.peer.barrier();
      expect_bytes({memory->data + offset, block}, wanted, "written remotely");
    } else {
      expect_bytes({link.mem.data(), block}, run.peer.receive_bytes(), "read remotely");
      Send write = link.write(++id, block, 0, block);
      std::memcpy(link.mem.data(block), wanted.data(), block);
      write.remote_address = target.address + offset;
      write.rkey = target.rkey;
      EXPECT_OK(post(link.qp, write));
      link.scq.expect(id);
      run.peer.barrier();
    }
  }
  run.peer.barrier();
  if (run.b()) {
    std::vector<bool> touched(bytes / 4096);
    for (const std::size_t offset : places) {
      for (std::size_t page = offset / 4096; page <= (offset + block - 1) / 4096; ++page) touched[page] = true;
    }
    for (std::size_t at = 0; at < bytes; at += 4096) {
      std::uint64_t mark = 0;
      std::memcpy(&mark, memory->data + at, sizeof(mark));
      if (!touched[at / 4096] && mark != run.seed + at) fail(__FILE__, __LINE__, text("a page that nobody wrote to has changed, at ", at));
    }
    const auto begin = std::chrono::steady_clock::now();
    mr.reset();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("… and deregistered after %.3f s\n", took.count());
    std::fflush(stdout);
  }
  run.peer.barrier();
  expect_fault(link, {"after the registration", Send{.opcode = IBV_WR_RDMA_WRITE,
                                                     .id = 1000,
                                                     .sges = {link.mem.sge(0, 2)},
                                                     .remote_address = target.address,
                                                     .rkey = target.rkey}});
}

}  // namespace vrdma::conformance
