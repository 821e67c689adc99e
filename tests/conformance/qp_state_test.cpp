// The QP state machine, walked against its table as data: every pair of states, every subset of the attributes that a
// transition knows, each of them with a foreign attribute added, and seeded random masks.
#include <bit>
#include <cerrno>
#include <memory>
#include <set>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

constexpr int PK = IBV_QP_PKEY_INDEX, PT = IBV_QP_PORT, QK = IBV_QP_QKEY, AF = IBV_QP_ACCESS_FLAGS, AV = IBV_QP_AV,
              MTU = IBV_QP_PATH_MTU, DQ = IBV_QP_DEST_QPN, RP = IBV_QP_RQ_PSN, SP = IBV_QP_SQ_PSN,
              DRA = IBV_QP_MAX_DEST_RD_ATOMIC, RNT = IBV_QP_MIN_RNR_TIMER, TO = IBV_QP_TIMEOUT, RC = IBV_QP_RETRY_CNT,
              RR = IBV_QP_RNR_RETRY, QRA = IBV_QP_MAX_QP_RD_ATOMIC, AP = IBV_QP_ALT_PATH, CS = IBV_QP_CUR_STATE,
              PM = IBV_QP_PATH_MIG_STATE, EN = IBV_QP_EN_SQD_ASYNC_NOTIFY;
constexpr int every_attribute = PK | PT | QK | AF | AV | MTU | DQ | RP | SP | DRA | RNT | TO | RC | RR | QRA | AP | CS | PM | EN |
                                IBV_QP_CAP;

struct Transition {
  ibv_qp_type type;
  ibv_qp_state from, to;
  int required, optional;
};

constexpr auto Reset = IBV_QPS_RESET, Init = IBV_QPS_INIT, Rtr = IBV_QPS_RTR, Rts = IBV_QPS_RTS, Sqd = IBV_QPS_SQD,
               Sqe = IBV_QPS_SQE, Err = IBV_QPS_ERR;

constexpr Transition transitions[] = {
    {IBV_QPT_UD, Reset, Init, PK | PT | QK, 0},
    {IBV_QPT_UD, Init, Init, 0, PK | PT | QK},
    {IBV_QPT_UD, Init, Rtr, 0, PK | QK},
    {IBV_QPT_UD, Rtr, Rts, SP, CS | QK},
    {IBV_QPT_UD, Rts, Rts, 0, CS | QK},
    {IBV_QPT_UD, Rts, Sqd, 0, EN},
    {IBV_QPT_UD, Sqd, Rts, 0, CS | QK},
    {IBV_QPT_UD, Sqd, Sqd, 0, PK | QK},
    {IBV_QPT_UD, Sqe, Rts, 0, CS | QK},

    {IBV_QPT_UC, Reset, Init, PK | PT | AF, 0},
    {IBV_QPT_UC, Init, Init, 0, PK | PT | AF},
    {IBV_QPT_UC, Init, Rtr, AV | MTU | DQ | RP, AP | AF | PK},
    {IBV_QPT_UC, Rtr, Rts, SP, CS | AP | AF | PM},
    {IBV_QPT_UC, Rts, Rts, 0, CS | AF | AP | PM},
    {IBV_QPT_UC, Rts, Sqd, 0, EN},
    {IBV_QPT_UC, Sqd, Rts, 0, CS | AP | AF | PM},
    {IBV_QPT_UC, Sqd, Sqd, 0, AV | AP | AF | PK | PM},
    {IBV_QPT_UC, Sqe, Rts, 0, CS | AF},

    {IBV_QPT_RC, Reset, Init, PK | PT | AF, 0},
    {IBV_QPT_RC, Init, Init, 0, PK | PT | AF},
    {IBV_QPT_RC, Init, Rtr, AV | MTU | DQ | RP | DRA | RNT, AP | AF | PK},
    {IBV_QPT_RC, Rtr, Rts, TO | RC | RR | SP | QRA, CS | AP | AF | RNT | PM},
    {IBV_QPT_RC, Rts, Rts, 0, CS | AF | AP | PM | RNT},
    {IBV_QPT_RC, Rts, Sqd, 0, EN},
    {IBV_QPT_RC, Sqd, Rts, 0, CS | AP | AF | RNT | PM},
    {IBV_QPT_RC, Sqd, Sqd, 0, PT | AV | TO | RC | RR | QRA | DRA | AP | AF | PK | RNT | PM},
};

