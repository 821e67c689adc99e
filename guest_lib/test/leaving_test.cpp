// What leaves waits for what is being copied: when ibv_destroy_qp or a change to RESET has returned, nobody writes to the
// buffers of that queue pair's work any more. The copy is held up by a page that comes when the test says so. And who moves a queue
// pair out of RTS does not lose what it posted before.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

// One page that is there until withdraw(), and then not before supply().
class LatePage {
 public:
  static constexpr std::size_t bytes = 4096;

  LatePage() : fd_(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK))) {
    // Executable: it stays where it is and is reached through the process.
    memory_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory_ != MAP_FAILED);
    *static_cast<char*>(memory_) = 1;  // registering it looks at it
    uffdio_api api{UFFD_API, 0, 0};
    uffdio_register whole{{address(), bytes}, UFFDIO_REGISTER_MODE_MISSING, 0};
    usable_ = fd_ >= 0 && ::ioctl(fd_, UFFDIO_API, &api) == 0 && ::ioctl(fd_, UFFDIO_REGISTER, &whole) == 0;
  }
  ~LatePage() {
    if (fd_ >= 0) ::close(fd_);
    ::munmap(memory_, bytes);
  }
  LatePage(const LatePage&) = delete;
  LatePage& operator=(const LatePage&) = delete;

  bool usable() const { return usable_; }
  void* memory() const { return memory_; }
  std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(memory_); }
  void withdraw() const { REQUIRE(::madvise(memory_, bytes, MADV_DONTNEED) == 0); }
  bool awaited() const { return readable(fd_); }
  void supply() const {
    uffdio_zeropage page{{address(), bytes}, 0, 0};
    REQUIRE(::ioctl(fd_, UFFDIO_ZEROPAGE, &page) == 0);
  }

 private:
  int fd_;
  void* memory_;
  bool usable_ = false;
};

// A WRITE is under way into a late page; `leave` is called on its responder meanwhile.
template <class Leave>
void while_written_to(Leave leave) {
  Service service;
  service.start(R"({"process_memory": "guest"})");  // a thread of ours copies, and waits for pages as any thread does
  LatePage page;
  if (!page.usable()) {
    MESSAGE("skipped: no userfaultfd that holds the kernel up (CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd=1)");
    return;
  }
  Device device;
  CqPtr cq = make_cq(device);
  QpPtr requester = make_qp(device, cq.get()), responder = make_qp(device, cq.get());
  connect(requester.get(), responder->qp_num);
  connect(responder.get(), requester->qp_num);
  ibv_mr* mr = ibv_reg_mr(device.pd, page.memory(), page.bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  REQUIRE(mr != nullptr);
  page.withdraw();
  REQUIRE(post_write(requester.get(), device.sge(), page.address(), mr->rkey) == 0);
  eventually("the copy waits for the page", [&] { return page.awaited(); });

  std::atomic<bool> supplied = false;
  std::thread supplier([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // for who does not wait to be found out
    supplied = true;
    page.supply();
  });
  const auto begun = std::chrono::steady_clock::now();
  leave(responder);
  // The service waits for 100 ms, lest somebody's page holds everything up for ever.
  CHECK((supplied || std::chrono::steady_clock::now() - begun >= std::chrono::milliseconds(100)));
  supplier.join();
  requester.reset();
  CHECK(ibv_dereg_mr(mr) == 0);
}

}  // namespace

TEST_CASE("a queue pair is destroyed when the copy into its memory has ended") {
  while_written_to([](QpPtr& responder) { responder.reset(); });
}

TEST_CASE("a queue pair is in RESET when the copy into its memory has ended") {
  while_written_to([](QpPtr& responder) {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_RESET;
    CHECK(ibv_modify_qp(responder.get(), &attributes, IBV_QP_STATE) == 0);
  });
}

