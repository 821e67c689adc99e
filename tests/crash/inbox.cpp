// A receiver of datagrams, a poster that is struck while it delivers to it, and a bystander that goes on delivering.
//
//   crash_inbox --peer-fd FD --role poster|receiver
//
//   poster     sends `messages` datagrams.
//   receiver   starts the bystander, a process of its own that sends as long as it is wanted, and checks that what comes from either comes once,
//              in order and whole. For a byte on its standard input it registers other memory, deregisters it ("deregistered"), and waits for more
//              from the bystander ("flowing"). It is done when the poster's have all come, or the poster has ended, and more from the bystander.
// Both say "ready" at first, and "done complete" or "fail WHAT" at their end.
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>

#include "tests/crash/small_client.hpp"

using namespace crash;

namespace {

constexpr unsigned watchdog_s = 120;
constexpr std::uint32_t messages = 20000, more = 300;
constexpr std::uint32_t window = 32, credit = 8;  // datagrams ahead of the receiver, and so many it acknowledges at a time
constexpr std::uint32_t depth = 128, grh_bytes = 40, datagram_bytes = 256, slot_bytes = 512, qkey = 0x1234;

struct Datagram {
  std::uint32_t who, number;  // 0: the poster, 1: the bystander
  std::uint32_t words[datagram_bytes / 4 - 2];
};
struct Info {
  std::uint32_t qpn, lid;
};

Info receive_info(int fd) {
  Info info{};
  if (::recv(fd, &info, sizeof(info), 0) != sizeof(info)) fail("no address came");
  return info;
}

class End {
 public:
  End() {
    void* const map = ::mmap(nullptr, depth * slot_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) fail("mmap");
    memory = static_cast<char*>(map);
    context = open_first_device();
    pd = ibv_alloc_pd(context);
    mr = pd != nullptr ? ibv_reg_mr(pd, memory, depth * slot_bytes, local_write) : nullptr;
    cq = ibv_create_cq(context, 2 * depth, nullptr, nullptr, 0);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.qp_type = IBV_QPT_UD;
    init.cap = {depth, depth, 1, 1, 0};
    qp = mr != nullptr && cq != nullptr ? ibv_create_qp(pd, &init) : nullptr;
    if (qp == nullptr) fail("creating");
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qkey = qkey;
    check(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "INIT");
    a.qp_state = IBV_QPS_RTR;
    check(ibv_modify_qp(qp, &a, IBV_QP_STATE), "RTR");
    a.qp_state = IBV_QPS_RTS;
    check(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN), "RTS");
  }
  Info info() const {
    ibv_port_attr port{};
    check(ibv_query_port(context, 1, &port), "ibv_query_port");
    return {qp->qp_num, port.lid};
  }
  ibv_sge slot(std::uint64_t number, std::uint32_t bytes) const {
    return {reinterpret_cast<std::uintptr_t>(memory) + number % depth * slot_bytes, bytes, mr->lkey};
  }
  bool poll(ibv_wc& wc) const {
    const int got = ibv_poll_cq(cq, 1, &wc);
    if (got < 0 || (got == 1 && wc.status != IBV_WC_SUCCESS)) fail(got < 0 ? "ibv_poll_cq" : ibv_wc_status_str(wc.status));
    return got == 1;
  }

  char* memory = nullptr;
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_mr* mr = nullptr;
  ibv_cq* cq = nullptr;
  ibv_qp* qp = nullptr;
};

// Datagrams to whoever is at the other end of the socket, who acknowledges them there; until so many are sent, or nobody wants them.
void send_all(int fd, std::uint32_t who, std::uint32_t count) {
  End end;
  const Info to = receive_info(fd);
  ibv_ah_attr attr{};
  attr.dlid = static_cast<std::uint16_t>(to.lid);
  attr.port_num = 1;
  ibv_ah* const ah = ibv_create_ah(end.pd, &attr);
  if (ah == nullptr) fail("ibv_create_ah");
  std::uint32_t ahead = 0;
  for (std::uint32_t number = 0; number < count; ++number) {
    while (ahead >= window) {
      char acknowledged[64];
      const auto got = ::recv(fd, acknowledged, sizeof(acknowledged), 0);
      if (got <= 0) return;
      ahead -= credit * static_cast<std::uint32_t>(got);
    }
    auto* const datagram = reinterpret_cast<Datagram*>(end.slot(number, datagram_bytes).addr);
    datagram->who = who, datagram->number = number;
    for (auto& word : datagram->words) word = number * 2 + who;
    ibv_sge sge = end.slot(number, datagram_bytes);
    ibv_send_wr wr{}, *bad = nullptr;
    wr.sg_list = &sge, wr.num_sge = 1, wr.opcode = IBV_WR_SEND, wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.ud = {ah, to.qpn, qkey};
    check(ibv_post_send(end.qp, &wr, &bad), "ibv_post_send");
    ++ahead;
    ibv_wc wc{};
    while (!end.poll(wc)) {
    }
  }
  char byte;
  while (::recv(fd, &byte, 1, 0) > 0) {  // the queue pair stays until all has come
  }
}