constexpr ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};
constexpr ibv_qp_state states[] = {Reset, Init, Rtr, Rts, Sqd, Sqe, Err};

const char* name(ibv_qp_state s) {
  constexpr const char* names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
  return s < 7 ? names[s] : "?";
}
const char* name(ibv_qp_type t) { return t == IBV_QPT_RC ? "RC" : t == IBV_QPT_UC ? "UC" : "UD"; }

const Transition* find(ibv_qp_type type, ibv_qp_state from, ibv_qp_state to) {
  for (const Transition& t : transitions) {
    if (t.type == type && t.from == from && t.to == to) return &t;
  }
  return nullptr;
}

// The rule, as the table's reader would state it.
bool is_legal(ibv_qp_type type, ibv_qp_state from, ibv_qp_state to, int mask) {
  mask &= ~IBV_QP_STATE;
  if ((mask & CS) && from != Rtr && from != Rts && from != Sqd && from != Sqe) return false;
  if (to == Reset || to == Err) return mask == 0;
  const Transition* t = find(type, from, to);
  return t && (mask & t->required) == t->required && (mask & ~(t->required | t->optional)) == 0;
}

class Walker {
 public:
  Walker(Run& run, ibv_qp_type type)
      : dev_(run.settings), pd_(dev_), cq_(dev_, 64), region_(pd_, 4096), type_(type), qp_(pd_, cq_, cq_, {.type = type}) {}

  // Attributes with good values for this moment; the mask chooses among them.
  ibv_qp_attr good_values(ibv_qp_state from, ibv_qp_state to) const {
    const Address self = address_of(dev_, qp_);
    ibv_qp_attr attr = init_of(dev_, type_).attr;
    const ibv_qp_attr rtr = rtr_of(dev_, IBV_QPT_RC, self).attr;
    const ibv_qp_attr rts = rts_of(dev_, qp_).attr;
    attr.qkey = test_qkey;
    attr.qp_access_flags = type_ == IBV_QPT_RC ? IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    attr.ah_attr = rtr.ah_attr;
    attr.path_mtu = rtr.path_mtu;
    attr.dest_qp_num = self.qpn;
    attr.rq_psn = self.psn;
    attr.max_dest_rd_atomic = rtr.max_dest_rd_atomic;
    attr.min_rnr_timer = 12;
    attr.sq_psn = rts.sq_psn;
    attr.timeout = 14;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr.max_rd_atomic = rtr.max_dest_rd_atomic;
    attr.alt_ah_attr = rtr.ah_attr;
    attr.alt_port_num = dev_.port_num;
    attr.alt_timeout = 14;
    attr.path_mig_state = IBV_MIG_MIGRATED;
    attr.cur_qp_state = from;
    attr.en_sqd_async_notify = 0;
    attr.cap = qp_.cap;
    attr.qp_state = to;
    return attr;
  }

  // Brings the QP to a state by the book; false when the type has no such state.
  bool reach(ibv_qp_state wanted) {
    if (wanted == Sqe && type_ == IBV_QPT_RC) return false;
    qp_.set_state(Reset);
    if (wanted == Reset) return true;
    if (wanted == Err) {
      qp_.set_state(Err);
      return true;
    }
    to_init(dev_, qp_);
    if (wanted == Init) return true;
    to_rtr(dev_, qp_, address_of(dev_, qp_));
    if (wanted == Rtr) return true;
    to_rts(dev_, qp_);
    if (wanted == Rts) return true;
    if (wanted == Sqd) {
      qp_.set_state(Sqd);
      return true;
    }
    // SQE: a local error of the send queue.
    std::unique_ptr<Ah> ah;
    Send bad{.id = 1, .sges = {{region_.buffer.address(), 16, region_.mr.p->lkey ^ 0x5a5a00}}};
    if (type_ == IBV_QPT_UD) {
      ah = std::make_unique<Ah>(pd_, ah_to(dev_, address_of(dev_, qp_)));
      bad.ah = *ah;
      bad.qpn = qp_.p->qp_num;
      bad.qkey = test_qkey;
    }
    EXPECT_OK(post(qp_, bad));
    cq_.expect(1, IBV_WC_LOC_PROT_ERR);
    qp_.wait_state(Sqe);
    return true;
  }

