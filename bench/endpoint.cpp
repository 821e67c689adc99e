#include "endpoint.hpp"

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace bench {

namespace {
constexpr int all_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

struct Address {
  std::uint32_t lid, count;
};
}  // namespace

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fputs("verbs_bench: ", stderr);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
  std::exit(1);
}

Endpoint::Endpoint(const Options& options, int cqe, bool events) : peer_fd_(options.peer_fd) {
  ibv_device** const devices = ibv_get_device_list(nullptr);
  if (devices == nullptr || devices[0] == nullptr) fail("no RDMA device: start this with vrdma run");
  context_ = ibv_open_device(devices[0]);
  if (context_ == nullptr) fail("cannot open %s: %s", ibv_get_device_name(devices[0]), std::strerror(errno));
  ibv_free_device_list(devices);
  if (ibv_query_port(context_, 1, &port_) != 0 || port_.lid == 0) fail("port 1 has no LID: an InfiniBand link layer is needed");
  pd_ = ibv_alloc_pd(context_);
  if (pd_ == nullptr) fail("ibv_alloc_pd: %s", std::strerror(errno));
  if (events) {
    channel_ = ibv_create_comp_channel(context_);
    if (channel_ == nullptr) fail("ibv_create_comp_channel: %s", std::strerror(errno));
  }
  cq_ = ibv_create_cq(context_, cqe, nullptr, channel_, 0);
  if (cq_ == nullptr) fail("ibv_create_cq: %s", std::strerror(errno));
}

Endpoint::~Endpoint() {
  for (ibv_qp* qp : qps_) ibv_destroy_qp(qp);
  ibv_destroy_cq(cq_);
  if (channel_ != nullptr) ibv_destroy_comp_channel(channel_);
  for (const Memory& memory : memories_) ibv_dereg_mr(memory.mr), ::munmap(memory.data, memory.bytes);
  ibv_dealloc_pd(pd_);
  ibv_close_device(context_);
}

Memory Endpoint::allocate(std::size_t bytes) {
  Memory memory;
  memory.bytes = (bytes + 4095) & ~std::size_t{4095};
  void* const data = ::mmap(nullptr, memory.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) fail("mmap of %zu bytes: %s", memory.bytes, std::strerror(errno));
  memory.data = static_cast<char*>(data);
  std::memset(memory.data, 0, memory.bytes);
  memory.mr = ibv_reg_mr(pd_, memory.data, memory.bytes, all_access);
  if (memory.mr == nullptr) fail("ibv_reg_mr of %zu bytes: %s", memory.bytes, std::strerror(errno));
  memories_.push_back(memory);
  return memory;
}

ibv_qp* Endpoint::create_qp(Depths depths) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_;
  init.qp_type = IBV_QPT_RC;
  init.cap = {depths.send, depths.receive, 1, 1, 8};
  ibv_qp* const qp = ibv_create_qp(pd_, &init);
  if (qp == nullptr) fail("ibv_create_qp: %s", std::strerror(errno));
  return qp;
}

void Endpoint::to_init(ibv_qp* qp) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  attr.qp_access_flags = all_access;
  if (const int error = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
    fail("RESET to INIT: %s", std::strerror(error));
}

