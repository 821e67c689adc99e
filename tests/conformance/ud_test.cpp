// UC and UD: what is dropped and what is not, Q_Keys, GRH, address handles, multicast.
#include <arpa/inet.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

// What an address with a GRH asks for, and the receiver finds.
constexpr std::uint8_t some_hop_limit = 9, some_traffic_class = 0xb4, some_sl = 3;
constexpr std::uint32_t some_flow_label = 0xa5c3e;

// One UD QP on each side, and an address handle to the other.
struct Datagrams {
  explicit Datagrams(Run& the_run, bool global = false, std::uint32_t qkey = test_qkey)
      : run(the_run), dev(run.settings), pd(dev), scq(dev, 256), rcq(dev, 256), mem(pd, 128 * 1024),
        qp(pd, scq, rcq, {.type = IBV_QPT_UD, .inline_bytes = 32}) {
    Path path;
    path.qkey = qkey;
    bring_up(dev, qp, {}, path);
    theirs = run.peer.exchange(address_of(dev, qp));
    ibv_ah_attr attr = ah_to(dev, theirs);
    if (global && !attr.is_global) {
      attr.is_global = 1;
      attr.grh.dgid = theirs.gid;
      attr.grh.sgid_index = 0;
    }
    if (global) {
      attr.grh.hop_limit = some_hop_limit;
      attr.grh.traffic_class = some_traffic_class;
      attr.grh.flow_label = some_flow_label;
      attr.sl = some_sl;
    }
    ah = std::make_unique<Ah>(pd, attr);
    run.peer.barrier();
  }
  Send datagram(std::uint64_t id, std::size_t offset, std::size_t bytes) const {
    return {.id = id, .sges = {mem.sge(offset, bytes)}, .ah = *ah, .qpn = theirs.qpn, .qkey = test_qkey};
  }
  // A request that is sent on its way and completes here, whatever becomes of it there.
  void send(const Send& s) {
    EXPECT_OK(post(qp, s));
    scq.expect(s.id);
  }
  Run& run;
  Device dev;
  Pd pd;
  Cq scq;
  Cq rcq;
  Region mem;
  Qp qp;
  Address theirs{};
  std::unique_ptr<Ah> ah;
};

ibv_gid group_gid(std::uint8_t last) {
  ibv_gid gid{};
  gid.raw[0] = 0xff;
  gid.raw[1] = 0x12;
  gid.raw[14] = 0x33;
  gid.raw[15] = last;
  return gid;
}
// ::ffff:first.1.2.last, which RoCE v2 has for IPv4 addresses.
ibv_gid ipv4_gid(std::uint8_t first, std::uint8_t last) {
  ibv_gid gid{};
  gid.raw[10] = gid.raw[11] = 0xff;
  gid.raw[12] = first, gid.raw[13] = 1, gid.raw[14] = 2, gid.raw[15] = last;
  return gid;
}
// By which a port on Ethernet sends over IPv4, where it has an IPv4 address; else the one that it is addressed by.
std::uint8_t ipv4_index(const Device& dev) {
  const ibv_gid mapped = ipv4_gid(0, 0);
  for (int i = 0; dev.ethernet() && i < dev.port.gid_tbl_len; ++i) {
    ibv_gid_entry entry{};
    if (ibv_query_gid_ex(dev.ctx, dev.port_num, static_cast<std::uint32_t>(i), &entry, 0) != 0 || entry.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
    if (std::memcmp(entry.gid.raw, mapped.raw, 12) == 0) return static_cast<std::uint8_t>(i);
  }
  return static_cast<std::uint8_t>(std::max(0, dev.gid_index));
}

}  // namespace

