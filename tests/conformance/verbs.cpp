#include "tests/conformance/verbs.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>

namespace vrdma::conformance {
namespace {

[[noreturn]] void fail_at(const Where& where, const std::string& what) {
  fail(where.file_name(), where.line(), what);
}

void must(int rc, const char* what, const Where& where) {
  if (rc != 0) fail_at(where, text(what, ": answered ", errno_name(rc)));
}
template <class T>
T* must(T* pointer, const char* what, const Where& where) {
  if (!pointer) fail_at(where, text(what, ": NULL and ", errno_name(errno)));
  return pointer;
}

bool is_background(ibv_event_type type) {
  return type == IBV_EVENT_COMM_EST || type == IBV_EVENT_PORT_ACTIVE || type == IBV_EVENT_PORT_ERR ||
         type == IBV_EVENT_LID_CHANGE || type == IBV_EVENT_PKEY_CHANGE || type == IBV_EVENT_SM_CHANGE ||
         type == IBV_EVENT_CLIENT_REREGISTER || type == IBV_EVENT_GID_CHANGE;
}

int choose_gid(const Device& device) {
  int chosen = -1;
  for (int i = 0; i < device.port.gid_tbl_len; ++i) {
    ibv_gid_entry entry{};
    if (ibv_query_gid_ex(device.ctx, device.port_num, static_cast<std::uint32_t>(i), &entry, 0) != 0) continue;
    if (chosen < 0) chosen = i;
    if (entry.gid_type == IBV_GID_TYPE_ROCE_V2) return i;
  }
  return chosen;
}

std::uint8_t rd_atomic_limit(const Device& device, std::uint8_t asked, int device_limit) {
  (void)device;
  return asked ? asked : static_cast<std::uint8_t>(std::clamp(device_limit, 1, 16));
}

}  // namespace

Device::Device(const Settings& settings) : port_num(static_cast<std::uint8_t>(settings.port)) {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  if (!list || count == 0) fail(__FILE__, __LINE__, "ibv_get_device_list finds no device any more");
  ibv_device* chosen = nullptr;
  for (int i = 0; i < count && !chosen; ++i) {
    if (settings.device.empty() || settings.device == list[i]->name) chosen = list[i];
  }
  if (!chosen) fail(__FILE__, __LINE__, text("no device ", settings.device));
  ctx = must(ibv_open_device(chosen), "ibv_open_device", Where::current());
  ibv_free_device_list(list);
  must(ibv_query_port(ctx, port_num, &port), "ibv_query_port", Where::current());
  must(ibv_query_device(ctx, &attr), "ibv_query_device", Where::current());
  gid_index = settings.gid_index >= 0 ? settings.gid_index : ethernet() ? choose_gid(*this) : -1;
  if (ethernet() && gid_index < 0) skip("an Ethernet port without a GID");
  if (ibv_query_gid(ctx, port_num, std::max(gid_index, 0), &gid) != 0) fail(__FILE__, __LINE__, "ibv_query_gid failed");
  const int flags = ::fcntl(ctx->async_fd, F_GETFL);
  if (flags < 0 || ::fcntl(ctx->async_fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    fail(__FILE__, __LINE__, "async_fd cannot be made non-blocking");
  }
}

Device::~Device() { must(ibv_close_device(ctx), "ibv_close_device", Where::current()); }

bool Device::take_event(ibv_async_event& event) {
  errno = 0;
  if (ibv_get_async_event(ctx, &event) == 0) return true;
  if (errno != EAGAIN) fail(__FILE__, __LINE__, text("ibv_get_async_event on an empty queue: ", errno_name(errno)));
  return false;
}

ibv_async_event Device::wait_event(ibv_event_type type, Where where) {
  mark_place(where.file_name(), where.line(), ibv_event_type_str(type));
  const Deadline deadline;
  ibv_async_event event{};
  for (;;) {
    if (take_event(event)) {
      ibv_ack_async_event(&event);
      if (event.event_type == type) return event;
      if (!is_background(event.event_type)) {
        fail_at(where, text("async event ", event.event_type, ", expected ", type));
      }
      continue;
    }
    if (deadline.passed()) fail_at(where, text("gave up waiting for async event ", type));
    pollfd waiting{ctx->async_fd, POLLIN, 0};
    ::poll(&waiting, 1, 20);
    pause_and_check_peer();
  }
}

void Device::expect_no_event(Where where) {
  ibv_async_event event{};
  while (take_event(event)) {
    ibv_ack_async_event(&event);
    if (!is_background(event.event_type)) fail_at(where, text("async event ", event.event_type, ", expected none"));
  }
}

Pd::Pd(Device& device, Where where) : p(must(ibv_alloc_pd(device.ctx), "ibv_alloc_pd", where)) {}
Pd::~Pd() { must(ibv_dealloc_pd(p), "ibv_dealloc_pd", Where::current()); }

Buffer::Buffer(std::size_t bytes) : bytes_(bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t inner = (std::max<std::size_t>(bytes, 1) + page - 1) / page * page;
  map_bytes_ = inner + 2 * page;
  void* map = ::mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) fail(__FILE__, __LINE__, text("mmap of ", map_bytes_, " bytes: ", errno_name(errno)));
  map_ = static_cast<std::byte*>(map);
  data_ = map_ + page;
  if (::mprotect(data_, inner, PROT_READ | PROT_WRITE) != 0) fail(__FILE__, __LINE__, "mprotect");
}
Buffer::~Buffer() { ::munmap(map_, map_bytes_); }

Mr::Mr(ibv_pd* pd, void* address, std::size_t bytes, unsigned access, Where where)
    : p(must(ibv_reg_mr(pd, address, bytes, static_cast<int>(access)), "ibv_reg_mr", where)) {}
void Mr::dereg(Where where) {
  must(ibv_dereg_mr(p), "ibv_dereg_mr", where);
  p = nullptr;
}
Mr::~Mr() {
  if (p) dereg();
}

Channel::Channel(Device& device, Where where)
    : p(must(ibv_create_comp_channel(device.ctx), "ibv_create_comp_channel", where)) {}
Channel::~Channel() { must(ibv_destroy_comp_channel(p), "ibv_destroy_comp_channel", Where::current()); }
bool Channel::readable(int timeout_ms) const {
  pollfd waiting{p->fd, POLLIN, 0};
  return ::poll(&waiting, 1, timeout_ms) == 1 && (waiting.revents & POLLIN);
}
ibv_cq* Channel::wait(Where where) {
  wait_until("a completion event", [&] { return readable(20); }, 20.0, where);
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  if (ibv_get_cq_event(p, &cq, &context) != 0) fail_at(where, text("ibv_get_cq_event: ", errno_name(errno)));
  if (context != cq->cq_context) fail_at(where, "ibv_get_cq_event gives another context than the CQ's");
  return cq;
}

Cq::Cq(Device& device, int depth, Channel* channel, void* context, Where where)
    : p(must(ibv_create_cq(device.ctx, depth, context, channel ? channel->p : nullptr, 0), "ibv_create_cq", where)) {
  if (p->cqe < depth) fail_at(where, text("cqe is ", p->cqe, ", asked for ", depth));
}
Cq::~Cq() { must(ibv_destroy_cq(p), "ibv_destroy_cq", Where::current()); }

ibv_wc Cq::next(Where where) {
  ibv_wc wc{};
  wait_until("a completion",
             [&] {
               const int n = ibv_poll_cq(p, 1, &wc);
               if (n < 0) fail_at(where, text("ibv_poll_cq: ", n));
               return n == 1;
             },
             20.0, where);
  return wc;
}
ibv_wc Cq::expect(std::uint64_t id, ibv_wc_status status, Where where) {
  const ibv_wc wc = next(where);
  if (wc.wr_id != id || wc.status != status) {
    fail_at(where, text("completion of wr_id ", wc.wr_id, " is ", wc.status, " (vendor_err ", wc.vendor_err,
                        "), expected wr_id ", id, " ", status));
  }
  return wc;
}
void Cq::expect_empty(Where where) {
  ibv_wc wc{};
  const int n = ibv_poll_cq(p, 1, &wc);
  if (n != 0) fail_at(where, text("unexpected completion: poll_cq ", n, ", wr_id ", wc.wr_id, " ", wc.status));
}
void Cq::arm(bool solicited_only, Where where) {
  must(ibv_req_notify_cq(p, solicited_only ? 1 : 0), "ibv_req_notify_cq", where);
}

Srq::Srq(ibv_pd* pd, std::uint32_t depth, std::uint32_t sges, Where where) {
  ibv_srq_init_attr init{};
  init.attr.max_wr = depth;
  init.attr.max_sge = sges;
  p = must(ibv_create_srq(pd, &init), "ibv_create_srq", where);
  attr = init.attr;
  if (attr.max_wr < depth || attr.max_sge < sges) fail_at(where, "ibv_create_srq gives less than asked for");
}
Srq::~Srq() { must(ibv_destroy_srq(p), "ibv_destroy_srq", Where::current()); }

ibv_qp_init_attr init_attr(ibv_cq* send_cq, ibv_cq* recv_cq, const QpSpec& spec) {
  ibv_qp_init_attr init{};
  init.send_cq = send_cq;
  init.recv_cq = recv_cq;
  init.srq = spec.srq;
  init.qp_type = spec.type;
  init.sq_sig_all = spec.sig_all ? 1 : 0;
  init.cap.max_send_wr = spec.send_wr;
  init.cap.max_recv_wr = spec.srq ? 0 : spec.recv_wr;
  init.cap.max_send_sge = spec.send_sge;
  init.cap.max_recv_sge = spec.srq ? 0 : spec.recv_sge;
  init.cap.max_inline_data = spec.inline_bytes;
  return init;
}

Qp::Qp(ibv_pd* pd, ibv_cq* send_cq, ibv_cq* recv_cq, const QpSpec& spec, Where where) {
  ibv_qp_init_attr init = init_attr(send_cq, recv_cq, spec);
  p = must(ibv_create_qp(pd, &init), "ibv_create_qp", where);
  cap = init.cap;
}
void Qp::destroy(Where where) {
  must(ibv_destroy_qp(p), "ibv_destroy_qp", where);
  p = nullptr;
}
Qp::~Qp() {
  if (p) destroy();
}
ibv_qp_state Qp::state(Where where) const {
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  must(ibv_query_qp(p, &attr, IBV_QP_STATE, &init), "ibv_query_qp", where);
  return attr.qp_state;
}
void Qp::wait_state(ibv_qp_state wanted, Where where) const {
  wait_until("a QP state", [&] { return state(where) == wanted; }, 20.0, where);
}
void Qp::set_state(ibv_qp_state wanted, Where where) {
  Modify modify;
  modify.attr.qp_state = wanted;
  modify.mask = IBV_QP_STATE;
  must(apply(p, modify), "ibv_modify_qp", where);
}

Ah::Ah(ibv_pd* pd, ibv_ah_attr attr, Where where) : p(must(ibv_create_ah(pd, &attr), "ibv_create_ah", where)) {}
Ah::~Ah() { must(ibv_destroy_ah(p), "ibv_destroy_ah", Where::current()); }

std::uint32_t psn_of(std::uint32_t qpn) { return (qpn * 2654435761u >> 7) & 0xffffff; }

Address address_of(const Device& device, const ibv_qp* qp) {
  Address address{};
  address.gid = device.gid;
  address.qpn = qp->qp_num;
  address.psn = psn_of(qp->qp_num);
  address.lid = device.port.lid;
  address.mtu = static_cast<std::uint16_t>(device.port.active_mtu);
  return address;
}

ibv_ah_attr ah_to(const Device& device, const Address& remote) {
  ibv_ah_attr ah{};
  ah.dlid = remote.lid;
  ah.port_num = device.port_num;
  if (device.by_gid()) {
    ah.is_global = 1;
    ah.grh.dgid = remote.gid;
    ah.grh.sgid_index = static_cast<std::uint8_t>(device.gid_index);
    ah.grh.hop_limit = 64;
  }
  return ah;
}

Modify init_of(const Device& device, ibv_qp_type type, const Path& path) {
  Modify m;
  m.attr.qp_state = IBV_QPS_INIT;
  m.attr.pkey_index = 0;
  m.attr.port_num = device.port_num;
  m.mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
  if (type == IBV_QPT_UD) {
    m.attr.qkey = path.qkey;
    m.mask |= IBV_QP_QKEY;
  } else {
    // UC knows no READ and no atomics; hardware refuses the bits.
    m.attr.qp_access_flags = type == IBV_QPT_UC ? path.access & (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE) : path.access;
    m.mask |= IBV_QP_ACCESS_FLAGS;
  }
  return m;
}

namespace {
// What programs give both ends of XRC, too; uverbs drops what an end has no use for.
bool reliable(ibv_qp_type type) { return type == IBV_QPT_RC || type == IBV_QPT_XRC_SEND || type == IBV_QPT_XRC_RECV; }
}  // namespace

Modify rtr_of(const Device& device, ibv_qp_type type, const Address& remote, const Path& path) {
  Modify m;
  m.attr.qp_state = IBV_QPS_RTR;
  m.mask = IBV_QP_STATE;
  if (type == IBV_QPT_UD) return m;
  m.attr.ah_attr = ah_to(device, remote);
  m.attr.path_mtu = path.mtu ? static_cast<ibv_mtu>(path.mtu)
                             : static_cast<ibv_mtu>(std::min<int>(device.port.active_mtu, remote.mtu));
  m.attr.dest_qp_num = remote.qpn;
  m.attr.rq_psn = remote.psn;
  m.mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
  if (reliable(type)) {
    m.attr.max_dest_rd_atomic = rd_atomic_limit(device, path.dest_rd_atomic, device.attr.max_qp_rd_atom);
    m.attr.min_rnr_timer = path.min_rnr_timer;
    m.mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  }
  return m;
}

Modify rts_of(const Device& device, const ibv_qp* qp, const Path& path) {
  Modify m;
  m.attr.qp_state = IBV_QPS_RTS;
  m.attr.sq_psn = psn_of(qp->qp_num);
  m.mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
  if (reliable(qp->qp_type)) {
    m.attr.timeout = path.timeout;
    m.attr.retry_cnt = path.retry_count;
    m.attr.rnr_retry = path.rnr_retry;
    m.attr.max_rd_atomic = rd_atomic_limit(device, path.rd_atomic, device.attr.max_qp_init_rd_atom);
    m.mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
  }
  return m;
}

int apply(ibv_qp* qp, Modify modify) { return ibv_modify_qp(qp, &modify.attr, modify.mask); }

void to_init(const Device& device, ibv_qp* qp, const Path& path, Where where) {
  must(apply(qp, init_of(device, qp->qp_type, path)), "RESET to INIT", where);
}
void to_rtr(const Device& device, ibv_qp* qp, const Address& remote, const Path& path, Where where) {
  must(apply(qp, rtr_of(device, qp->qp_type, remote, path)), "INIT to RTR", where);
}
void to_rts(const Device& device, ibv_qp* qp, const Path& path, Where where) {
  must(apply(qp, rts_of(device, qp, path)), "RTR to RTS", where);
}
void bring_up(const Device& device, ibv_qp* qp, const Address& remote, const Path& path, Where where) {
  if (qp->state == IBV_QPS_RESET) to_init(device, qp, path, where);
  to_rtr(device, qp, remote, path, where);
  to_rts(device, qp, path, where);
}

ibv_send_wr to_wr(const Send& send) {
  ibv_send_wr wr{};
  wr.wr_id = send.id;
  wr.sg_list = const_cast<ibv_sge*>(send.sges.data());
  wr.num_sge = static_cast<int>(send.sges.size());
  wr.opcode = send.opcode;
  wr.send_flags = send.flags;
  wr.imm_data = send.imm;
  if (send.ah) {
    wr.wr.ud.ah = send.ah;
    wr.wr.ud.remote_qpn = send.qpn;
    wr.wr.ud.remote_qkey = send.qkey;
  } else if (send.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || send.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
    wr.wr.atomic.remote_addr = send.remote_address;
    wr.wr.atomic.rkey = send.rkey;
    wr.wr.atomic.compare_add = send.compare_add;
    wr.wr.atomic.swap = send.swap;
  } else {
    wr.wr.rdma.remote_addr = send.remote_address;
    wr.wr.rdma.rkey = send.rkey;
  }
  wr.qp_type.xrc.remote_srqn = send.srqn;
  return wr;
}

int post(ibv_qp* qp, const Send& send, Where where) {
  ibv_send_wr wr = to_wr(send);
  ibv_send_wr* bad = nullptr;
  const int rc = ibv_post_send(qp, &wr, &bad);
  if (rc != 0 && bad != &wr) fail_at(where, text("post_send answered ", errno_name(rc), " and bad_wr is not the request"));
  return rc;
}

namespace {
template <class Queue, class Verb>
int post_receive(Queue* queue, const Recv& recv, Verb verb, const Where& where) {
  ibv_recv_wr wr{};
  wr.wr_id = recv.id;
  wr.sg_list = const_cast<ibv_sge*>(recv.sges.data());
  wr.num_sge = static_cast<int>(recv.sges.size());
  ibv_recv_wr* bad = nullptr;
  const int rc = verb(queue, &wr, &bad);
  if (rc != 0 && bad != &wr) fail_at(where, text("post_recv answered ", errno_name(rc), " and bad_wr is not the request"));
  return rc;
}
}  // namespace

int post(ibv_qp* qp, const Recv& recv, Where where) { return post_receive(qp, recv, ibv_post_recv, where); }
int post(ibv_srq* srq, const Recv& recv, Where where) { return post_receive(srq, recv, ibv_post_srq_recv, where); }

Link::Link(Run& the_run, const LinkSpec& the_spec, Where where)
    : run(the_run),
      spec(the_spec),
      dev(the_run.settings),
      pd(dev, where),
      scq(dev, spec.cq_depth, nullptr, nullptr, where),
      rcq(dev, spec.cq_depth, nullptr, nullptr, where),
      mem(pd, spec.bytes, spec.access, where),
      qp(pd, scq, rcq, spec.qp, where) {
  to_init(dev, qp, spec.path, where);
  peer_address = run.peer.exchange(address_of(dev, qp), where);
  remote = run.peer.exchange(Remote{mem.buffer.address(), spec.bytes, mem.mr.p->rkey, 0}, where);
  to_rtr(dev, qp, peer_address, spec.path, where);
  to_rts(dev, qp, spec.path, where);
  run.peer.barrier(where);
}

Send Link::write(std::uint64_t id, std::size_t local, std::size_t remote_offset, std::size_t bytes) const {
  return {.opcode = IBV_WR_RDMA_WRITE,
          .id = id,
          .sges = {mem.sge(local, bytes)},
          .remote_address = remote.address + remote_offset,
          .rkey = remote.rkey};
}
Send Link::read(std::uint64_t id, std::size_t local, std::size_t remote_offset, std::size_t bytes) const {
  Send out = write(id, local, remote_offset, bytes);
  out.opcode = IBV_WR_RDMA_READ;
  return out;
}
Send Link::send(std::uint64_t id, std::size_t local, std::size_t bytes) const {
  return {.id = id, .sges = {mem.sge(local, bytes)}};
}
Recv Link::recv(std::uint64_t id, std::size_t local, std::size_t bytes) const {
  return {.id = id, .sges = {mem.sge(local, bytes)}};
}

void Link::reconnect(Where where) {
  run.peer.barrier(where);
  qp.set_state(IBV_QPS_RESET, where);
  to_init(dev, qp, spec.path, where);
  run.peer.barrier(where);  // nobody sends to a QP of the old connection
  to_rtr(dev, qp, peer_address, spec.path, where);
  to_rts(dev, qp, spec.path, where);
  run.peer.barrier(where);
}

void expect_fault(Link& link, const Fault& fault, Where where) {
  const Note note("fault: ", fault.name);
  if (link.run.a()) {
    must(post(link.qp, fault.request, where), "post_send", where);
    const ibv_wc wc = link.scq.expect(fault.request.id, fault.status, where);
    if (wc.qp_num != link.qp.p->qp_num) fail_at(where, "the error completion names another QP");
    link.qp.wait_state(IBV_QPS_ERR, where);
  } else {
    const ibv_async_event event = link.dev.wait_event(fault.event, where);
    if (event.element.qp != link.qp.p) fail_at(where, "the async event names another QP");
    link.qp.wait_state(IBV_QPS_ERR, where);
  }
  link.reconnect(where);
}

Loop::Loop(Run& run, const LinkSpec& spec, Where where)
    : dev(run.settings),
      pd(dev, where),
      scq(dev, spec.cq_depth, nullptr, nullptr, where),
      rcq(dev, spec.cq_depth, nullptr, nullptr, where),
      unused(dev, spec.cq_depth, nullptr, nullptr, where),
      mem(pd, spec.bytes, spec.access, where),
      qp(pd, scq, unused, spec.qp, where),
      other(pd, unused, rcq, spec.qp, where) {
  to_init(dev, qp, spec.path, where);
  to_init(dev, other, spec.path, where);
  bring_up(dev, qp, address_of(dev, other), spec.path, where);
  bring_up(dev, other, address_of(dev, qp), spec.path, where);
}

void fill_pattern(std::span<std::byte> out, std::uint64_t seed) { Rng(seed * 0x2545f4914f6cdd1du + 1).fill(out); }

void expect_bytes(std::span<const std::byte> got, std::span<const std::byte> wanted, const char* what, Where where) {
  if (got.size() != wanted.size()) fail_at(where, text(what, ": ", got.size(), " bytes, expected ", wanted.size()));
  if (got.empty() || std::memcmp(got.data(), wanted.data(), got.size()) == 0) return;
  const auto first = std::mismatch(got.begin(), got.end(), wanted.begin()).first - got.begin();
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) wrong += got[i] != wanted[i];
  fail_at(where, text(what, ": ", wrong, " of ", got.size(), " bytes are wrong, the first at ", first, " (",
                      hex(static_cast<std::uint64_t>(got[static_cast<std::size_t>(first)])), ", expected ",
                      hex(static_cast<std::uint64_t>(wanted[static_cast<std::size_t>(first)])), ")"));
}

void Threads::start(std::function<void()> body) {
  auto thread = std::make_shared<std::thread>([body = std::move(body)] {
    try {
      body();
    } catch (const std::exception& error) {
      fail(__FILE__, __LINE__, text("a thread threw: ", error.what()));
    }
  });
  joiners_.push_back([thread] { thread->join(); });
}
void Threads::join() {
  for (auto& joiner : joiners_) joiner();
  joiners_.clear();
}

}  // namespace vrdma::conformance