void Endpoint::to_rts(ibv_qp* qp, std::uint32_t remote_qpn, std::uint16_t remote_lid) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = port_.active_mtu;
  attr.dest_qp_num = remote_qpn;
  attr.max_dest_rd_atomic = 16;
  attr.min_rnr_timer = 1;  // 10 µs
  attr.ah_attr.dlid = remote_lid;
  attr.ah_attr.port_num = 1;
  if (const int error = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
    fail("INIT to RTR: %s", std::strerror(error));
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = 14;
  attr.retry_cnt = attr.rnr_retry = 7;
  attr.max_rd_atomic = 16;
  if (const int error = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                                     IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
    fail("RTR to RTS: %s", std::strerror(error));
}

std::vector<ibv_qp*> Endpoint::connect(std::uint32_t count, Depths depths) {
  std::vector<ibv_qp*> made;
  if (count == 0) return made;
  std::vector<std::uint32_t> mine, theirs(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    made.push_back(create_qp(depths));
    to_init(made.back());
    mine.push_back(made.back()->qp_num);
  }
  const Address here{port_.lid, count};
  Address there{};
  tell(std::as_bytes(std::span(&here, 1)));
  hear(std::as_writable_bytes(std::span(&there, 1)));
  if (there.count != count) fail("the other side connects %u queue pairs, this one %u", there.count, count);
  tell(std::as_bytes(std::span(mine)));
  hear(std::as_writable_bytes(std::span(theirs)));
  for (std::uint32_t i = 0; i < count; ++i) to_rts(made[i], theirs[i], static_cast<std::uint16_t>(there.lid));
  qps_.insert(qps_.end(), made.begin(), made.end());
  return made;
}

Remote Endpoint::exchange(const Memory& mine) {
  const Remote here{reinterpret_cast<std::uintptr_t>(mine.data), mine.mr->rkey, 0};
  Remote there;
  tell(std::as_bytes(std::span(&here, 1)));
  hear(std::as_writable_bytes(std::span(&there, 1)));
  return there;
}

void Endpoint::exchange_keys(std::span<const std::uint32_t> mine, std::span<std::uint32_t> theirs) {
  // In turns of what a socket holds for whoever does not read yet.
  constexpr std::size_t turn = 4096;
  for (std::size_t at = 0; at < std::max(mine.size(), theirs.size()); at += turn) {
    if (at < mine.size()) tell(std::as_bytes(mine.subspan(at, std::min(turn, mine.size() - at))));
    if (at < theirs.size()) hear(std::as_writable_bytes(theirs.subspan(at, std::min(turn, theirs.size() - at))));
  }
}

void Endpoint::disconnect(std::span<ibv_qp* const> made) {
  for (ibv_qp* qp : made)
    if (const int error = ibv_destroy_qp(qp)) fail("ibv_destroy_qp: %s", std::strerror(error));
  qps_.resize(qps_.size() - made.size());
}

bool Endpoint::agree(bool mine) {
  const std::byte here{mine};
  std::byte there{};
  tell(std::span(&here, 1));
  hear(std::span(&there, 1));
  return mine && there != std::byte{0};
}

void Endpoint::barrier() {
  const std::byte here{1};
  std::byte there{};
  tell(std::span(&here, 1));
  hear(std::span(&there, 1));
}

void Endpoint::tell(std::span<const std::byte> mine) {
  if (::send(peer_fd_, mine.data(), mine.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(mine.size()))
    fail("the other side does not listen: %s", std::strerror(errno));
}

void Endpoint::hear(std::span<std::byte> theirs) {
  const ssize_t got = ::recv(peer_fd_, theirs.data(), theirs.size(), MSG_WAITALL);
  if (got != static_cast<ssize_t>(theirs.size())) fail("the other side left");
}

int Endpoint::poll(ibv_wc* wc, int room) {
  const int got = ibv_poll_cq(cq_, room, wc);
  if (got < 0) fail("ibv_poll_cq returned %d", got);
  for (int i = 0; i < got; ++i)
    if (wc[i].status != IBV_WC_SUCCESS) fail("a request failed: %s", ibv_wc_status_str(wc[i].status));
  return got;
}

int Endpoint::wait(ibv_wc* wc, int room) {
  for (;;) {
    if (const int got = poll(wc, room)) return got;
    if (channel_ == nullptr) continue;
    if (!armed_) {
      if (ibv_req_notify_cq(cq_, 0) != 0) fail("ibv_req_notify_cq");
      armed_ = true;
      continue;
    }
    ibv_cq* cq;
    void* cq_context;
    if (ibv_get_cq_event(channel_, &cq, &cq_context) != 0) {
      if (errno == EINTR) return 0;  // told to stop
      fail("ibv_get_cq_event: %s", std::strerror(errno));
    }
    ibv_ack_cq_events(cq, 1);
    armed_ = false;
  }
}

void Endpoint::post(ibv_qp* qp, ibv_send_wr& wr) {
  ibv_send_wr* bad;
  if (const int error = ibv_post_send(qp, &wr, &bad)) fail("ibv_post_send: %s", std::strerror(error));
}

void Endpoint::post(ibv_qp* qp, ibv_recv_wr& wr) {
  ibv_recv_wr* bad;
  if (const int error = ibv_post_recv(qp, &wr, &bad)) fail("ibv_post_recv: %s", std::strerror(error));
}

}  // namespace bench