CONFORMANCE(UdPayloadsArriveWhole, "UD-04 UD-02 WC-05 WC-03 WC-01") {
  Datagrams d(run);
  const std::size_t mtu = d.dev.mtu_bytes();
  std::uint64_t id = 0;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{31}, std::size_t{64},
                                  std::size_t{255}, std::size_t{1000}, mtu - 1, mtu}) {
    for (const bool with_imm : {false, true}) {
      const Note note("bytes ", bytes, with_imm ? " with immediate" : "");
      ++id;
      std::vector<std::byte> wanted(bytes);
      fill_pattern(wanted, run.seed + id);
      if (run.b()) {
        std::memset(d.mem.data(), 0x77, 16384);
        EXPECT_OK(post(d.qp, Recv{id, {d.mem.sge(0, grh_bytes + mtu)}}));
      }
      run.peer.barrier();
      if (run.a()) {
        std::memcpy(d.mem.data(), wanted.data(), bytes);
        Send s = d.datagram(id, 0, bytes);
        if (with_imm) s.opcode = IBV_WR_SEND_WITH_IMM;
        s.imm = static_cast<std::uint32_t>(id * 0x01030507u);
        if (bytes <= 32 && with_imm) s.flags |= IBV_SEND_INLINE;
        d.send(s);
      } else {
        const ibv_wc wc = d.rcq.expect(id);
        EXPECT_EQ(wc.opcode, IBV_WC_RECV);
        EXPECT_EQ(wc.byte_len, bytes + grh_bytes);
        EXPECT_EQ(wc.src_qp, d.theirs.qpn);
        EXPECT_EQ(wc.qp_num, d.qp.p->qp_num);
        EXPECT_EQ((wc.wc_flags & IBV_WC_WITH_IMM) != 0, with_imm);
        if (with_imm) EXPECT_EQ(wc.imm_data, static_cast<std::uint32_t>(id * 0x01030507u));
        if (!d.dev.ethernet()) EXPECT_EQ(wc.slid, d.theirs.lid);
        expect_bytes({d.mem.data(grh_bytes), bytes}, wanted, "payload");
        for (std::size_t i = grh_bytes + bytes; i < 16384; ++i) EXPECT(*d.mem.data(i) == std::byte{0x77});
      }
      run.peer.barrier();
    }
  }
}

CONFORMANCE(UdBeyondTheMtuIsALocalError, "ERR-07 UD-04 UD-07") {
  Datagrams d(run);
  if (run.b()) EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 16384)}}));
  run.peer.barrier();
  if (run.a()) {
    const int rc = post(d.qp, d.datagram(1, 0, d.dev.mtu_bytes() + 1));
    if (rc == 0) {
      d.scq.expect(1, IBV_WC_LOC_LEN_ERR);
    } else {
      EXPECT_ERRNO(rc, EINVAL);
    }
    run.peer.barrier();
  } else {
    run.peer.barrier();
    d.rcq.expect_empty();
  }
  run.peer.barrier();
}

CONFORMANCE(UdDropsInSilence, "ERR-14 ERR-13") {
  Datagrams d(run);
  if (run.b()) EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 4096)}}));
  run.peer.barrier();
  if (run.a()) {
    Send wrong_qkey = d.datagram(1, 0, 32);
    wrong_qkey.qkey = test_qkey ^ 1;
    d.send(wrong_qkey);
    Send unknown = d.datagram(2, 0, 32);
    unknown.qpn = (d.theirs.qpn + 0x4321) & 0xffffff;
    d.send(unknown);
    // Behind them a good one, along the same path: what is dropped did not take its receive.
    d.send(d.datagram(3, 0, 33));
    run.peer.barrier();
  } else {
    EXPECT_EQ(d.rcq.expect(1).byte_len, 33 + grh_bytes);
    run.peer.barrier();
    d.rcq.expect_empty();
    EXPECT_EQ(d.qp.state(), IBV_QPS_RTS);
  }
  // No receive at all: dropped; the next one with a receive arrives.
  run.peer.barrier();
  if (run.a()) {
    d.send(d.datagram(4, 0, 34));
    run.peer.barrier();
    run.peer.barrier();
    d.send(d.datagram(5, 0, 35));
  } else {
    run.peer.barrier();
    // The message of 34 bytes may still be under way on a slow path: only 35 must come, 34 must not come twice.
    EXPECT_OK(post(d.qp, Recv{2, {d.mem.sge(0, 4096)}}));
    EXPECT_OK(post(d.qp, Recv{3, {d.mem.sge(0, 4096)}}));
    run.peer.barrier();
    const ibv_wc wc = d.rcq.expect(2);
    EXPECT(wc.byte_len == 35 + grh_bytes || wc.byte_len == 34 + grh_bytes);
  }
  run.peer.barrier();
}

CONFORMANCE(AUdReceiveTooSmallIsDropped, "ERR-14 UD-02") {
  Datagrams d(run);
  if (run.b()) {
    std::memset(d.mem.data(), 0x66, 8192);
    EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, grh_bytes + 31)}}));
    EXPECT_OK(post(d.qp, Recv{2, {d.mem.sge(4096, grh_bytes + 16)}}));
  }
  run.peer.barrier();
  if (run.a()) {
    d.send(d.datagram(1, 0, 32));
    d.send(d.datagram(2, 0, 16));
  } else {
    // Devices differ in whether the small receive was used up in an error; the message itself must not appear as good,
    // and nothing may be written beyond the room given.
    ibv_wc wc = d.rcq.next();
    if (wc.status != IBV_WC_SUCCESS) EXPECT_EQ(wc.status, IBV_WC_LOC_LEN_ERR);
    if (wc.status == IBV_WC_SUCCESS) EXPECT_EQ(wc.byte_len, 16 + grh_bytes);
    for (std::size_t i = grh_bytes + 31; i < 4096; ++i) EXPECT(*d.mem.data(i) == std::byte{0x66});
    EXPECT_NE(d.qp.state(), IBV_QPS_RESET);
  }
  run.peer.barrier();
}

