// One side of a pair of verbs programs that the crash tests end, stop and survive: a client of libibverbs alone.
//
//   crash_client --peer-fd FD --workload send|event|rdma|uc|ud|srq|churn --role pair|victim|survivor
//                [--messages N] [--expect peer|service]
//
// Both sides send, so that either can be the one that dies. Every completion is checked: per queue in the order of posting,
// nothing lost or doubled (sequence numbers in the messages, the peer's counter for atomics), the first error is the one
// that the specification names, all after it are flushed.
//   pair      N messages each way, then both take everything down.
//   victim    N messages, then takes everything down whatever the other does.
//   survivor  until the queue pair fails; then checks what is left and takes everything down. After a stopped peer it says what it
//             has to say and waits for the peer's end: nothing is written to it any more.
// Standard output: "ready" once connected, then "done OUTCOME" or "fail WHAT". An 's' on standard input: the peer is stopped.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

// ibv_reg_mr is a macro that compares its argument with another enumeration: clang wants a number.
constexpr int local_write = IBV_ACCESS_LOCAL_WRITE;
constexpr std::uint32_t window_max = 8;       // messages ahead of the peer's
constexpr std::uint32_t send_depth = 32;
constexpr std::uint32_t receive_depth = 32;   // > 2 * window_max: no RNR while both run
constexpr std::uint32_t message_bytes = 64;
constexpr std::uint32_t grh_bytes = 40;
constexpr std::uint32_t slot_bytes = 128;
constexpr std::uint64_t receive_tag = 1ull << 63;
constexpr std::uint32_t qkey = 0x1234;
constexpr unsigned watchdog_s = 60;

// The registered memory: slots to send from, slots to receive into, and what the peer reaches by RDMA.
constexpr std::size_t receives_at = 64 * slot_bytes;
constexpr std::size_t fetched_at = 128 * slot_bytes;  // where our READs and atomics put what they got
constexpr std::size_t window_at = 192 * slot_bytes;   // the peer writes here, one slot per message in flight
constexpr std::size_t pattern_at = 256 * slot_bytes;  // the peer reads here
constexpr std::size_t counter_at = pattern_at + slot_bytes;
constexpr std::size_t memory_bytes = 257 * slot_bytes + 4096;
constexpr std::uint64_t pattern = 0x5eed5eed5eed5eedull;

[[noreturn]] [[gnu::format(printf, 1, 2)]] void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  std::printf("fail %s\n", text);
  std::fflush(stdout);
  _exit(1);
}

void done(const std::string& outcome) {
  std::printf("done %s\n", outcome.c_str());
  std::fflush(stdout);
}

struct Info {
  std::uint64_t address;
  std::uint32_t qpn, rkey;
  std::uint16_t lid;
};

class Client {
 public:
  int peer_fd = -1;
  std::string workload = "send", role = "pair", expect = "peer";
  std::uint64_t messages = 200;

  int run() {
    rdma_ = workload == "rdma";
    events_ = workload == "event";
    shared_ = workload == "srq";
    churn_ = workload == "churn";
    window_ = events_ ? 1 : window_max;  // one at a time: both sleep between messages
    type_ = workload == "uc" ? IBV_QPT_UC : workload == "ud" ? IBV_QPT_UD : IBV_QPT_RC;
    open();
    if (!connect()) {
      take_down();
      done("peer-left");
      return 0;
    }
    std::printf("ready\n");
    std::fflush(stdout);
    converse();
    if (failed_) settle();
    if (role == "pair") barrier();
    take_down();
    done(outcome_);
    return 0;
  }

 private:
  // A control verb failed. That is the end of a test in which the service is ended meanwhile, else a failure.
  [[noreturn]] void refused(const char* what) {
    const int error = errno;
    if (expect == "service" && (error == EIO || error == ENODEV || error == ECONNREFUSED || error == ENOENT)) {
      done(std::string("refused ") + what);
      _exit(0);
    }
    fail("%s: %s", what, std::strerror(error));
  }
  void check(int result, const char* what) {
    if (result == 0) return;
    errno = result > 0 ? result : errno;
    refused(what);
  }

