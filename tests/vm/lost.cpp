// Two programs between which every kind of transfer is under way at once, both ways, until one of them is gone with its machine: the
// other then judges what it is told. A client of libibverbs alone.
//
//   lost listen PORT        lost connect HOST PORT
//
// A queue pair for each kind, size and type, each with as many requests as it may have. Says "all under way" when every one of them
// has moved data both ways. Once the peer is lost (retries of all RC queue pairs are exceeded), what verbs prescribe is checked:
//   RC    sends complete in order, the first that fails with RETRY_EXC_ERR, all after it and all receives with WR_FLUSH_ERR; the one
//         with an SRQ has LAST_WQE_REACHED, and there is no other asynchronous event
//   UC UD sends go on and succeed, the queue pair stays in RTS; its receives wait, and are flushed when it is moved to ERR
// and what arrived before is whole. Then says "told: …", and at SIGTERM looks whether anything has written to its memory since, takes
// everything down and leaves with 0. Anything else: 1, and what it was.
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <fcntl.h>
#include <poll.h>

#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/vm/lost_kinds.hpp"
#include "tests/vm/meeting.hpp"

namespace {

using namespace vrdma::test;

constexpr std::uint64_t send_depth = 3, receive_depth = 4, afterwards = 8;  // afterwards: sends to a peer that is lost
constexpr std::uint32_t qkey = 0x1357;
constexpr std::uint64_t receive_tag = 1ull << 63, pattern = 0x7a11;
constexpr int event_patience_ms = 30'000;

volatile std::sig_atomic_t stopping = 0;

[[noreturn]] [[gnu::format(printf, 1, 2)]] void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::printf("wrong: ");
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
  std::fflush(stdout);
  std::_Exit(1);
}
[[gnu::format(printf, 1, 2)]] void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::fflush(stdout);
}

struct Flow {
  const Kind* kind = nullptr;
  ibv_qp* qp = nullptr;
  std::byte* out = nullptr;      // a slot for each send: what it sends, or where it puts what it fetches
  std::byte* landing = nullptr;  // a slot for each receive; what the peer writes, reads or adds to lies here, too
  std::uint64_t posted = 0, done = 0, receives_posted = 0, received = 0;
  std::uint64_t next_number = 0;  // the least that the peer's next message can have
  bool failed = false, flushes = false;  // a send has failed; a receive was flushed
  std::uint64_t flushed = 0;

  bool reliable() const { return kind->type == IBV_QPT_RC; }
  std::byte* slot(std::byte* area, std::uint64_t number, std::uint64_t depth) const { return area + number % depth * stride(*kind); }
};

struct Address {
  std::uint64_t memory;
  std::uint32_t rkey, lid;
  std::uint32_t qpn[kind_count];
};

class Lost {
 public:
  explicit Lost(const Meeting& meeting) {
    open();
    connect(meeting);
    for (Flow& flow : flows_) {
      if (receives(*flow.kind))
        while (flow.receives_posted < receive_depth) post_receive(flow);
    }
    meeting.wait();
    for (Flow& flow : flows_)
      while (flow.posted < send_depth) post_send(flow);
  }

  void until_lost() {
    bool under_way = false;
    while (!all([](const Flow& flow) { return !flow.reliable() || ended(flow); })) {
      step(/*posts=*/true);
      if (!under_way && all([](const Flow& flow) { return flow.done > send_depth && (!receives(*flow.kind) || flow.received > receive_depth); })) {
        under_way = true;
        say("all under way\n");
      }
      if (!under_way && stopping) fail("stopped before all was under way: %s", slowest().c_str());
    }
    if (!under_way) fail("the peer is lost before all was under way");
  }