CONFORMANCE(ABadReceiveSgeEndsAUdQpToo, "ERR-05 ERR-12") {
  Datagrams d(run);
  if (run.b()) {
    EXPECT_OK(post(d.qp, Recv{1, {{d.mem.buffer.address(), 4096, d.mem.mr.p->lkey ^ 0x3300}}}));
    EXPECT_OK(post(d.qp, Recv{2, {d.mem.sge(0, 4096)}}));
  }
  run.peer.barrier();
  if (run.a()) {
    d.send(d.datagram(1, 0, 16));
  } else {
    d.rcq.expect(1, IBV_WC_LOC_PROT_ERR);
    d.rcq.expect(2, IBV_WC_WR_FLUSH_ERR);
    d.qp.wait_state(IBV_QPS_ERR);
  }
  run.peer.barrier();
}

CONFORMANCE(AQkeyWithItsTopBitMeansTheQpsOwn, "UD-01 ERR-14") {
  // Both QPs have a controlled Q_Key; the request names another one with the top bit set.
  Datagrams d(run, false, 0x80010000);
  if (run.b()) EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 4096)}}));
  run.peer.barrier();
  if (run.a()) {
    Send plain = d.datagram(1, 0, 20);
    plain.qkey = 0x00010000;  // without the bit it is taken as it is, and does not match
    d.send(plain);
    Send own = d.datagram(2, 0, 21);
    own.qkey = 0xffffffff;
    d.send(own);
  } else {
    EXPECT_EQ(d.rcq.expect(1).byte_len, 21 + grh_bytes);
  }
  run.peer.barrier();
}

CONFORMANCE(TheGrhIsThereWhenFlagged, "UD-02 UD-03") {
  Datagrams d(run, true);
  if (run.b()) EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 4096)}}));
  run.peer.barrier();
  if (run.a()) {
    Send asked = d.datagram(1, 0, 22);
    asked.opcode = IBV_WR_SEND_WITH_IMM;
    d.send(asked);
    // The answer comes back to this QP.
    EXPECT_OK(post(d.qp, Recv{5, {d.mem.sge(8192, 4096)}}));
    run.peer.barrier();
    const ibv_wc wc = d.rcq.expect(5);
    EXPECT_EQ(wc.byte_len, 48 + grh_bytes);
    EXPECT_EQ(wc.src_qp, d.theirs.qpn);
  } else {
    ibv_wc wc = d.rcq.expect(1);
    EXPECT((wc.wc_flags & IBV_WC_GRH) != 0);
    constexpr int carried = 12 + 8 + 4 + 22 + 2 + 4;  // BTH, DETH, immediate, the payload, to whole words, ICRC
    ibv_grh grh{};
    std::memcpy(&grh, d.mem.data(), sizeof(grh));
    const bool ipv4 = d.dev.ethernet() && std::to_integer<int>(*d.mem.data(20)) >> 4 == 4;
    // RoCE has no SL: bit 3 says that it came over UDP, the others over what that went (mlx5; UCX takes datagrams by it).
    const int over_udp = ipv4 ? 8 | 2 : grh.next_hdr == IPPROTO_UDP ? 8 | 1 : 0;
    EXPECT_EQ(int{wc.sl}, d.dev.ethernet() ? over_udp : int{some_sl});
    if (ipv4) {
      // RoCE v2 over IPv4: the header lies in the last 20 bytes.
      std::uint32_t sum = 0;
      for (std::size_t i = 20; i < 40; i += 2) {
        std::uint16_t word = 0;
        std::memcpy(&word, d.mem.data(i), 2);
        sum += ntohs(word);
      }
      sum = (sum & 0xffff) + (sum >> 16);
      sum = (sum & 0xffff) + (sum >> 16);
      EXPECT_EQ(sum, 0xffffu);
      EXPECT_EQ(std::to_integer<int>(*d.mem.data(29)), 17);  // UDP
      EXPECT_EQ(std::to_integer<int>(*d.mem.data(21)), int{some_traffic_class});
      EXPECT_EQ(std::to_integer<int>(*d.mem.data(23)), 20 + 8 + carried);
      EXPECT_EQ(std::to_integer<int>(*d.mem.data(28)), int{some_hop_limit});
    } else {
      EXPECT_EQ(ntohl(grh.version_tclass_flow) >> 28, 6u);
      EXPECT_EQ(ntohl(grh.version_tclass_flow) >> 20 & 0xff, std::uint32_t{some_traffic_class});
      EXPECT(grh.next_hdr == 0x1b || grh.next_hdr == 17);
      if (grh.next_hdr == 0x1b) EXPECT_EQ(ntohl(grh.version_tclass_flow) & 0xfffff, some_flow_label);  // over UDP devices may choose one (rdma_rxe: 0)
      EXPECT_EQ(ntohs(grh.paylen), (grh.next_hdr == 17 ? 8 : 0) + carried);
      EXPECT_EQ(int{grh.hop_limit}, int{some_hop_limit});
      EXPECT(std::memcmp(&grh.sgid, &d.theirs.gid, 16) == 0);
      EXPECT(std::memcmp(&grh.dgid, &d.dev.gid, 16) == 0);
    }
    // Both makers of an address from a completion lead back to the sender.
    ibv_ah_attr attr{};
    EXPECT_OK(ibv_init_ah_from_wc(d.dev.ctx, d.dev.port_num, &wc, &grh, &attr));
    EXPECT_EQ(attr.port_num, d.dev.port_num);
    EXPECT_EQ(attr.is_global, 1);
    EXPECT(std::memcmp(&attr.grh.dgid, &d.theirs.gid, 16) == 0);
    if (!ipv4 && grh.next_hdr == 0x1b) EXPECT_EQ(attr.grh.flow_label, some_flow_label);
    if (!d.dev.ethernet()) EXPECT_EQ(attr.dlid, d.theirs.lid);
    ibv_ah* back = ibv_create_ah_from_wc(d.pd, &wc, &grh, d.dev.port_num);
    EXPECT(back != nullptr);
    const Ah owner(back);
    run.peer.barrier();
    Send answer = d.datagram(2, 0, 48);
    answer.ah = back;
    answer.qpn = wc.src_qp;
    d.send(answer);
  }
  run.peer.barrier();
}

