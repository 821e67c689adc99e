// A provider with one defect, to prove that the suite would notice it: preloaded before any libibverbs, it passes every call
// on and spoils one thing, named by CONFORMANCE_SABOTAGE. mutations.txt names the test that must notice it, mutation.sh checks.
// Test tool only. Works over any provider, since it touches nothing but the public API.
#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

// After the wrappers of the header, the plain symbols are wanted here.
#include <infiniband/verbs.h>
#undef ibv_reg_mr
#undef ibv_query_port

namespace {

bool is(const char* name) {
  static const char* const wanted = std::getenv("CONFORMANCE_SABOTAGE");
  return wanted && std::strcmp(wanted, name) == 0;
}

template <class F>
F next(const char* name, const char* version) {
  void* symbol = ::dlvsym(RTLD_NEXT, name, version);
  if (!symbol) ::abort();
  return reinterpret_cast<F>(symbol);
}

ibv_context_ops real;
std::once_flag once;

// --- the data path

int poll_cq(ibv_cq* cq, int count, ibv_wc* wc) {
  static std::mutex mutex;
  static std::map<ibv_cq*, std::vector<ibv_wc>> held;
  static std::uint64_t polled = 0;
  int n = real.poll_cq(cq, count, wc);
  const std::lock_guard lock(mutex);
  for (int i = 0; i < n; ++i) {
    ibv_wc& c = wc[i];
    const bool receive = c.status == IBV_WC_SUCCESS && (c.opcode & IBV_WC_RECV);
    ++polled;
    if (is("recv-length-off-by-one") && receive) ++c.byte_len;
    if (is("immediate-byte-swapped") && receive && (c.wc_flags & IBV_WC_WITH_IMM)) c.imm_data = __builtin_bswap32(c.imm_data);
    if (is("immediate-flag-missing")) c.wc_flags &= ~static_cast<unsigned>(IBV_WC_WITH_IMM);
    if (is("grh-flag-missing")) c.wc_flags &= ~static_cast<unsigned>(IBV_WC_GRH);
    if (is("source-qp-missing")) c.src_qp = 0;
    if (is("write-imm-opcode-recv") && receive) c.opcode = IBV_WC_RECV;
    if (is("qp-num-missing-on-error") && c.status != IBV_WC_SUCCESS) c.qp_num = 0;
    if (is("invalid-request-as-access-error") && c.status == IBV_WC_REM_INV_REQ_ERR) c.status = IBV_WC_REM_ACCESS_ERR;
    if (is("operation-error-as-access-error") && c.status == IBV_WC_REM_OP_ERR) c.status = IBV_WC_REM_ACCESS_ERR;
    if (is("length-error-as-protection-error") && c.status == IBV_WC_LOC_LEN_ERR) c.status = IBV_WC_LOC_PROT_ERR;
    if (is("rnr-as-retry-exceeded") && c.status == IBV_WC_RNR_RETRY_EXC_ERR) c.status = IBV_WC_RETRY_EXC_ERR;
    if (is("flush-as-general-error") && c.status == IBV_WC_WR_FLUSH_ERR) c.status = IBV_WC_GENERAL_ERR;
  }
  if (is("completion-lost") && n == 1 && polled % 500 == 499) n = 0;
  if (is("flush-completion-lost") && n == 1 && wc[0].status == IBV_WC_WR_FLUSH_ERR && polled % 7 == 6) n = 0;
  if (is("completion-doubled") && n == 1) {
    auto& kept = held[cq];
    if (polled % 500 == 499) kept.push_back(wc[0]);
  } else if (is("completion-doubled") && n == 0 && count > 0) {
    auto& kept = held[cq];
    if (!kept.empty()) {
      wc[0] = kept.back();
      kept.pop_back();
      n = 1;
    }
  }
  if (is("completions-swapped")) {
    // One is kept back until the next has been given (or, so that nothing hangs, a while).
    static std::map<ibv_cq*, int> patience;
    auto& kept = held[cq];
    if (n > 1) {
      std::swap(wc[0], wc[1]);
    } else if (n == 1 && kept.empty() && polled % 50 == 49) {
      kept.push_back(wc[0]);
      patience[cq] = 1000;
      n = 0;
    } else if (n == 1 && !kept.empty()) {
      patience[cq] = 0;
    } else if (n == 0 && count > 0 && !kept.empty() && --patience[cq] <= 0) {
      wc[0] = kept.back();
      kept.pop_back();
      n = 1;
    }
  }
  return n;
}

int post_send(ibv_qp* qp, ibv_send_wr* first, ibv_send_wr** bad) {
  // Spoiled copies are posted one by one, so that bad_wr can be told in the caller's terms.
  static std::atomic<std::uint64_t> posted{0};
  for (ibv_send_wr* wr = first; wr; wr = wr->next) {
    ibv_send_wr copy = *wr;
    copy.next = nullptr;
    std::vector<ibv_sge> sges(wr->sg_list, wr->sg_list + (wr->num_sge > 0 ? wr->num_sge : 0));
    copy.sg_list = sges.data();
    std::uint64_t total = 0;
    for (const ibv_sge& s : sges) total += s.length;
    ++posted;
    const bool is_write = wr->opcode == IBV_WR_RDMA_WRITE || wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    if (is("everything-signalled")) copy.send_flags |= IBV_SEND_SIGNALED;
    if (is("solicited-ignored")) copy.send_flags &= ~static_cast<unsigned>(IBV_SEND_SOLICITED);
    if (is("everything-solicited")) copy.send_flags |= IBV_SEND_SOLICITED;
    if (is("inline-not-copied")) copy.send_flags &= ~static_cast<unsigned>(IBV_SEND_INLINE);
    if (is("write-shifted-by-one") && is_write && total == 4097) copy.wr.rdma.remote_addr += 1;
    if (is("last-byte-missing") && total > 60'000 && !sges.empty() && sges.back().length > 1) --sges.back().length;
    if (is("last-sge-missing") && sges.size() == 7) --copy.num_sge;
    if (is("fetch-add-adds-twice") && wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD && posted % 64 == 63) copy.wr.atomic.compare_add *= 2;
    if (is("qkey-ignored") && qp->qp_type == IBV_QPT_UD) copy.wr.ud.remote_qkey = 0x80000000;
    ibv_send_wr* ours = nullptr;
    int rc = real.post_send(qp, &copy, &ours);
    if (rc == ENOMEM && is("full-queue-as-einval")) rc = EINVAL;
    if (rc == EINVAL && is("bad-state-as-enomem")) rc = ENOMEM;
    if (rc != 0) {
      *bad = is("bad-wr-is-first") ? first : is("bad-wr-missing") ? nullptr : wr;
      return rc;
    }
  }
  return 0;
}

int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  int rc = real.post_recv(qp, wr, bad);
  if (rc == ENOMEM && is("full-receive-queue-as-einval")) rc = EINVAL;
  if (rc != 0 && is("receive-bad-wr-is-first")) *bad = wr;
  return rc;
}

int req_notify_cq(ibv_cq* cq, int solicited_only) {
  if (is("arming-ignored")) return 0;
  if (is("solicited-arming-is-any")) solicited_only = 0;
  return real.req_notify_cq(cq, solicited_only);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

ibv_context* ibv_open_device(ibv_device* device) {
  static const auto call = next<ibv_context* (*)(ibv_device*)>("ibv_open_device", "IBVERBS_1.1");
  ibv_context* context = call(device);
  if (!context) return nullptr;
  std::call_once(once, [&] { real = context->ops; });
  context->ops.poll_cq = poll_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.req_notify_cq = req_notify_cq;
  if (verbs_context* const extended = verbs_get_ctx_op(context, alloc_parent_domain)) {
    if (is("parent-domain-of-its-own"))
      extended->alloc_parent_domain = [](ibv_context* of, ibv_parent_domain_init_attr*) { return ibv_alloc_pd(of); };
    if (is("thread-domain-never-busy")) extended->dealloc_td = [](ibv_td*) { return 0; };
  }
  return context;
}

int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  static const auto call = next<int (*)(ibv_qp*, ibv_qp_attr*, int)>("ibv_modify_qp", "IBVERBS_1.1");
  ibv_qp_attr copy = *attr;
  if (is("rnr-retries-for-ever") && (mask & IBV_QP_RNR_RETRY)) copy.rnr_retry = 7;
  if (is("rnr-seven-is-seven") && (mask & IBV_QP_RNR_RETRY) && copy.rnr_retry == 7) copy.rnr_retry = 6;
  if (is("rnr-timer-too-short") && (mask & IBV_QP_MIN_RNR_TIMER)) copy.min_rnr_timer = 1;
  if (is("timeout-too-short") && (mask & IBV_QP_TIMEOUT) && copy.timeout) copy.timeout = 8;
  if (is("timeout-zero-is-finite") && (mask & IBV_QP_TIMEOUT) && !copy.timeout) copy.timeout = 14;
  if (is("qp-access-ignored") && (mask & IBV_QP_ACCESS_FLAGS)) {
    copy.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  }
  if (is("foreign-attribute-accepted")) mask &= ~IBV_QP_CAP;
  if (is("port-zero-accepted") && (mask & IBV_QP_PORT) && copy.port_num == 0) copy.port_num = 1;
  int rc = call(qp, &copy, mask);
  if (is("sqd-skipped") && rc == 0 && copy.qp_state == IBV_QPS_SQD && !(mask & ~(IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY))) {
    ibv_qp_attr back{};
    back.qp_state = IBV_QPS_RTS;
    (void)call(qp, &back, IBV_QP_STATE);
  }
  if (is("illegal-transition-as-success") && rc == EINVAL) rc = 0;
  if (is("illegal-transition-as-enotsup") && rc == EINVAL) rc = EOPNOTSUPP;
  return rc;
}

int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) {
  static const auto call = next<int (*)(ibv_qp*, ibv_qp_attr*, int, ibv_qp_init_attr*)>("ibv_query_qp", "IBVERBS_1.1");
  const int rc = call(qp, attr, mask, init);
  if (is("query-qp-forgets-timeout")) attr->timeout = 0;
  if (is("query-qp-forgets-caps")) attr->cap = {};
  if (is("query-qp-forgets-context")) init->qp_context = nullptr;
  return rc;
}

ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
  static const auto call = next<ibv_qp* (*)(ibv_pd*, ibv_qp_init_attr*)>("ibv_create_qp", "IBVERBS_1.1");
  ibv_qp_init_attr copy = *init;
  if (is("capacity-clamped") && copy.cap.max_send_sge > 30) copy.cap.max_send_sge = 30;
  if (is("sq-sig-all-ignored")) copy.sq_sig_all = 0;
  ibv_qp* qp = call(pd, &copy);
  if (!is("capacity-not-written-back")) init->cap = copy.cap;
  return qp;
}