  void open() {
    ibv_device** list = ibv_get_device_list(nullptr);
    if (list == nullptr || list[0] == nullptr) {
      if (errno == 0) errno = ENODEV;
      refused("ibv_get_device_list");
    }
    context_ = ibv_open_device(list[0]);
    if (context_ == nullptr) refused("ibv_open_device");
    ibv_free_device_list(list);
    if (::fcntl(context_->async_fd, F_SETFL, ::fcntl(context_->async_fd, F_GETFL) | O_NONBLOCK) != 0) fail("async_fd");
    pd_ = ibv_alloc_pd(context_);
    if (pd_ == nullptr) refused("ibv_alloc_pd");
    memory_ = static_cast<char*>(std::aligned_alloc(4096, (memory_bytes + 4095) / 4096 * 4096));
    std::memset(memory_, 0, memory_bytes);
    std::memcpy(memory_ + pattern_at, &pattern, sizeof(pattern));
    mr_ = ibv_reg_mr(pd_, memory_, memory_bytes,
                     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
    if (mr_ == nullptr) refused("ibv_reg_mr");
    if (events_) {
      channel_ = ibv_create_comp_channel(context_);
      if (channel_ == nullptr) refused("ibv_create_comp_channel");
    }
    cq_ = ibv_create_cq(context_, 2 * (send_depth + receive_depth), nullptr, channel_, 0);
    if (cq_ == nullptr) refused("ibv_create_cq");
    if (shared_) {
      ibv_srq_init_attr init{};
      init.attr = {receive_depth, 1, 0};
      srq_ = ibv_create_srq(pd_, &init);
      if (srq_ == nullptr) refused("ibv_create_srq");
    }
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_;
    init.srq = srq_;
    init.qp_type = type_;
    init.cap = {send_depth, receive_depth, 2, 1, 0};
    qp_ = ibv_create_qp(pd_, &init);
    if (qp_ == nullptr) refused("ibv_create_qp");
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    a.qkey = qkey;
    check(ibv_modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                                     (type_ == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)),
          "ibv_modify_qp to INIT");
    for (std::uint32_t i = 0; i < receive_depth; ++i) post_receive();
  }

  bool exchange(const void* mine, void* theirs, std::size_t bytes) {
    if (::send(peer_fd, mine, bytes, MSG_NOSIGNAL) != static_cast<ssize_t>(bytes)) return false;
    ssize_t got;
    do got = ::recv(peer_fd, theirs, bytes, 0);
    while (got < 0 && errno == EINTR);
    return got == static_cast<ssize_t>(bytes);
  }

  bool connect() {
    ibv_port_attr port{};
    check(ibv_query_port(context_, 1, &port), "ibv_query_port");
    const Info mine{reinterpret_cast<std::uintptr_t>(memory_), qp_->qp_num, mr_->rkey, port.lid};
    if (!exchange(&mine, &peer_, sizeof(mine))) return false;
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = IBV_MTU_1024;
    a.dest_qp_num = peer_.qpn;
    a.max_dest_rd_atomic = 4;
    a.min_rnr_timer = 12;
    a.ah_attr.dlid = peer_.lid;
    a.ah_attr.port_num = 1;
    const int connected = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    const int reliable = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    check(ibv_modify_qp(qp_, &a, IBV_QP_STATE | (type_ == IBV_QPT_UD ? 0 : connected) | (type_ == IBV_QPT_RC ? reliable : 0)),
          "ibv_modify_qp to RTR");
    a = {};
    a.qp_state = IBV_QPS_RTS;
    a.timeout = 10;
    a.retry_cnt = 3;
    a.rnr_retry = 5;
    a.max_rd_atomic = 4;
    check(ibv_modify_qp(qp_, &a, IBV_QP_STATE | IBV_QP_SQ_PSN |
                                     (type_ == IBV_QPT_RC ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : 0)),
          "ibv_modify_qp to RTS");
    if (type_ == IBV_QPT_UD) {
      ibv_ah_attr attributes{};
      attributes.dlid = peer_.lid;
      attributes.port_num = 1;
      ah_ = ibv_create_ah(pd_, &attributes);
      if (ah_ == nullptr) refused("ibv_create_ah");
    }
    return barrier();
  }