CONFORMANCE(AnAddressFromAMessageWithoutGrhLeadsBack, "UD-03 UD-02") {
  Datagrams d(run);
  if (d.dev.by_gid()) skip("addressed by GID: every message has a GRH");
  if (run.b()) EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 4096)}}));
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(d.qp, Recv{5, {d.mem.sge(8192, 4096)}}));
    d.send(d.datagram(1, 0, 24));
    EXPECT_EQ(d.rcq.expect(5).byte_len, 9 + grh_bytes);
  } else {
    ibv_wc wc = d.rcq.expect(1);
    EXPECT_EQ(wc.wc_flags & IBV_WC_GRH, 0u);
    ibv_grh grh{};
    const Ah back(ibv_create_ah_from_wc(d.pd, &wc, &grh, d.dev.port_num));
    EXPECT(back.p != nullptr);
    Send answer = d.datagram(2, 0, 9);
    answer.ah = back;
    answer.qpn = wc.src_qp;
    d.send(answer);
  }
  run.peer.barrier();
}

CONFORMANCE(CreateAhChecksItsAttributes, "UD-06 OBJ-03", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Address self{};
  self.gid = dev.gid;
  self.lid = dev.port.lid;
  const ibv_ah_attr good = ah_to(dev, self);
  { Ah ah(pd, good); }
  ibv_ah_attr bad = good;
  bad.port_num = 0;
  EXPECT_NULL(ibv_create_ah(pd, &bad), EINVAL);
  bad.port_num = 200;
  EXPECT_NULL(ibv_create_ah(pd, &bad), EINVAL);
  bad = good;
  bad.is_global = 1;
  bad.grh.dgid = dev.gid;
  bad.grh.sgid_index = 255;
  EXPECT(ibv_create_ah(pd, &bad) == nullptr);
  EXPECT(errno == EINVAL || errno == ENODATA);  // no such entry, or an empty one
  if (dev.ethernet()) {
    bad = good;
    bad.is_global = 0;
    EXPECT_NULL(ibv_create_ah(pd, &bad), EINVAL);
  }
}

