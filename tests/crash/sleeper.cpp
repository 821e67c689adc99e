// A poster and a sleeper, connected to each other: whether a message that has arrived wakes its receiver, whatever becomes of the sender.
//
//   crash_sleeper --peer-fd FD --role poster|sleeper
//
//   poster   sends one message for each byte on its standard input, says "posted", and takes its queue pair down at the end of that.
//   sleeper  arms its completion queue, polls until it is empty, sleeps in ibv_get_cq_event and nowhere else; "woke COUNT" after each
//            event, with the completions polled then. Its caller ends it.
// Both say "ready" once they are connected, the sleeper when it has armed.
#include "tests/crash/small_client.hpp"

using namespace crash;

namespace {

constexpr unsigned watchdog_s = 300;
constexpr int depth = 64;

class End {
 public:
  explicit End(int peer_fd) : peer_fd_(peer_fd) {
    context_ = open_first_device();
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
    say("ready");
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
      say("posted");
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
      say(first ? "ready" : "woke " + std::to_string(polled));
      ibv_cq* cq = nullptr;
      void* cq_context = nullptr;
      if (ibv_get_cq_event(channel_, &cq, &cq_context) != 0 || cq != cq_) fail("ibv_get_cq_event");
      ibv_ack_cq_events(cq, 1);
    }
  }

 private:
  void post_receive() {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(memory_), 64, mr_->lkey};
    ibv_recv_wr wr{0, nullptr, &sge, 1}, *bad = nullptr;
    check(ibv_post_recv(qp_, &wr, &bad), "ibv_post_recv");
  }

  void connect() {
    crash::connect(qp_, peer_fd_, [this] {
      for (int i = 0; i < depth; ++i) post_receive();
    });
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
  const auto [peer_fd, role] = options_of(argc, argv);
  if (peer_fd < 0 || (role != "poster" && role != "sleeper")) {
    std::fprintf(stderr, "usage: crash_sleeper --peer-fd FD --role poster|sleeper\n");
    return 2;
  }
  End end(peer_fd);
  if (role == "poster") end.post_for_each_byte();
  else end.sleep_for_ever();
  return 0;
}
