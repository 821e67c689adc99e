// A vrdmad of the test's own, and small verbs helpers: an RC queue pair connected to another one of the same process.
#pragma once

#include <infiniband/verbs.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "doctest/doctest.h"

namespace vrdma::test {

using Clock = std::chrono::steady_clock;

// Waits until the condition holds; fails the test after a minute, which no machine needs.
inline void eventually(const char* what, const std::function<bool()>& condition) {
  const auto deadline = Clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (Clock::now() > deadline) FAIL("never happened: ", std::string(what));
    std::this_thread::yield();
  }
}

// Whether a thread of ours sleeps in the kernel.
inline bool sleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name_end = text.rfind(')');
  return name_end != text.npos && text.substr(name_end, 3) == ") S";
}

class Service {
 public:
  Service() {
    char pattern[] = "/tmp/vrdma-guest-test-XXXXXX";
    REQUIRE(mkdtemp(pattern) != nullptr);
    directory_ = pattern;
    socket_ = directory_ + "/vrdmad.sock";
    ::setenv("VRDMA_SOCKET", socket_.c_str(), 1);
  }
  ~Service() {
    kill_now();
    ::unlink(socket_.c_str());
    ::unlink((directory_ + "/vrdmad.json").c_str());
    ::rmdir(directory_.c_str());
  }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // configuration: JSON text.
  void start(const std::string& configuration = "{}") {
    const std::string file = directory_ + "/vrdmad.json";
    std::ofstream(file) << configuration;
    int ready[2];
    REQUIRE(::pipe(ready) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // also when this test crashes
      const std::string fd = std::to_string(ready[1]);
      ::execl(VRDMAD_PATH, "vrdmad", "--config", file.c_str(), "--socket", socket_.c_str(), "--log-level", "warn", "--ready-fd", fd.c_str(), nullptr);
      ::_exit(127);
    }
    ::close(ready[1]);
    char byte;
    if (::read(ready[0], &byte, 1) != 1) {
      int status = 0;
      ::waitpid(std::exchange(pid_, 0), &status, 0);
      FAIL("vrdmad did not start, wait status ", status);
    }
    ::close(ready[0]);
  }
  void kill_now(int signal = SIGKILL) {
    if (pid_ <= 0) return;
    ::kill(pid_, signal);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  std::string directory_, socket_;
  pid_t pid_ = 0;
};

struct Device {
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  std::vector<char> memory = std::vector<char>(1 << 16);
  ibv_mr* mr = nullptr;

