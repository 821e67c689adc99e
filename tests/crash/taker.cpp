// A poster that takes from its peer's shared receive queue, and the keeper of that queue, whose memory lies in no file.
//
//   crash_taker --peer-fd FD --role poster|keeper
//
//   poster   sends `messages` messages, each after the one before has completed.
//   keeper   has as many receive requests in its queue, and says once all are used whether each was used for one message, in their order.
//            For each byte on its standard input it registers other memory and deregisters it: "deregistered".
// Both say "ready" once they are connected, and "done complete" or "fail WHAT" at their end.
#include <poll.h>

#include <vector>

#include "tests/crash/small_client.hpp"

using namespace crash;

namespace {

constexpr unsigned watchdog_s = 120;
constexpr std::uint32_t messages = 120;
constexpr std::size_t message_bytes = 32;

class End {
 public:
  explicit End(int peer_fd) : peer_fd_(peer_fd) {
    context_ = open_first_device();
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

  void connect() {
    crash::connect(qp_, peer_fd_, [] {});
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
  const auto [peer_fd, role] = options_of(argc, argv);
  if (peer_fd < 0 || (role != "poster" && role != "keeper")) {
    std::fprintf(stderr, "usage: crash_taker --peer-fd FD --role poster|keeper\n");
    return 2;
  }
  End end(peer_fd);
  if (role == "poster") end.post_all();
  else end.keep();
  say("done complete");
}