CONFORMANCE(ADatagramsBufferMayEndBeyondItsRegion, "UD-07 ERR-05") {
  constexpr std::uint64_t datagrams = 40;
  Datagrams d(run);
  Region small(d.pd, 1024);
  for (std::uint64_t id = 1; id <= datagrams; ++id) {
    if (run.b()) EXPECT_OK(post(d.qp, Recv{id, {{small.buffer.address(1024 - grh_bytes - 16), 4096, small.mr.p->lkey}}}));
    run.peer.barrier();
    if (run.a()) d.send(d.datagram(id, 0, 16));
    else EXPECT_EQ(d.rcq.expect(id).byte_len, 16 + grh_bytes);
  }
  run.peer.barrier();
}

CONFORMANCE(AUdQpInSqeStillReceives, "UD-07 QP-06 ERR-06") {
  Datagrams d(run);
  if (run.a()) {
    EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(8192, 4096)}}));
    Send bad = d.datagram(2, 0, 16);
    bad.sges[0].lkey ^= 0x4400;
    EXPECT_OK(post(d.qp, bad));
    EXPECT_OK(post(d.qp, d.datagram(3, 0, 16)));
    d.scq.expect(2, IBV_WC_LOC_PROT_ERR);
    d.scq.expect(3, IBV_WC_WR_FLUSH_ERR);
    d.qp.wait_state(IBV_QPS_SQE);
    run.peer.barrier();
    EXPECT_EQ(d.rcq.expect(1).byte_len, 16 + grh_bytes);
    d.qp.set_state(IBV_QPS_RTS);
    run.peer.barrier();
    d.send(d.datagram(4, 0, 17));
  } else {
    EXPECT_OK(post(d.qp, Recv{9, {d.mem.sge(0, 4096)}}));
    run.peer.barrier();
    d.send(d.datagram(8, 0, 16));
    run.peer.barrier();
    EXPECT_EQ(d.rcq.expect(9).byte_len, 17 + grh_bytes);
  }
  run.peer.barrier();
}

CONFORMANCE(MulticastReachesEveryAttachedQpOnce, "MC-02 MC-01") {
  Datagrams d(run);
  Qp second(d.pd, d.scq, d.rcq, {.type = IBV_QPT_UD});
  bring_up(d.dev, second, {});
  const ibv_gid group = group_gid(static_cast<std::uint8_t>(run.seed));
  const std::uint16_t mlid = 0xc011;
  ibv_ah_attr attr{};
  attr.port_num = d.dev.port_num;
  attr.dlid = mlid;
  attr.is_global = 1;
  attr.grh.dgid = group;
  attr.grh.sgid_index = static_cast<std::uint8_t>(std::max(0, d.dev.gid_index));
  attr.grh.hop_limit = 1;
  if (const int rc = ibv_attach_mcast(d.qp, &group, mlid); rc != 0) {
    if (rc == EOPNOTSUPP) skip("ibv_attach_mcast: EOPNOTSUPP");
    EXPECT_OK(rc);
  }
  if (run.b()) EXPECT_OK(ibv_attach_mcast(second, &group, mlid));
  Ah to_group(d.pd, attr);
  for (std::uint64_t i = 0; i < 4; ++i) {
    EXPECT_OK(post(d.qp, Recv{i, {d.mem.sge(4096 * i, 2048)}}));
    EXPECT_OK(post(second, Recv{10 + i, {d.mem.sge(32768 + 4096 * i, 2048)}}));
  }
  run.peer.barrier();
  const auto announce = [&](const Qp& from, std::uint64_t id, std::size_t bytes) {
    EXPECT_OK(post(from, Send{.id = id, .sges = {d.mem.sge(65536, bytes)}, .ah = to_group, .qpn = 0xffffff, .qkey = test_qkey}));
    d.scq.expect(id);
  };
  // From a's attached QP: to a's first and both of b's, not to a's second.
  if (run.a()) announce(d.qp, 100, 50);
  std::uint64_t first = 0;
  std::uint64_t other = 0;
  const auto take = [&](std::size_t bytes) {
    const ibv_wc wc = d.rcq.next();
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.byte_len, bytes + grh_bytes);
    EXPECT((wc.wc_flags & IBV_WC_GRH) != 0);
    (wc.qp_num == d.qp.p->qp_num ? first : other) += 1;
  };
  take(50);
  if (run.b()) take(50);
  EXPECT_EQ(first, 1u);
  EXPECT_EQ(other, run.b() ? 1u : 0u);
  run.peer.barrier();
  d.rcq.expect_empty();
  run.peer.barrier();  // what the other side sends from here on is of the next step
  // From a QP that is not attached.
  if (run.a()) announce(second, 101, 51);
  take(51);
  if (run.b()) take(51);
  run.peer.barrier();
  d.rcq.expect_empty();
  run.peer.barrier();
  // After detaching, only who is left gets it; a unicast message marks the end.
  if (run.b()) EXPECT_OK(ibv_detach_mcast(d.qp, &group, mlid));
  run.peer.barrier();
  if (run.a()) {
    announce(d.qp, 102, 52);
    d.send(d.datagram(103, 0, 53));
    take(52);
  } else {
    first = other = 0;
    for (int i = 0; i < 2; ++i) {
      const ibv_wc wc = d.rcq.next();
      EXPECT_EQ(wc.byte_len, (wc.qp_num == d.qp.p->qp_num ? 53 : 52) + grh_bytes);
    }
    EXPECT_OK(ibv_detach_mcast(second, &group, mlid));
    EXPECT_ERRNO(ibv_detach_mcast(second, &group, mlid), EINVAL);
  }
  if (run.a()) EXPECT_OK(ibv_detach_mcast(d.qp, &group, mlid));
  run.peer.barrier();
  d.rcq.expect_empty();
  run.peer.barrier();
}