  bool barrier() {
    const char mine = 'b';
    char theirs = 0;
    return exchange(&mine, &theirs, 1);
  }

  ibv_sge at(std::size_t offset, std::uint32_t bytes) const {
    return {reinterpret_cast<std::uintptr_t>(memory_) + offset, bytes, mr_->lkey};
  }

  void post_receive() {
    const std::uint64_t number = receives_posted_++;
    ibv_sge sge = at(receives_at + number % receive_depth * slot_bytes, grh_bytes + message_bytes);
    ibv_recv_wr wr{receive_tag | number, nullptr, &sge, 1};
    ibv_recv_wr* bad = nullptr;
    const int error = srq_ != nullptr ? ibv_post_srq_recv(srq_, &wr, &bad) : ibv_post_recv(qp_, &wr, &bad);
    if (error != 0) fail("posting receive %llu: %s", static_cast<unsigned long long>(number), std::strerror(error));
  }

  void post_send() {
    const std::uint64_t number = sends_posted_++;
    ibv_send_wr wr{};
    ibv_sge sges[2]{};
    ibv_sge& sge = sges[0];
    wr.wr_id = number;
    wr.sg_list = sges;
    wr.num_sge = 1;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.opcode = IBV_WR_SEND;
    const std::uint64_t slot = number % 64;
    if (peer_left_ && type_ == IBV_QPT_RC && !rdma_) {  // an empty WRITE takes no receive: it succeeds until the peer's end is known
      wr.opcode = IBV_WR_RDMA_WRITE;
      wr.num_sge = 0;
      return post(wr);
    }
    std::memcpy(memory_ + slot * slot_bytes, &number, sizeof(number));
    sge = at(slot * slot_bytes, message_bytes);
    if (rdma_) {
      if (number % 3 == 0) {
        wr.opcode = IBV_WR_RDMA_WRITE;
        wr.wr.rdma = {peer_.address + window_at + slot * slot_bytes, peer_.rkey};
      } else {
        sge = at(fetched_at + slot * slot_bytes, 8);
        if (number % 3 == 1) {
          wr.opcode = IBV_WR_RDMA_READ;
          wr.wr.rdma = {peer_.address + pattern_at, peer_.rkey};
        } else {
          wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
          wr.wr.atomic = {peer_.address + counter_at, 1, 0, peer_.rkey};
        }
      }
    } else if (type_ == IBV_QPT_UD) {
      wr.wr.ud.ah = ah_;
      wr.wr.ud.remote_qpn = peer_.qpn;
      wr.wr.ud.remote_qkey = qkey;
    }
    if (number % 2 == 1 && sge.length > 8) {  // in direct mode one of one buffer goes another way than one of two
      sges[1] = {sge.addr + 8, sge.length - 8, sge.lkey};
      sge.length = 8;
      wr.num_sge = 2;
    }
    post(wr);
  }

  void post(ibv_send_wr& wr) {
    ibv_send_wr* bad = nullptr;
    if (const int error = ibv_post_send(qp_, &wr, &bad); error != 0)
      fail("posting send %llu: %s", static_cast<unsigned long long>(wr.wr_id), std::strerror(error));
  }

  // --- completions

  void first_error(const ibv_wc& wc, bool receive) {
    failed_ = true;
    const char* const status = ibv_wc_status_str(wc.status);
    if (expect == "service" || gave_up_) {
      if (wc.status != IBV_WC_WR_FLUSH_ERR) fail("the first error is \"%s\", not a flush", status);
      outcome_ = "flushed";
      return;
    }
    if (type_ != IBV_QPT_RC) fail("\"%s\" on an unreliable queue pair", status);
    if (receive) fail("the first error is \"%s\" of a receive", status);
    if (role == "survivor" && peer_stopped_ && wc.status == IBV_WC_RNR_RETRY_EXC_ERR && !rdma_)
      outcome_ = "rnr-retry-exceeded";
    else if (wc.status == IBV_WC_RETRY_EXC_ERR)
      outcome_ = "retry-exceeded";
    else
      fail("the first error is \"%s\" (peer %s)", status, peer_stopped_ ? "stopped" : peer_left_ ? "left" : "running");
  }