class Receiver {
 public:
  Receiver(int poster_fd, int bystander_fd) : fds_{poster_fd, bystander_fd} {
    for (std::uint64_t number = 0; number < depth; ++number) post(number);
    const Info mine = end_.info();
    for (const int fd : fds_)
      if (::send(fd, &mine, sizeof(mine), MSG_NOSIGNAL) != sizeof(mine)) fail("a sender is not there");
  }

  void run() {
    std::uint32_t wanted = 0;  // of the bystander, at last
    for (;;) {
      take();
      if (asked()) {
        deregister();
        const std::uint32_t until = heard_[1] + more;
        while (heard_[1] < until) take();
        say("flowing");
      }
      const bool poster_done = heard_[0] == messages || poster_ended();
      if (poster_done && wanted == 0) wanted = heard_[1] + more;
      if (wanted != 0 && heard_[1] >= wanted) return;
    }
  }

 private:
  void post(std::uint64_t number) {
    ibv_sge sge = end_.slot(number, slot_bytes);
    ibv_recv_wr wr{number, nullptr, &sge, 1}, *bad = nullptr;
    check(ibv_post_recv(end_.qp, &wr, &bad), "ibv_post_recv");
  }

  void take() {
    ibv_wc wc{};
    if (!end_.poll(wc)) return;
    Datagram datagram;
    std::memcpy(&datagram, reinterpret_cast<const char*>(end_.slot(wc.wr_id, slot_bytes).addr) + grh_bytes, sizeof(datagram));
    if (wc.byte_len != grh_bytes + datagram_bytes || datagram.who > 1) fail("a datagram of nobody's");
    std::uint32_t& heard = heard_[datagram.who];
    const std::string what = (datagram.who == 0 ? "the poster's " : "the bystander's ") + std::to_string(datagram.number);
    if (datagram.number != heard) fail(what + " comes where " + std::to_string(heard) + " is due");
    for (const auto word : datagram.words)
      if (word != datagram.number * 2 + datagram.who) fail(what + " has other bytes");
    post(wc.wr_id);
    if (++heard % credit == 0) ::send(fds_[datagram.who], "c", 1, MSG_NOSIGNAL);
  }

  static bool asked() {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    char byte;
    return ::poll(&input, 1, 0) == 1 && ::read(STDIN_FILENO, &byte, 1) == 1;
  }
  bool poster_ended() const {
    pollfd other{fds_[0], POLLIN, 0};
    char byte;
    return ::poll(&other, 1, 0) == 1 && ::recv(fds_[0], &byte, 1, MSG_DONTWAIT) == 0;
  }
  void deregister() const {
    char other[64];
    ibv_mr* const other_mr = ibv_reg_mr(end_.pd, other, sizeof(other), local_write);
    if (other_mr == nullptr) fail("ibv_reg_mr");
    check(ibv_dereg_mr(other_mr), "ibv_dereg_mr");
    say("deregistered");
  }

  End end_;
  int fds_[2];
  std::uint32_t heard_[2] = {0, 0};
};

void receive(int poster_fd) {
  int fds[2];
  check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), "socketpair");
  const pid_t bystander = ::fork();  // before anything is opened
  if (bystander == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(fds[0]), ::close(poster_fd);
    send_all(fds[1], 1, ~0u);
    _exit(0);
  }
  ::close(fds[1]);
  {
    Receiver receiver(poster_fd, fds[0]);
    say("ready");
    receiver.run();
  }
  ::close(fds[0]);
  int status = 0;
  if (::waitpid(bystander, &status, 0) != bystander || status != 0) fail("the bystander ended with " + std::to_string(status));
}

}  // namespace

int main(int argc, char** argv) {
  ::alarm(watchdog_s);
  const auto [peer_fd, role] = options_of(argc, argv);
  if (peer_fd < 0 || (role != "poster" && role != "receiver")) {
    std::fprintf(stderr, "usage: crash_inbox --peer-fd FD --role poster|receiver\n");
    return 2;
  }
  if (role == "receiver") {
    receive(peer_fd);
  } else {
    say("ready");
    send_all(peer_fd, 0, messages);
  }
  say("done complete");
}