  void judge() {
    const auto drained = [](const Flow& flow) { return flow.posted == flow.done; };
    while (!all(drained)) step(/*posts=*/false);
    for (Flow& flow : flows_)
      if (!flow.reliable())
        for (std::uint64_t i = 0; i < afterwards; ++i) {
          post_send(flow);
          while (!drained(flow)) step(/*posts=*/false);
        }
    for (Flow& flow : flows_) check_state(flow, flow.reliable() ? IBV_QPS_ERR : IBV_QPS_RTS);
    check_events();
    std::uint64_t flushed = 0, exceeded = 0;
    for (const Flow& flow : flows_) flushed += flow.flushed, exceeded += flow.failed;
    memory_then_ = memory_;
    say("told: %llu queue pairs have exceeded retries, %llu requests are flushed\n", static_cast<unsigned long long>(exceeded), static_cast<unsigned long long>(flushed));
  }

  void take_down() {
    while (!stopping) {
      ::poll(nullptr, 0, 100);
      step(/*posts=*/false);
    }
    if (memory_ != memory_then_) fail("memory has changed after its peer was lost");
    for (Flow& flow : flows_) {
      if (flow.reliable()) continue;
      ibv_qp_attr error{};
      error.qp_state = IBV_QPS_ERR;
      must(ibv_modify_qp(flow.qp, &error, IBV_QP_STATE) == 0, "go to ERR");
      flow.failed = true;
      while (!ended(flow)) step(/*posts=*/false);
    }
    check_no_event();
    for (Flow& flow : flows_) must(ibv_destroy_qp(flow.qp) == 0, "destroy a QP");
    must(ibv_destroy_srq(srq_) == 0 && ibv_destroy_ah(ah_) == 0 && ibv_dereg_mr(mr_) == 0, "destroy the SRQ, AH and MR");
    must(ibv_destroy_cq(cq_) == 0 && ibv_destroy_comp_channel(channel_) == 0 && ibv_dealloc_pd(pd_) == 0 && ibv_close_device(context_) == 0,
         "destroy the rest");
    say("ends\n");
  }

 private:
  static bool ended(const Flow& flow) {
    return flow.failed && flow.posted == flow.done && (flow.kind->shared || flow.receives_posted == flow.received);
  }
  template <class Condition>
  bool all(const Condition& holds) const {
    for (const Flow& flow : flows_)
      if (!holds(flow)) return false;
    return true;
  }
  std::string slowest() const {
    std::string text;
    for (const Flow& flow : flows_)
      if (flow.done <= send_depth || (receives(*flow.kind) && flow.received <= receive_depth))
        text += std::string(flow.kind->name) + " " + std::to_string(flow.done) + "/" + std::to_string(flow.received) + ", ";
    return text;
  }

  void open() {
    ibv_device** const devices = must(ibv_get_device_list(nullptr), "list devices");
    context_ = must(ibv_open_device(must(devices[0], "find a device")), "open the device");
    ibv_free_device_list(devices);
    must(::fcntl(context_->async_fd, F_SETFL, O_NONBLOCK) == 0, "not wait for events");
    pd_ = must(ibv_alloc_pd(context_), "make a PD");
    channel_ = must(ibv_create_comp_channel(context_), "make a channel");
    cq_ = must(ibv_create_cq(context_, static_cast<int>(kind_count * (send_depth + receive_depth)), nullptr, channel_, 0), "make a CQ");
    must(ibv_req_notify_cq(cq_, 0) == 0, "arm the CQ");
    ibv_srq_init_attr shared{};
    shared.attr = {receive_depth, 1, 0};
    srq_ = must(ibv_create_srq(pd_, &shared), "make an SRQ");
    std::size_t bytes = 64;
    for (const Kind& kind : kinds) bytes += (send_depth + receive_depth) * stride(kind);
    memory_.resize(bytes);
    base_ = memory_.data() + (64 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 64);
    mr_ = must(ibv_reg_mr(pd_, base_, bytes - 64, static_cast<int>(access_)), "register memory");
    std::byte* at = base_;
    for (std::size_t i = 0; i < kind_count; ++i) {
      Flow& flow = flows_[i];
      flow.kind = &kinds[i];
      flow.out = at;
      flow.landing = at + send_depth * stride(kinds[i]);
      at = flow.landing + receive_depth * stride(kinds[i]);
      if (kinds[i].opcode == IBV_WR_RDMA_READ) stamp(flow.landing, kinds[i].bytes, pattern);
      ibv_qp_init_attr init{};
      init.send_cq = init.recv_cq = cq_;
      init.cap = {send_depth, receive_depth, 1, 1, 0};
      init.qp_type = kinds[i].type;
      if (kinds[i].shared) init.srq = srq_;
      flow.qp = must(ibv_create_qp(pd_, &init), "make a QP");
    }
  }