// Three SENDs, then at once the change, as a program does that says good-bye. Their memory is copied by a thread of this process.
TEST_CASE("what was posted before a change to ERR or RESET arrives") {
  Service service;
  service.start(R"({"direct": "mediated", "process_memory": "guest"})");
  constexpr std::size_t bytes = 100'000;  // more than one copy
  Device device;
  void* const memory = ::mmap(nullptr, 2 * bytes, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);  // stays where it is, as above
  REQUIRE(memory != MAP_FAILED);
  const int access = IBV_ACCESS_LOCAL_WRITE;
  ibv_mr* const mr = ibv_reg_mr(device.pd, memory, 2 * bytes, access);
  REQUIRE(mr != nullptr);
  const auto change = [](QpPtr& qp, ibv_qp_state to) {
    ibv_qp_attr attributes{};
    attributes.qp_state = to;
    REQUIRE(ibv_modify_qp(qp.get(), &attributes, IBV_QP_STATE) == 0);
  };
  for (const ibv_qp_state to : {IBV_QPS_ERR, IBV_QPS_RESET})
    for (const std::uint32_t size : {100u, static_cast<std::uint32_t>(bytes)}) {
      CAPTURE(to);
      CAPTURE(size);
      CqPtr send_cq = make_cq(device), receive_cq = make_cq(device);
      QpPtr sender = make_qp(device, send_cq.get()), receiver = make_qp(device, receive_cq.get());
      connect(sender.get(), receiver->qp_num);
      connect(receiver.get(), sender->qp_num);
      ibv_sge from{reinterpret_cast<std::uintptr_t>(memory), size, mr->lkey}, into{from.addr + bytes, size, mr->lkey};
      for (std::uint64_t i = 0; i < 3; ++i) {
        ibv_recv_wr wr{i, nullptr, &into, 1}, *bad = nullptr;
        REQUIRE(ibv_post_recv(receiver.get(), &wr, &bad) == 0);
      }
      for (std::uint64_t i = 0; i < 3; ++i) {
        ibv_send_wr wr{}, *bad = nullptr;
        wr.sg_list = &from;
        wr.num_sge = 1;
        wr.opcode = IBV_WR_SEND;
        wr.send_flags = IBV_SEND_SIGNALED;
        REQUIRE(ibv_post_send(sender.get(), &wr, &bad) == 0);
      }
      const auto begun = Clock::now();
      change(sender, to);
      const bool waited_enough = Clock::now() - begun >= std::chrono::milliseconds(100);  // as above
      change(receiver, IBV_QPS_ERR);  // flushes what has not arrived
      for (const ibv_wc& wc : collect(receive_cq.get(), 3)) CHECK((wc.status == IBV_WC_SUCCESS || waited_enough));
      if (to == IBV_QPS_ERR)
        for (const ibv_wc& wc : collect(send_cq.get(), 3)) CHECK((wc.status == IBV_WC_SUCCESS || waited_enough));
    }
  CHECK(ibv_dereg_mr(mr) == 0);
  ::munmap(memory, 2 * bytes);
}

namespace {

struct Address {
  std::uint32_t qpn = 0;
  std::uint16_t lid = 0;

  static Address of(ibv_qp* qp) {
    ibv_port_attr port{};
    REQUIRE(ibv_query_port(qp->context, 1, &port) == 0);
    return {qp->qp_num, port.lid};
  }
};

// Over a socket to the other end.
Address exchange(int socket, const Address& own) {
  Address other;
  REQUIRE(::write(socket, &own, sizeof(own)) == sizeof(own));
  REQUIRE(::read(socket, &other, sizeof(other)) == sizeof(other));
  return other;
}

bool is_poster = false;

// Posts a SEND of memory that only this process has, and returns from main. polls: beside a thread that goes on polling.
[[noreturn]] void post_and_exit(int socket, bool polls) {
  const Device device;
  CqPtr cq = make_cq(device);
  QpPtr qp = make_qp(device, cq.get());
  void* const memory = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);  // executable: it stays where it is
  REQUIRE(memory != MAP_FAILED);
  const int access = IBV_ACCESS_LOCAL_WRITE;
  ibv_mr* const mr = ibv_reg_mr(device.pd, memory, 4096, access);
  REQUIRE(mr != nullptr);
  const Address other = exchange(socket, Address::of(qp.get()));
  connect(qp.get(), other.qpn, {}, 0, other.lid);
  exchange(socket, other);  // both are connected
  ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory), 8, mr->lkey};
  ibv_send_wr wr{}, *bad = nullptr;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_SIGNALED;
  if (polls)
    std::thread([cq = cq.get()] {
      for (ibv_wc wc;;) ibv_poll_cq(cq, 1, &wc);
    }).detach();
  std::exit(ibv_post_send(qp.get(), &wr, &bad) == 0 ? 0 : 1);
}

// Whether the other end got it.
bool arrives_from_who_exits(bool polls) {
  int sockets[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    is_poster = true;
    ::close(sockets[0]);
    try {
      post_and_exit(sockets[1], polls);
    } catch (...) {  // what it requires
      ::_exit(1);
    }
  }
  ::close(sockets[1]);
  const Device device;
  CqPtr cq = make_cq(device);
  QpPtr qp = make_qp(device, cq.get());
  const Address other = exchange(sockets[0], Address::of(qp.get()));
  connect(qp.get(), other.qpn, {}, 0, other.lid);
  REQUIRE(post_recv(device, qp.get(), 1) == 0);
  exchange(sockets[0], other);
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  ::close(sockets[0]);
  // A READ of the peer's would end behind what it has sent; there is nobody to be read from any more, and this end's own requests end with it.
  REQUIRE(post_send(device, qp.get(), 2) == 0);
  const auto first = collect(cq.get(), 1)[0];
  return first.wr_id == 1 && first.status == IBV_WC_SUCCESS;
}

}  // namespace

// LeakSanitizer asks: what a child of fork(2) has of its parent's, and never gives back, is no leak.
extern "C" int __lsan_is_turned_off() { return is_poster; }

// A busy machine may leave the service no moment to look: not every time, then.
TEST_CASE("what a process posts last, of memory that is its own, arrives though it ends at once") {
  Service service;
  service.start(R"({"direct": "mediated"})");
  for (const bool polls : {false, true}) {
    CAPTURE(polls);
    constexpr int rounds = 10;
    int arrived = 0;
    for (int round = 0; round < rounds; ++round) arrived += arrives_from_who_exits(polls);
    CHECK(arrived > rounds / 2);
  }
}
