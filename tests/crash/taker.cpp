// A poster that takes from its peer's shared receive queue, and the keeper of that queue, whose memory lies in no file.
//
//   crash_taker --peer-fd FD --role poster|keeper
//
//   poster   sends `messages` messages, each after the one before has completed.
//   keeper   has as many receive requests in its queue, and says once all are used whether each was used for one message, in their order.
//            For each byte on its standard input it registers other memory and deregisters it: "deregistered".
// Both say "ready" once they are connected, and "done complete" or "fail WHAT" at their end.
#include <infiniband/verbs.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr unsigned watchdog_s = 120;
constexpr std::uint32_t messages = 120;
constexpr std::size_t message_bytes = 32;
constexpr int local_write = IBV_ACCESS_LOCAL_WRITE;  // ibv_reg_mr is a macro that compares its argument with another enumeration

void say(const char* line) {
  std::printf("%s\n", line);
  std::fflush(stdout);
}
[[noreturn]] void fail(const std::string& what) {
  say(("fail " + what).c_str());
  _exit(1);
}
void check(int result, const char* what) {
  if (result != 0) fail(std::string(what) + ": " + std::strerror(result > 0 ? result : errno));
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
    mr_ = pd_ != nullptr ? ibv_reg_mr(pd_, memory_.data(), memory_.size(), local_write) : nullptr;
    cq_ = ibv_create_cq(context_, 2 * static_cast<int>(messages), nullptr, nullptr, 0);
    ibv_srq_init_attr queue{};
    queue.attr = {messages, 1, 0};
    srq_ = mr_ != nullptr ? ibv_create_srq(pd_, &queue) : nullptr;
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_;
    init.srq = srq_;
    init.qp_type = IBV_QPT_RC;
    init.cap = {messages, 0, 1, 0, 0};
    qp_ = srq_ != nullptr && cq_ != nullptr ? ibv_create_qp(pd_, &init) : nullptr;
    if (qp_ == nullptr) fail("creating");
  }

  void post_all() {
    connect();
    for (std::uint32_t number = 0; number < messages; ++number) {
      std::memset(memory_.data(), static_cast<int>(number + 1), message_bytes);
      ibv_sge sge = buffer(0);
      ibv_send_wr wr{}, *bad = nullptr;
      wr.sg_list = &sge, wr.num_sge = 1, wr.opcode = IBV_WR_SEND, wr.send_flags = IBV_SEND_SIGNALED;
      check(ibv_post_send(qp_, &wr, &bad), "ibv_post_send");
      ibv_wc wc{};
      int got;
      while ((got = ibv_poll_cq(cq_, 1, &wc)) == 0) {
      }
      if (got < 0 || wc.status != IBV_WC_SUCCESS) fail("message " + std::to_string(number) + ": " + ibv_wc_status_str(wc.status));
    }
  }

  void keep() {
    for (std::uint32_t number = 0; number < messages; ++number) {
      ibv_sge sge = buffer(number);
      ibv_recv_wr wr{number, nullptr, &sge, 1}, *bad = nullptr;
      check(ibv_post_srq_recv(srq_, &wr, &bad), "ibv_post_srq_recv");
    }
    connect();
    std::vector<bool> used(messages);
    for (std::uint32_t number = 0; number < messages;) {
      serve_input();
      ibv_wc wc{};
      const int got = ibv_poll_cq(cq_, 1, &wc);
      if (got < 0 || (got == 1 && (wc.status != IBV_WC_SUCCESS || wc.wr_id >= messages))) fail("a receive");
      if (got == 0) continue;
      if (used[wc.wr_id]) fail("receive " + std::to_string(wc.wr_id) + " is used twice");
      used[wc.wr_id] = true;
      for (std::size_t i = 0; i < message_bytes; ++i)
        if (memory_[wc.wr_id * message_bytes + i] != static_cast<char>(number + 1)) fail("message " + std::to_string(number) + " has other bytes");
      ++number;
    }
  }

 private:
  ibv_sge buffer(std::uint64_t number) {
    return {reinterpret_cast<std::uintptr_t>(memory_.data()) + number * message_bytes, message_bytes, mr_->lkey};
  }

  void serve_input() {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    char byte;
    if (::poll(&input, 1, 0) != 1 || ::read(STDIN_FILENO, &byte, 1) != 1) return;
    std::vector<char> other(message_bytes);
    ibv_mr* const mr = ibv_reg_mr(pd_, other.data(), other.size(), local_write);
    if (mr == nullptr) fail("ibv_reg_mr");
    check(ibv_dereg_mr(mr), "ibv_dereg_mr");
    say("deregistered");
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
    say("ready");
  }

  int peer_fd_;
  std::vector<char> memory_ = std::vector<char>(messages * message_bytes);  // on the heap, with others in its pages: they do not move
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_mr* mr_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_srq* srq_ = nullptr;
  ibv_qp* qp_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  ::alarm(watchdog_s);
  int peer_fd = -1;
  std::string role;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--peer-fd") peer_fd = std::atoi(argv[i + 1]);
    else if (name == "--role") role = argv[i + 1];
  }
  if (peer_fd < 0 || (role != "poster" && role != "keeper")) {
    std::fprintf(stderr, "usage: crash_taker --peer-fd FD --role poster|keeper\n");
    return 2;
  }
  End end(peer_fd);
  if (role == "poster") end.post_all();
  else end.keep();
  say("done complete");
}