  void take(const ibv_wc& wc) {
    const bool receive = (wc.wr_id & receive_tag) != 0;
    const std::uint64_t number = wc.wr_id & ~receive_tag;
    std::uint64_t& next = receive ? receives_completed_ : sends_completed_;
    if (number != next)
      fail("%s %llu completes where %llu is due (status %s)", receive ? "receive" : "send", static_cast<unsigned long long>(number),
           static_cast<unsigned long long>(next), ibv_wc_status_str(wc.status));
    ++next;
    if (wc.qp_num != qp_->qp_num) fail("a completion of queue pair %#x", wc.qp_num);
    if (wc.status != IBV_WC_SUCCESS) {
      queue_failed_[receive] = true;
      if (!failed_) return first_error(wc, receive);
      if (wc.status != IBV_WC_WR_FLUSH_ERR) fail("\"%s\" after the first error", ibv_wc_status_str(wc.status));
      return;
    }
    // Of one queue. Between a queue pair's two there is no order: what arrived before may be polled after the send that failed.
    if (queue_failed_[receive]) fail("a success after the first error");
    if (receive) {
      std::uint64_t sequence;
      const std::size_t offset = receives_at + number % receive_depth * slot_bytes + (type_ == IBV_QPT_UD ? grh_bytes : 0);
      std::memcpy(&sequence, memory_ + offset, sizeof(sequence));
      if (sequence != received_)
        fail("message %llu arrives where %llu is due", static_cast<unsigned long long>(sequence), static_cast<unsigned long long>(received_));
      ++received_;
      post_receive();
    } else if (rdma_ && number % 3 != 0) {
      std::uint64_t got;
      std::memcpy(&got, memory_ + fetched_at + number % 64 * slot_bytes, sizeof(got));
      const std::uint64_t due = number % 3 == 1 ? pattern : number / 3;
      if (got != due) fail("request %llu fetches %#llx, not %#llx", static_cast<unsigned long long>(number),
                           static_cast<unsigned long long>(got), static_cast<unsigned long long>(due));
    }
  }

  bool poll_some() {
    ibv_wc wc[8];
    const int got = ibv_poll_cq(cq_, 8, wc);
    if (got < 0) fail("ibv_poll_cq: %d", got);
    for (int i = 0; i < got; ++i) take(wc[i]);
    return got != 0;
  }

  // What the other side and the test say meanwhile. wait: until they or the completion channel say something.
  void look_around(bool wait) {
    pollfd sources[] = {{peer_fd, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}, {channel_ != nullptr ? channel_->fd : -1, POLLIN, 0}};
    if (peer_left_ || barrier_seen_) sources[0].fd = -1;
    if (told_) sources[1].fd = -1;
    if (::poll(sources, 3, wait ? -1 : 0) <= 0) return;
    if (sources[0].revents != 0) {
      char byte;
      if (::recv(peer_fd, &byte, 1, MSG_PEEK) <= 0)
        peer_left_ = true;
      else
        barrier_seen_ = true;  // it is done and waits; the byte is for barrier()
    }
    if (sources[1].revents != 0) {
      char byte;
      told_ = true;  // or there is nobody who could
      if (::read(STDIN_FILENO, &byte, 1) == 1 && byte == 's') peer_stopped_ = true;
    }
    if (sources[2].revents != 0) {
      ibv_cq* cq = nullptr;
      void* cq_context = nullptr;
      if (ibv_get_cq_event(channel_, &cq, &cq_context) != 0) fail("ibv_get_cq_event: %s", std::strerror(errno));
      if (cq != cq_) fail("an event of another completion queue");
      ibv_ack_cq_events(cq, 1);
    }
  }