  // One modify from the QP's present state. Keeps the QP in `from` when the answer allows that.
  // Returns true when the QP has left `from`.
  bool attempt(ibv_qp_state from, ibv_qp_state to, int mask) {
    ibv_qp_attr attr = good_values(from, to);
    const bool legal = is_legal(type_, from, to, mask);
    const int rc = ibv_modify_qp(qp_, &attr, mask | IBV_QP_STATE);
    // Without automatic path migration a device may refuse these two where the table has them.
    const bool may_refuse = (mask & (AP | PM)) && !(dev_.attr.device_cap_flags & IBV_DEVICE_AUTO_PATH_MIG);
    if (legal && rc != 0 && may_refuse) {
      EXPECT(rc == EINVAL || rc == EOPNOTSUPP);
    } else {
      EXPECT_ERRNO(rc, legal ? 0 : EINVAL);
    }
    const ibv_qp_state expected = rc == 0 ? to : from;
    EXPECT_EQ(qp_.p->state, expected);
    if (rc == 0 || ++refusals_ % 16 == 0) EXPECT_EQ(qp_.state(), expected);
    return rc == 0 && to != from;
  }

  void walk(ibv_qp_state from, ibv_qp_state to, Rng& rng) {
    std::vector<int> masks;
    const Transition* t = find(type_, from, to);
    if (t) {
      const int known = t->required | t->optional;
      for (int subset = known;; subset = (subset - 1) & known) {
        masks.push_back(subset);
        if (subset == 0) break;
      }
    } else {
      masks.push_back(0);
      // What other transitions require must not make this one legal.
      for (const Transition& other : transitions) {
        if (other.type == type_) masks.push_back(other.required);
      }
    }
    std::vector<int> foreign;
    for (const int mask : masks) {
      const int outside = every_attribute & ~(t ? t->required | t->optional : 0) & ~mask;
      int pick = static_cast<int>(rng.below(static_cast<std::uint64_t>(std::popcount(static_cast<unsigned>(outside)))));
      for (int bit = 1; bit <= every_attribute; bit <<= 1) {
        if ((outside & bit) && pick-- == 0) foreign.push_back(mask | bit);
      }
    }
    masks.insert(masks.end(), foreign.begin(), foreign.end());
    for (int bit = 1; bit <= every_attribute; bit <<= 1) {  // each single attribute beside the required ones
      if (every_attribute & bit) masks.push_back((t ? t->required : 0) | bit);
    }
    for (int i = 0; i < 64; ++i) masks.push_back(static_cast<int>(rng.next()) & every_attribute);
    EXPECT(reach(from));
    for (const int mask : masks) {
      const Note note(name(type_), " ", name(from), " to ", name(to), " with mask ", hex(static_cast<unsigned>(mask)));
      if (attempt(from, to, mask)) EXPECT(reach(from));
    }
  }

  Device dev_;
  Pd pd_;
  Cq cq_;
  Region region_;
  ibv_qp_type type_;
  Qp qp_;
  unsigned refusals_ = 0;
};

void walk_type(Run& run, ibv_qp_type type) {
  Walker walker(run, type);
  for (const ibv_qp_state from : states) {
    if (from == Sqe && type == IBV_QPT_RC) continue;
    for (const ibv_qp_state to : states) walker.walk(from, to, run.rng);
  }
}

}  // namespace

CONFORMANCE(EveryRcTransitionFollowsTheTable, "QP-01 QP-02 QP-03 QP-04 QP-05 QP-06 QP-07", .solo = true, .timeout_s = 180) {
  walk_type(run, IBV_QPT_RC);
}
CONFORMANCE(EveryUcTransitionFollowsTheTable, "QP-01 QP-02 QP-03 QP-04 QP-05 QP-06 QP-07", .solo = true, .timeout_s = 180) {
  walk_type(run, IBV_QPT_UC);
}
CONFORMANCE(EveryUdTransitionFollowsTheTable, "QP-01 QP-02 QP-03 QP-04 QP-05 QP-06 QP-07", .solo = true, .timeout_s = 180) {
  walk_type(run, IBV_QPT_UD);
}

