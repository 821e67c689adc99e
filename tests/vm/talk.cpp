// Two programs that talk by every kind of transfer for as long as they are let, and judge every byte: a pair that shall outlive what
// becomes of their machines. A client of libibverbs alone; they meet by TCP once, before the first transfer.
//
//   talk listen PORT TIMEOUT KIND        talk connect HOST PORT TIMEOUT KIND
//
// TIMEOUT: of the queue pair, 4.096 µs * 2^TIMEOUT, eight of them; 0 waits for ever. A round: the client sends a message; the server reads the
// client's memory, writes it back with immediate data; the client adds to a word of the server's. KIND: polls; sleeps, until a completion;
// repeats: as sleeps, of what may be done twice alone: the server answers by a message, and nothing is added;
// alone: the client writes, reads that back and adds, and the server knows nothing of it. Says "round N" now and then.
// Ends by SIGTERM with 0 and "ends after round N"; with 3 and "status S" where a completion says so; with 4 where bytes are wrong; with 5 where
// the device is lost.
#include <infiniband/verbs.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/vm/meeting.hpp"

namespace {

using vrdma::test::Meeting;
using vrdma::test::must;

constexpr std::size_t message_bytes = 24 * 1024 + 13;  // of no round size
constexpr std::size_t area_bytes = 32 * 1024;
constexpr auto news_every = std::chrono::milliseconds(100);
volatile std::sig_atomic_t stopping = 0;
std::uint64_t rounds = 0;

// The first word is the last: another thread that has something to say is not heard any more.
[[noreturn]] void leave(int code, const std::string& why) {
  static std::atomic_flag leaving;
  while (leaving.test_and_set()) ::pause();
  std::printf("%s after round %llu\n", why.c_str(), static_cast<unsigned long long>(rounds));
  std::fflush(stdout);
  std::_Exit(code);
}

struct Address {
  std::uint32_t qpn, psn, rkey;
  std::uint16_t lid, reserved;
  ibv_gid gid;
  std::uint64_t memory;
};

std::uint8_t byte_of(std::uint64_t round, std::size_t at) { return static_cast<std::uint8_t>((round * 0x9e3779b97f4a7c15ull >> 32) + at * 31 + (at >> 8)); }
void fill(std::byte* area, std::uint64_t round) {
  for (std::size_t i = 0; i < message_bytes; ++i) area[i] = std::byte{byte_of(round, i)};
}
void judge(const std::byte* area, std::uint64_t round, const char* what) {
  for (std::size_t i = 0; i < message_bytes; ++i)
    if (area[i] != std::byte{byte_of(round, i)}) leave(4, std::string("wrong byte ") + std::to_string(i) + " of what was " + what);
}

class Talk {
 public:
  enum Area : std::size_t { outgoing, incoming, fetched, answered, counter, area_count };

  Talk(bool listening, const char* host, const char* port, std::uint8_t timeout, bool sleeps, bool repeats) : repeats_(repeats) {
    ibv_device** const devices = must(ibv_get_device_list(nullptr), "list devices");
    context_ = must(ibv_open_device(must(devices[0], "find a device")), "open the device");
    ibv_free_device_list(devices);
    pd_ = must(ibv_alloc_pd(context_), "make a PD");
    if (sleeps) channel_ = must(ibv_create_comp_channel(context_), "make a channel");
    cq_ = must(ibv_create_cq(context_, 64, nullptr, channel_, 0), "make a CQ");
    if (channel_ != nullptr) must(ibv_req_notify_cq(cq_, 0) == 0, "arm the CQ");
    memory_.resize(area_count * area_bytes + 64);
    base_ = memory_.data() + (64 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 64);
    constexpr int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    mr_ = must(ibv_reg_mr(pd_, base_, area_count * area_bytes, all), "register memory");
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_;
    init.cap = {16, 16, 1, 1, 0};
    init.qp_type = IBV_QPT_RC;
    qp_ = must(ibv_create_qp(pd_, &init), "make a QP");
    connect(listening, host, port, timeout, all);
    std::thread([context = context_] {  // the device's end is told whatever the rest is waiting for
      for (ibv_async_event event{}; ibv_get_async_event(context, &event) == 0; ibv_ack_async_event(&event))
        if (event.event_type == IBV_EVENT_DEVICE_FATAL) leave(5, "the device is lost");
    }).detach();
  }