  void await_completions() {
    if (events_) check(ibv_req_notify_cq(cq_, 0), "ibv_req_notify_cq");
    const bool some = poll_some();  // in direct mode always, where a peer that stands still costs nothing
    if (events_) return look_around(!some);
    if (++polls_ % 64 == 0) look_around(false);
  }

  bool finished() const {
    if (role == "survivor" || sends_posted_ < messages || sends_completed_ != sends_posted_) return false;
    return rdma_ || received_ >= messages || (role == "victim" && peer_left_);
  }

  // More than the peer has asked for: how one learns what became of it. Where nobody tells, so many are enough.
  static constexpr std::uint64_t probes = 3 * receive_depth;

  void converse() {
    const bool endless = role == "survivor";
    while (!failed_ && !finished()) {
      const bool probing = peer_left_ || peer_stopped_;
      const std::uint64_t ahead = rdma_ ? sends_completed_ : received_;
      while ((endless || sends_posted_ < messages || (probing && sends_completed_ == sends_posted_)) && sends_posted_ - sends_completed_ < window_ &&
             (probing || sends_posted_ < ahead + window_)) {
        const bool answered = type_ == IBV_QPT_RC && (peer_left_ || !rdma_);  // by an error, sooner or later
        if (probing && !answered && ++probes_posted_ > probes) break;
        post_send();
      }
      // Unreliable, or the peer's memory is served although it is stopped: nobody tells, and nothing may fail.
      if (probes_posted_ > probes && sends_completed_ == sends_posted_) return give_up();
      await_completions();
      if (churn_ && ++turns_ % 16 == 0) churn();
    }
    if (!failed_) outcome_ = "complete";
  }

  void give_up() {
    gave_up_ = true;
    failed_ = false;
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_ERR;
    check(ibv_modify_qp(qp_, &a, IBV_QP_STATE), "ibv_modify_qp to ERR");
    while (!all_completed() && !(shared_ && sends_posted_ == sends_completed_)) await_completions();
    outcome_ = peer_stopped_ && !peer_left_ ? "served" : "unnoticed";
    failed_ = true;
  }

  bool all_completed() const {
    return sends_completed_ == sends_posted_ && (shared_ || receives_completed_ == receives_posted_);
  }

  // The queue pair failed: everything outstanding, and what is posted now, is flushed; then nothing more comes.
  void settle() {
    if (!gave_up_ && type_ != IBV_QPT_UD) {
      post_send();
      if (!shared_ && receives_posted_ - receives_completed_ < receive_depth) post_receive();
    }
    while (!all_completed()) await_completions();
    if (expect == "service") await_async(IBV_EVENT_DEVICE_FATAL);
    else if (shared_) await_async(IBV_EVENT_QP_LAST_WQE_REACHED);
    while (shared_ && poll_some()) {  // how many receives were taken, only the completions tell: all are here by that event
    }
    for (int i = 0; i < 200; ++i)
      if (poll_some()) fail("a completion more than there were requests");
    ibv_async_event event;
    if (ibv_get_async_event(context_, &event) == 0) fail("an event more: %s", ibv_event_type_str(event.event_type));
  }

  void await_async(ibv_event_type wanted) {
    ibv_async_event event;
    while (ibv_get_async_event(context_, &event) != 0) {
      if (errno != EAGAIN && errno != EINTR) fail("ibv_get_async_event: %s", std::strerror(errno));
      pollfd readable{context_->async_fd, POLLIN, 0};
      ::poll(&readable, 1, -1);  // the watchdog ends it
    }
    if (event.event_type != wanted) fail("the event is %s", ibv_event_type_str(event.event_type));
    ibv_ack_async_event(&event);
  }

  void churn() {
    constexpr std::size_t bytes = 200'000;
    char* const block = static_cast<char*>(std::malloc(bytes));
    std::memset(block, static_cast<int>(turns_), bytes);
    ibv_mr* const mr = ibv_reg_mr(pd_, block + 100, bytes - 200, local_write);
    if (mr == nullptr) {
      if (expect == "service" && errno == EIO) return std::free(block);  // the flushes are on their way
      refused("ibv_reg_mr");
    }
    check(ibv_dereg_mr(mr), "ibv_dereg_mr");
    for (std::size_t i = 0; i < bytes; ++i)
      if (block[i] != static_cast<char>(turns_)) fail("registration changed byte %zu", i);
    std::free(block);
  }

