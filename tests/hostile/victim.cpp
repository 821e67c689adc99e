// The honest pair that hostile guests must not disturb: two processes, an RC connection, and for ever SEND, WRITE, READ and
// atomics whose every byte is known. Between the areas that operations touch lie red zones.
//
//   hostile_victim FD      FD: a file of one VictimReport, shared with the test; leaves on SIGTERM to its parent process
#include <infiniband/verbs.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <vector>

#include "tests/hostile/report.hpp"

namespace {

using vrdma::hostile::VictimReport;

VictimReport* report;
volatile std::sig_atomic_t leave = 0;

[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(report->message, sizeof(report->message), format, arguments);
  va_end(arguments);
  report->failed.store(1, std::memory_order_release);
  ::_exit(1);
}

void require(bool good, const char* what) {
  if (!good) fail("%s failed (errno %d)", what, errno);
}

constexpr std::size_t zone = 4096, area = 64 * 1024;  // red zone | inbox | red zone | target | red zone | atomic | red zone | scratch
constexpr std::size_t inbox_at = zone, target_at = inbox_at + area + zone, atomic_at = target_at + area + zone,
                      scratch_at = atomic_at + zone + zone, total = scratch_at + area + zone;
constexpr unsigned char red = 0xa5;

struct Side {
  unsigned qpn;
  unsigned short lid;
  unsigned rkey;
  unsigned long long address;
};

unsigned char pattern(unsigned long long round, std::size_t i, unsigned salt) {
  return static_cast<unsigned char>(round * 131 + i * 7 + (i >> 8) + salt);
}

class End {
 public:
  End(int socket, bool leads) : socket_(socket), leads_(leads) {
    int count = 0;
    ibv_device** const list = ibv_get_device_list(&count);
    require(list != nullptr && count == 1, "ibv_get_device_list");
    context_ = ibv_open_device(list[0]);
    require(context_ != nullptr, "ibv_open_device");
    ibv_free_device_list(list);
    pd_ = ibv_alloc_pd(context_);
    cq_ = ibv_create_cq(context_, 64, nullptr, nullptr, 0);
    require(pd_ != nullptr && cq_ != nullptr, "ibv_alloc_pd, ibv_create_cq");
    memory_ = static_cast<unsigned char*>(::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::fill(memory_, memory_ + total, red);
    std::fill_n(memory_ + atomic_at, 8, 0);
    mr_ = ibv_reg_mr(pd_, memory_, total, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
    require(mr_ != nullptr, "ibv_reg_mr");
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_;
    init.qp_type = IBV_QPT_RC;
    init.cap = {16, 16, 1, 1, 0};
    qp_ = ibv_create_qp(pd_, &init);
    require(qp_ != nullptr, "ibv_create_qp");
    connect();
  }

  // One message each way, and between them WRITE, READ and FETCH_ADD by the leader.
  void round(unsigned long long n) {
    const auto bytes = static_cast<unsigned>(1 + (n * 977) % area);
    receive();
    if (leads_) {
      barrier();
      put(n, bytes, 1, IBV_WR_SEND, 0);
      put(n, bytes, 2, IBV_WR_RDMA_WRITE, target_at);
      std::fill_n(memory_ + scratch_at, area, red);
      post(IBV_WR_RDMA_READ, bytes, target_at, scratch_at, 0);
      check(scratch_at, n, bytes, 2, "READ");
      post(IBV_WR_ATOMIC_FETCH_AND_ADD, 8, atomic_at, scratch_at, 3);
      unsigned long long old = 0;
      std::memcpy(&old, memory_ + scratch_at, 8);
      if (old != 3 * n) fail("FETCH_ADD in round %llu found %llu, not %llu", n, old, 3 * n);
      wait(IBV_WC_RECV, bytes);
      check(inbox_at, n, bytes, 4, "SEND back");
    } else {
      barrier();
      wait(IBV_WC_RECV, bytes);
      check(inbox_at, n, bytes, 1, "SEND");
      put(n, bytes, 4, IBV_WR_SEND, 0);
    }
    zones(n);
  }

 private:
  void connect() {
    ibv_port_attr port{};
    require(ibv_query_port(context_, 1, &port) == 0, "ibv_query_port");
    const Side mine{qp_->qp_num, port.lid, mr_->rkey, reinterpret_cast<std::uintptr_t>(memory_)};
    require(::write(socket_, &mine, sizeof(mine)) == sizeof(mine) && ::read(socket_, &peer_, sizeof(peer_)) == sizeof(peer_), "exchange");
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    require(ibv_modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0, "to INIT");
    a = {};
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = peer_.qpn;
    a.max_dest_rd_atomic = 1;
    a.min_rnr_timer = 1;
    a.ah_attr.dlid = peer_.lid;
    a.ah_attr.port_num = 1;
    require(ibv_modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0, "to RTR");
    a = {};
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 20;
    a.retry_cnt = a.rnr_retry = 7;
    a.max_rd_atomic = 1;
    require(ibv_modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                       IBV_QP_MAX_QP_RD_ATOMIC) == 0, "to RTS");
    barrier();
  }
  void barrier() {
    char byte = 0;
    require(::write(socket_, &byte, 1) == 1, "barrier");
    if (::read(socket_, &byte, 1) != 1) ::_exit(0);  // the other has left
  }
  void receive() {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory_ + inbox_at), area, mr_->lkey};
    ibv_recv_wr wr{1, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    require(ibv_post_recv(qp_, &wr, &bad) == 0, "ibv_post_recv");
  }
  void put(unsigned long long n, unsigned bytes, unsigned salt, ibv_wr_opcode opcode, std::size_t to) {
    for (std::size_t i = 0; i < bytes; ++i) memory_[scratch_at + i] = pattern(n, i, salt);
    post(opcode, bytes, to, scratch_at, 0);
    std::fill_n(memory_ + scratch_at, area, red);
  }
  void post(ibv_wr_opcode opcode, unsigned bytes, std::size_t to, std::size_t from, unsigned long long add) {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory_ + from), bytes, mr_->lkey};
    ibv_send_wr wr{};
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = opcode;
    wr.send_flags = IBV_SEND_SIGNALED;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      wr.wr.atomic.remote_addr = peer_.address + to;
      wr.wr.atomic.compare_add = add;
      wr.wr.atomic.rkey = peer_.rkey;
    } else {
      wr.wr.rdma.remote_addr = peer_.address + to;
      wr.wr.rdma.rkey = peer_.rkey;
    }
    ibv_send_wr* bad = nullptr;
    require(ibv_post_send(qp_, &wr, &bad) == 0, "ibv_post_send");
    wait(opcode == IBV_WR_SEND         ? IBV_WC_SEND
         : opcode == IBV_WR_RDMA_WRITE ? IBV_WC_RDMA_WRITE
         : opcode == IBV_WR_RDMA_READ  ? IBV_WC_RDMA_READ
                                       : IBV_WC_FETCH_ADD, bytes);
  }
  // The next completion of that kind; one of the other direction may come first and is kept.
  void wait(ibv_wc_opcode opcode, unsigned bytes) {
    const bool wants_receive = opcode == IBV_WC_RECV;
    if (wants_receive && received_ != 0) {
      if (std::exchange(received_, 0) != bytes) fail("a message had another length than sent");
      return;
    }
    for (;;) {
      ibv_wc wc{};
      const int got = ibv_poll_cq(cq_, 1, &wc);
      if (got < 0) fail("ibv_poll_cq says %d", got);
      if (got == 0) continue;
      if (wc.status != IBV_WC_SUCCESS) fail("completion %d with status %s", static_cast<int>(wc.opcode), ibv_wc_status_str(wc.status));
      if (wc.opcode == IBV_WC_RECV && !wants_receive) {
        received_ = wc.byte_len;
        continue;
      }
      if (wc.opcode != opcode) fail("completion of opcode %d where %d was due", static_cast<int>(wc.opcode), static_cast<int>(opcode));
      if (wants_receive && wc.byte_len != bytes) fail("received %u bytes, not %u", wc.byte_len, bytes);
      return;
    }
  }
  void check(std::size_t at, unsigned long long n, std::size_t bytes, unsigned salt, const char* what) {
    for (std::size_t i = 0; i < bytes; ++i)
      if (memory_[at + i] != pattern(n, i, salt)) fail("%s in round %llu: byte %zu of %zu is wrong", what, n, i, bytes);
    for (std::size_t i = bytes; i < area; ++i)
      if (at == scratch_at && memory_[at + i] != red) fail("%s in round %llu wrote behind its end, at %zu of %zu", what, n, i, bytes);
  }
  void zones(unsigned long long n) {
    for (const std::size_t at : {std::size_t{0}, inbox_at + area, target_at + area, atomic_at + 8, scratch_at - zone, scratch_at + area})
      for (std::size_t i = 0; i < zone - 8; ++i)
        if (memory_[at + i] != red) fail("round %llu: red zone at %zu is broken", n, at + i);
  }

  int socket_;
  bool leads_;
  ibv_context* context_;
  ibv_pd* pd_;
  ibv_cq* cq_;
  ibv_mr* mr_;
  ibv_qp* qp_;
  unsigned char* memory_;
  Side peer_{};
  unsigned received_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  void* const page = ::mmap(nullptr, sizeof(VictimReport), PROT_READ | PROT_WRITE, MAP_SHARED, std::atoi(argv[1]), 0);
  if (page == MAP_FAILED) return 2;
  report = static_cast<VictimReport*>(page);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) return 2;
  ::signal(SIGPIPE, SIG_IGN);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();  // before anything of verbs: two honest processes that share nothing
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) return 0;
    ::close(ends[0]);
    End end(ends[1], false);
    for (unsigned long long n = 0;; ++n) end.round(n);
  }
  ::close(ends[1]);
  report->second.store(child, std::memory_order_relaxed);
  struct sigaction action {};
  action.sa_handler = [](int) { leave = 1; };
  ::sigaction(SIGTERM, &action, nullptr);
  End end(ends[0], true);
  for (unsigned long long n = 0; leave == 0; ++n) {
    end.round(n);
    report->rounds.store(n + 1, std::memory_order_release);
  }
  ::close(ends[0]);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  return 0;
}