  void serve() {
    for (;;) {
      post_receive();
      await(IBV_WC_RECV);
      const std::uint64_t round = number(incoming);
      if (round != rounds) leave(4, "another round");
      judge(area(incoming) + 8, round, "sent");
      post(IBV_WR_RDMA_READ, fetched, outgoing);
      await(IBV_WC_RDMA_READ);
      judge(area(fetched) + 8, round, "read");
      std::memcpy(area(outgoing), area(fetched), message_bytes + 8);
      if (repeats_) {
        post(IBV_WR_SEND, outgoing, incoming);
        await(IBV_WC_SEND);
      } else {
        post(IBV_WR_RDMA_WRITE_WITH_IMM, outgoing, answered);
        await(IBV_WC_RDMA_WRITE);
      }
      tell();
    }
  }
  [[noreturn]] void stand_by() {
    while (!stopping) ::poll(nullptr, 0, 100);
    leave(0, "ends");
  }
  void go_alone() {
    for (; !stopping; tell()) {
      std::memcpy(area(outgoing), &rounds, sizeof(rounds));
      fill(area(outgoing) + 8, rounds);
      post(IBV_WR_RDMA_WRITE, outgoing, incoming);
      await(IBV_WC_RDMA_WRITE);
      post(IBV_WR_RDMA_READ, fetched, incoming);
      await(IBV_WC_RDMA_READ);
      judge(area(fetched) + 8, rounds, "read back");
      add();
    }
  }
  void ask() {
    for (; !stopping; tell()) {
      std::memcpy(area(outgoing), &rounds, sizeof(rounds));
      fill(area(outgoing) + 8, rounds);
      std::memset(area(answered), 0, area_bytes);
      post_receive();
      post(IBV_WR_SEND, outgoing, outgoing);
      await(IBV_WC_SEND);
      await(repeats_ ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM);
      const Area answer = repeats_ ? incoming : answered;
      if (number(answer) != rounds) leave(4, "another round's answer");
      judge(area(answer) + 8, rounds, "answered");
      if (!repeats_) add();
    }
  }

 private:
  std::byte* area(Area which) { return base_ + which * area_bytes; }
  std::uint64_t number(Area which) {
    std::uint64_t value;
    std::memcpy(&value, area(which), sizeof(value));
    return value;
  }

  void add() {
    post(IBV_WR_ATOMIC_FETCH_AND_ADD, fetched, counter);
    await(IBV_WC_FETCH_ADD);
    if (number(fetched) != rounds) leave(4, "an addition is lost or done twice: " + std::to_string(number(fetched)));
  }

  void connect(bool listening, const char* host, const char* port, std::uint8_t timeout, int access) {
    ibv_port_attr port_attributes{};
    must(ibv_query_port(context_, 1, &port_attributes) == 0, "query the port");
    Address mine{qp_->qp_num, qp_->qp_num & 0xffff, mr_->rkey, port_attributes.lid, 0, {}, reinterpret_cast<std::uintptr_t>(base_)};
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = 1;
    attributes.qp_access_flags = static_cast<unsigned>(access);
    must(ibv_modify_qp(qp_, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0, "go to INIT");
    {
      const Meeting meeting(listening ? nullptr : host, port);
      theirs_ = meeting.swap(mine);
      meeting.wait();  // both have it: neither begins before the other can answer
    }
    attributes = {};
    attributes.qp_state = IBV_QPS_RTR;
    attributes.path_mtu = IBV_MTU_1024;
    attributes.dest_qp_num = theirs_.qpn;
    attributes.rq_psn = theirs_.psn;
    attributes.max_dest_rd_atomic = 1;
    attributes.min_rnr_timer = 12;
    attributes.ah_attr.dlid = theirs_.lid;
    attributes.ah_attr.port_num = 1;
    must(ibv_modify_qp(qp_, &attributes, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                             IBV_QP_MIN_RNR_TIMER) == 0, "go to RTR");
    attributes.qp_state = IBV_QPS_RTS;
    attributes.timeout = timeout;
    attributes.retry_cnt = 7;
    attributes.rnr_retry = 7;
    attributes.sq_psn = mine.psn;
    attributes.max_rd_atomic = 1;
    must(ibv_modify_qp(qp_, &attributes, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0,
         "go to RTS");
  }

  void post(ibv_wr_opcode opcode, Area here, Area there) {
    const bool atomic = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(area(here)), atomic ? 8u : static_cast<std::uint32_t>(message_bytes + 8), mr_->lkey};
    ibv_send_wr request{}, *bad = nullptr;
    request.sg_list = &sge;
    request.num_sge = 1;
    request.opcode = opcode;
    request.send_flags = IBV_SEND_SIGNALED;
    const std::uint64_t remote = theirs_.memory + there * area_bytes;
    if (atomic) {
      request.wr.atomic = {remote, 1, 0, theirs_.rkey};
    } else {
      request.wr.rdma = {remote, theirs_.rkey};
    }
    if (const int error = ibv_post_send(qp_, &request, &bad); error != 0) leave(5, std::string("cannot post: ") + std::strerror(error));
  }
  void post_receive() {
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(area(incoming)), static_cast<std::uint32_t>(area_bytes), mr_->lkey};
    ibv_recv_wr request{}, *bad = nullptr;
    request.sg_list = &sge;
    request.num_sge = 1;
    if (const int error = ibv_post_recv(qp_, &request, &bad); error != 0) leave(5, std::string("cannot post: ") + std::strerror(error));
  }