// Registrations of about 10 000 bytes only: those of the bounds test, whose surroundings are mapped.
void spoil_registration(std::uint64_t& address, std::size_t& length, std::uint64_t& iova, unsigned& access) {
  if (is("mr-rights-ignored") && (access & IBV_ACCESS_LOCAL_WRITE)) access |= 15;
  if (is("write-without-local-write-accepted") && (access & 10)) access |= 1;
  if (is("mr-bounds-rounded-to-pages") && length > 10'000 && length < 10'020) {
    const std::uint64_t end = (address + length + 4095) & ~std::uint64_t{4095};
    iova -= address & 4095;
    address &= ~std::uint64_t{4095};
    length = end - address;
  }
}

ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, std::size_t length, int access) {
  static const auto call = next<ibv_mr* (*)(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr", "IBVERBS_1.1");
  auto at = reinterpret_cast<std::uint64_t>(address);
  std::uint64_t iova = at;
  auto flags = static_cast<unsigned>(access);
  spoil_registration(at, length, iova, flags);
  return call(pd, reinterpret_cast<void*>(at), length, static_cast<int>(flags));
}

ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, std::size_t length, std::uint64_t iova, unsigned access) {
  static const auto call =
      next<ibv_mr* (*)(ibv_pd*, void*, std::size_t, std::uint64_t, unsigned)>("ibv_reg_mr_iova2", "IBVERBS_1.8");
  auto at = reinterpret_cast<std::uint64_t>(address);
  spoil_registration(at, length, iova, access);
  return call(pd, reinterpret_cast<void*>(at), length, iova, access);
}