CONFORMANCE(AttributeValuesOutOfRangeAreRefused, "QP-08 QP-17", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 16);
  Qp qp(pd, cq, cq);
  const Address self = address_of(dev, qp);
  const auto refused = [&](const char* what, Modify m, auto change) {
    const Note note(what);
    const ibv_qp_state before = qp.state();
    change(m.attr);
    EXPECT_ERRNO(apply(qp, m), EINVAL);
    EXPECT_EQ(qp.state(), before);
  };
  const Modify init = init_of(dev, IBV_QPT_RC);
  refused("port 0", init, [](auto& a) { a.port_num = 0; });
  refused("port beyond the last", init, [&](auto& a) { a.port_num = static_cast<std::uint8_t>(dev.attr.phys_port_cnt + 1); });
  refused("pkey_index", init, [&](auto& a) { a.pkey_index = dev.port.pkey_tbl_len; });
  to_init(dev, qp);
  const Modify rtr = rtr_of(dev, IBV_QPT_RC, self);
  refused("path_mtu 0", rtr, [](auto& a) { a.path_mtu = static_cast<ibv_mtu>(0); });
  refused("path_mtu beyond the port's", rtr, [&](auto& a) { a.path_mtu = static_cast<ibv_mtu>(dev.port.max_mtu + 1); });
  if (dev.attr.max_qp_rd_atom < 255) {
    refused("max_dest_rd_atomic", rtr, [&](auto& a) { a.max_dest_rd_atomic = static_cast<std::uint8_t>(dev.attr.max_qp_rd_atom + 1); });
  }
  refused("sgid_index out of range", rtr, [&](auto& a) {
    a.ah_attr.is_global = 1;
    a.ah_attr.grh.dgid = dev.gid;
    a.ah_attr.grh.sgid_index = 255;
  });
  if (dev.ethernet()) {
    refused("not global on Ethernet", rtr, [](auto& a) { a.ah_attr.is_global = 0; });
    for (int i = 0; i < dev.port.gid_tbl_len && i < 255; ++i) {
      ibv_gid_entry entry{};
      if (ibv_query_gid_ex(dev.ctx, dev.port_num, static_cast<std::uint32_t>(i), &entry, 0) == ENODATA) {
        refused("an empty GID index", rtr, [&](auto& a) { a.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(i); });
        break;
      }
    }
    Modify with_alternate = rtr;
    with_alternate.mask |= IBV_QP_ALT_PATH;
    refused("an alternate path on Ethernet", with_alternate, [&](auto& a) {
      a.alt_ah_attr = a.ah_attr;
      a.alt_port_num = dev.port_num;
    });
  }
  refused("port of the address vector", rtr, [](auto& a) { a.ah_attr.port_num = 200; });
  to_rtr(dev, qp, self);
  const Modify rts = rts_of(dev, qp);
  refused("timeout 32", rts, [](auto& a) { a.timeout = 32; });
  if (dev.attr.max_qp_init_rd_atom < 255) {
    refused("max_rd_atomic", rts, [&](auto& a) { a.max_rd_atomic = static_cast<std::uint8_t>(dev.attr.max_qp_init_rd_atom + 1); });
  }
  to_rts(dev, qp);
}

