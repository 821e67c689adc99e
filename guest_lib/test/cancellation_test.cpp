// What POSIX calls no cancellation point, and verbs on the data path, come back to a thread that is being cancelled: inside, it would hold locks
// of this library's for ever, or end the program where an unwinding meets `noexcept`.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "guest_lib/test/cancelled.hpp"
#include "guest_lib/test/direct_pair.hpp"

using namespace vrdma::test;

namespace {

// As before Linux 6.11, for this thread and its children: mappings are read from text.
bool have_no_procmap_query() {
  constexpr auto query = static_cast<std::uint32_t>(_IOWR('f', 17, char[104]));
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, query, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOTTY),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{std::size(program), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

}  // namespace

TEST_CASE("madvise, mremap and fork come back to a thread that is being cancelled, however the mappings are read") {
  Service service;
  service.start();
  const Device device;
  for (const bool text : {false, true}) {
    CAPTURE(text);
    const Pages pages(device);
    std::memset(pages.at(0), 1, Pages::bytes);
    constexpr std::size_t part = Pages::bytes / 4;
    bool ready = true;
    const auto prepare = [&] { ready = !text || have_no_procmap_query(); };

    int advised = -1;
    comes_back_though_cancelled([&] { prepare(), advised = ::madvise(pages.at(0), part, MADV_DONTNEED); });
    CHECK(ready);
    CHECK(advised == 0);
    CHECK(pages.at(part - 1)[0] == 0);
    CHECK(pages.at(part)[0] == 1);

    pid_t child = -1;
    comes_back_though_cancelled([&] {
      prepare(), child = ::fork();
      if (child == 0) ::_exit(pages.at(part - 1)[0] == 0 && pages.at(part)[0] == 1 ? 0 : 1);
    });
    int status = -1;
    CHECK(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);

    void* moved = MAP_FAILED;
    comes_back_though_cancelled([&] { prepare(), moved = ::mremap(pages.at(part), part, 2 * part, MREMAP_MAYMOVE); });
    REQUIRE(moved != MAP_FAILED);
    CHECK(static_cast<char*>(moved)[0] == 1);
    CHECK(static_cast<char*>(moved)[2 * part - 1] == 0);
    CHECK(::munmap(moved, 2 * part) == 0);
  }
}

TEST_CASE("the first post into memory that is reached through its process comes back to a thread that is being cancelled, as do those that follow, and polls") {
  Service service;
  service.start(with_direct);
  const Pair pair;
  std::vector<char> own(1500, 1), peers(1500, 2);  // parts of pages, which stay where they are
  ibv_mr* const own_mr = ibv_reg_mr(pair.device.pd, own.data(), own.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  ibv_mr* const peers_mr = ibv_reg_mr(pair.device.pd, peers.data(), peers.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  REQUIRE(own_mr != nullptr);
  REQUIRE(peers_mr != nullptr);
  // From now on the next post takes the offer up, and opens what it needs.
  std::string because;
  eventually("the connection is direct, or may not be", [&] { return mode_of(pair.a.get(), &because) == "direct" || is_apart(because); });
  if (is_apart(because)) MESSAGE("SKIP: processes cannot be direct here: ", because);
  constexpr int messages = 20;
  int done = 0, error = 0;
  comes_back_though_cancelled([&] {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    for (; done < messages && error == 0; ++done) {
      ibv_sge sge{reinterpret_cast<std::uintptr_t>(own.data()), 1000, own_mr->lkey};
      ibv_send_wr wr{}, *bad = nullptr;
      wr.sg_list = &sge;
      wr.num_sge = 1;
      wr.opcode = IBV_WR_RDMA_WRITE;
      wr.send_flags = IBV_SEND_SIGNALED;
      wr.wr.rdma = {reinterpret_cast<std::uintptr_t>(peers.data()), peers_mr->rkey};
      error = ibv_post_send(pair.a.get(), &wr, &bad);
      ibv_wc wc{};
      while (error == 0 && ibv_poll_cq(pair.a_cq.get(), 1, &wc) == 0) {
        ::sched_yield();
        if (std::chrono::steady_clock::now() > deadline) error = ETIMEDOUT;
      }
      if (error == 0 && wc.status != IBV_WC_SUCCESS) error = EIO;
    }
  });
  CHECK(error == 0);
  CHECK(done == messages);
  CHECK(peers[999] == 1);
  CHECK(peers[1000] == 2);
  CHECK(ibv_dereg_mr(own_mr) == 0);
  CHECK(ibv_dereg_mr(peers_mr) == 0);
}
