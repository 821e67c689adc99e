// A poster and a sleeper, connected to each other: whether a message that has arrived wakes its receiver, whatever becomes of the sender.
//
//   crash_sleeper --peer-fd FD --role poster|sleeper
//
//   poster   sends one message for each byte on its standard input, says "posted", and takes its queue pair down at the end of that.
//   sleeper  arms its completion queue, polls until it is empty, sleeps in ibv_get_cq_event and nowhere else; "woke COUNT" after each
//            event, with the completions polled then. Its caller ends it.
// Both say "ready" once they are connected, the sleeper when it has armed.
#include <infiniband/verbs.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr unsigned watchdog_s = 300;
constexpr int depth = 64;
constexpr int local_write = IBV_ACCESS_LOCAL_WRITE;  // ibv_reg_mr is a macro that compares its argument with another enumeration

[[noreturn]] void fail(const char* what) {
  std::printf("fail %s: %s\n", what, std::strerror(errno));
  std::fflush(stdout);
  _exit(1);
}
void check(int result, const char* what) {
  if (result == 0) return;
  if (result > 0) errno = result;
  fail(what);
}

struct Info {
  std::uint32_t qpn, lid;
};

class End {
 public:
  explicit End(int peer_fd) : peer_fd_(peer_fd) {
    ibv_device** const list = ibv_get_device_list(nullptr);
    context_ = list != nullptr && list[0] != nullptr ? ibv_open_device(list[0]) : nullptr;
    if (context_ == nullptr) fail("ibv_open_device");
    ibv_free_device_list(list);
    pd_ = ibv_alloc_pd(context_);
    memory_ = static_cast<char*>(std::aligned_alloc(4096, 4096));
    std::memset(memory_, 0, 4096);
    mr_ = pd_ != nullptr ? ibv_reg_mr(pd_, memory_, 4096, local_write) : nullptr;
    channel_ = ibv_create_comp_channel(context_);
    cq_ = channel_ != nullptr ? ibv_create_cq(context_, 2 * depth, nullptr, channel_, 0) : nullptr;
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_;
    init.qp_type = IBV_QPT_RC;
    init.cap = {depth, depth, 1, 1, 0};
    qp_ = mr_ != nullptr && cq_ != nullptr ? ibv_create_qp(pd_, &init) : nullptr;
    if (qp_ == nullptr) fail("creating");
    connect();
  }

  void post_for_each_byte() {
    say_ready();
    char byte;
    while (::read(STDIN_FILENO, &byte, 1) == 1) {
      ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory_), 64, mr_->lkey};
      ibv_send_wr wr{}, *bad = nullptr;
      wr.sg_list = &sge, wr.num_sge = 1, wr.opcode = IBV_WR_SEND, wr.send_flags = IBV_SEND_SIGNALED;
      check(ibv_post_send(qp_, &wr, &bad), "ibv_post_send");
      ibv_wc wc{};
      int got;
      while ((got = ibv_poll_cq(cq_, 1, &wc)) == 0) {
      }
      if (got < 0 || wc.status != IBV_WC_SUCCESS) fail("a send");
      std::printf("posted\n");
      std::fflush(stdout);
    }
    check(ibv_destroy_qp(qp_), "ibv_destroy_qp");
  }

  void sleep_for_ever() {
    for (bool first = true;; first = false) {
      check(ibv_req_notify_cq(cq_, 0), "ibv_req_notify_cq");
      int polled = 0;
      ibv_wc wc{};
      for (int got; (got = ibv_poll_cq(cq_, 1, &wc)) != 0; ++polled) {
        if (got < 0) fail("ibv_poll_cq");
        if (wc.status == IBV_WC_SUCCESS) post_receive();
      }
      if (first) say_ready();
      else std::printf("woke %d\n", polled), std::fflush(stdout);
      ibv_cq* cq = nullptr;
      void* cq_context = nullptr;
      if (ibv_get_cq_event(channel_, &cq, &cq_context) != 0 || cq != cq_) fail("ibv_get_cq_event");
      ibv_ack_cq_events(cq, 1);
    }
  }

 private:
  static void say_ready() {
    std::printf("ready\n");
    std::fflush(stdout);
  }

  void post_receive() {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory_), 64, mr_->lkey};
    ibv_recv_wr wr{0, nullptr, &sge, 1}, *bad = nullptr;
    check(ibv_post_recv(qp_, &wr, &bad), "ibv_post_recv");
  }

  void exchange(const void* mine, void* theirs, std::size_t bytes) const {
    if (::send(peer_fd_, mine, bytes, MSG_NOSIGNAL) != static_cast<ssize_t>(bytes) || ::recv(peer_fd_, theirs, bytes, 0) != static_cast<ssize_t>(bytes))
      fail("the peer");
  }

  void connect() {
    ibv_port_attr port{};
    check(ibv_query_port(context_, 1, &port), "ibv_query_port");
    const Info mine{qp_->qp_num, port.lid};
    Info peer{};
    exchange(&mine, &peer, sizeof(mine));
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    check(ibv_modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
    for (int i = 0; i < depth; ++i) post_receive();
    a = {};
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = peer.qpn;
    a.max_dest_rd_atomic = 1;
    a.min_rnr_timer = 12;
    a.ah_attr.dlid = static_cast<std::uint16_t>(peer.lid);
    a.ah_attr.port_num = 1;
    check(ibv_modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
    a = {};
    a.qp_state = IBV_QPS_RTS;
    a.retry_cnt = a.rnr_retry = 7;
    a.max_rd_atomic = 1;
    check(ibv_modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
    exchange(&mine, &peer, sizeof(mine));
  }

  int peer_fd_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_mr* mr_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_qp* qp_ = nullptr;
  char* memory_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  ::alarm(watchdog_s);
  int peer_fd = -1;
  std::string role;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i];
    if (key == "--peer-fd") peer_fd = std::atoi(argv[i + 1]);
    else if (key == "--role") role = argv[i + 1];
  }
  End end(peer_fd);
  if (role == "poster") end.post_for_each_byte();
  else end.sleep_for_ever();
  return 0;
}