CONFORMANCE(PsnsAreTakenModulo24Bits, "QP-09") {
  LinkSpec spec;
  Link link(run, spec);
  run.peer.barrier();
  link.qp.set_state(IBV_QPS_RESET);
  to_init(link.dev, link.qp);
  run.peer.barrier();
  // The same PSN, written with other high bits on either side, close to the wrap.
  Modify rtr = rtr_of(link.dev, IBV_QPT_RC, link.peer_address);
  rtr.attr.rq_psn = run.a() ? 0x01fffffe : 0xabfffffe;
  EXPECT_OK(apply(link.qp, rtr));
  Modify rts = rts_of(link.dev, link.qp);
  rts.attr.sq_psn = run.a() ? 0x7ffffffe : 0x00fffffe;
  EXPECT_OK(apply(link.qp, rts));
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  EXPECT_OK(ibv_query_qp(link.qp, &attr, IBV_QP_SQ_PSN | IBV_QP_RQ_PSN, &init));
  EXPECT_EQ(attr.sq_psn & ~0xffffffu, 0u);
  for (std::uint64_t i = 0; i < 8; ++i) EXPECT_OK(post(link.qp, link.recv(i, 0, 64)));
  run.peer.barrier();
  for (std::uint64_t i = 0; i < 8; ++i) EXPECT_OK(post(link.qp, link.send(100 + i, 1024, 64)));
  for (std::uint64_t i = 0; i < 8; ++i) link.scq.expect(100 + i);
  for (std::uint64_t i = 0; i < 8; ++i) link.rcq.expect(i);
  run.peer.barrier();
}

CONFORMANCE(CapacitiesBeyondTheDeviceAreRefused, "QP-10", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 16);
  for (const ibv_qp_type type : types) {
    const Note note(name(type));
    const auto refused = [&](auto change) {
      ibv_qp_init_attr init = init_attr(cq, cq, {.type = type});
      change(init.cap);
      EXPECT_NULL(ibv_create_qp(pd, &init), EINVAL);
    };
    refused([&](auto& c) { c.max_send_wr = static_cast<std::uint32_t>(dev.attr.max_qp_wr) + 1; });
    refused([&](auto& c) { c.max_recv_wr = static_cast<std::uint32_t>(dev.attr.max_qp_wr) + 1; });
    refused([&](auto& c) { c.max_send_sge = static_cast<std::uint32_t>(dev.attr.max_sge) + 1; });
    refused([&](auto& c) { c.max_recv_sge = static_cast<std::uint32_t>(dev.attr.max_sge) + 1; });
    refused([&](auto& c) { c.max_inline_data = 1u << 24; });
    refused([&](auto& c) { c.max_send_wr = ~0u; });
  }
}

CONFORMANCE(CapacitiesWrittenBackAreAtLeastThoseAskedFor, "QP-11 QRY-09", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq send_cq(dev, 16);
  Cq recv_cq(dev, 16);
  Srq srq(pd, 16);
  int context = 0;
  for (const ibv_qp_type type : types) {
    for (const bool with_srq : {false, true}) {
      for (int i = 0; i < 10; ++i) {
        QpSpec spec{.type = type, .sig_all = run.rng.one_in(2)};
        spec.send_wr = static_cast<std::uint32_t>(run.rng.between(1, 300));
        spec.recv_wr = static_cast<std::uint32_t>(run.rng.between(1, 300));
        spec.send_sge = static_cast<std::uint32_t>(run.rng.between(1, static_cast<std::uint64_t>(std::min(dev.attr.max_sge, 8))));
        spec.recv_sge = static_cast<std::uint32_t>(run.rng.between(1, static_cast<std::uint64_t>(std::min(dev.attr.max_sge, 8))));
        spec.inline_bytes = static_cast<std::uint32_t>(run.rng.between(0, 64));
        spec.srq = with_srq ? srq.p : nullptr;
        const Note note(name(type), with_srq ? " with SRQ" : "", " #", i);
        ibv_qp_init_attr init = init_attr(send_cq, recv_cq, spec);
        init.qp_context = &context;
        init.cap.max_recv_wr = spec.recv_wr;  // with an SRQ ignored, and written back as 0
        init.cap.max_recv_sge = spec.recv_sge;
        ibv_qp* qp = ibv_create_qp(pd, &init);
        EXPECT(qp != nullptr);
        EXPECT_GE(init.cap.max_send_wr, spec.send_wr);
        EXPECT_GE(init.cap.max_send_sge, spec.send_sge);
        EXPECT_GE(init.cap.max_inline_data, spec.inline_bytes);
        if (with_srq) {
          EXPECT_EQ(init.cap.max_recv_wr, 0u);
          EXPECT_EQ(init.cap.max_recv_sge, 0u);
        } else {
          EXPECT_GE(init.cap.max_recv_wr, spec.recv_wr);
          EXPECT_GE(init.cap.max_recv_sge, spec.recv_sge);
        }
        ibv_qp_attr attr{};
        ibv_qp_init_attr queried{};
        EXPECT_OK(ibv_query_qp(qp, &attr, IBV_QP_CAP, &queried));
        EXPECT_EQ(attr.cap.max_send_wr, init.cap.max_send_wr);
        EXPECT_EQ(attr.cap.max_recv_wr, init.cap.max_recv_wr);
        EXPECT_EQ(attr.cap.max_send_sge, init.cap.max_send_sge);
        EXPECT_EQ(attr.cap.max_recv_sge, init.cap.max_recv_sge);
        EXPECT_EQ(attr.cap.max_inline_data, init.cap.max_inline_data);
        EXPECT_EQ(queried.cap.max_send_wr, init.cap.max_send_wr);
        EXPECT(queried.send_cq == send_cq.p && queried.recv_cq == recv_cq.p && queried.srq == spec.srq);
        EXPECT(queried.qp_context == &context && qp->qp_context == &context);
        EXPECT_EQ(queried.qp_type, type);
        EXPECT_EQ(queried.sq_sig_all, spec.sig_all ? 1 : 0);
        EXPECT_EQ(attr.qp_state, IBV_QPS_RESET);
        EXPECT_OK(ibv_destroy_qp(qp));
      }
    }
  }
}