  // The next completion of that kind. Those of the two directions come in any order.
  void await(ibv_wc_opcode opcode) {
    if (std::exchange(early_[opcode & IBV_WC_RECV ? 1 : 0], false)) return;
    for (ibv_wc wc{};;) {
      const int got = ibv_poll_cq(cq_, 1, &wc);
      if (stopping) leave(0, "ends");
      if (got < 0) leave(5, "cannot poll");
      if (got == 0) {
        wait();
        continue;
      }
      if (wc.status != IBV_WC_SUCCESS) leave(3, "status " + std::to_string(static_cast<int>(wc.status)));
      if (wc.opcode == opcode) return;
      early_[wc.opcode & IBV_WC_RECV ? 1 : 0] = true;
    }
  }
  void wait() {
    if (channel_ == nullptr) return;
    // A little at a time: a signal may have come just before.
    pollfd waiting{channel_->fd, POLLIN, 0};
    if (::poll(&waiting, 1, 100) <= 0) return;
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    if (ibv_get_cq_event(channel_, &cq, &context) != 0) leave(5, "no more events");
    ibv_ack_cq_events(cq, 1);
    if (ibv_req_notify_cq(cq_, 0) != 0) leave(5, "cannot arm the CQ");
  }

  void tell() {
    ++rounds;
    const auto now = std::chrono::steady_clock::now();
    if (now < next_news_) return;
    next_news_ = now + news_every;
    std::printf("round %llu\n", static_cast<unsigned long long>(rounds));
    std::fflush(stdout);
  }

  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_mr* mr_ = nullptr;
  ibv_qp* qp_ = nullptr;
  std::vector<std::byte> memory_;
  std::byte* base_ = nullptr;
  const bool repeats_;
  Address theirs_{};
  bool early_[2] = {};  // a completion of the send queue, of the receive queue, that came before it was awaited
  std::chrono::steady_clock::time_point next_news_{};
};

}  // namespace

int main(int count, char** words) {
  const bool listening = count > 1 && std::string(words[1]) == "listen";
  const int first = listening ? 2 : 3;  // PORT
  const std::string kind = count == first + 3 ? words[first + 2] : "";
  if (kind != "polls" && kind != "sleeps" && kind != "repeats" && kind != "alone") {
    std::fprintf(stderr, "usage: %s listen PORT TIMEOUT KIND | connect HOST PORT TIMEOUT KIND; KIND: polls, sleeps, repeats, alone\n", words[0]);
    return 2;
  }
  struct sigaction stop {};
  stop.sa_handler = [](int) { stopping = 1; };
  ::sigaction(SIGTERM, &stop, nullptr);
  Talk talk(listening, listening ? nullptr : words[2], words[first], static_cast<std::uint8_t>(std::atoi(words[first + 1])), kind != "polls", kind == "repeats");
  if (kind == "alone") {
    if (listening) talk.stand_by();
    talk.go_alone();
  } else {
    listening ? talk.serve() : talk.ask();
  }
  leave(0, "ends");
}