  void take_down() {
    if (ah_ != nullptr) check(ibv_destroy_ah(ah_), "ibv_destroy_ah");
    check(ibv_destroy_qp(qp_), "ibv_destroy_qp");
    if (srq_ != nullptr) check(ibv_destroy_srq(srq_), "ibv_destroy_srq");
    check(ibv_destroy_cq(cq_), "ibv_destroy_cq");
    if (channel_ != nullptr) check(ibv_destroy_comp_channel(channel_), "ibv_destroy_comp_channel");
    check(ibv_dereg_mr(mr_), "ibv_dereg_mr");
    if (role == "survivor" && peer_stopped_) outlast_peer();
    check(ibv_dealloc_pd(pd_), "ibv_dealloc_pd");
    check(ibv_close_device(context_), "ibv_close_device");
  }

  // What the stopped peer was in the middle of hits nothing when it goes on: the same memory, registered anew, and queues where the
  // former ones were.
  void outlast_peer() {
    std::memset(memory_, 0x5a, memory_bytes);
    mr_ = ibv_reg_mr(pd_, memory_, memory_bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
    cq_ = ibv_create_cq(context_, 2 * (send_depth + receive_depth), nullptr, nullptr, 0);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq_;
    init.qp_type = IBV_QPT_RC;
    init.cap = {send_depth, receive_depth, 1, 1, 0};
    qp_ = mr_ != nullptr && cq_ != nullptr ? ibv_create_qp(pd_, &init) : nullptr;
    if (qp_ == nullptr) refused("registering and creating anew");
    done(outcome_);
    ::shutdown(peer_fd, SHUT_WR);
    char byte;
    while (::recv(peer_fd, &byte, 1, 0) > 0 || errno == EINTR) errno = 0;
    ibv_wc wc;
    if (ibv_poll_cq(cq_, 1, &wc) != 0) fail("a completion on a queue that was created afterwards");
    for (std::size_t i = 0; i < memory_bytes; ++i)
      if (memory_[i] != 0x5a) fail("the peer wrote byte %zu after its memory was deregistered", i);
    check(ibv_destroy_qp(qp_), "ibv_destroy_qp");
    check(ibv_destroy_cq(cq_), "ibv_destroy_cq");
    check(ibv_dereg_mr(mr_), "ibv_dereg_mr");
  }

  bool rdma_ = false, events_ = false, shared_ = false, churn_ = false;
  std::uint32_t window_ = window_max;
  ibv_qp_type type_ = IBV_QPT_RC;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_mr* mr_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_srq* srq_ = nullptr;
  ibv_qp* qp_ = nullptr;
  ibv_ah* ah_ = nullptr;
  char* memory_ = nullptr;
  Info peer_{};

  std::uint64_t sends_posted_ = 0, sends_completed_ = 0;
  std::uint64_t receives_posted_ = 0, receives_completed_ = 0, received_ = 0;
  std::uint64_t probes_posted_ = 0, turns_ = 0, polls_ = 0;
  bool failed_ = false, gave_up_ = false, peer_left_ = false, peer_stopped_ = false, told_ = false, barrier_seen_ = false;
  bool queue_failed_[2] = {};  // sends, receives
  std::string outcome_;
};

}  // namespace

int main(int argc, char** argv) {
  ::alarm(watchdog_s);
  Client client;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--peer-fd") client.peer_fd = std::atoi(value.c_str());
    else if (key == "--workload") client.workload = value;
    else if (key == "--role") client.role = value;
    else if (key == "--expect") client.expect = value;
    else if (key == "--messages") client.messages = std::strtoull(value.c_str(), nullptr, 10);
    else fail("unknown option %s", key.c_str());
  }
  return client.run();
}