CONFORMANCE(WhoStaysInAGroupMissesNothingWhileOthersLeave, "MC-02", .solo = true) {
  constexpr int rounds = 8;
  constexpr std::size_t leavers = 16, stayers = 2;
  constexpr std::chrono::milliseconds patience(100);  // longer than that for somebody's memory a sender need not wait
  Device dev(run.settings);
  Pd pd(dev);
  Cq scq(dev, 16);
  Region mem(pd, 4096);
  Qp sender(pd, scq, scq, {.type = IBV_QPT_UD});
  bring_up(dev, sender, {});
  std::vector<std::unique_ptr<Qp>> leaving;
  for (std::size_t i = 0; i < leavers; ++i) {
    leaving.push_back(std::make_unique<Qp>(pd, scq, scq, QpSpec{.type = IBV_QPT_UD}));
    bring_up(dev, *leaving.back(), {});
  }
  struct Stayer {
    Stayer(Device& dev, Pd& pd) : cq(dev, 16), qp(pd, cq, cq, {.type = IBV_QPT_UD}) { bring_up(dev, qp, {}); }
    Cq cq;
    Qp qp;
  };
  std::vector<std::unique_ptr<Stayer>> staying;
  for (std::size_t i = 0; i < stayers; ++i) staying.push_back(std::make_unique<Stayer>(dev, pd));
  // On the stack, which is no memory that a service could have mapped: each delivery waits for somebody to copy it.
  std::byte here[stayers][256];
  const Mr room(pd, here, sizeof(here), local_write);
  const auto receive = [&](std::size_t i) {
    EXPECT_OK(post(staying[i]->qp, Recv{1, {{reinterpret_cast<std::uint64_t>(here[i]), sizeof(here[i]), room.p->lkey}}}));
  };
  for (std::size_t i = 0; i < stayers; ++i) receive(i);

  const ibv_gid group = group_gid(static_cast<std::uint8_t>(run.seed));
  const std::uint16_t mlid = 0xc014;
  ibv_ah_attr attr{};
  attr.port_num = dev.port_num;
  attr.dlid = mlid;
  attr.is_global = 1;
  attr.grh.dgid = group;
  attr.grh.sgid_index = static_cast<std::uint8_t>(std::max(0, dev.gid_index));
  attr.grh.hop_limit = 1;
  const Ah to_group(pd, attr);
  const auto attach = [&](ibv_qp* qp) {
    const int rc = ibv_attach_mcast(qp, &group, mlid);
    if (rc == EOPNOTSUPP) skip("ibv_attach_mcast: EOPNOTSUPP");
    EXPECT_OK(rc);
  };

  std::atomic<std::uint32_t> sent{0};
  for (int round = 0; round < rounds; ++round) {
    const Note note("round ", round);
    for (const auto& qp : leaving) attach(*qp);
    for (const auto& member : staying) attach(member->qp);
    std::atomic<bool> all_left{false};
    Threads threads;
    threads.start([&] {
      for (const auto& qp : leaving) {
        const std::uint32_t before = sent;
        wait_until("another datagram has been sent", [&] { return sent != before; }, 40.0);
        EXPECT_OK(ibv_detach_mcast(*qp, &group, mlid));  // while the next one is
      }
      all_left = true;
    });
    while (!all_left) {
      const auto begin = std::chrono::steady_clock::now();
      const std::uint32_t number = sent + 1;
      EXPECT_OK(post(sender, Send{.opcode = IBV_WR_SEND_WITH_IMM, .id = number, .sges = {mem.sge(0, 100)}, .imm = number, .ah = to_group, .qpn = 0xffffff, .qkey = test_qkey}));
      scq.expect(number);
      const bool in_time = std::chrono::steady_clock::now() - begin < patience;
      for (std::size_t i = 0; i < stayers; ++i) {
        const Note who("member ", i);
        ibv_wc wc{};
        if (in_time) wc = staying[i]->cq.next();
        else if (ibv_poll_cq(staying[i]->cq, 1, &wc) != 1) skip("a datagram may have been dropped because its receiver's memory took too long to come");
        EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
        EXPECT_EQ(wc.imm_data, number);
        receive(i);
      }
      sent = number;
    }
    threads.join();
    for (const auto& member : staying) EXPECT_OK(ibv_detach_mcast(member->qp, &group, mlid));
  }
}