CONFORMANCE(QueryQpReturnsWhatWasSetAndItCanBeFedBack, "QRY-09 QRY-10 QRY-11 QP-14", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 16);
  Qp qp(pd, cq, cq);
  const Address self = address_of(dev, qp);
  Path path;
  path.timeout = 17;
  path.retry_count = 5;
  path.rnr_retry = 6;
  path.min_rnr_timer = 21;
  path.rd_atomic = 1;
  path.dest_rd_atomic = 1;
  path.access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  bring_up(dev, qp, self, path);
  EXPECT_EQ(qp.p->state, IBV_QPS_RTS);
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  EXPECT_OK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));  // the mask is a hint: all comes back
  const auto check = [&] {
    EXPECT_EQ(attr.qp_state, IBV_QPS_RTS);
    EXPECT_EQ(attr.timeout, 17);
    EXPECT_EQ(attr.retry_cnt, 5);
    EXPECT_EQ(attr.rnr_retry, 6);
    EXPECT_EQ(attr.min_rnr_timer, 21);
    EXPECT_EQ(attr.max_rd_atomic, 1);
    EXPECT_EQ(attr.max_dest_rd_atomic, 1);
    EXPECT_EQ(attr.qp_access_flags & (IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC),
              static_cast<unsigned>(IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE));
    EXPECT_EQ(attr.dest_qp_num, self.qpn);
    EXPECT_EQ(attr.rq_psn, self.psn);
    EXPECT_EQ(attr.port_num, dev.port_num);
    EXPECT_EQ(attr.pkey_index, 0);
    EXPECT_EQ(attr.path_mtu, dev.port.active_mtu);
    EXPECT_EQ(attr.ah_attr.port_num, dev.port_num);
    EXPECT_EQ(attr.ah_attr.is_global, dev.by_gid() ? 1 : 0);
    if (!dev.by_gid()) EXPECT_EQ(attr.ah_attr.dlid, self.lid);
  };
  check();
  // RESET, then the queried attributes once more.
  const ibv_qp_attr kept = attr;
  qp.set_state(IBV_QPS_RESET);
  EXPECT_OK(ibv_query_qp(qp, &attr, 0, &init));
  EXPECT_EQ(attr.qp_state, IBV_QPS_RESET);
  EXPECT_EQ(attr.dest_qp_num, 0u);
  EXPECT_EQ(attr.timeout, 0);
  EXPECT_EQ(attr.cap.max_send_wr, kept.cap.max_send_wr);
  const auto feed = [&](const Modify& like, ibv_qp_state to) {
    ibv_qp_attr again = kept;
    again.qp_state = to;
    EXPECT_OK(ibv_modify_qp(qp, &again, like.mask));
  };
  feed(init_of(dev, IBV_QPT_RC), IBV_QPS_INIT);
  feed(rtr_of(dev, IBV_QPT_RC, self), IBV_QPS_RTR);
  feed(rts_of(dev, qp), IBV_QPS_RTS);
  EXPECT_OK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
  check();
  EXPECT_EQ(attr.sq_psn, kept.sq_psn);
}