int ibv_dereg_mr(ibv_mr* mr) {
  static const auto call = next<int (*)(ibv_mr*)>("ibv_dereg_mr", "IBVERBS_1.1");
  if (is("dereg-does-nothing")) return 0;
  return call(mr);
}

int ibv_destroy_cq(ibv_cq* cq) {
  static const auto call = next<int (*)(ibv_cq*)>("ibv_destroy_cq", "IBVERBS_1.1");
  if (is("destroy-cq-does-not-wait")) cq->comp_events_completed = ~0u;
  return call(cq);
}

int ibv_dealloc_pd(ibv_pd* pd) {
  static const auto call = next<int (*)(ibv_pd*)>("ibv_dealloc_pd", "IBVERBS_1.1");
  const int rc = call(pd);
  return rc == EBUSY && is("busy-as-einval") ? EINVAL : rc;
}

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  static const auto call = next<int (*)(ibv_context*, ibv_async_event*)>("ibv_get_async_event", "IBVERBS_1.1");
  static const auto acknowledge = next<void (*)(ibv_async_event*)>("ibv_ack_async_event", "IBVERBS_1.1");
  int rc = call(context, event);
  const auto lost = [&](ibv_event_type type, const char* name) {
    while (rc == 0 && event->event_type == type && is(name)) {
      acknowledge(event);
      rc = call(context, event);
    }
  };
  lost(IBV_EVENT_SRQ_LIMIT_REACHED, "limit-event-lost");
  lost(IBV_EVENT_QP_LAST_WQE_REACHED, "last-wqe-event-lost");
  lost(IBV_EVENT_COMM_EST, "comm-est-lost");
  lost(IBV_EVENT_CQ_ERR, "cq-err-lost");
  lost(IBV_EVENT_SQ_DRAINED, "drained-event-lost");
  if (rc == 0 && is("access-event-as-request-event") && event->event_type == IBV_EVENT_QP_ACCESS_ERR) {
    event->event_type = IBV_EVENT_QP_REQ_ERR;
  }
  return rc;
}

