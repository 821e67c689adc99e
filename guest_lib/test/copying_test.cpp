// Memory that the service cannot reach, copied by a thread of this process: what applications do to it, and to the thread.
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <cstdlib>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

constexpr std::size_t page = 4096;
constexpr char by_guest[] = R"({"process_memory": "guest"})";
constexpr int all_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

int copying_threads() {
  int count = 0;
  DIR* const tasks = ::opendir("/proc/self/task");
  REQUIRE(tasks != nullptr);
  while (const dirent* entry = ::readdir(tasks)) {
    std::ifstream comm(std::string("/proc/self/task/") + entry->d_name + "/comm");
    std::string name;
    count += std::getline(comm, name) && name == "vrdma-copy";
  }
  ::closedir(tasks);
  return count;
}

// Before the library looks. Memory of less than a page is then what the service cannot map, wherever it is.
const int keeps_partial_pages = ::setenv("VRDMA_PARTIAL_PAGES", "stay", 1);

// Low, where the kernel puts nothing by itself: what a test unmaps stays unmapped, also while threads start and libraries allocate.
struct Page {
  static inline std::uintptr_t wish = 0x10000000;
  char* at = static_cast<char*>(::mmap(reinterpret_cast<void*>(wish += 16 * page), page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  Page() { REQUIRE(at != MAP_FAILED); }
  ~Page() { ::munmap(at, page); }
};

// Two queue pairs of this process, connected, with memory of less than a page each.
struct Pair {
  Device device;  // its 64 KiB are mapped, but for the pages at the ends
  CqPtr cq = make_cq(device);
  QpPtr a = make_qp(device, cq.get()), b = make_qp(device, cq.get());
  Page here, there;
  ibv_mr* local = ibv_reg_mr(device.pd, here.at + 64, 256, all_access);
  ibv_mr* remote = ibv_reg_mr(device.pd, there.at + 128, 256, all_access);

  Pair() {
    REQUIRE(local != nullptr);
    REQUIRE(remote != nullptr);
    connect(a.get(), b->qp_num, {}, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
    connect(b.get(), a->qp_num, {}, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
  }
  ~Pair() {
    a.reset(), b.reset(), cq.reset();
    CHECK(ibv_dereg_mr(local) == 0);
    CHECK(ibv_dereg_mr(remote) == 0);
  }

  ibv_wc_status run(ibv_wr_opcode opcode, std::uint32_t bytes, std::uint64_t compare_add = 0, std::uint64_t swap = 0) {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(here.at + 64), bytes, local->lkey};
    ibv_send_wr wr{};
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    const auto address = reinterpret_cast<std::uintptr_t>(there.at + 128);
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP)
      wr.wr.atomic = {address, compare_add, swap, remote->rkey};
    else
      wr.wr.rdma = {address, remote->rkey};
    ibv_send_wr* bad = nullptr;
    REQUIRE(ibv_post_send(a.get(), &wr, &bad) == 0);
    return collect(cq.get(), 1).front().status;
  }
  std::uint64_t& word_here() { return *reinterpret_cast<std::uint64_t*>(here.at + 64); }
  std::uint64_t& word_there() { return *reinterpret_cast<std::uint64_t*>(there.at + 128); }

  void expect_all_work() {
    for (std::uint32_t bytes : {1u, 7u, 8u, 9u, 256u}) {
      std::memset(here.at, static_cast<int>('a' + bytes % 16), page);
      std::memset(there.at, '.', page);
      REQUIRE(run(IBV_WR_RDMA_WRITE, bytes) == IBV_WC_SUCCESS);
      REQUIRE(std::memcmp(there.at + 128, here.at + 64, bytes) == 0);
      REQUIRE(there.at[127] == '.');
      REQUIRE(there.at[128 + bytes] == '.');
      std::memset(here.at, '-', page);
      REQUIRE(run(IBV_WR_RDMA_READ, bytes) == IBV_WC_SUCCESS);
      REQUIRE(std::memcmp(there.at + 128, here.at + 64, bytes) == 0);
      REQUIRE(here.at[63] == '-');
      REQUIRE(here.at[64 + bytes] == '-');
    }
    word_there() = 40;
    REQUIRE(run(IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 2) == IBV_WC_SUCCESS);
    REQUIRE(word_here() == 40);
    REQUIRE(word_there() == 42);
    REQUIRE(run(IBV_WR_ATOMIC_CMP_AND_SWP, 8, 41, 7) == IBV_WC_SUCCESS);
    REQUIRE(word_here() == 42);
    REQUIRE(word_there() == 42);
    REQUIRE(run(IBV_WR_ATOMIC_CMP_AND_SWP, 8, 42, 7) == IBV_WC_SUCCESS);
    REQUIRE(word_here() == 42);
    REQUIRE(word_there() == 7);
  }
};

}  // namespace

TEST_CASE("a thread copies only where the service cannot, and all operations work through it") {
  Service service;
  SUBCASE("the service reaches this process") {
    service.start();
    Pair pair;
    pair.expect_all_work();
    CHECK(copying_threads() == 0);
  }
  SUBCASE("the service leaves it to this process") {
    service.start(by_guest);
    Pair pair;
    pair.expect_all_work();
    CHECK(copying_threads() == 1);
  }
}

TEST_CASE("memory that the application has unmapped or protected is an error completion, not a crash") {
  Service service;
  service.start(by_guest);
  struct Case {
    const char* what;
    int protection;  // -1: unmapped
    bool remote;
    ibv_wr_opcode opcode;
    ibv_wc_status status;
  };
  const Case cases[] = {
      {"write to unmapped", -1, true, IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR},
      {"write to read-only", PROT_READ, true, IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR},
      {"read of unmapped", -1, true, IBV_WR_RDMA_READ, IBV_WC_REM_ACCESS_ERR},
      {"atomic on unmapped", -1, true, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WC_REM_ACCESS_ERR},
      {"atomic on read-only", PROT_READ, true, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WC_REM_ACCESS_ERR},
      {"write from unmapped", -1, false, IBV_WR_RDMA_WRITE, IBV_WC_LOC_PROT_ERR},
      {"read into inaccessible", PROT_NONE, false, IBV_WR_RDMA_READ, IBV_WC_LOC_PROT_ERR}};
  for (const Case& c : cases) {
    CAPTURE(std::string(c.what));
    Pair pair;
    pair.word_there() = 0;
    char* const victim = c.remote ? pair.there.at : pair.here.at;
    REQUIRE((c.protection < 0 ? ::munmap(victim, page) : ::mprotect(victim, page, c.protection)) == 0);
    CHECK(pair.run(c.opcode, 8) == c.status);
    if (c.protection == PROT_READ) CHECK(pair.word_there() == 0);
  }
  Pair pair;
  pair.expect_all_work();
}

TEST_CASE("copies go on when the application closes every descriptor it does not know, or limits file sizes") {
  Service service;
  service.start(by_guest);
  CHECK(in_child([] {
          Pair pair;
          pair.expect_all_work();
          const rlimit page_size{page, page};
          if (::setrlimit(RLIMIT_FSIZE, &page_size) != 0) return 2;
          pair.expect_all_work();
          // The segment's number is somebody else's file now: nothing may be written there.
          char pattern[] = "/tmp/vrdma-guest-test-file-XXXXXX";
          const int file = ::mkstemp(pattern);
          ::unlink(pattern);
          int taken_over = 0;
          for (int fd = 3; fd < 1024; ++fd) {
            char target[256] = {};
            const std::string link = "/proc/self/fd/" + std::to_string(fd);
            if (::readlink(link.c_str(), target, sizeof(target) - 1) > 0 && std::strstr(target, "memfd:vrdma-copy") != nullptr)
              taken_over += ::syscall(SYS_dup3, file, fd, 0) == fd;  // dup2(2) would find that nothing may be put there
          }
          if (taken_over != 1) return 3;
          pair.expect_all_work();
          if (::lseek(file, 0, SEEK_END) != 0) return 4;
          return copying_threads() == 1 ? 0 : 5;
        }) == 0);
}

TEST_CASE("a fork's child copies by a thread of its own, and its parent goes on") {
  Service service;
  service.start(by_guest);
  Pair pair;
  pair.expect_all_work();
  for (int i = 0; i < 3; ++i) {
    const auto child = [] {
      if (copying_threads() != 0) return 2;
      Pair of_child;
      of_child.expect_all_work();
      return copying_threads() == 1 ? 0 : 3;
    };
    CHECK(in_child(child, [&] { pair.expect_all_work(); }) == 0);
    pair.expect_all_work();
  }
}

TEST_CASE("registrations go on moving pages beside the copying thread, and lose nothing") {
  Service service;
  service.start(by_guest);
  Pair pair;
  pair.expect_all_work();
  // Each round moves a page in and out that a copy writes to all the time.
  std::uint64_t expected = pair.word_there() = 1;
  for (int i = 0; i < 300; ++i) {
    ibv_mr* const whole = ibv_reg_mr(pair.device.pd, pair.there.at, page, all_access);
    REQUIRE(whole != nullptr);
    REQUIRE(pair.run(IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 3) == IBV_WC_SUCCESS);
    expected += 3;
    REQUIRE(ibv_dereg_mr(whole) == 0);
    REQUIRE(pair.run(IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 5) == IBV_WC_SUCCESS);
    expected += 5;
    REQUIRE(pair.word_there() == expected);
  }
}

TEST_CASE("the thread ends with the service, and a new one serves the next") {
  Service service;
  service.start(by_guest);
  {
    Pair pair;
    pair.expect_all_work();
    service.kill_now();
    eventually("the device is fatal", [&] { return readable(pair.device.context->async_fd); });
  }
  service.start(by_guest);
  Pair pair;
  pair.expect_all_work();
  CHECK(copying_threads() == 1);
}