CONFORMANCE(AnIpv4GroupIsAGroupOnBothLinkLayers, "MC-02 MC-01 UD-02") {
  Datagrams d(run);
  const ibv_gid group = ipv4_gid(239, static_cast<std::uint8_t>(run.seed));
  const std::uint16_t mlid = 0xc013;
  if (const int rc = ibv_attach_mcast(d.qp, &group, mlid); rc != 0) {
    if (rc == EOPNOTSUPP) skip("ibv_attach_mcast: EOPNOTSUPP");
    EXPECT_OK(rc);
  }
  ibv_ah_attr attr{};
  attr.port_num = d.dev.port_num;
  attr.dlid = mlid;
  attr.is_global = 1;
  attr.grh.dgid = group;
  attr.grh.sgid_index = ipv4_index(d.dev);
  attr.grh.hop_limit = some_hop_limit;
  const Ah to_group(d.pd, attr);
  EXPECT_OK(post(d.qp, Recv{1, {d.mem.sge(0, 4096)}}));
  EXPECT_OK(post(d.qp, Recv{2, {d.mem.sge(4096, 4096)}}));
  run.peer.barrier();
  Send message = d.datagram(3, 16384, 50);
  message.ah = to_group;
  message.qpn = 0xffffff;
  if (run.a()) d.send(message);
  // The sender is a member, too.
  ibv_wc wc = d.rcq.expect(1);
  EXPECT_EQ(wc.byte_len, 50 + grh_bytes);
  EXPECT_EQ(wc.src_qp, run.a() ? d.qp.p->qp_num : d.theirs.qpn);
  EXPECT((wc.wc_flags & IBV_WC_GRH) != 0);
  ibv_grh grh{};
  std::memcpy(&grh, d.mem.data(), sizeof(grh));
  const bool ipv4 = d.dev.ethernet() && std::to_integer<int>(*d.mem.data(20)) >> 4 == 4;
  if (ipv4) EXPECT(std::memcmp(d.mem.data(36), group.raw + 12, 4) == 0);
  else EXPECT(std::memcmp(&grh.dgid, &group, sizeof(group)) == 0);
  // A library that makes an address of it (rdma-core's does not: no GID of the receiver's is named) makes one that leads back.
  run.peer.barrier();
  if (run.b()) {
    ibv_ah* const back = ibv_create_ah_from_wc(d.pd, &wc, &grh, d.dev.port_num);
    const std::unique_ptr<Ah> owner(back != nullptr ? new Ah(back) : nullptr);
    Send answer = d.datagram(4, 16384, 48);
    if (back != nullptr) answer.ah = back;
    d.send(answer);
  } else {
    wc = d.rcq.expect(2);
    EXPECT_EQ(wc.byte_len, 48 + grh_bytes);
    EXPECT_EQ(wc.src_qp, d.theirs.qpn);
  }
  run.peer.barrier();
  EXPECT_OK(ibv_detach_mcast(d.qp, &group, mlid));
  EXPECT_ERRNO(ibv_detach_mcast(d.qp, &group, mlid), EINVAL);
}

CONFORMANCE(MulticastAttachChecksItsArguments, "MC-01", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 16);
  Qp ud(pd, cq, cq, {.type = IBV_QPT_UD});
  Qp rc(pd, cq, cq);
  to_init(dev, ud);
  to_init(dev, rc);
  ibv_gid group = group_gid(9);
  if (ibv_attach_mcast(ud, &group, 0xc012) == EOPNOTSUPP) skip("ibv_attach_mcast: EOPNOTSUPP");
  EXPECT_ERRNO(ibv_attach_mcast(rc, &group, 0xc012), EINVAL);
  ibv_gid unicast = group;
  unicast.raw[0] = 0xfe;
  EXPECT_ERRNO(ibv_attach_mcast(ud, &unicast, 0xc012), EINVAL);
  EXPECT_ERRNO(ibv_detach_mcast(ud, &unicast, 0xc012), EINVAL);
  unicast = ipv4_gid(198, 9);
  EXPECT_ERRNO(ibv_attach_mcast(ud, &unicast, 0xc012), EINVAL);
  // Attaching again changes nothing: one detach ends it, and the QP can be destroyed.
  EXPECT_OK(ibv_attach_mcast(ud, &group, 0xc012));
  EXPECT_ERRNO(ibv_destroy_qp(ud), EBUSY);
  EXPECT_OK(ibv_detach_mcast(ud, &group, 0xc012));
  EXPECT_ERRNO(ibv_detach_mcast(ud, &group, 0xc012), EINVAL);
  EXPECT_OK(ibv_destroy_qp(std::exchange(ud.p, nullptr)));
}