int ibv_query_gid(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) {
  static const auto call = next<int (*)(ibv_context*, std::uint8_t, int, ibv_gid*)>("ibv_query_gid", "IBVERBS_1.1");
  const int rc = call(context, port, index, gid);
  const ibv_gid zero{};
  return rc == 0 && std::memcmp(gid, &zero, 16) == 0 && is("empty-gid-is-an-error") ? -1 : rc;
}

int ibv_attach_mcast(ibv_qp* qp, const ibv_gid* gid, std::uint16_t lid) {
  static const auto call = next<int (*)(ibv_qp*, const ibv_gid*, std::uint16_t)>("ibv_attach_mcast", "IBVERBS_1.1");
  if (is("multicast-takes-any-gid") && gid->raw[0] != 0xff) return 0;
  return call(qp, gid, lid);
}

int ibv_resize_cq(ibv_cq* cq, int cqe) {
  static const auto call = next<int (*)(ibv_cq*, int)>("ibv_resize_cq", "IBVERBS_1.1");
  return is("resize-does-nothing") ? 0 : call(cq, cqe);
}

int ibv_modify_srq(ibv_srq* srq, ibv_srq_attr* attr, int mask) {
  static const auto call = next<int (*)(ibv_srq*, ibv_srq_attr*, int)>("ibv_modify_srq", "IBVERBS_1.1");
  ibv_srq_attr copy = *attr;
  if (is("srq-limit-off-by-one") && (mask & IBV_SRQ_LIMIT) && copy.srq_limit) ++copy.srq_limit;
  return call(srq, &copy, mask);
}

}  // extern "C"
#pragma GCC visibility pop