CONFORMANCE(CompletionsVanishWithResetAndDestroy, "QP-14 QP-18") {
  Link link(run);
  Qp second(link.pd, link.scq, link.rcq);
  to_init(link.dev, second);
  const Address theirs = run.peer.exchange(address_of(link.dev, second));
  bring_up(link.dev, second, theirs);
  run.peer.barrier();
  for (const bool destroy : {false, true}) {
    const Note note(destroy ? "destroy" : "reset");
    for (std::uint64_t i = 0; i < 5; ++i) EXPECT_OK(post(link.qp, link.recv(10 + i, 0, 64)));
    for (std::uint64_t i = 0; i < 5; ++i) EXPECT_OK(post(second, link.recv(20 + i, 0, 64)));
    run.peer.barrier();
    for (std::uint64_t i = 0; i < 5; ++i) {
      EXPECT_OK(post(second, link.send(200 + i, 1024, 8)));
      EXPECT_OK(post(link.qp, link.send(100 + i, 1024, 8)));
    }
    // Everything of link.qp has arrived once the other queue's last message has, plus one write that is polled for.
    volatile std::byte* flag = link.mem.data(4096);
    *flag = std::byte{0};
    run.peer.barrier();
    *link.mem.data(5000) = std::byte{1};
    EXPECT_OK(post(link.qp, [&] {
      Send w = link.write(105, 5000, 4096, 1);
      w.flags = 0;
      return w;
    }()));
    wait_until("the flag", [&] { return *flag == std::byte{1}; });
    std::uint64_t seen = 0;
    if (destroy) {
      run.peer.barrier();
      link.qp.destroy();
    } else {
      run.peer.barrier();
      link.qp.set_state(IBV_QPS_RESET);
    }
    // Only the second QP's completions are left, all ten of them.
    wait_until("the completions of the other QP", [&] {
      ibv_wc wc{};
      for (ibv_cq* cq : {link.scq.p, link.rcq.p}) {
        while (ibv_poll_cq(cq, 1, &wc) == 1) {
          EXPECT_EQ(wc.qp_num, second.p->qp_num);
          EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
          ++seen;
        }
      }
      return seen == 10;
    });
    link.scq.expect_empty();
    link.rcq.expect_empty();
    run.peer.barrier();
    if (!destroy) link.reconnect();
  }
  run.peer.barrier();
}

CONFORMANCE(SqdHoldsRequestsBackAndReportsDraining, "QP-16") {
  Link link(run);
  if (run.b()) {
    for (std::uint64_t i = 0; i < 3; ++i) EXPECT_OK(post(link.qp, link.recv(i, 0, 64)));
  }
  run.peer.barrier();
  if (run.a()) {
    Modify sqd;
    sqd.attr.qp_state = IBV_QPS_SQD;
    sqd.attr.en_sqd_async_notify = 1;
    sqd.mask = IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY;
    EXPECT_OK(apply(link.qp, sqd));
    EXPECT(link.dev.wait_event(IBV_EVENT_SQ_DRAINED).element.qp == link.qp.p);
    for (std::uint64_t i = 0; i < 3; ++i) EXPECT_OK(post(link.qp, link.send(10 + i, 0, 16)));
    holds_for(0.05, "nothing completes in SQD", [&] {
      link.scq.expect_empty();
      return true;
    });
    run.peer.barrier();  // b has looked
    run.peer.barrier();
    link.qp.set_state(IBV_QPS_RTS);
    for (std::uint64_t i = 0; i < 3; ++i) link.scq.expect(10 + i);
  } else {
    run.peer.barrier();
    link.rcq.expect_empty();
    run.peer.barrier();
    for (std::uint64_t i = 0; i < 3; ++i) link.rcq.expect(i);
  }
  run.peer.barrier();
}

}  // namespace vrdma::conformance