CONFORMANCE(MulticastCountsPairsOfGidAndLid, "MC-01 MC-03", .solo = true) {
  Device dev(run.settings);
  Pd pd(dev);
  Cq cq(dev, 16);
  Qp ud(pd, cq, cq, {.type = IBV_QPT_UD});
  to_init(dev, ud);
  const ibv_gid group = group_gid(10);
  if (ibv_attach_mcast(ud, &group, 0xc014) == EOPNOTSUPP) skip("ibv_attach_mcast: EOPNOTSUPP");
  EXPECT_ERRNO(ibv_detach_mcast(ud, &group, 0xc015), EINVAL);
  EXPECT_OK(ibv_attach_mcast(ud, &group, 0xc015));
  EXPECT_OK(ibv_detach_mcast(ud, &group, 0xc014));
  EXPECT_ERRNO(ibv_detach_mcast(ud, &group, 0xc014), EINVAL);
  EXPECT_ERRNO(ibv_destroy_qp(ud), EBUSY);
  EXPECT_OK(ibv_detach_mcast(ud, &group, 0xc015));
  // No LID of a group's on InfiniBand; any will do on Ethernet.
  for (const std::uint16_t lid : std::to_array<std::uint16_t>({0, 1, 0xbfff, 0xffff})) {
    EXPECT_ERRNO(ibv_attach_mcast(ud, &group, lid), dev.ethernet() ? 0 : EINVAL);
    EXPECT_ERRNO(ibv_detach_mcast(ud, &group, lid), dev.ethernet() ? 0 : EINVAL);
  }
  EXPECT_OK(ibv_destroy_qp(std::exchange(ud.p, nullptr)));
}

CONFORMANCE(UcDropsInSilenceAndGoesOn, "UC-03 ERR-13 UC-01") {
  LinkSpec spec;
  spec.qp.type = IBV_QPT_UC;
  Link link(run, spec);
  fill_pattern(link.mem.buffer.span(), 3);
  std::vector<std::byte> wanted(link.mem.buffer.size());
  fill_pattern(wanted, 3);
  run.peer.barrier();
  // Each of these is lost, and reported as a success.
  if (run.a()) {
    EXPECT_OK(post(link.qp, link.send(1, 0, 100)));  // no receive there
    link.scq.expect(1);
    Send wrong_key = link.write(2, 0, 4096, 100);
    wrong_key.rkey ^= 0x5500;
    EXPECT_OK(post(link.qp, wrong_key));
    link.scq.expect(2);
    Send outside = link.write(3, 0, 64 * 1024, 100);
    EXPECT_OK(post(link.qp, outside));
    link.scq.expect(3);
    run.peer.barrier();
    run.peer.barrier();
    EXPECT_OK(post(link.qp, link.send(4, 0, 8)));
    link.scq.expect(4);
  } else {
    run.peer.barrier();
    EXPECT_EQ(link.qp.state(), IBV_QPS_RTS);
    link.rcq.expect_empty();
    expect_bytes(link.mem.buffer.span(), wanted, "memory after refused writes");
    EXPECT_OK(post(link.qp, link.recv(7, 32768, 64)));
    run.peer.barrier();
    EXPECT_EQ(link.rcq.expect(7).byte_len, 8u);
    EXPECT_EQ(link.qp.state(), IBV_QPS_RTS);
    link.dev.expect_no_event();
  }
  run.peer.barrier();
  // To a QP that is gone: still a success here.
  if (run.b()) link.qp.set_state(IBV_QPS_RESET);
  run.peer.barrier();
  if (run.a()) {
    EXPECT_OK(post(link.qp, link.send(5, 0, 8)));
    link.scq.expect(5);
    EXPECT_EQ(link.qp.state(), IBV_QPS_RTS);
  }
  run.peer.barrier();
}

}  // namespace vrdma::conformance