  void connect(const Meeting& meeting) {
    ibv_port_attr port{};
    must(ibv_query_port(context_, 1, &port) == 0, "query the port");
    Address mine{reinterpret_cast<std::uintptr_t>(base_), mr_->rkey, port.lid, {}};
    for (std::size_t i = 0; i < kind_count; ++i) mine.qpn[i] = flows_[i].qp->qp_num;
    peer_ = meeting.swap(mine);
    ibv_ah_attr to_peer{};
    to_peer.dlid = static_cast<std::uint16_t>(peer_.lid);
    to_peer.port_num = 1;
    ah_ = must(ibv_create_ah(pd_, &to_peer), "make an AH");
    for (std::size_t i = 0; i < kind_count; ++i) move_to_rts(flows_[i], to_peer, peer_.qpn[i]);
  }

  static void move_to_rts(const Flow& flow, const ibv_ah_attr& to_peer, std::uint32_t peer) {
    const ibv_qp_type type = flow.kind->type;
    ibv_qp_attr now{};
    now.qp_state = IBV_QPS_INIT;
    now.port_num = 1;
    now.qkey = qkey;
    now.qp_access_flags = access_;
    must(ibv_modify_qp(flow.qp, &now, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | (type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)) == 0, "go to INIT");
    now = {};
    now.qp_state = IBV_QPS_RTR;
    now.path_mtu = IBV_MTU_1024;
    now.dest_qp_num = peer;
    now.rq_psn = 11;
    now.max_dest_rd_atomic = 2;
    now.min_rnr_timer = 12;
    now.ah_attr = to_peer;
    int mask = IBV_QP_STATE;
    if (type != IBV_QPT_UD) mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    if (type == IBV_QPT_RC) mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    must(ibv_modify_qp(flow.qp, &now, mask) == 0, "go to RTR");
    now.qp_state = IBV_QPS_RTS;
    now.timeout = 14;  // half a second with all retries
    now.retry_cnt = 7;
    now.rnr_retry = 7;
    now.sq_psn = 11;
    now.max_rd_atomic = 2;
    mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    if (type == IBV_QPT_RC) mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    must(ibv_modify_qp(flow.qp, &now, mask) == 0, "go to RTS");
  }

  std::uint64_t id_of(const Flow& flow, std::uint64_t number) const { return static_cast<std::uint64_t>(&flow - flows_) << 48 | number; }