  Device() {
    int count = 0;
    ibv_device** list = ibv_get_device_list(&count);
    REQUIRE(count == 1);
    context = ibv_open_device(list[0]);
    REQUIRE(context != nullptr);
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(context);
    REQUIRE(pd != nullptr);
    mr = ibv_reg_mr(pd, memory.data(), memory.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    REQUIRE(mr != nullptr);
  }
  ~Device() {
    if (mr != nullptr) CHECK(ibv_dereg_mr(mr) == 0);
    CHECK(ibv_dealloc_pd(pd) == 0);
    CHECK(ibv_close_device(context) == 0);
  }
  ibv_sge sge(std::uint32_t bytes = 8) const { return {reinterpret_cast<std::uintptr_t>(memory.data()), bytes, mr->lkey}; }
};

struct QpDeleter {
  void operator()(ibv_qp* qp) const { CHECK(ibv_destroy_qp(qp) == 0); }
};
struct CqDeleter {
  void operator()(ibv_cq* cq) const { CHECK(ibv_destroy_cq(cq) == 0); }
};
struct SrqDeleter {
  void operator()(ibv_srq* srq) const { CHECK(ibv_destroy_srq(srq) == 0); }
};
struct ChannelDeleter {
  void operator()(ibv_comp_channel* channel) const { CHECK(ibv_destroy_comp_channel(channel) == 0); }
};
using QpPtr = std::unique_ptr<ibv_qp, QpDeleter>;
using CqPtr = std::unique_ptr<ibv_cq, CqDeleter>;
using ChannelPtr = std::unique_ptr<ibv_comp_channel, ChannelDeleter>;

inline CqPtr make_cq(const Device& device, int cqe = 256, ibv_comp_channel* channel = nullptr) {
  CqPtr cq(ibv_create_cq(device.context, cqe, nullptr, channel, 0));
  REQUIRE(cq != nullptr);
  return cq;
}

inline QpPtr make_qp(const Device& device, ibv_cq* cq, std::uint32_t depth = 16, ibv_srq* srq = nullptr) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq;
  init.srq = srq;
  init.qp_type = IBV_QPT_RC;
  init.cap = {depth, depth, 2, 2, 64};
  QpPtr qp(ibv_create_qp(device.pd, &init));
  REQUIRE(qp != nullptr);
  return qp;
}

struct Patience {
  std::uint8_t timeout = 0;  // none: on a busy machine nothing here may depend on when a thread runs
  std::uint8_t retry_cnt = 7;
  std::uint8_t rnr_retry = 7;
};

// lid: the peer's, where it is another process.
inline void connect(ibv_qp* qp, std::uint32_t peer, Patience patience = {}, unsigned more_access = 0, std::uint16_t lid = 0) {
  ibv_port_attr port{};
  REQUIRE(ibv_query_port(qp->context, 1, &port) == 0);
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_INIT;
  a.port_num = 1;
  a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | more_access;
  REQUIRE(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
  a = {};
  a.qp_state = IBV_QPS_RTR;
  a.path_mtu = IBV_MTU_1024;
  a.dest_qp_num = peer;
  a.max_dest_rd_atomic = 1;
  a.min_rnr_timer = 1;
  a.ah_attr.dlid = lid != 0 ? lid : port.lid;
  a.ah_attr.port_num = 1;
  REQUIRE(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
  a = {};
  a.qp_state = IBV_QPS_RTS;
  a.timeout = patience.timeout;
  a.retry_cnt = patience.retry_cnt;
  a.rnr_retry = patience.rnr_retry;
  a.max_rd_atomic = 1;
  REQUIRE(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                            IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

inline int post_recv(const Device& device, ibv_qp* qp, std::uint64_t wr_id) {
  ibv_sge sge = device.sge();
  ibv_recv_wr wr{wr_id, nullptr, &sge, 1};
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(qp, &wr, &bad);
}

// srqn: of an XRC initiator, for which SRQ.
inline int post_send(const Device& device, ibv_qp* qp, std::uint64_t wr_id, unsigned flags = IBV_SEND_SIGNALED, std::uint32_t srqn = 0) {
  ibv_sge sge = device.sge();
  ibv_send_wr wr{};
  wr.wr_id = wr_id;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = flags;
  wr.qp_type.xrc.remote_srqn = srqn;
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(qp, &wr, &bad);
}

// One signalled RDMA WRITE of what `from` describes.
inline int post_write(ibv_qp* qp, ibv_sge from, std::uint64_t address, std::uint32_t rkey) {
  ibv_send_wr wr{};
  wr.sg_list = &from;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_RDMA_WRITE;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.wr.rdma = {address, rkey};
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(qp, &wr, &bad);
}

// Polls until `count` completions came, in order.
inline std::vector<ibv_wc> collect(ibv_cq* cq, std::size_t count) {
  std::vector<ibv_wc> all;
  eventually("completions arrive", [&] {
    ibv_wc wc[8];
    const int got = ibv_poll_cq(cq, 8, wc);
    REQUIRE(got >= 0);
    all.insert(all.end(), wc, wc + got);
    return all.size() >= count;
  });
  return all;
}

// `destroy` destroys the queue, of whose events one was read and not acknowledged: it waits for that.
template <class Destroy>
void destroy_waits_for_acknowledgement(ibv_cq* cq, Destroy&& destroy) {
  std::atomic<bool> acknowledged{false}, destroyed_after{false};
  std::thread destroyer([&] {
    destroy();
    destroyed_after = acknowledged.load();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // time to go wrong in; the outcome does not depend on it
  acknowledged = true;
  ibv_ack_cq_events(cq, 1);
  destroyer.join();
  CHECK(destroyed_after);
}

inline bool readable(int fd) {
  pollfd waiting{fd, POLLIN, 0};
  return ::poll(&waiting, 1, 0) == 1 && (waiting.revents & POLLIN) != 0;
}

// What `body` returns in a fork's child; a failed requirement is 99.
template <class Body>
int in_child(Body&& body, const std::function<void()>& meanwhile = [] {}) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    try {
      ::_exit(body());
    } catch (...) {
      ::_exit(99);
    }
  }
  meanwhile();
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return status == 0 || !WIFEXITED(status) ? status : WEXITSTATUS(status);
}

}  // namespace vrdma::test