  void post_receive(Flow& flow) {
    const std::uint64_t number = flow.receives_posted++;
    const bool writes = flow.kind->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(flow.slot(flow.landing, number, receive_depth)), static_cast<std::uint32_t>(stride(*flow.kind)), mr_->lkey};
    ibv_recv_wr request{}, *bad = nullptr;
    request.wr_id = receive_tag | id_of(flow, number);
    request.sg_list = &sge;
    request.num_sge = writes ? 0 : 1;
    const int error = flow.kind->shared ? ibv_post_srq_recv(srq_, &request, &bad) : ibv_post_recv(flow.qp, &request, &bad);
    if (error != 0) fail("%s: posting receive %llu: %s", flow.kind->name, static_cast<unsigned long long>(number), std::strerror(error));
  }

  void post_send(Flow& flow) {
    const Kind& kind = *flow.kind;
    const std::uint64_t number = flow.posted++;
    std::byte* const out = flow.slot(flow.out, number, send_depth);
    stamp(out, kind.bytes, fetches(kind) ? ~0ull : number);
    ibv_sge sge{reinterpret_cast<std::uintptr_t>(out), kind.bytes, mr_->lkey};
    ibv_send_wr request{}, *bad = nullptr;
    request.wr_id = id_of(flow, number);
    request.sg_list = &sge;
    request.num_sge = 1;
    request.opcode = kind.opcode;
    request.send_flags = IBV_SEND_SIGNALED;
    request.imm_data = htonl(static_cast<std::uint32_t>(number));
    const auto landing = static_cast<std::uint64_t>(flow.landing - base_) + peer_.memory;
    if (kind.type == IBV_QPT_UD)
      request.wr.ud = {ah_, peer_.qpn[&flow - flows_], qkey};
    else if (kind.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
      request.wr.atomic = {landing, 1, 0, peer_.rkey};
    else if (kind.opcode == IBV_WR_ATOMIC_CMP_AND_SWP)
      request.wr.atomic = {landing, number, number + 1, peer_.rkey};
    else
      request.wr.rdma = {kind.opcode == IBV_WR_RDMA_READ ? landing : landing + number % receive_depth * stride(kind), peer_.rkey};
    if (const int error = ibv_post_send(flow.qp, &request, &bad); error != 0)
      fail("%s: posting send %llu: %s", kind.name, static_cast<unsigned long long>(number), std::strerror(error));
  }

  // Takes what has completed; where there is nothing, waits a little for it.
  void step(bool posts) {
    ibv_wc wc[32];
    const int got = ibv_poll_cq(cq_, 32, wc);
    if (got < 0) fail("polling: %d", got);
    for (int i = 0; i < got; ++i) take(wc[i], posts);
    if (got != 0) return;
    pollfd waiting{channel_->fd, POLLIN, 0};
    if (::poll(&waiting, 1, 20) <= 0) return;
    ibv_cq* cq = nullptr;
    void* context = nullptr;
    must(ibv_get_cq_event(channel_, &cq, &context) == 0, "take an event");
    ibv_ack_cq_events(cq, 1);
    must(ibv_req_notify_cq(cq_, 0) == 0, "arm the CQ");
  }

  void take(const ibv_wc& wc, bool posts) {
    const bool receive = (wc.wr_id & receive_tag) != 0;
    Flow& flow = flows_[(wc.wr_id & ~receive_tag) >> 48];
    const std::uint64_t number = wc.wr_id & 0xffff'ffff'ffff;
    std::uint64_t& due = receive ? flow.received : flow.done;
    if (number != due) fail("%s: %s %llu completes where %llu is due", flow.kind->name, receive ? "receive" : "send", static_cast<unsigned long long>(number), static_cast<unsigned long long>(due));
    if (wc.qp_num != flow.qp->qp_num) fail("%s: a completion of queue pair %#x", flow.kind->name, wc.qp_num);
    ++due;
    if (wc.status != IBV_WC_SUCCESS) return take_error(flow, wc, receive);
    if (receive ? flow.flushes : flow.failed) fail("%s: a success after an error", flow.kind->name);
    receive ? take_message(flow, wc, number) : take_done(flow, wc, number);
    if (posts && !flow.failed && !flow.flushes) receive ? post_receive(flow) : post_send(flow);
  }

  static void take_error(Flow& flow, const ibv_wc& wc, bool receive) {
    const bool first = !receive && !flow.failed;
    const ibv_wc_status due = first ? IBV_WC_RETRY_EXC_ERR : IBV_WC_WR_FLUSH_ERR;
    if (!flow.reliable() && !flow.failed) fail("%s: \"%s\" on an unreliable queue pair", flow.kind->name, ibv_wc_status_str(wc.status));
    if (wc.status != due) fail("%s: \"%s\" where \"%s\" is due", flow.kind->name, ibv_wc_status_str(wc.status), ibv_wc_status_str(due));
    (receive ? flow.flushes : flow.failed) = true;
    if (!first) ++flow.flushed;
  }

  static void take_done(const Flow& flow, const ibv_wc&, std::uint64_t number) {
    if (!fetches(*flow.kind)) return;
    const std::uint64_t due = flow.kind->opcode == IBV_WR_RDMA_READ ? pattern : number;
    each_stamp(flow.slot(flow.out, number, send_depth), flow.kind->bytes, [&](const std::byte* at) {
      if (number_at(at) != due) fail("%s: fetches %#llx where %#llx is due", flow.kind->name, static_cast<unsigned long long>(number_at(at)), static_cast<unsigned long long>(due));
    });
  }

  static void take_message(Flow& flow, const ibv_wc& wc, std::uint64_t number) {
    const Kind& kind = *flow.kind;
    const std::size_t head = kind.type == IBV_QPT_UD ? grh_bytes : 0;
    std::byte* const at = flow.slot(flow.landing, number, receive_depth) + head;
    const bool written = kind.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;  // the next one may lie there already
    if (wc.byte_len != kind.bytes + head) fail("%s: %u bytes", kind.name, wc.byte_len);
    if (((wc.wc_flags & IBV_WC_WITH_IMM) != 0) != immediate(kind)) fail("%s: flags %#x", kind.name, wc.wc_flags);
    const std::uint64_t sent = written ? ntohl(wc.imm_data) : number_at(at);
    if (immediate(kind) && ntohl(wc.imm_data) != static_cast<std::uint32_t>(sent)) fail("%s: another one's immediate data", kind.name);
    if (flow.reliable() ? sent != flow.next_number : sent < flow.next_number)
      fail("%s: message %llu where %llu is due", kind.name, static_cast<unsigned long long>(sent), static_cast<unsigned long long>(flow.next_number));
    flow.next_number = sent + 1;
    if (!written)
      each_stamp(at, kind.bytes, [&](const std::byte* where) {
        if (number_at(where) != sent) fail("%s: a message in parts", kind.name);
      });
  }

  static void check_state(const Flow& flow, ibv_qp_state due) {
    ibv_qp_attr attributes{};
    ibv_qp_init_attr init{};
    must(ibv_query_qp(flow.qp, &attributes, IBV_QP_STATE, &init) == 0, "query a QP");
    if (attributes.qp_state != due) fail("%s: the queue pair is in state %d, not %d", flow.kind->name, attributes.qp_state, due);
  }
  void check_events() {
    for (const Flow& flow : flows_) {
      if (!flow.kind->shared) continue;
      pollfd waiting{context_->async_fd, POLLIN, 0};
      ibv_async_event event{};
      if (::poll(&waiting, 1, event_patience_ms) != 1 || ibv_get_async_event(context_, &event) != 0) fail("%s: no event", flow.kind->name);
      if (event.event_type != IBV_EVENT_QP_LAST_WQE_REACHED || event.element.qp != flow.qp) fail("the event is \"%s\"", ibv_event_type_str(event.event_type));
      ibv_ack_async_event(&event);
    }
    check_no_event();
  }
  void check_no_event() {
    ibv_async_event event{};
    if (ibv_get_async_event(context_, &event) == 0) fail("there is an event, \"%s\"", ibv_event_type_str(event.event_type));
  }

  static constexpr unsigned access_ = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_srq* srq_ = nullptr;
  ibv_mr* mr_ = nullptr;
  ibv_ah* ah_ = nullptr;
  std::vector<std::byte> memory_, memory_then_;
  std::byte* base_ = nullptr;
  Address peer_{};
  Flow flows_[kind_count];
};

}  // namespace

int main(int count, char** words) {
  const std::string role = count > 1 ? words[1] : "";
  if (!(role == "listen" && count == 3) && !(role == "connect" && count == 4)) {
    std::fprintf(stderr, "usage: %s listen PORT | connect HOST PORT\n", words[0]);
    return 2;
  }
  struct sigaction stop {};
  stop.sa_handler = [](int) { stopping = 1; };
  ::sigaction(SIGTERM, &stop, nullptr);
  Lost lost(Meeting(role == "listen" ? nullptr : words[2], words[count - 1]));
  lost.until_lost();
  lost.judge();
  lost.take_down();
}
